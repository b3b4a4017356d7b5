"""Fresh problems: laws and what they draw, calls before any truth, and a kernel in a process of its
own with a score."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof import fresh, laws
from deltaproof.kernel_process import KernelProcess
from deltaproof.score import _forbidden, score_file
from kernels import kda
from recurrences import MODELS, right

OWN: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}
TINY = "T: 66..90\nH = 1\nHV: H * 1 | H * 2\nK = 16\nV = 16\nop = kda\ng_scale: 0.02 | 0.2\n"


def test_a_law_draws_what_its_lines_say() -> None:
    law = laws.parse(
        "T: 5..9\nHV: H * 2 | H * 4  # of an earlier line\nH = 3\ngate: log | softplus\n"
        "A_log = 1 if gate in softplus\n_x = 1 if gate not in softplus\ncu_seqlens = cut 2\n"
        "s0_scale = 1 with 0.5\n",
        "own.law",
    )
    with pytest.raises(ValueError, match="own.law:2: HV: no earlier line says H"):
        law.draw(random.Random(1))
    drawn = [law.draw(random.Random(i), {"H": 3}) for i in range(200)]
    assert {int(x["T"]) for x in drawn} == set(range(5, 10))
    assert {x["HV"] for x in drawn} == {"6", "12"} and {x["H"] for x in drawn} == {"3"}
    assert all(("A_log" in x) == (x["gate"] == "softplus") for x in drawn)
    assert all(("_x" in x) != ("A_log" in x) for x in drawn)
    assert 60 < sum("s0_scale" in x for x in drawn) < 140
    for x in drawn:
        cu = [int(n) for n in x["cu_seqlens"].split(",")]
        assert cu == sorted(set(cu)) and [cu[0], cu[-1]] == [0, int(x["T"])] and len(cu) == 4
    assert "_x" not in laws.case_text(drawn[0] | {"_x": "1"})
    with pytest.raises(ValueError, match="own.law:1: 'T 5': must be KEY = VALUE"):
        laws.parse("T 5\n", "own.law")
    with pytest.raises(ValueError, match="law wide: no such file, and in .* are long packed"):
        laws.read("wide")


@pytest.mark.parametrize("model", MODELS)
def test_right_kernels_of_every_recurrence_pass(model: str) -> None:
    found = deltaproof.run(right(model), "fresh", models=(model,), seed=7, count=2, **OWN)
    assert found.passed and len(found.verdicts()) == 2, found.text


def test_a_seed_has_the_same_problems_and_no_seed_others(tmp_path: Path) -> None:
    (tmp_path / "tiny.law").write_text(TINY)
    told: dict[str, Any] = {**OWN, "laws": str(tmp_path), "count": 2}
    a, b = (deltaproof.run(kda, "fresh", seed=3, **told) for _ in range(2))
    assert (
        a.record == b.record and a.passed and list(a.verdicts()) == ["fresh:tiny-0", "fresh:tiny-1"]
    )
    c, d = (deltaproof.run(kda, "fresh", **told) for _ in range(2))
    assert c.record and d.record and c.record["seed"] != d.record["seed"]
    with pytest.raises(ValueError, match="count=0"):
        deltaproof.run(kda, "fresh", **{**told, "count": 0})
    with pytest.raises(ValueError, match="fresh problems are a run of their own"):
        deltaproof.run(kda, ["fresh", "smoke"], **told)


def test_no_truth_is_made_before_the_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.law").write_text(TINY)
    events: list[str] = []

    def judge(*a: Any, **b: Any) -> Any:
        events.append("judged")
        return deltaproof.judge(*a, **b)

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        events.append("called")
        return kda(q, k, v, g, beta)

    monkeypatch.setattr(fresh, "judge", judge)
    found = deltaproof.run(kernel, "fresh", laws=str(tmp_path), count=4, **OWN)
    assert found.passed, found.text
    assert events == ["called"] * 8 + ["judged"] * 4


def _caches_by_shape() -> Any:
    kept: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return kept.setdefault(q.shape, kda(q, k, v, g, beta)[0])

    return kernel


def _caches_by_address() -> Any:
    kept: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return kept.setdefault((q.ctypes.data, q.shape), kda(q, k, v, g, beta)[0])

    return kernel


def _right_once() -> Any:
    calls = [0]

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        calls[0] += 1
        return kda(q, k, v, g, beta)[0] * np.float32(1 + (calls[0] % 2 == 0) * 2**-20)

    return kernel


def _writes_its_input() -> Any:
    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        o = kda(q, k, v, g, beta)[0]
        q *= 2
        return o

    return kernel


def _fills_later() -> Any:
    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        import threading

        o = np.zeros_like(v)
        made = kda(q, k, v, g, beta)[0]
        threading.Timer(0.005, lambda: o.__setitem__(..., made)).start()
        return o

    return kernel


def _writes_beside_its_input() -> Any:
    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        o = kda(q, k, v, g, beta)[0]
        np.lib.stride_tricks.as_strided(q, (q.size + 5,), (q.itemsize,))[-1] = 0
        return o

    return kernel


class Lazy(np.ndarray):
    """Computed when somebody looks."""


class Posing:
    """Has what tensors of PyTorch are known by."""

    __module__ = "torch.posing"
    shape, dtype = (1,), "float32"

    def detach(self) -> Any:
        raise AssertionError

    storage_offset = detach


def _lazy() -> Any:
    return lambda q, k, v, g, beta: kda(q, k, v, g, beta)[0].view(Lazy)


def _posing() -> Any:
    return lambda q, k, v, g, beta: Posing()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_caches_by_shape, "times its limit"),
        (_caches_by_address, "times its limit"),
        (_right_once, "not repeatable: called again with the same inputs, o has other bits"),
        (_writes_its_input, "the call wrote into its input q, or beside it"),
        (_writes_beside_its_input, "the call wrote into its input q, or beside it"),
        (_posing, "o is a torch.posing.Posing, which is no plain array"),
        (_fills_later, "o changed after the call returned"),
        (_lazy, "o is a test_fresh.Lazy, which is no plain array"),
    ],
)
def test_what_calls_may_not_do(make: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.law").write_text(TINY)
    own = {**OWN, "outputs": "o"}
    own |= {"layouts": ("unaligned",)} if make is _writes_beside_its_input else {}
    found = deltaproof.run(make(), "fresh", laws=str(tmp_path), seed=1, count=2, **own)
    assert found.status == 1 and says in found.text, found.text


PACKED = (
    "reason = r\nop = kda\nT = 40\nK = 8\nV = 8\ns0_scale = 1\ncu_seqlens = 0,9,40\nbeta = plain\n"
)


@pytest.mark.parametrize("fault", ["", "lengths", "scale", "strides"])
def test_packings_scales_and_states_in_layouts_are_drawn(fault: str, tmp_path: Path) -> None:
    (tmp_path / "packed.law").write_text(PACKED)
    kept: dict[Any, Any] = {}

    def kernel(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, scale: Any
    ) -> Any:
        if fault == "lengths":
            cu_seqlens = kept.setdefault((len(cu_seqlens), len(q)), cu_seqlens.copy())
        if fault == "strides":  # as if states were contiguous
            dense = np.empty(initial_state.shape, np.float32).strides
            initial_state = np.lib.stride_tricks.as_strided(initial_state, strides=dense)
        own = None if fault == "scale" else scale
        return kda(q, k, v, g, beta, initial_state, cu_seqlens, own)

    own = {**OWN, "layouts": ("strided",), "seed": 5, "count": 12}
    found = deltaproof.run(kernel, "fresh", laws=str(tmp_path), **own)
    assert found.passed == (not fault) and found.status == bool(fault), found.text
    assert (found.layouts["strided"] == "fail") == (fault == "strides") or fault == "scale"


# ---- a kernel of a file -------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
KERNEL = f"""
import sys
sys.path.insert(0, {HERE!r})
from kernels import kda as _kda
"""


def scored(tmp_path: Path, body: str, **told: Any) -> tuple[dict[str, Any], str]:
    (tmp_path / "tiny.law").write_text(TINY)
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL + body)
    told = {"seed": 5, "count": 2, "laws": [str(tmp_path)], "base": "fp32", **told}
    return score_file(str(file), "kda-forward", **told)


RIGHT = "def kernel(q, k, v, g, beta): return _kda(q, k, v, g, beta)[0]\n"


def test_scores_stand_in_the_order_of_errors(tmp_path: Path) -> None:
    scores = [
        scored(tmp_path, f"def kernel(q, k, v, g, beta): return {x}\n", seed=2)[0]["score"]
        for x in (
            "_kda(q, k, v, g, beta)[0]",
            "_kda(q, k, v, g, beta)[0] * (1 + 2e-7)",
            "_kda(q, k, v, g, beta)[0] * 1.001",
            "0 * v",
        )
    ]
    assert scores == sorted(scores) and scores[0] < 1 < scores[2], scores


def test_a_score_is_json_with_its_power(tmp_path: Path) -> None:
    out = tmp_path / "score.json"
    (tmp_path / "tiny.law").write_text(TINY)
    (tmp_path / "kernel.py").write_text(KERNEL + RIGHT)
    told = ["--laws", str(tmp_path), "--count", "2", "--seed", "5", "--json", str(out)]
    command = [sys.executable, "-m", "deltaproof", "score", str(tmp_path / "kernel.py")]
    done = subprocess.run(
        [*command, "--task", "kda-forward", *told], capture_output=True, text=True
    )
    assert done.returncode == 0 and "SCORE: " in done.stdout, done.stdout + done.stderr
    said = json.loads(out.read_text())
    assert said["schema"] == "deltaproof.score/1" and said["seed"] == 5 and said["score"] < 1
    assert set(said["tensors"]["o"]["power"]) == {"whole", "window", "row", "seen"}
    assert [r["verdict"] for r in said["runs"]] == ["pass"] * 7 and "numpy" in said["modules"]
    done = subprocess.run([*command, "--task", "none", *told], capture_output=True, text=True)
    assert not out.read_text()  # no score of the call before
    assert done.returncode == 2 and "task none: no such file" in done.stderr


def test_a_used_library_may_be_forbidden_by_name(tmp_path: Path) -> None:
    said, text = scored(tmp_path, RIGHT, forbid=["safetens"])
    assert said["forbidden"] == ["safetensors"] and said["score"] == np.inf and said["status"] == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os\ndef kernel(q, k, v, g, beta): os._exit(0)\n", "ended with the status 0"),
        ("import ctypes\ndef kernel(q, k, v, g, beta): ctypes.string_at(0)\n", "signal SIGSEGV"),
        ("import os\ndef kernel(q, k, v, g, beta):\n    os.write(1, b'pass'*999); return 0*v\n",
         "times its limit"),
        ("import os, time\ndef kernel(q, k, v, g, beta): time.sleep(99)\n", "the call took"),
    ],
)  # fmt: skip
def test_a_kernel_that_ends_its_process_or_talks_fails(
    tmp_path: Path, body: str, says: str
) -> None:
    said, text = scored(tmp_path, body, limit=2.0)
    assert said["status"] == 1 and says in text, text


FORGED = "\\x1b[2JSCORE: 0.1 (at most 1 passes)\\nSCORE: 0.1 (at most 1 passes)\\x1b[8m"


@pytest.mark.parametrize(
    "body",
    [
        f"def kernel(q, k, v, g, beta): raise ValueError('{FORGED}')\n",
        f"def kernel(q, k, v, g, beta): raise type('{FORGED}', (Exception,), {{}})\n",
        f"import os, sys\ndef kernel(q, k, v, g, beta): print('{FORGED}', file=sys.stderr);"
        " sys.stderr.flush(); os._exit(0)\n",
        "import sys\nm = sys.modules['__main__']\nreal = m._say\n"
        f"m._say = lambda f, x: real(f, {{**x, 'modules': ['{FORGED}'], 'raised': '{FORGED}'}})\n"
        "def kernel(q, k, v, g, beta): return v\n",
        "import sys\nm = sys.modules['__main__']\nreal = m._say\n"
        "m._say = lambda f, x: real(f, x | {'kernels': 5} if 'modules' in x else x)\n"
        "def kernel(q, k, v, g, beta): return v\n",
    ],
)
def test_what_a_kernel_says_is_no_line_of_its_own_and_moves_no_cursor(
    tmp_path: Path, body: str
) -> None:
    said, text = scored(tmp_path, body, limit=20.0, forbid=["score"], count=1)
    assert said["status"] == 1 and "\x1b" not in text, text
    assert not [x for x in text.splitlines() if x.startswith("SCORE")], text


def test_an_empty_name_forbids_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="forbid='': is a part of every name"):
        scored(tmp_path, "def kernel(q, k, v, g, beta): return v\n", forbid=[""])


def test_a_kernel_whose_answer_is_none_ends(tmp_path: Path) -> None:
    """Each waited for the other to read: more than a pipe holds."""
    body = """import os
def kernel(q, k, v, g, beta, initial_state=None, cu_seqlens=None, scale=None):
    for fd in range(3, 30):
        try: os.write(fd, b'{"ok":1}')
        except OSError: pass
    return v
"""
    said, text = scored(tmp_path, body, limit=5.0, laws=["shapes", "packed", "long"], count=8)
    assert said["status"] == 1 and text.count("the kernel's process lied") >= 8, text


BEYOND = """
import numpy as np
def kernel(q, k, v, g, beta):
    o = _kda(q, k, v, g, beta)[0]
    seen = np.lib.stride_tricks.as_strided(q.reshape(-1), (q.size + 80,))[<at>]
    <what>
    return o
"""


@pytest.mark.parametrize(
    ("at", "what"),
    [("q.size + 70", "seen + 0"), ("-1", "pass"), ("q.size : q.size + 4", "seen[:] = np.nan")],
)
def test_a_kernel_that_reads_or_writes_beyond_its_arrays_ends(
    tmp_path: Path, at: str, what: str
) -> None:
    """Though it makes nothing of what it reads, and writes what was there."""
    said, text = scored(tmp_path, BEYOND.replace("<at>", at).replace("<what>", what))
    runs = {r["id"].rpartition("-")[2]: r["why"] for r in said["runs"]}
    assert said["status"] == 1 and "SIGSEGV" in runs["guarded"], text


NARROW = """
import numpy as np
def kernel(q, k, v, g, beta):
    short = [np.asarray(x).astype(np.float16).astype(np.float32) for x in (q, k, v, g, beta)]
    return _kda(*short)[0]
"""


def test_a_format_narrower_than_claimed_fails(tmp_path: Path) -> None:
    said, text = scored(tmp_path, NARROW)
    assert said["status"] == 1 and said["score"] > 2, text


def test_kernels_that_ran_may_be_forbidden_by_name() -> None:
    ran = ["void fla::chunk_kda_fwd<64>(float*)", "my_gemm", "numpy"]
    assert _forbidden(ran, ["FLA", "cudnn"]) == ran[:1]


LATE = """
import threading, time
import numpy as np
import deltaproof.guards as guards
def kernel(q, k, v, g, beta):
    guards.WAIT, guards.time = -1, type("no", (), {"sleep": lambda *_: None})
    time.sleep = lambda *_: None
    o, made = np.zeros_like(v), _kda(q, k, v, g, beta)[0]
    threading.Timer(0.5, lambda: o.__setitem__(..., made)).start()
    return o
"""


def test_timers_that_a_kernel_patches_do_not_help_late_results(tmp_path: Path) -> None:
    said, text = scored(tmp_path, LATE)
    assert said["status"] == 1 and said["score"] > 1, text


READS = """
import os
def kernel(q, k, v, g, beta):
    for what in ("mem", "maps", "environ", "fd/0"):
        try:
            with open(f"/proc/{os.getppid()}/{what}", "rb") as f:
                if f.read(1):
                    return _kda(q, k, v, g, beta)[0]
        except OSError:
            pass
    return 0 * v
"""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all processes")
def test_a_kernel_cannot_read_the_judge_in_proc(tmp_path: Path) -> None:
    assert scored(tmp_path, READS)[0]["score"] > 1


PATCHES = """
import numpy as np, deltaproof.contract as _c, deltaproof.guards as _g, deltaproof.judging as _j
def kernel(q, k, v, g, beta):
    np.allclose = np.array_equal = lambda *a, **b: True
    _g.look = _c.look = lambda *a: None
    _j.judge = lambda *a, **b: None
    return 0 * v
"""


def test_what_a_kernel_patches_changes_no_verdict(tmp_path: Path) -> None:
    said, text = scored(tmp_path, PATCHES)
    assert said["status"] == 1 and said["score"] > 1 and "times its limit" in text


SEARCHES = """
import glob, json, os
def kernel(q, k, v, g, beta):
    found = []
    for pid in (os.getppid(), os.getpid()):
        for what in ("cmdline", "environ"):
            try:
                found.append(open(f"/proc/{pid}/{what}", "rb").read())
            except OSError:
                pass
    files = [f for d in (TMP + "/*/*", os.getcwd() + "/*", os.getcwd() + "/../*")
             for f in glob.glob(d) if os.path.getmtime(f) > START]
    with open(OUT, "a") as f:
        f.write(json.dumps([files, b" ".join(found).decode(errors="replace")]) + "\\n")
    return _kda(q, k, v, g, beta)[0]
"""


def test_a_kernel_finds_no_truth_name_or_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that its process can open: its arguments and environment, files made since it began.
    It may see the judge's arguments, which hold no seed unless the user says one."""
    out, tmp = tmp_path / "found", tmp_path / "tmp"
    tmp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    body = f"OUT, TMP, START = {str(out)!r}, {str(tmp)!r}, {time.time()!r}\n" + SEARCHES
    (tmp_path / "tiny.law").write_text(TINY)
    (tmp_path / "kernel.py").write_text(KERNEL + body)
    told = {"seed": None, "count": 2, "laws": [str(tmp_path)], "base": "fp32"}
    said, _ = score_file(str(tmp_path / "kernel.py"), "kda-forward", **told)
    assert said["status"] == 0 and str(said["seed"]) not in out.read_text()
    for line in out.read_text().splitlines():
        files, _ = json.loads(line)
        assert {os.path.basename(x) for x in files} <= {"work"}, files


def test_the_judge_cannot_be_read_by_processes_of_its_user(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL + RIGHT)
    call = KernelProcess(str(file), None, 5.0, outputs=("o",))
    call.close()
    assert os.stat("/proc/self/mem").st_uid == 0  # not dumpable: its files are root's


def test_a_function_that_takes_decays_is_drawn_log_gates() -> None:
    def decaying(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None) -> Any:
        return kda(q, k, v, np.log(np.maximum(g, 1e-300)), beta, cu_seqlens=cu_seqlens)[0]

    def late(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None) -> Any:
        return kda(q, k, v, g - 1, beta, cu_seqlens=cu_seqlens)[0]

    told: dict[str, Any] = {"base": "fp32", "gate": "exp", "count": 2, "seed": 5, "layouts": ()}
    assert deltaproof.run(decaying, "fresh", **told).passed
    assert deltaproof.run(late, "fresh", **told).status == 1


def test_a_scale_of_0_is_a_scale(tmp_path: Path) -> None:
    (tmp_path / "tiny.law").write_text(TINY + "scale = 0\n")
    found = deltaproof.run(kda, "fresh", seed=3, count=1, laws=str(tmp_path), **OWN)
    assert found.passed, found.text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"count": 1.5}, "count=1.5: must be a whole number"),
        ({"count": "x"}, "count='x': must be a whole number"),
        ({"laws": []}, r"laws=\[\]: no law"),
        ({"laws": [lambda rng: {"q": rng}]}, "lambda>-0: must return arrays q, k, v, g"),
        ({"models": ()}, r"models=\(\): name at least one"),
        ({"outputs": ()}, r"outputs=\(\): name at least one"),
    ],
)
def test_arguments_of_fresh_problems_are_refused_by_name(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        deltaproof.run(kda, "fresh", **{**OWN, "seed": 3, "count": 1, **wrong})


@pytest.mark.parametrize(
    ("law", "says"),
    [
        (b"T = cut 3", "bad.law:1: T: no earlier line says T"),
        (b"H = 2\nT = 5..3", "bad.law:2: T: empty range"),
        (b"H = x\nHV = H * 2", "bad.law:2: HV: invalid literal"),
        (b"T = 64 with 1.2.3", "bad.law:1: with 1.2.3: must be from 0 to 1"),
        (b"include bad", "bad.law: includes itself"),
        (b"\xff", "bad.law: is no UTF-8"),
        (b"T = 64\nsession = 1,5", "bad-0: session: fresh problems are single calls"),
        (b"recurrence = rwkv7", "bad-0: recurrence: fresh problems are single calls"),
    ],
)
def test_a_wrong_law_is_refused_by_file_and_line(law: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.law"
    path.write_bytes(law)
    with pytest.raises(ValueError, match=says):
        deltaproof.run(kda, "fresh", seed=3, count=1, laws=str(path), **OWN)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("models = kda", "task .*bad.task: base is missing"),
        ("base = fp32\nbase = bf16", "bad.task:2: base stands twice"),
        ("l2norm = maybe", "bad.task:1: l2norm = maybe: must be yes or no"),
        ("count = 0", "bad.task:1: count = 0: must be a whole number from 1 on"),
        ("base = fp32\nmodels =", r"models=\(\): name at least one"),
    ],
)
def test_a_wrong_task_is_refused_by_file_and_line(task: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.task").write_text(task)
    (tmp_path / "kernel.py").write_text(KERNEL + RIGHT)
    with pytest.raises(ValueError, match=says):
        score_file(str(tmp_path / "kernel.py"), str(tmp_path / "bad.task"))


def test_a_score_of_no_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count=0: must be a whole number from 1 on"):
        scored(tmp_path, RIGHT, count=0)


@pytest.mark.parametrize("said", [{"seed": 3}, {"count": 3}, {"laws": "packed"}])
def test_what_is_said_of_fresh_problems_is_refused_with_cases(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is of fresh problems, not of cases"):
        deltaproof.run(kda, "t65", **OWN, **said)
