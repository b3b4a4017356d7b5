"""The lines that a failure prints work as they stand: in a shell, from any folder, or in Python."""

import html
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from kernels import inputs, kda, without_packing

SMALL = """reason = of one's own
source = none
op = kda
T = 20
H = 1
K = 16
V = 16
gate = log
beta = plain
l2norm = no
base = fp32
"""
SAID: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}


def line(text: str, word: str) -> str:
    """The text after the first `word: `."""
    lines = (x.strip() for x in text.splitlines())
    return next(x for x in lines if x.startswith(word + ": ")).removeprefix(word + ": ").strip()


def in_a_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as a user's shell takes it, `deltaproof` being the program under test."""
    name, *words = shlex.split(command)
    assert name == "deltaproof", command
    return subprocess.run(
        [deltaproof.program(), *words], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("kept", [False, True])
def test_a_failing_run_is_had_again_in_python_and_explained_in_a_shell(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own: dict[str, Any] = {"base": "fp32", "layouts": (), "outputs": ("o",)}
    out = "report" if kept else None
    found = deltaproof.run(without_packing, ("packed-ones", "beta-zero"), out=out, **own)
    assert found.status == 1, found.text
    same = eval(line(found.text, "again"))
    assert same.verdicts() == {i: v for i, v in found.verdicts().items() if "packed" in i}
    said = in_a_shell(line(found.text, "explain"), Path("/"))
    assert said.returncode == 0 and "decided by" in said.stdout, said
    if kept:
        page = (tmp_path / "report" / "report.html").read_text()
        assert "deltaproof.run(without_packing, &#39;packed-ones&#39;" in page
        assert "bridge.so" not in page
        call = re.search(r"deltaproof\.bisect\([^<]*\)", page)
        assert call and eval(html.unescape(call[0])).status == 1


@pytest.mark.parametrize("more", [(), ("other.case", "beta-zero")])
def test_cases_of_one_s_own_are_had_again_by_their_files(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return np.roll(kda(q, k, v, g, beta, initial_state)[0], 1, 0)

    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        Path(f"{name}.case").write_text(SMALL)
    own: dict[str, Any] = {"base": "fp32", "layouts": (), "report": "report"}
    found = deltaproof.run(late, ("mine.case", *more), **own)
    assert found.status == 1, found.text
    page = html.unescape((tmp_path / "report" / "report.html").read_text())
    calls = set(re.findall(r"deltaproof\.(?:run|bisect)\([^<]*\)", page))
    lines = [x.strip() for x in found.text.splitlines()]
    calls |= {x.removeprefix("again:").strip() for x in lines if x.startswith("again:")}
    assert len(calls) >= 2 + bool(more), page
    scope = {"deltaproof": deltaproof, "late": late}
    assert {call: eval(call, scope).status for call in calls} == dict.fromkeys(calls, 1)


def test_a_pass_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert deltaproof.run(kda, "t65", base="fp32", outputs=("o", "final_state"), layouts=()).passed
    assert not list(tmp_path.iterdir())


def test_judged_files_that_fail_are_judged_again_and_explained(tmp_path: Path) -> None:
    x = inputs()
    found = deltaproof.judge(x, {"o": np.zeros_like(kda(**x)[0])}, **SAID)
    assert found.status == 1
    assert in_a_shell(found.command, tmp_path).returncode == 1
    said = in_a_shell(line(found.text, "explain"), tmp_path)
    assert said.returncode == 0 and "decided by" in said.stdout, said


def test_the_program_says_where_the_header_lies(tmp_path: Path) -> None:
    said = in_a_shell("deltaproof --include-dir", tmp_path).stdout.strip()
    assert (Path(said) / "deltaproof_subject.h").samefile(deltaproof.header())
