"""The pytest plug-in, run as a user runs it: on a right and on a wrong kernel."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltaproof import pytest_plugin

HERE = Path(__file__).parent
# An installed package is known to pytest; that of a source tree is named.
PLUGIN = (
    [] if entry_points(group="pytest11", name="deltaproof") else ["-p", "deltaproof.pytest_plugin"]
)

TESTS = """
from kernels import inputs, kda

FORMS = dict(base="fp32", gate="log", beta="plain", l2norm=False)

def test_right(deltaproof):
    x = inputs()
    deltaproof.assert_explained(x, dict(o=kda(**x)[0]), **FORMS)

def test_wrong(deltaproof):
    x = inputs()
    o = kda(**x)[0]
    o[70, 1] *= 1.01
    deltaproof.assert_explained(x, dict(o=o), **FORMS)
"""


PUNCTUATION = """
import pytest
from kernels import inputs, kda

@pytest.mark.parametrize("name", ["a,b", "a;b"])
def test_ids(deltaproof, name):
    x = inputs(T=8)
    deltaproof.assert_explained(x, dict(o=kda(**x)[0]), base="fp32", gate="log", beta="plain",
                                l2norm=False)

def test_lost(deltaproof):
    assert deltaproof.judge({}, {}, base="fp32").status == 2
"""


def run(folder: Path, *options: str, tests: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_kernel.py").write_text(tests or TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *options]
    environment = dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": "1"}
    own = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE)] + ([own] if own else []))
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [*command, "test_kernel.py"],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


def test_the_summary_names_tensor_rank_token_and_the_command(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    named = [n for n in lines if n.startswith("test_kernel.py::test_wrong: o, rank 0, head 1")]
    assert len(named) == 1 and "token 70" in named[0], done.stdout
    again = lines[lines.index(named[0]) + 1].strip()
    assert again.startswith("again: deltaproof judge --inputs=")
    assert "2 judged, 1 failed" in done.stdout


def test_reports_are_written_below_the_folder_that_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--deltaproof-report", "out")
    assert done.returncode == 1, done.stdout
    pages = sorted(p.parent.name for p in tmp_path.glob("out/*/report.html"))
    assert pages == ["test_kernel.py-test_right", "test_kernel.py-test_wrong"], done.stdout
    assert "report: " in done.stdout
    page = (tmp_path / "out" / pages[1] / "report.html").read_text()
    assert "token 70" in page or ">70<" in page


def test_a_report_goes_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for at in ("", "file"):
        done = run(tmp_path, f"--deltaproof-report={at}")
        assert done.returncode == 4 and f"report={at}: must be a folder" in done.stderr, done
        assert "Traceback" not in done.stderr


CHECKS = """
import pytest
from kernels import inputs, kda

FORMS = dict(base="fp32", gate="log", beta="plain", l2norm=False)

def zeros(**x):
    return kda(**x)[0] * 0

def test_idle(deltaproof):
    assert deltaproof.program()

def test_checked(deltaproof):
    deltaproof.check(lambda **x: kda(**x)[0], case="t1", **FORMS)

def test_zeros(deltaproof):
    assert not deltaproof.differ(lambda **x: kda(**x)[0], zeros, "t1", **FORMS).passed

def test_alone():
    pass

@pytest.fixture
def after(deltaproof):
    yield
    x = inputs(T=8)
    deltaproof.judge(x, dict(o=kda(**x)[0]), **FORMS)

def test_later(after):
    pass
"""


def test_what_judges_nothing_is_told_and_checks_are_judged(tmp_path: Path) -> None:
    done = run(tmp_path, tests=CHECKS)
    assert "3 judged, 1 failed, 1 judged nothing" in done.stdout, done.stdout
    assert "test_idle: takes deltaproof, judges nothing in this process" in done.stdout
    assert "test_zeros: differ: beyond, first o" in done.stdout and "test_alone" not in done.stdout


def test_no_summary_where_nothing_was_judged(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "nothing")
    assert "deltaproof" not in done.stdout


def test_every_test_has_a_folder_and_all_are_in_one_summary(tmp_path: Path) -> None:
    workers = ("-n", "2") if find_spec("xdist") else ()
    done = run(tmp_path, "--deltaproof-report", "out", *workers, tests=PUNCTUATION)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 judged, 0 failed, 1 could not be judged") == 1, done.stdout
    assert "test_lost: could not be judged" in done.stdout
    assert len(list(tmp_path.glob("out/*/results.json"))) == 3, list(tmp_path.glob("out/*"))


CRASHES = """
import os, pytest
from kernels import inputs, kda

@pytest.mark.parametrize("n", range(3))
def test_one_of(deltaproof, n):
    x = inputs(T=8)
    deltaproof.assert_explained(x, dict(o=kda(**x)[0]), base="fp32", gate="log", beta="plain",
                                l2norm=False)
    if n == 1:
        os._exit(3)
"""


def test_a_worker_that_crashes_has_told_what_it_judged(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    done = run(tmp_path, "-n", "2", tests=CRASHES)
    assert "1 failed, 2 passed" in done.stdout and "2 judged, 0 failed" in done.stdout, done.stdout


FORKS = """
import os
from kernels import inputs, kda

def judged(deltaproof, factor):
    x = inputs(T=8)
    deltaproof.judge(x, dict(o=kda(**x)[0] * factor), base="fp32", gate="log", beta="plain",
                     l2norm=False)

def in_a_child(deltaproof):
    pid = os.fork()
    if not pid:
        judged(deltaproof, 2)
        os._exit(0)
    os.waitpid(pid, 0)

def test_child(deltaproof):
    in_a_child(deltaproof)

def test_both(deltaproof):
    in_a_child(deltaproof)
    judged(deltaproof, 1)
"""


def test_children_that_a_test_forks_tell_what_they_judged(tmp_path: Path) -> None:
    done = run(tmp_path, "--deltaproof-report", "out", tests=FORKS)
    assert "3 judged, 2 failed\n" in done.stdout, done.stdout
    for test in ("child", "both", "both-2"):
        assert f"report: out/test_kernel.py-test_{test}/report.html\n" in done.stdout, done.stdout


def test_a_judgement_outside_of_tests_is_named(tmp_path: Path) -> None:
    told = run(
        tmp_path, tests=TESTS + "\nimport deltaproof\ndeltaproof.judge({}, {}, base='fp32')\n"
    )
    assert "\noutside of tests: could not be judged" in told.stdout, told.stdout


def test_pytest_before_8_4_takes_a_hash_of_every_plugin() -> None:
    assert hash(pytest_plugin.Session(None))


RUNS = """
from kernels import kda

def right(q, k, v, g, beta):
    return kda(q, k, v, g, beta)[0]

def test_asserted(deltaproof):
    assert deltaproof.run(right, "beta-zero", base="fp32", layouts=()).passed

def test_ignored(deltaproof):
    deltaproof.run(lambda q, k, v, g, beta: 2 * right(q, k, v, g, beta), "beta-zero", base="fp32",
                   layouts=())

def test_fresh(deltaproof):
    deltaproof.run(lambda q, k, v, g, beta: v, "fresh", base="fp32", count=2, seed=3, layouts=())

def test_refused(deltaproof):
    try:
        deltaproof.run(right, "no-such-case", base="fp32")
    except ValueError:
        pass
"""


def test_runs_of_functions_are_in_the_summary_and_have_reports(tmp_path: Path) -> None:
    done = run(tmp_path, "--deltaproof-report", "out", tests=RUNS)
    assert done.returncode == 0, done.stdout
    assert "3 judged, 2 failed, 1 could not be judged" in done.stdout, done.stdout
    assert "test_ignored: beta-zero: o, rank 0, head 0" in done.stdout
    assert "    again: deltaproof.run(<lambda>, 'beta-zero', base='fp32'" in done.stdout
    assert "test_fresh: " in done.stdout and "    again: seed=3" in done.stdout
    assert "test_refused: could not be judged" in done.stdout
    for page in ("asserted/report.html", "ignored/report.html", "fresh/*/report.html"):
        assert f"report: out/test_kernel.py-test_{page}\n" in done.stdout, done.stdout
    assert len(list(tmp_path.glob("out/*/results.json"))) == 3  # the refused one says so
    assert len(list(tmp_path.glob("out/*/long-*/results.json"))) == 2


DIES = """
import os
from kernels import inputs, kda

def test_twice(deltaproof):
    x = inputs(T=8)
    for n in range(2):
        if os.environ.get("DIES_AT") == str(n):
            raise RuntimeError
        deltaproof.assert_explained(x, dict(o=kda(**x)[0]), base="fp32", gate="log", beta="plain",
                                    l2norm=False)
"""


def test_no_verdict_of_an_earlier_session_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dies, stay in (("2", 2), ("1", 1), ("2", 2), ("0", 0)):
        monkeypatch.setenv("DIES_AT", dies)
        done = run(tmp_path, "--deltaproof-report", "out", tests=DIES)
        assert done.returncode == int(stay < 2), done.stdout
        assert len(list(tmp_path.glob("out/*/results.json"))) == stay, dies
