"""Two records, the second edited: each change is named, measured, held against noise, and decides
the exit status (reports/compare.py)."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deltaproof

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
sys.path.insert(0, str(TREE / "reports"))
import compare  # noqa: E402

SMALL = json.loads((TREE / "harness/tests/data/record-small.json").read_text())
ROW = {"tensor": "o", "backend": "sim", "base": "fp32", "cases": 9, "ratio": 1, "verdict": "pass"}
SMALL |= {"pooled": [ROW], "digest": {"value": "0123456789abcdef"}, "verdict": "pass", "errors": 0}
SMALL["totals"]["fail"] = 0
for one in (x for run in SMALL["runs"] for x in [run, *run["tensors"]] if x["verdict"] == "fail"):
    one["verdict"] = "pass"
RANKED = next(
    i
    for i, r in enumerate(SMALL["runs"])
    if r["tensors"] and isinstance(r["tensors"][0].get("rel_fro"), float) and r["ranks"] > 1
)
PASSES = next(i for i, r in enumerate(SMALL["runs"]) if r["verdict"] == "pass")
ID = SMALL["runs"][RANKED]["id"]

Change = Callable[[dict[str, Any]], Any]


def tensor(r: dict[str, Any]) -> dict[str, Any]:
    return r["runs"][RANKED]["tensors"][0]


def scaled(by: float) -> Change:
    return lambda r: tensor(r).update(rel_fro=tensor(SMALL)["rel_fro"] * by)


def same(r: dict[str, Any]) -> None:
    """Left as it is."""


def put(folder: Path, name: str, change: Change) -> str:
    r = copy.deepcopy(SMALL)
    change(r)
    (folder / name).write_text(json.dumps(r))
    return str(folder / name)


def fails(r: dict[str, Any]) -> None:
    r["runs"][PASSES] |= {"verdict": "fail", "why": "o: too far off"}


def unjudged(r: dict[str, Any]) -> None:
    for run in r["runs"]:
        for t in run["tensors"]:
            t["verdict"] = "unjudged"


GONE, WORSE, NOT_WORSE = "COMPARE: GONE: ", "COMPARE: WORSE", "COMPARE: NOT WORSE"
# (OLD, NEW, further words, exit status, what is said)
ROWS: list[tuple[Change, Change, list[str], int, list[str]]] = [
    (same, same, [], 0, ["COMPARE: SAME", "0 appeared, 0 vanished"]),
    # parts beside the runs
    (same, lambda r: r["cases"].pop(0), [], 1, ["gone    case ", GONE]),
    (same, lambda r: r["cases"][0].update(op="gdn2"), [], 0, ["changed case ", NOT_WORSE]),
    (
        same,
        lambda r: r["pooled"].clear(),
        [],
        1,
        ["gone    all cases of o sim fp32 (pass)\n", GONE],
    ),
    (
        same,
        lambda r: r["pooled"][0].update(verdict="fail"),
        [],
        1,
        ["worse   all cases of o sim fp32: pass -> fail", WORSE],
    ),
    (
        same,
        lambda r: r["pooled"][0].update(ratio=1.5),
        [],
        0,
        ["changed all cases of o sim fp32\n", NOT_WORSE],
    ),
    (same, lambda r: r.pop("digest"), [], 0, ["digest: NEW has none", NOT_WORSE]),
    (same, lambda r: r.update(verdict="fail"), [], 1, ["worse   the record: pass -> fail", WORSE]),
    (
        same,
        lambda r: r.update(verdict="error", errors=3),
        [],
        1,
        ["the record: pass -> error, cases that could not be judged: 0 -> 3"],
    ),
    (
        same,
        lambda r: r["totals"].update(fail=7),
        [],
        0,
        ["changed the record: runs that fail: 0 -> 7", NOT_WORSE],
    ),
    # errors against noise and the factor
    (
        same,
        scaled(1.4),
        [],
        1,
        [f"worse   {ID} ", "+40% (noise 0)", "1 moved up, 1 by more than 1.25, 0 down"],
    ),
    (same, scaled(1.4), ["--worse", "1.5"], 0, ["up ", NOT_WORSE]),
    (scaled(1.4), same, [], 0, ["down ", "-28.6%"]),
    (
        same,
        scaled(1.4),  # is within twice 25%
        ["--again", "again"],
        0,
        ["COMPARE: SAME", "measured between OLD and 1 further record"],
    ),
    (same, lambda r: tensor(r).update(rel_fro="nan"), [], 1, ["-> nan, from 0 or to no number"]),
    (
        same,
        lambda r: tensor(r)["per_rank"].__setitem__(1, 3 * tensor(SMALL)["per_rank"][1]),
        [],
        1,
        [", rank 1: ", "+200%"],
    ),
    # verdicts; runs and tensors that appear, vanish, or are not judged
    (same, fails, [], 1, ["pass -> fail (o: too far off)", "1 changed, 1 for the worse"]),
    (fails, same, [], 0, ["better ", "fail -> pass"]),
    (same, lambda r: r["runs"].pop(PASSES), [], 1, ["gone ", "0 appeared, 1 vanished", GONE]),
    (lambda r: r["runs"].pop(PASSES), same, [], 0, ["new ", "1 appeared, 0 vanished"]),
    (
        same,
        lambda r: r["runs"][RANKED]["tensors"].pop(0),
        [],
        1,
        ["gone    ", "o: is not judged any more (gone)", GONE],
    ),
    (same, unjudged, [], 1, ["is not judged any more (unjudged)", GONE]),
    (same, lambda r: r["runs"].__delitem__(slice(1, None)), [], 1, [" runs\n", GONE]),
    (
        same,
        fails,
        ["--json", "-"],
        1,
        ['{\n "schema": "deltaproof-comparison"', '"worse": true', WORSE],
    ),
    # what cannot be compared
    (same, lambda r: r["runs"].clear(), [], 2, ["no run in common"]),
    (same, lambda r: r.update(schema="something"), [], 2, ['schema: expected "deltaproof-record"']),
    (lambda r: r.update(schema_version=2), same, [], 2, ["old: schema_version"]),
    (same, lambda r: r["runs"][0].update(verdict="error"), [], 2, ["runs[0].verdict: expected"]),
    (
        same,
        lambda r: r["runs"][RANKED]["tensors"].append(tensor(r)),
        [],
        2,
        [f"new: runs[{RANKED}].tensors: a name is there twice"],
    ),
    (same, same, ["more"], 2, ["name two records"]),
]


@pytest.mark.parametrize("old, new, more, status, says", ROWS)
def test_a_change_is_named_and_decides_the_status(
    old: Change,
    new: Change,
    more: list[str],
    status: int,
    says: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "again", scaled(1.25))
    words = [put(tmp_path, "old", old), put(tmp_path, "new", new), *more]
    assert compare.main(["compare.py", *words]) == status
    said = "".join(capsys.readouterr())
    assert all(s in said for s in says), said


def test_a_line_a_run_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [put(tmp_path, "old", same), put(tmp_path, "new", lambda r: r["runs"].clear())]
    compare.main(["compare.py", *words, "-v"])
    assert " runs\n" not in capsys.readouterr().out


def test_many_runs_of_one_id_are_compared_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SMALL["runs"][RANKED] | {"tensors": [{"name": "o", "rel_fro": 0.5, "verdict": "pass"}]}
    path = put(tmp_path, "r", lambda r: r.update(runs=[run] * 5000))
    assert compare.main(["compare.py", path, path]) == 0
    assert "5000 runs in both" in capsys.readouterr().out


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [deltaproof.program(), "compare", *words], capture_output=True, text=True, check=False
    )


def test_the_program_hands_its_words_on(tmp_path: Path) -> None:
    folder, html = tmp_path / "a", tmp_path / "h.html"
    folder.mkdir()
    old = put(folder, "results.json", same)
    new = put(tmp_path, "new", scaled(1.4))
    found = program(str(folder), "--worse=1.5", new, "--json", str(tmp_path / "c"))
    assert found.returncode == 0 and "NOT WORSE" in found.stdout, found
    assert json.loads((tmp_path / "c").read_text())["moved"][0]["id"] == ID
    for words, says in (
        ((old, "nowhere"), "nowhere: No such file"),
        ((old, new, "--worse", "0.5"), "0.5: must be a factor from 1 on"),
        ((old, new, "--wors"), "requires an argument"),
        ((old, new, "--wurse", "1"), "did you mean --worse"),
        (("/proc/self/pagemap", old), "its size is 0, and it is not empty"),
        (("--history", str(html), old), "two are needed"),
        (("--history", str(tmp_path / "no/h.html"), old, new), "/no/h.html: No such file"),
    ):
        found = program(*words)
        assert found.returncode == 2 and says in found.stderr, found


def test_a_comparison_that_is_refused_leaves_no_earlier_one(tmp_path: Path) -> None:
    old, earlier = put(tmp_path, "old", same), tmp_path / "c"
    page = "<!DOCTYPE html>\n<title>deltaproof history</title>"
    for refused in ([old, "nowhere"], [old], [old, old, "--foo"], [old, old, "--worse=x"]):
        for option, text in (("--json", ""), ("--js", ""), ("--history", page)):
            if text:
                earlier.write_text(text)
            else:
                assert program(old, old, option, str(earlier)).returncode == 0 and earlier.exists()
            assert program(*refused, option, str(earlier)).returncode == 2
            assert not earlier.exists(), (refused, option)
            earlier.write_text("mine")
            assert program(*refused, option, str(earlier)).returncode == 2
            assert earlier.read_text() == "mine"


def test_history_draws_what_moved_over_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def later(r: dict[str, Any]) -> None:
        r |= {"created": "2099-01-01T00:00:00Z"}
        r["program"]["commit"] = "feedbeef"
        scaled(1.4)(r)

    html = tmp_path / "h.html"
    found = program("--history", str(html), put(tmp_path, "b", later), put(tmp_path, "a", same))
    assert "2 records" in found.stdout, found
    text = html.read_text()
    assert "<svg" in text and ": 1 of" in text and "feedbeef" in text
