"""The next commands after a failure, for runs of cases, of subjects and of judged files alike."""

import shlex
from functools import lru_cache
from itertools import pairwise

from read.record import NO_STAGES, Record, Run, operation

# Options of the recorded command line without which the same run is not had again.
SUBJECT = ("subject", "run", "serve", "writes")
KEPT = ("cases", *SUBJECT, "design", "truth", "limit", "memory")


@lru_cache(maxsize=1)
def kept_options(command: str) -> dict[str, str]:
    """{name: value} of the options in KEPT, in either spelling (--name value, --name=value) and as
    short as argp allows."""
    try:
        words = shlex.split(command)
    except ValueError:  # a record may hold anything
        return {}
    out = {}
    for word, following in pairwise([*words, ""]):
        key, equals, value = word.partition("=")
        if len(key) < 5 or not key.startswith("--"):
            continue
        name = next((k for k in KEPT if k.startswith(key[2:])), None)
        if name:
            out[name] = value if equals else following
    return out


def shell(words: list[str], options: dict[str, str]) -> str:
    """A line for a shell."""
    parts = words + [x for k, v in options.items() for x in (f"--{k}", v)]
    return " ".join(shlex.quote(x) for x in parts)


def _call(rec: Record, cases: str) -> str:
    """A Python function's call on these cases, or on the only one; "": none made the record."""
    return (rec.provenance.get("notes") or {}).get("again", "").replace("{case}", cases)


def all_again(rec: Record) -> str:
    """The command that makes the whole record again; "" where it does not say."""
    call = (rec.provenance.get("notes") or {}).get("again-all")
    return call or _call(rec, repr(list(rec.cases))) or rec.program.get("command") or ""


def again(rec: Record, run: Run) -> str:
    """The same run, the same bits. Judged files have no ID that `run` takes: their own command."""
    made_by = rec.program.get("command") or ""
    if run["id"].startswith("judge:") or run.get("backend") == "file":
        return made_by or "deltaproof judge --help"
    call = _call(rec, repr(run["case"]))
    if run.get("backend") == "subject" and call:
        return call
    options = kept_options(made_by)
    if run.get("backend") != "subject":
        options = {k: v for k, v in options.items() if k not in SUBJECT}
    quoted = run["id"].replace("'", "'\\''")
    more = shell([], options)
    return f"deltaproof run --id '{quoted}'" + (f" {more}" if more else "")


def wrong_stage(rec: Record, run: Run) -> str:
    """The command that names the first wrong stage; "" where there is none."""
    if operation(rec.cases[run["case"]]) in NO_STAGES:
        return ""
    if run.get("backend") not in ("sim", "subject"):
        return ""
    call = _call(rec, repr(run["case"]))
    if run.get("backend") == "subject" and call:
        return call.replace("deltaproof.run(", "deltaproof.bisect(").replace(", layouts=()", "")
    kept = kept_options(rec.program.get("command") or "")
    subject = run.get("backend") == "subject"
    options = {"cases": kept["cases"]} if "cases" in kept else {}
    if subject:
        if not any(k in kept for k in SUBJECT):
            return ""
        options |= {k: kept[k] for k in (*SUBJECT, "design") if k in kept}
    options["ranks"] = str(run["ranks"])
    options |= {k: run["policy"][k] for k in ("base", "chain", "merge") if run["policy"].get(k)}
    if run["policy"].get("fault") and not subject:
        options["fault"] = run["policy"]["fault"]
    return "deltaproof bisect stage " + shell([run["case"]], options)
