"""scripts/campaigns/peers/field without a GPU: rows, resuming, tables, and folders that miss."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FIELD = Path(__file__).resolve().parents[2] / "scripts/campaigns/peers/field"
pytestmark = pytest.mark.skipif(not FIELD.exists(), reason="no source tree")
sys.path.insert(0, str(FIELD))
if FIELD.exists():
    import rows
    import speed
    import tables

Entry = dict[str, Any]
sys.path.insert(1, str(FIELD.parent))
A, B = "kda forward 1 x 8192, heads 64", "kda forward 1 x 131072, heads 8"


def entry(kernel: str, row: str, us: float | None = None, **more: Any) -> Entry:
    timed = {"us": us, "clock": "graph", "contract": "all"} if us else {}
    return {"kernel": kernel, "row": row, **timed, **more}


def test_names_and_bytes_of_rows() -> None:
    assert len(rows.BY_NAME) == len(rows.ROWS)
    # q k v o of bf16, a gate a channel, beta: what reports/device/peers.txt counts
    assert rows.floor_bytes(rows.BY_NAME[A]) == 8192 * 64 * (4 * 256 + 258)
    decode = rows.BY_NAME["gdn decode B 256, heads 32, fp32 states"]
    assert rows.floor_bytes(decode) > 2 * 4 * 256 * 32 * 128 * 128
    grouped = rows.BY_NAME["gdn forward 1 x 8192, heads 16/64, states out, rows given"]
    assert (grouped.H, grouped.HV, grouped.given) == (16, 64, True)


def test_a_reason_never_takes_the_place_of_a_time() -> None:
    lines = [entry("x", A, 7.0), entry("x", A, why="out of memory"), entry("y", A, 9.0)]
    assert tables.merged([*lines, entry("y", A, 8.0)])[A] == {
        "x": lines[0],
        "y": entry("y", A, 8.0),
    }


def test_what_was_cut_off_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    done = [entry("x", A, 7.0), entry("x", B, why="lost"), entry("y", A, why="no", refused=True)]
    path.write_text("".join(json.dumps(e) + "\n" for e in done) + '{"kernel": "y", "ro')
    got = tables.read_lines(path)
    assert got == done
    assert tables.measured(got) == {("x", A), ("y", A)}
    assert tables.read_lines(tmp_path / "none") == []


def test_the_fastest_is_bold() -> None:
    entries = [
        entry("deltaproof", A, 629.0),
        entry("x", A, 541.5),
        entry("y", A, 700.0, clock="events, queue filled ahead (no)"),
        entry("z", A, why="no"),
    ]
    table = tables.page_rows(tables.as_rows(entries, 3e12))
    assert table[-1].endswith("| 0.629 ms | x **0.541 ms**, y 0.700 ms* |")
    assert table[-1].count("**") == 2
    assert any("not timed: no" in x for x in tables.contracts(tables.as_rows(entries, 3e12)))
    cell = tables.standard(tables.as_rows(entries, 3e12), "x", "kda", False, ("forward",))
    assert cell == {"8192": "0.54 (2.4x) / -", "131072": "- / -"}


class Device:
    """torch.cuda as clocks.py uses it: 1 ms passes between two events."""

    def __init__(self, captures: bool) -> None:
        self.captures = captures

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: self

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *a: object) -> None:
        pass

    def graph(self, *a: object, **k: object) -> Device:
        if not self.captures:
            raise RuntimeError("synchronised in a capture")
        return self

    def elapsed_time(self, _: object) -> float:
        return 1.0


def test_what_cannot_be_captured_is_queued_ahead() -> None:
    import clocks

    for captures, clock in ((True, "graph"), (False, "events, queue filled ahead")):
        device = Device(captures)
        torch = argparse.Namespace(cuda=device)
        spent, how = clocks.seconds(torch, [list, dict], 5)
        assert how.startswith(clock)
        rounds = 10 if captures else 1  # of two calls, as they take no time here
        assert spent == pytest.approx(1e-3 / (2 * rounds))
    assert "synchronised in a capture" in how


def stand_in(script: str) -> Any:
    """start() of speed.py, with this script in place of a kernel's process."""

    def start(args: Any, name: str, todo: list[Any], *more: str) -> Any:
        p = subprocess.Popen(
            [sys.executable, "-c", "import json, os, sys, time\n" + script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert p.stdin
        p.stdin.write("".join(f"{r.name}\n" for r in todo))
        p.stdin.close()
        return p

    return start


EACH = """
for name in sys.stdin.read().splitlines():
    print(json.dumps({"started": name}), flush=True)
    BODY
    print(json.dumps({"kernel": "x", "row": name, "us": 1.0, "clock": "graph"}), flush=True)
"""


@pytest.mark.parametrize(
    ("body", "silent", "why"),
    [
        ("if '131072' in name: sys.exit('device lost')", 60.0, "its process ended: device lost"),
        ("if '131072' in name: time.sleep(60)", 4.0, "not finished in 4.0 s"),
    ],
)
def test_a_process_that_ends_costs_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, body: str, silent: float, why: str
) -> None:
    monkeypatch.setattr(speed, "start", stand_in(EACH.replace("BODY", body)))
    got: list[Entry] = []
    args = argparse.Namespace(deadline=time.monotonic() + 120, silent=silent)
    todo = [rows.BY_NAME[A], rows.BY_NAME[B], rows.BY_NAME["kda forward 1 x 8192, heads 8"]]
    speed.run_kernel(args, "x", todo, got.append)
    assert [e["row"] for e in got] == [r.name for r in todo]
    assert [e.get("why") for e in got] == [None, why, None]


def test_a_kernel_that_is_lost_thrice_waits_for_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "start", stand_in("sys.exit('no device')"))
    got: list[Entry] = []
    args = argparse.Namespace(deadline=time.monotonic() + 120, silent=60.0)
    speed.run_kernel(args, "x", rows.ROWS[:9], got.append)
    assert [e["why"] for e in got] == ["its process ended: no device"] * 3


def test_out_of_time_leaves_rows_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "start", stand_in(EACH.replace("BODY", "time.sleep(60)")))
    got: list[Entry] = []
    args = argparse.Namespace(deadline=time.monotonic() + 0.5, silent=30.0)
    speed.run_kernel(args, "x", [rows.BY_NAME[A]], got.append)
    assert got == []


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FIELD / script), *map(str, words)], capture_output=True, text=True
    )


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    p = run("speed.py", tmp_path / "file", "--kernels", "fla")
    assert p.returncode == 2
    assert p.stderr.strip() == f"speed.py: {tmp_path / 'file'}: File exists"
    p = run("speed.py", tmp_path / "new", "--kernels", "flub")
    assert p.returncode == 2
    assert "--kernels: no kernel flub" in p.stderr
    p = run("speed.py", tmp_path / "new", "--rows", "flub")
    assert (p.returncode, p.stderr) == (2, "speed.py: --rows flub: no row has such a name\n")


def reports(folder: Path) -> Path:
    """A report of two kernels of an earlier run."""
    kernel = {
        "version": "1",
        "date": "2026-01-01",
        "declared": "bf16",
        "served": 1,
        "judged": [],
        "passed": 1,
        "failed": [],
        "reasons": "-",
        "speed": {"8192": "1.00 / -", "131072": "2.00 / -"},
    }
    folder.mkdir()
    names = ("flashkda-forward", "deltaproof-kda")
    have = {
        "speed": {"date": "2026-01-01", "where": "one run", "rows": []},
        "left_out": {},
        "notes": {},
        "kernels": [kernel | {"kernel": n} for n in names],
    }
    (folder / "field.json").write_text(json.dumps(have))
    return folder


@pytest.mark.parametrize("more", [("--only-times",), ("--program", "true")])
@pytest.mark.parametrize("made", [False, True])
def test_missing_results_leave_the_reports(
    tmp_path: Path, more: tuple[str, ...], made: bool
) -> None:
    page = reports(tmp_path / "reports")
    before = (page / "field.json").read_text()
    folder = tmp_path / "results"
    if made:
        folder.mkdir()
    p = run("judge.py", folder, "--reports", page, *more)
    assert p.returncode == 2
    assert str(folder) in p.stderr
    assert (page / "field.json").read_text() == before
    assert not (page / "field.md").exists()


def test_kernels_that_were_not_run_keep_their_rows(tmp_path: Path) -> None:
    page, folder = reports(tmp_path / "reports"), tmp_path / "results"
    (folder / "out").mkdir(parents=True)
    (folder / "left_out.json").write_text("{}")
    no = {"version": "0.7", "cases": {"field-gdn": ["not served", "no device"]}}
    (folder / "out/flashinfer-gdn-forward.json").write_text(json.dumps(no))
    p = run("judge.py", folder, "--reports", page, "--program", "true")
    assert p.returncode == 0, p.stderr
    kernels = json.loads((page / "field.json").read_text())["kernels"]
    assert [k["kernel"] for k in kernels] == [
        "flashkda-forward",
        "flashinfer-gdn-forward",
        "deltaproof-kda",
    ]
    assert kernels[0]["speed"]["8192"] == "1.00 / -"


def test_new_times_beside_verdicts_that_stand(tmp_path: Path) -> None:
    page, folder = reports(tmp_path / "reports"), tmp_path / "results"
    folder.mkdir()
    entries = [entry("deltaproof", A, 629.0), entry("flashkda", A, 1241.0)]
    (folder / "speed.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    speed.write(folder, {"date": "2026-11-27", "copy_bytes_per_s": 3e12})
    p = run("judge.py", folder, "--reports", page, "--only-times")
    assert p.returncode == 0, p.stderr
    text = (page / "field.md").read_text()
    assert f"| {A} | 0.224 ms | **0.629 ms** | flashkda 1.241 ms |" in text
    row = "| flashkda-forward | 1 | 2026-01-01 | bf16 | 1 | 1 | 0 | 0 | - | - | 1.24 (5.5x) / - |"
    assert f"{row} - / - |" in text
