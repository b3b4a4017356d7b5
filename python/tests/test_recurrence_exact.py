"""Exact cases of a user's own rows: nothing rounds, so any error is a fault (inputs_exact.c)."""

import subprocess
from pathlib import Path

import pytest

from deltaproof.program import program

CASE = """reason = nothing rounds
source = ref/inputs/inputs_exact.c
op = dplr
T = 144
H = 2
K = 16
V = 24
seed = 3
keys = exact
s0_scale = 1
dstate = yes
ranks = 1,4
base = fp32,bf16
chain = fp32,bf16st
"""
HEAD = "recurrence {}\nquery q\ngate g per channel\n"
ROWS = {
    "gates": "keys k\nvalues v w\nnumber b\nrow write=k read=k value=v*w strength=b\n",
    "turn": "keys k e\nvalues v w\nnumber b\nrows in turn\n"
    "row write=k read=e*k value=v strength=b\nrow write=k*exp(g) read=k value=w\n",
    "writes": "keys k\nvalues v\nrow write=-k value=v\n",
}
REFUSED = {
    "norm": ("keys k\nvalues v\nnorm k\nrow write=k value=v\n", "norms round"),
    "grows": ("keys k\nvalues v\nrow write=k read=-k value=v\n", "a row adds to what it reads"),
    "two": (
        "keys k\nvalues v\nrow write=k read=k value=v\nrow write=k read=k\n",
        "several rows read at once",
    ),
    "vectors": (
        "keys k p\nvalues v\nrow write=k*p value=v\nrow write=k value=v\nrow write=p value=v\n",
        "an entry is a product of vectors",
    ),
    "long": (
        "keys k\nvalues v w x y\n" + "".join(f"row write=k*exp(-g) value={x}\n" for x in "vwxy"),
        "need more than the 8 bits",
    ),
}


def ran(folder: Path, recurrence: str, *more: str) -> subprocess.CompletedProcess[str]:
    case = folder / "exact-rows.case"
    case.write_text(CASE.replace("T = 144", "T = 23040") if "long" in recurrence else CASE)
    said = ["run", str(case), "--recurrence", recurrence, *more]
    return subprocess.run([program(), *said], capture_output=True, text=True, check=False)


def path_of(folder: Path, name: str, rows: str) -> str:
    path = folder / f"{name}.recurrence"
    path.write_text(HEAD.format(name) + rows)
    return str(path)


@pytest.mark.parametrize("name", ["rwkv7", "comba", "mamba3", *ROWS])
def test_nothing_rounds_in_any_format_on_any_rank(name: str, tmp_path: Path) -> None:
    recurrence = path_of(tmp_path, name, ROWS[name]) if name in ROWS else name
    done = ran(tmp_path, recurrence)
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr
    wrong = ran(tmp_path, recurrence, "--fault", "merge-scaled", "--ranks", "4", "--base", "bf16")
    assert wrong.returncode == 1 and "nothing rounds in this case" in wrong.stdout, wrong.stdout


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_round_are_refused(name: str, tmp_path: Path) -> None:
    rows, why = REFUSED[name]
    done = ran(tmp_path, path_of(tmp_path, name, rows))
    assert done.returncode == 2 and why in done.stderr, done.stdout + done.stderr
