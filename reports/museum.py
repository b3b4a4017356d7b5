"""The museum's records (DIR/museum.json and DIR/kernels.json, formats: harness/museum.h) as sections of the page; nothing is counted here that they do not say.
   load(path), load_kernels(path) -> dict or None when there is no such file;   section(museum), kernels_section(kernels) -> markup"""
import os
import re

from markup import render
from record import Malformed, Reject, boolean, count, integer, list_of, load_json, object_of, text
from view import plural, whole

RUNS = object_of({"runs": count, "red": count}, ("runs", "red"))
LOCATIONS = object_of({"right": count, "of": count}, ("right", "of"))
FLA = object_of({"red": count, "of": count}, ("red", "of"))
SEEN = object_of({"id": text, "T": count, "tensor": text, "tier": text}, ("id", "tensor", "tier"))
PLACE = object_of({"stage": text, "rank": integer, "head": integer}, ("stage", "rank", "head"))
FAULT = object_of({"name": text, "bug": count, "stage": text, "what": text, "source": text, "runs": count, "acted": count, "red": count, "seen": SEEN, "located": PLACE, "locations": LOCATIONS,
                   "fla": FLA}, ("name", "bug", "stage", "what", "source", "runs", "acted", "red", "locations", "fla"))
BUG = object_of({"number": count, "what": text, "note": text, "faults": list_of(text)}, ("number", "what", "note", "faults"))
MUSEUM = object_of({"faults": list_of(FAULT), "bugs": list_of(BUG), "cases": count, "clean": RUNS}, ("faults", "bugs", "cases", "clean"))
SHOWN = object_of({"id": text, "T": count, "tensor": text, "tier": text, "rank": integer, "head": integer, "says": text, "source": text}, ("id", "tensor", "tier", "rank", "head", "says", "source"))
KERNEL = object_of({"name": text, "bug": count, "what": text, "red": count, "right": boolean, "fla": boolean, "seen": SHOWN}, ("name", "bug", "what", "red", "right", "fla"))
KERNELS = object_of({"faults": list_of(KERNEL), "clean": RUNS}, ("faults", "clean"))


def read(path, schema, check):
    if not os.path.lexists(path):
        return None
    m = load_json(path)
    if not isinstance(m, dict) or m.get("schema") != schema or m.get("schema_version") != 1 or isinstance(m.get("schema_version"), bool):
        raise Malformed(f'{path}: schema: expected "{schema}", version 1')
    try:
        return check(m, "")
    except Reject as e:
        raise Malformed(f"{path}: {e}")


def load_kernels(path):
    return read(path, "deltaproof-museum-kernels", KERNELS)


def load(path):
    return read(path, "deltaproof-museum", MUSEUM)


def sentences(m):
    f = [x for x in m["faults"] if x["runs"]]
    seen = [x for x in f if x["red"]]
    right, of = sum(x["locations"]["right"] for x in f), sum(x["locations"]["of"] for x in f)
    known = [x for x in seen if x["fla"]["of"]]
    none, some = [x["name"] for x in known if not x["fla"]["red"]], [x["name"] for x in known if 0 < x["fla"]["red"] < x["fla"]["of"]]
    unseen = [x["name"] for x in f if not x["red"]]
    out = [f"{len(seen)} of {plural(len(f), 'fault')} turn a verdict red" + (f"; not seen: {', '.join(unseen)}" if unseen else "") + ".",
           f"Without a fault {m['clean'].get('red')} of {plural(m['clean'].get('runs', 0), 'run')} of {plural(m['cases'], 'case')} were red."]
    if of:
        out.append(f"Of {plural(of, 'red run')} that were looked into, {whole(right)} ({100 * right / of:.0f}%) were located at the fault's own stage, on a rank and head where it had acted.")
    if none:
        out.append(f"The thresholds of FLA's own tests (relative RMS error of a whole tensor) see no red run of {', '.join(none)}" + (f", and only some of {', '.join(some)}" if some else "") + ".")
    return out


def problem_of(run_id, T=None):
    """'smoke-kda:backend=cuda,ranks=2,base=fp32,chain=fp32' -> 'smoke-kda, 2 ranks, fp32': what the museum does not vary is left out."""
    case, _, rest = run_id.partition(":")
    key = dict(x.split("=", 1) for x in rest.split(",") if "=" in x)
    chain = [f"{key['chain']} chain"] if key.get("chain", "fp32") != "fp32" else []
    return ", ".join([case] + ([f"T {T}"] if T else []) + ([plural(int(key["ranks"]), "rank")] if re.fullmatch("[0-9]{1,6}", key.get("ranks", "")) else []) + ([key["base"]] if key.get("base") else []) + chain)


def place_of(p):
    return p["stage"] + "".join(f", {k} {p[k]}" for k in ("rank", "head") if p[k] >= 0) if p else "–"


def section(m):
    return render("museum.html", m=m, sentences=sentences(m), problem_of=problem_of, place_of=place_of)


def kernels_section(m):
    f = m["faults"]
    return render("kernels.html", m=m, seen=sum(x["red"] > 0 for x in f), right=sum(x["right"] for x in f), of=plural(len(f), "fault"), runs=plural(m["clean"]["runs"], "run"), problem_of=problem_of)
