"""The museum's counting: what is red, where it points, what is not seen, what FLA's thresholds see
(reports/museum.py)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deltaproof
from processes import becomes, marked

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
sys.path.insert(0, str(TREE / "reports"))
from read import museum as reader  # noqa: E402
from say.bugs import BUGS  # noqa: E402
from say.fla import fla_limit  # noqa: E402


def museum(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [deltaproof.program(), "museum", *words], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Faults that act, act nowhere, are below FLA's thresholds, or show between runs alone."""
    out = tmp_path_factory.mktemp("museum")
    names = "merge-nearest-first,fwd-first-subseq,state-bf16,race,draft-gate,halo-leak"
    made = museum(
        *("smoke-kda", "session-verify", "smoke-conv", "fp64-inputs", "--fault", names),
        *("--out", str(out)),
    )
    assert made.returncode == 1, made.stderr
    assert "NOT SEEN" in made.stdout and "5 of 6 faults seen" in made.stdout
    assert "not seen: fwd-first-subseq: 0 of 6 runs differ" in made.stdout
    record = reader.load(str(out / "museum.json"))
    assert record and record["clean"] == {"runs": 16, "red": 0}
    return {r["name"]: r for r in json.loads((out / "museum.json").read_text())["faults"]}


def test_counts_red_runs_and_says_where(rows: dict[str, dict[str, Any]]) -> None:
    r = rows["merge-nearest-first"]
    assert [r[k] for k in ("runs", "acted", "red", "ranks")] == [6, 2, 2, 4]
    assert r["seen"]["T"] == 160 and r["fla"] == {"red": 2, "of": 2}
    assert r["located"]["by"] == "bisect stage" and r["located"]["stage"] == "merge_fwd"
    assert r["located"]["rank"] >= 2 and r["locations"] == {"right": 1, "of": 1, "astray": ""}


def test_a_fault_that_does_not_act_is_not_seen(rows: dict[str, dict[str, Any]]) -> None:
    """One sequence has no first sub-sequence other than its last."""
    r = rows["fwd-first-subseq"]
    assert [r[k] for k in ("runs", "acted", "red")] == [6, 0, 0] and not r["seen"]


def test_thresholds_of_whole_tensors_miss_what_bounds_see(rows: dict[str, dict[str, Any]]) -> None:
    r = rows["state-bf16"]
    assert r["red"] and r["fla"]["of"] and not r["fla"]["red"]


def test_faults_of_calls_and_convolutions_and_races_are_located(
    rows: dict[str, dict[str, Any]],
) -> None:
    want = {"draft-gate": "calls", "halo-leak": "conv_fwd", "race": "state_fwd"}
    for name, stage in want.items():
        assert rows[name]["located"]["stage"] == stage and rows[name]["located"]["right"], name
    assert rows["race"]["seen"]["tier"] == "repeat"


def test_every_result_has_the_threshold_of_flas_tests() -> None:
    for name, limit in {"o": 5e-3, "ds0": 8e-3, "db": 8e-3, "dg": 2e-2, "dA_log": 2e-2}.items():
        assert fla_limit(name) == limit
    assert not any(map(fla_limit, ("M", "dM", "dS_out", "dw_k", "dx")))


def test_every_bug_has_a_fault_or_a_reason() -> None:
    listed = [deltaproof.program(), "list", "--faults", "--json", "-"]
    faults = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    numbers = {f["bug"] for f in faults}
    assert numbers <= {0, *BUGS} and len(BUGS) == 60
    without = [n for n, (what, note) in BUGS.items() if n not in numbers]
    assert len(without) == 7 and all(BUGS[n][1] for n in without)


def test_tensors_stand_in_the_order_of_the_pipeline() -> None:
    """By which the first wrong one is found (kernels.py)."""
    listed = [deltaproof.program(), "list", "--tensors", "--json", "-"]
    made = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    order = [t["name"] for t in made]
    assert [x for x in order if x in ("o", "gcum", "dg", "S_in", "M", "dS_out")] == [
        *("gcum", "M", "S_in", "o", "dS_out", "dg")
    ]
    assert order[0] == "gcum" and order[-1] == "ddt_bias" and len(set(order)) == len(order) == 36


def test_a_museum_that_cannot_run_leaves_none_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "museum.json").write_text("{}")
    words = ["fp64-inputs", "--fault", "merge-scaled", "--out", str(tmp_path)]
    made = museum(*words)
    assert made.returncode == 2 and "offers no run" in made.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["--foo", "--fault", "--locate=x", "-z"])
@pytest.mark.parametrize("name", ["museum", "kernels"])
def test_a_museum_that_is_refused_leaves_none_of_an_earlier_one(
    word: str, name: str, tmp_path: Path
) -> None:
    for file in ("museum.json", "kernels.json"):
        (tmp_path / file).write_text("{}")
    made = museum("--out", str(tmp_path), *["--kernels"] * (name == "kernels"), word)
    assert made.returncode == 2
    assert [x.stem for x in tmp_path.iterdir()] == [{"museum": "kernels"}.get(name, "museum")]


def test_an_interrupt_says_how_far_it_came() -> None:
    code = """
import museum
def work(row):
    if row["name"] == "b": raise KeyboardInterrupt
museum.each(work, [{"name": x} for x in "abc"], True)"""
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, cwd=TREE / "reports", capture_output=True, text=True)
    assert "interrupted: 1 of 3 faults are done, nothing is written" in done.stderr, done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_runs_on_where_a_museum_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"DELTAPROOF_TEST={os.getpid()}-{number}"
    env = os.environ | {"TMPDIR": str(tmp_path)} | dict([mark.split("=")])
    words = ["weak-heads", "--fault", "merge-scaled,offset-wraps", "--cache", "none"]
    # what runs in the background may ignore some of them, and so would all that it starts
    command = ["env", "--default-signal", deltaproof.program(), "museum", *words]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=env, start_new_session=True, stdout=quiet, stderr=quiet
    ) as p:
        assert becomes(lambda: any(tmp_path.iterdir()) and len(marked(mark)) > 1, 60)
        p.send_signal(number)
    assert p.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert becomes(lambda: not marked(mark), 3)
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "museum.json").mkdir()
    for words, says in (
        (["--fault", "no-such-fault"], "no-such-fault"),
        (["--fault", ""], "--fault ''"),
        (["smoke-kda", "--fault", "halo-leak"], "none of these cases can show"),
        (["smoke-kda", "--recurrence", "/no-such-rows"], "/no-such-rows"),
        (["--locate", "x"], "--locate"),
        (["no-such-case"], "no-such-case"),
        (["--kernels"], "no faults to switch on"),
        (["--out", str(tmp_path)], "museum.json: cannot be written"),
    ):
        made = museum(*words)
        assert made.returncode == 2 and says in made.stderr, (words, made)
