"""A Python function on the program's cases: verdicts, skips and their reasons, memory layouts, and
the searches for what broke."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof.layouts import LAYOUTS
from deltaproof.program import program, put
from deltaproof.tensors import BFLOAT16
from kernels import (
    deltaproduct,
    dplr,
    gla,
    in_slots,
    inputs,
    kda,
    without_packing,
    wrong_at_70,
)
from processes import becomes, marked
from recurrences import unit

CASES = ("t65", "packed-ones", "initial-state", "smoke-kda")
OWN: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state")}


def test_a_right_kernel_passes_what_it_serves_and_says_why_not_the_rest() -> None:
    found = deltaproof.run(kda, CASES, **OWN)
    assert found.passed, found.text
    verdicts = {i.split(":")[0]: v for i, v in found.verdicts().items()}
    assert [verdicts[n] for n in CASES[:3]] == ["pass"] * 3, found.text
    assert verdicts["smoke-kda"].startswith("skipped: ") and "gate softplus" in found.text
    assert found.layouts == dict.fromkeys((*LAYOUTS[1:], "far"), "pass")
    assert found.record is not None and found.record["provenance"]["notes"]["python"]


def test_gates_above_0_grow_and_a_kernel_that_clamps_them_fails() -> None:
    def clamped(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any) -> Any:
        return kda(q, k, v, np.minimum(g, 0), beta, cu_seqlens=cu_seqlens)

    found = deltaproof.run(kda, "growing-gates", **OWN)
    assert found.passed, found.text
    assert deltaproof.run(clamped, "growing-gates", layouts=(), **OWN).status == 1


def test_a_state_that_grows_out_of_fp32_is_said_to_grow(tmp_path: Path) -> None:
    case = tmp_path / "grown.case"
    case.write_text("reason = r\nsource = s\nop = kda\nT = 128\nK = 16\nV = 16\ng_least = -1\n")
    found = deltaproof.run(kda, str(case), layouts=(), **OWN)
    assert found.status == 1
    assert "the state grows: log decays above 0 add up to" in found.text


def test_a_kernel_that_erases_nothing_serves_gla_and_ssd_alone() -> None:
    cases = ("exact-gla", "smoke-ssd", "beta-zero")
    found = deltaproof.run(gla, cases, models=("gla", "ssd"), **OWN)
    verdicts = {i.split(":")[0]: v for i, v in found.verdicts().items()}
    assert [verdicts[n] for n in cases[:2]] == ["pass"] * 2, found.text
    assert verdicts["beta-zero"].startswith("skipped: ") and "model kda" in found.text
    assert set(found.layouts) == {*LAYOUTS[1:], "far"}


def test_keys_that_read_in_turn_are_a_recurrence_of_their_own() -> None:
    def at_once(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return deltaproduct(q, k, v, g, beta, initial_state, turns=False)

    own = {**OWN, "models": ("gated-deltaproduct",), "layouts": ()}
    found = deltaproof.run(deltaproduct, ("deltaproduct-weak", "smoke-mkda2"), **own)
    verdicts = {i.split(":")[0]: v for i, v in found.verdicts().items()}
    assert verdicts["deltaproduct-weak"] == "pass", found.text
    assert "model mkda, the function computes gated-deltaproduct" in found.text
    assert deltaproof.run(at_once, ("deltaproduct-weak",), **own).status == 1


def test_the_recurrence_is_said_not_told_by_shapes(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.case"  # of one channel, as GDN's gates are
    narrow.write_text(
        "reason = r\nsource = s\nop = kda\nT = 65\nH = 2\nK = 1\nV = 8\ng_scale = 0.02\n"
        "s0_scale = 1\nranks = 1\nbase = fp32\n"
    )
    found = deltaproof.run(kda, str(narrow), layouts=(), **OWN)
    assert found.passed, found.text


def test_factors_of_a_token_are_arrays_of_their_own() -> None:
    found = deltaproof.run(dplr, ("dplr-weak",), models=("dplr",), layouts=(), **OWN)
    assert found.passed, found.text


def test_arrays_that_the_function_does_not_take_skip_the_case() -> None:
    found = deltaproof.run(wrong_at_70, ("t65",), base="fp32", layouts=())
    assert found.status == 2 and not found.passed
    (verdict,) = found.verdicts().values()
    assert verdict.startswith("skipped: ") and "takes no `initial_state`" in verdict


def test_a_wrong_kernel_fails_where_it_is_wrong() -> None:
    found = deltaproof.run(without_packing, ("packed-ones", "beta-zero"), base="fp32", layouts=())
    assert found.status == 1 and not found.passed
    assert list(found.verdicts().values()) == ["fail", "pass"], found.text
    assert found.record is not None
    failed = found.record["runs"][0]["tensors"][0]["failed"]
    assert failed["sequence"] > 0


def test_a_kernel_that_ignores_strides_is_seen() -> None:
    def flat(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        base = v.base if v.base is not None else v
        while base.base is not None:
            base = base.base
        dense = base[: v.size].reshape(v.shape)  # as if v were contiguous
        return kda(q, k, dense, g, beta)[0]

    found = deltaproof.run(flat, ("beta-zero",), base="fp32")
    assert found.status == 1 and not found.passed, found.text
    assert all(x.startswith("fail") for x in found.layouts.values()) and len(found.layouts) == 5
    assert list(found.verdicts().values()) == ["pass"] and "layout strided: fail" in found.text
    assert found.text.endswith("VERDICT: FAIL (in no case)\n"), found.text


def test_a_kernel_that_ignores_strides_of_states_is_seen() -> None:
    def flat(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, cu_seqlens: Any = None
    ) -> Any:
        if initial_state is not None:
            dense = np.empty(initial_state.shape, np.float32).strides
            initial_state = np.lib.stride_tricks.as_strided(initial_state, strides=dense)
        return kda(q, k, v, g, beta, initial_state, cu_seqlens)

    found = deltaproof.run(flat, ("initial-state",), layouts=("strided", "offset"), **OWN)
    assert found.layouts == {"strided": "fail", "offset": "pass"} and found.status == 1


@pytest.mark.parametrize("gate", ["log", "softplus"])
@pytest.mark.parametrize("beta_form", ["plain", "sigmoid"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_layouts_and_checks_are_tried_with_the_forms_of_the_function(
    gate: str, beta_form: str, l2norm: bool
) -> None:
    seen = []

    def fn(
        q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any = None, dt_bias: Any = None
    ) -> Any:
        seen.append(q.flags.c_contiguous)
        raise deltaproof.Unsupported("all")

    forms: dict[str, Any] = {"gate": gate, "beta": beta_form, "l2norm": l2norm, "models": "gdn"}
    deltaproof.run(fn, "smoke", layouts=("strided",), base="fp32", **forms)
    assert not seen[-1], "no call with strides"
    with pytest.raises(RuntimeError, match="fn refuses it: Unsupported: all"):
        deltaproof.check(fn, base="fp32", **forms)


@pytest.mark.parametrize("fault", ["strides of q", "dense tokens", "dense heads"])
def test_a_kernel_that_computes_strides_of_keys_is_seen(fault: str) -> None:
    """From those of q, or one from the other."""

    def guesses(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        token, head, entry = k.strides
        own = {"dense tokens": (k.shape[1] * head, head, entry), "strides of q": q.strides}
        own["dense heads"] = (token, k.shape[2] * entry, entry)
        return kda(q, np.lib.stride_tricks.as_strided(k, strides=own[fault]), v, g, beta)[0]

    layout = "heads-first" if fault == "dense heads" else "strided"
    found = deltaproof.run(guesses, "beta-zero", base="fp32", layouts=(layout, "offset"))
    assert found.layouts == {layout: "fail", "offset": "pass"} and found.status == 1


@pytest.mark.parametrize("name", ["q", "g", "cu_seqlens", "initial_state"])
def test_a_kernel_that_writes_into_its_inputs_fails(name: str) -> None:
    def spoils(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, cu_seqlens: Any = None
    ) -> Any:
        made = kda(q, k, v, g, beta, initial_state, cu_seqlens)
        given = {"q": q, "g": g, "cu_seqlens": cu_seqlens, "initial_state": initial_state}[name]
        if given is not None:
            given[-1] = 0
        return made

    found = deltaproof.run(spoils, ("t65", "packed-ones"), layouts=("strided",), **OWN)
    assert found.status == 1 and f"wrote into its input {name}" in found.text, found.text
    assert "wrote into its input" in found.layouts["strided"]


def test_a_kernel_may_leave_its_state_in_place_of_the_initial_one() -> None:
    def in_place(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any = None
    ) -> Any:
        o, initial_state[...] = kda(q, k, v, g, beta, initial_state, cu_seqlens=cu_seqlens)
        return o, initial_state

    found = deltaproof.run(in_place, ("initial-state", "packed-ones"), layouts=(), **OWN)
    assert found.passed, found.text


def test_a_scale_that_is_none_is_that_of_k() -> None:
    """A kernel that fills K up to a power of 2 took that for K."""
    given = set()

    def filled(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None) -> Any:
        given.add(scale)
        K = 1 << (q.shape[-1] - 1).bit_length()
        return kda(q, k, v, g, beta, scale=K**-0.5 if scale is None else scale)[0]

    cases = ("kda-t1", "kda-tails", "kda-scaled")
    found = deltaproof.run(filled, cases, base="fp32", layouts=())
    assert list(found.verdicts().values()) == ["pass", "fail", "pass"], found.text
    assert given == {None, 0.31}
    further: Any = lambda q, k, v, g, beta, **more: kda(q, k, v, g, beta, **more)[0]
    assert deltaproof.run(further, cases, base="fp32", layouts=()).passed


def test_a_session_in_slots_is_judged_by_the_pool() -> None:
    takes: dict[str, Any] = {"base": "fp32", "outputs": ("o", "pool"), "layouts": ()}
    found = deltaproof.run(in_slots, "session-slots", **takes)
    assert found.passed and found.record is not None, found.text
    assert "pool" in [t["name"] for t in found.record["runs"][0]["tensors"]]

    def in_place(q: Any, k: Any, v: Any, g: Any, beta: Any, **slots: Any) -> Any:
        slots.pop("scale", None)
        return in_slots(q, k, v, g, beta, in_place=True, **slots)

    wrong = deltaproof.run(in_place, "session-slots", **takes)
    assert wrong.status == 1 and "pool: slot " in wrong.text, wrong.text


@pytest.mark.parametrize("kind", [NotImplementedError, deltaproof.Unsupported, ValueError])
def test_a_layout_is_refused_by_name_and_anything_else_is_a_failure(kind: Any) -> None:
    def strict(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        if not v.flags.c_contiguous:
            raise kind("v must be contiguous")
        return kda(q, k, v, g, beta)[0]

    found = deltaproof.run(strict, ("beta-zero",), base="fp32", layouts=("strided",))
    refused = kind is not ValueError
    assert found.passed == refused
    how = "refused" if refused else "fail"
    assert found.layouts["strided"] == f"{how}: {kind.__name__}: v must be contiguous"


def test_a_call_that_takes_too_long_fails_alone() -> None:
    calls = []

    def slow(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        calls.append(len(q))
        if len(calls) == 4:  # the first case is called three times
            time.sleep(300)
        return kda(q, k, v, g, beta)[0]

    cases = ("beta-zero", "strong-uniform", "beta-decades")
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    found = deltaproof.run(slow, cases, base="fp32", layouts=(), limit=1)
    assert list(found.verdicts().values()) == ["pass", "fail", "pass"], found.text
    took = re.search(r"TooLong: the call took (\d+\.\d) s, limit=1", found.text)
    assert took and 1 <= float(took[1]) < 250, found.text
    assert time.monotonic() - start < 250 and signal.getsignal(signal.SIGALRM) is before


def test_a_process_that_the_function_forked_keeps_nothing_waiting() -> None:
    children = []

    def forks(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        children.append(child)
        return kda(q, k, v, g, beta)[0]

    start = time.monotonic()
    found = deltaproof.run(forks, "beta-zero", base="fp32", layouts=())
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found.passed and time.monotonic() - start < 500


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGKILL, 0.9), (signal.SIGINT, 0.2)])
def test_nothing_stays_of_a_run_that_a_signal_ends(
    tmp_path: Path, number: signal.Signals, delay: float
) -> None:
    script = (  # numpy makes another error of a signal that ends its import
        "import deltaproof, kernels\n"
        "print(flush=True)\n"
        "own = dict(base='fp32', outputs=('o', 'final_state'), layouts=(), out='o', cache='c')\n"
        "raise SystemExit(deltaproof.run(kernels.kda, 't65', **own).status)\n"
    )
    mark = f"DELTAPROOF_TEST={os.getpid()}-{number}-{delay}"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, **dict([mark.split("=")])}

    def start() -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", script], cwd=tmp_path, env=env, stdin=quiet,
            stdout=subprocess.PIPE, stderr=quiet, start_new_session=True,
        )  # fmt: skip

    first = start()
    assert first.stdout and first.stdout.readline()
    time.sleep(delay)
    (os.killpg if number == signal.SIGINT else os.kill)(first.pid, number)
    assert first.wait(200) in (0, -number, 128 + number)
    assert becomes(lambda: not marked(mark), 100)
    assert not list(tmp_path.glob("o/*.tmp")) or number == signal.SIGKILL
    assert start().wait(600) == 0
    record = json.loads((tmp_path / "o" / "results.json").read_text())
    assert [r["verdict"] for r in record["runs"]] == ["pass"]


def test_the_program_ends_with_the_process_that_called_it(tmp_path: Path) -> None:
    """It is killed a second after the program has asked it, which then computes for a minute."""
    (tmp_path / "long.case").write_text(
        "reason = r\nsource = s\nop = kda\nT = 16384\nHV = 2\nK = 64\nV = 64\n"
    )
    script = (
        "import os, threading, deltaproof, kernels\n"
        "from deltaproof.server import Server\n"
        "about, kill = Server._about, lambda: os.kill(os.getpid(), 9)\n"
        "Server._about = lambda self: threading.Timer(1, kill).start() or about(self)\n"
        "deltaproof.run(kernels.kda, 'long.case', base='fp32', layouts=(), cache='c')\n"
    )
    mark = f"DELTAPROOF_TEST={os.getpid()}-killed"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, **dict([mark.split("=")])}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, check=False)
    ended = becomes(lambda: not marked(mark), 10)
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL and ended


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a lone \udc80 surrogate"),
        RuntimeError("a\0b\n\x1b[31m"),
        RuntimeError("\u6f22" * 1000),
        NotImplementedError("\ud800"),
        _Mute(),
        SystemExit(0),
        GeneratorExit(),
    ],
)
def test_whatever_the_function_raises_the_rest_goes_on(error: BaseException) -> None:
    calls = []

    def raises(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        calls.append(len(q))
        if len(calls) == 1:
            raise error
        return kda(q, k, v, g, beta)[0]

    found = deltaproof.run(raises, ("beta-zero", "strong-uniform"), base="fp32", layouts=())
    one, other = found.verdicts().values()
    assert other == "pass" and type(error).__name__ in found.text
    assert one.startswith("skipped: " if isinstance(error, NotImplementedError) else "fail")
    "".join(found.raised).encode()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"models": ("nope",)}, "models='nope': must be kda, gdn, .* or dplr"),
        ({"gate": "expo"}, "gate='expo': must be log, softplus, lower_bound or exp"),
        ({"beta": None}, "beta=None: must be plain, sigmoid, sigmoid2 or none"),
        ({"layouts": ("bad",)}, "layouts='bad': must be contiguous, .* or far"),
        ({"outputs": ("o\ud800",)}, r"outputs=.*: 'o\\ud800' is no UTF-8"),
        ({"outputs": ("o", "finalstate")}, "outputs='finalstate': must be o, .* mean final_state"),
        ({"outputs": "yy", "layout": "mamba"}, "outputs='yy': must be y, out, final_states, dB, "),
        ({"outputs": (1,)}, "outputs=.*: 1 is no text"),
        ({"design": "\ud800"}, "design=.* is no UTF-8"),
        ({"cases": "a\0b"}, r"cases='a\\x00b': .* without a zero byte"),
        ({"cases": [None]}, "cases=.*: None is no text"),
        ({"cases": 3}, "cases=3: must be one name or several"),
        ({"outputs": ("o", "o")}, "outputs=.*: one of them stands twice"),
        ({"queries": "a"}, "queries='a': must be a whole number"),
        ({"checkpoints": "a"}, "checkpoints='a': must be the number of tokens"),
        ({"recurrence": "rwkv7"}, "recurrence='rwkv7': must be a deltaproof.Recurrence"),
        ({"device": "nope"}, "device='nope': "),
        ({"kernel_commit": "\0"}, "kernel_commit=.*zero byte"),
        ({"out": 5}, "out=5: must be a folder"),
        ({"report": 5}, "report=5: must be a folder"),
        ({"report": ""}, "report='': name one folder"),
        ({"out": "a", "report": "b"}, "out='a', report='b': name one folder"),
        ({"cases": "fresh", "seed": "a"}, "seed='a': must be a whole number"),
    ],
)
def test_an_argument_that_is_none_is_named_before_anything_runs(
    settings: dict[str, Any], said: str
) -> None:
    def never(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        raise AssertionError("called")

    with pytest.raises((TypeError, ValueError), match=said):
        deltaproof.run(never, **{"cases": "beta-zero", "base": "fp32"} | settings)


def test_a_single_output_may_be_a_name() -> None:
    def own(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return (kda(q, k, v, g, beta, initial_state)[1],)

    found = deltaproof.run(own, "t65", base="fp32", outputs="final_state", layouts=())
    assert found.passed, found.text


def test_a_state_that_is_required_is_zero_and_another_array_skips_the_case() -> None:
    def decode(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any) -> Any:
        return kda(q, k, v, g, beta, initial_state + 0)

    found = deltaproof.run(decode, ("beta-zero", "t65"), layouts=(), **OWN)
    assert found.passed and len(found.verdicts()) == 2, found.text

    def packed(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any) -> Any:
        return kda(q, k, v, g, beta, None, cu_seqlens + 0)

    assert deltaproof.run(packed, "beta-zero", layouts=("strided",), **OWN).passed

    def slots(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: Any) -> Any:
        return kda(q, k, v, g, beta)

    found = deltaproof.run(slots, ("beta-zero",), layouts=(), **OWN)
    (verdict,) = found.verdicts().values()
    assert verdict.startswith("skipped: ") and "requires `pool`" in verdict

    def told(q: Any, k: Any, v: Any, g: Any, beta: Any, has_initial_state: Any, do: Any) -> Any:
        assert has_initial_state.all()
        return {"ds0": np.zeros((1, v.shape[1], k.shape[-1], v.shape[-1]))}

    own = {"base": "fp32", "outputs": ("ds0",), "layouts": ()}
    found = deltaproof.run(told, ("beta-zero",), **own)
    assert found.status == 1 and not found.raised, found.raised


def test_threads_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    ready = threading.Barrier(8, timeout=10)

    def write(_: int) -> list[str]:
        made = []
        for i in range(40):
            ready.wait()
            made.append(Path(put(str(tmp_path / str(i)), "x" * 2000)).read_text())
        return made

    with ThreadPoolExecutor(8) as pool:
        assert {x for made in pool.map(write, range(8)) for x in made} == {"x" * 2000}
    assert len(os.listdir(tmp_path)) == 40


def test_a_function_that_no_call_serves_is_refused_before_any() -> None:
    def masked(q: Any, k: Any, v: Any, g: Any, beta: Any, mask: Any) -> Any:
        return kda(q, k, v, g, beta)

    def by_position(q: Any, /, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return kda(q, k, v, g, beta)

    for call in (deltaproof.run, deltaproof.check):
        with pytest.raises(ValueError, match="fn requires `mask`, which is no array and no sett"):
            call(masked, **OWN)
        with pytest.raises(ValueError, match="fn takes `q` by position alone"):
            call(by_position, **OWN)


def test_the_first_call_is_judged_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import deltaproof.contract

    calls = []

    def first_wrong(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        calls.append(len(q))
        return kda(q, k, v, g, beta)[0] * np.float32(1 + (len(calls) == 1))

    own = {"base": "fp32", "layouts": (), "device": "cuda:0", "batch": False}
    monkeypatch.setattr(deltaproof.contract.Contract, "_on_device", lambda self, x: x)
    monkeypatch.setattr(deltaproof.contract, "_check_device", lambda device: None)
    found = deltaproof.run(first_wrong, ("beta-zero", "strong-uniform"), **own)
    assert list(found.verdicts().values()) == ["fail", "pass"], found.text


@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        ("first", 1, "(not repeatable, 1 of 1 call with the same inputs: "),
        ("second", 1, "(not repeatable, 1 of 1 call with the same inputs: "),
        ("bit", 0, "(not repeatable, 1 of 1 call with the same inputs: 1 of 3072 entries of o"),
        ("raises", 1, "(called again with the same inputs: failed: returned 1: RuntimeError"),
        ("remembers", 1, "(called again with other values at the same addresses; "),
        ("buffer", 1, "Broken: o of the call before changed in this call: both are in one memory"),
    ],
)
def test_calls_are_repeated_and_given_other_values(kind: str, status: int, says: str) -> None:
    calls, seen = [], {}

    def fn(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        calls.append(len(q))
        if kind == "remembers":
            v = seen.setdefault(v.__array_interface__["data"][0], v.copy())
        o = kda(q, k, v, g, beta)[0]
        if kind == "bit" and len(calls) == 2:
            o[3, 0, 0] = np.nextafter(o[3, 0, 0], np.float32(9))
        if kind == "raises" and len(calls) == 2:
            raise RuntimeError("no slot is left")
        wrong = {"first": 1, "second": 2}.get(kind)
        o = o * np.float32(1 + (len(calls) == wrong))
        if kind == "buffer":
            seen.setdefault(0, o)[...] = o
            return seen[0]
        return o

    found = deltaproof.run(fn, "beta-zero", base="fp32", layouts=())
    assert found.status == status and says in found.text, found.text
    assert "fits: " not in found.text or kind == "remembers"


def test_lengths_kept_by_address_are_stale_where_others_lie() -> None:
    """The key of the cache is the array's address, the number of sequences and that of tokens."""
    seen: dict[Any, Any] = {}

    def keeps(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None) -> Any:
        if cu_seqlens is not None:
            key = (cu_seqlens.__array_interface__["data"][0], len(cu_seqlens), len(q))
            cu_seqlens = seen.setdefault(key, cu_seqlens.copy())
        return kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)

    cases = ("beta-zero", "strong-uniform", "kda-packed-aligned")  # one sequence in the first two
    found = deltaproof.run(keeps, cases, layouts=(), **OWN)
    assert list(found.verdicts().values()) == ["pass", "pass", "fail"], found.text
    assert "(called again with other values at the same addresses; " in found.text


def test_what_the_function_raises_fails_the_run_and_is_kept() -> None:
    def broken(q: Any, k: Any, v: Any, g: Any, beta: Any) -> np.ndarray:
        raise RuntimeError("no such kernel image")

    found = deltaproof.run(broken, ("beta-zero",), base="fp32", layouts=())
    assert found.status == 1 and "RuntimeError: no such kernel image" in found.text
    assert "in broken" in found.raised[0]


def test_a_number_of_results_that_was_not_said_is_an_error() -> None:
    found = deltaproof.run(kda, ("beta-zero",), base="fp32", layouts=())
    assert found.status == 1 and "returns 2 arrays, outputs names 1" in found.text


def test_shrink_finds_a_small_input(tmp_path: Path) -> None:
    small = tmp_path / "small.case"
    found = deltaproof.shrink(
        without_packing, "packed-ones", base="fp32", output=str(small), tries=200
    )
    assert found.status == 0 and "written: " in found.text, found.text
    assert small.stat().st_size < 4000


def test_bisect_blames_the_output_stage_of_a_kernel_that_shows_its_state() -> None:
    found = deltaproof.bisect(wrong_at_70, "kda-corr", base="fp32")
    assert found.status == 1 and "WRONG STAGE" in found.text, found.text


def test_gradients_of_autograd_are_judged() -> None:
    torch = pytest.importorskip("torch")

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        T, H, K = q.shape[1:]
        q, k, v = q.float(), k.float(), v.float()
        S = torch.zeros(H, K, v.shape[-1]) if initial_state is None else initial_state[0]
        rows = []
        for t in range(T):
            S = S * torch.exp(g[0, t])[..., None]
            e = beta[0, t][:, None] * (v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], S))
            S = S + k[0, t][..., None] * e[:, None, :]
            rows.append(torch.einsum("hk,hkv->hv", q[0, t], S) * K**-0.5)
        return torch.stack(rows)[None], S[None]

    # gradients of bf16 tensors are bf16
    own = {**OWN, "base": "bf16", "autograd": True, "device": "cpu", "layouts": ("strided",)}
    found = deltaproof.run(kernel, ("t65",), **own)
    assert found.passed, found.text + "".join(found.raised)
    assert found.record is not None
    names = {t["name"] for t in found.record["runs"][0]["tensors"]}
    assert {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"} <= names

    class Dense(torch.autograd.Function):  # type: ignore[misc]
        """Reads its gradient as if that were contiguous."""

        @staticmethod
        def forward(ctx: Any, o: Any) -> Any:
            return o.clone()

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            return do.as_strided(do.shape, torch.empty(do.shape).stride(), do.storage_offset())

    def dense(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        o, S = kernel(q, k, v, g, beta, initial_state)
        return Dense.apply(o), S

    found = deltaproof.run(dense, ("kda-t1", "kda-reflected"), **own)
    assert list(found.verdicts().values()) == ["pass", "fail"], found.text
    assert found.layouts == {"strided": "fail"}, found.layouts
    rng = np.random.default_rng(3)
    x = {n: torch.tensor(rng.normal(size=(1, 65, 1, 8)) / 3).float() for n in "qkv"}
    x["g"], x["beta"] = -torch.rand(1, 65, 1, 8) / 9, torch.rand(1, 65, 1)
    forms = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}
    once = deltaproof.judge_autograd(kernel, x, **forms)
    assert once.passed and "dbeta" in once.tensors, once.text


def test_gradients_of_a_wider_claim_and_of_a_state_that_is_not_used() -> None:
    torch = pytest.importorskip("torch")

    def gdn(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, S: Any = None) -> Any:
        G = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(G, 2).float() for x in (q, k))
        S = q.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1]) if S is None else S
        o = []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp()[..., None, None]
            e = v[:, t].float() - (k[:, t, :, :, None] * S).sum(-2)
            S = S + k[:, t, :, :, None] * (e * beta[:, t, :, None])[:, :, None]
            o.append((scale * q[:, t, :, :, None] * S).sum(-2))
        return torch.stack(o, 1), S

    def takes_none(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any) -> Any:
        return gdn(q, k, v, g, beta, scale)

    def ignores(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any = None
    ) -> Any:
        return gdn(q, k, v, g, beta, scale)

    def takes(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any) -> Any:
        return gdn(q, k, v, g, beta, scale, initial_state)

    own = OWN | {"design": "recurrent", "models": ("gdn",), "autograd": True, "device": "cpu"}
    for fn in (takes_none, takes, ignores):
        found = deltaproof.run(fn, "smoke-gdn", layouts=(), **own)
        assert found.passed, found.text
        assert found.record is not None
        judged = {t["name"] for t in found.record["runs"][0]["tensors"]}
        assert "dq" in judged and ("ds0" in judged) == (fn is takes)
    given = set()

    def half(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any) -> Any:
        given.add((q.dtype, v.dtype, g.dtype))
        return gdn(q, k, v, g, beta, scale)

    found = deltaproof.run(half, "gdn-t1", layouts=(), **own | {"base": "fp16"})
    assert found.passed and given == {(torch.float16, torch.float16, torch.float32)}, found.text
    found = deltaproof.run(ignores, "gdn-states", layouts=(), **own)
    assert "ds0: no gradient reaches `initial_state`" in found.text


def test_a_kernel_of_decays_is_judged_by_name() -> None:
    torch = pytest.importorskip("torch")

    def gdn(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        G = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(G, 2).float() for x in (q, k))
        S = initial_state
        S = q.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1]) if S is None else S
        o = []
        for t in range(q.shape[1]):
            S = S * g[:, t, :, None, None]
            e = v[:, t].float() - (k[:, t, :, :, None] * S).sum(-2)
            S = S + k[:, t, :, :, None] * (e * beta[:, t, :, None])[:, :, None]
            o.append((q.shape[-1] ** -0.5 * q[:, t, :, :, None] * S).sum(-2))
        return torch.stack(o, 1), S

    own = OWN | {"design": "recurrent", "models": ("gdn",), "autograd": True, "device": "cpu"}
    found = deltaproof.run(gdn, ("gdn-t65", "gdn-killing"), gate="exp", layouts=(), **own)
    assert found.passed, found.text
    assert found.record is not None
    assert "dg" in {t["name"] for t in found.record["runs"][0]["tensors"]}
    assert deltaproof.run(gdn, "gdn-t65", layouts=(), **own).status == 1


def test_a_verdict_on_fewer_than_half_of_the_cases_says_so() -> None:
    own = {"outputs": ("o", "final_state"), "base": "fp32", "layouts": ()}
    found = deltaproof.run(kda, ("t65", "smoke-gdn", "gdn-raw"), **own)
    assert found.status == 2
    assert "COULD NOT JUDGE (1 passed, 0 failed, 2 skipped, 0 unjudged; only 1 of 3" in found.text


def test_a_claim_that_would_see_more_is_told() -> None:
    own = {"outputs": ("o", "final_state"), "base": "bf16", "layouts": ()}
    found = deltaproof.run(kda, "t65", **own)
    assert found.passed and 't65 tighter claim: passes with base="fp32", too' in found.text

    def rounded(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any) -> Any:
        return [x.astype(BFLOAT16) for x in kda(q, k, v, g, beta, initial_state)]

    found = deltaproof.run(rounded, "t65", **own)
    assert found.passed and "tighter claim" not in found.text, found.text


@pytest.mark.parametrize("call", ["run", "check", "bisect", "shrink", "differ"])
def test_an_unknown_argument_is_named_in_the_words_of_the_caller(call: str) -> None:
    functions = (kda, kda) if call == "differ" else (kda,)
    case = {} if call == "check" else {"case": "t65"}
    case = {"cases": "t65"} if call == "run" else case
    with pytest.raises(TypeError, match=rf"{call}\(\) has no argument 'l2nrm'; .* l2norm\?"):
        getattr(deltaproof, call)(*functions, base="fp32", l2nrm=True, **case)


def ssd(
    x: Any, dt: Any, A: Any, B: Any, C: Any, initial_states: Any = None, cu_seqlens: Any = None
) -> Any:
    """Mamba-2's recurrence token by token, in its names; states [V,K]."""
    T, HV, V = x.shape
    B, C = (np.repeat(y, HV // B.shape[1], 1) for y in (B, C))
    ends = [0, T] if cu_seqlens is None else cu_seqlens
    y = np.zeros_like(x)
    states = np.zeros((len(ends) - 1, HV, V, B.shape[-1]), np.float32)
    states = states if initial_states is None else initial_states.copy()
    for n, S in enumerate(states):
        for t in range(ends[n], ends[n + 1]):
            S *= np.exp(dt[t] * A)[:, None, None]
            S += (x[t] * dt[t][:, None])[:, :, None] * B[t][:, None, :]
            y[t] = (S * C[t][:, None, :]).sum(-1)
    return y, states


def test_one_failing_run_says_how_it_is_explained() -> None:
    found = deltaproof.run(wrong_at_70, "kda-corr", base="fp32", layouts=())
    lines = [x.strip() for x in found.text.splitlines() if "explain: " in x]
    assert len(lines) == 1, found.text
    command = lines[0].removeprefix("explain: deltaproof ")
    done = subprocess.run(
        [program(), *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "token 7" in done.stdout, done.stdout + done.stderr


def test_a_kernel_of_fp16_is_claimed_by_that_name() -> None:
    def short(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return [x.astype(np.float16) for x in kda(q, k, v, g, beta, initial_state)]

    def shorter(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        return [x.astype(BFLOAT16) for x in kda(q, k, v, g, beta, initial_state)]

    own: dict[str, Any] = {"base": "fp16", "outputs": ("o", "final_state"), "layouts": ()}
    assert deltaproof.run(short, "t65", **own).passed
    assert deltaproof.run(shorter, "t65", **own).status == 1

    def read(q: Any, k: Any, v: Any, g: Any, beta: Any, l2norm: bool) -> Any:
        q, k, v = (x.astype(np.float16).astype(np.float32) for x in (q, k, v))
        return short(*(unit(x) if l2norm else x for x in (q, k)), v, g, beta)

    found = deltaproof.run(read, ("kda-small-norms", "kda-tiny-norms"), **own)
    assert list(found.verdicts().values()) == ["pass", "pass"], found.text
    with pytest.raises(ValueError, match="base='bf17': must be bf16, fp16, fp32 or fp64"):
        deltaproof.run(short, "t65", base="bf17")


def test_mamba_is_run_in_its_own_names() -> None:
    own = {"base": "fp32", "outputs": ("y", "final_states"), "layout": "mamba", "layouts": ()}
    found = deltaproof.run(ssd, ("ssd-packed-inside", "ssd-slots", "smoke-ssd"), **own)
    assert found.passed and found.record is not None, found.text
    assert all(n == "pass" for n in found.verdicts().values()), found.text

    def wrong(x: Any, dt: Any, A: Any, B: Any, C: Any, initial_states: Any = None) -> Any:
        return ssd(x, dt, A[::-1], B, C, initial_states)

    assert deltaproof.run(wrong, "ssd-smoke", **own).status == 1
    with pytest.raises(ValueError, match='gate=.log.: not with layout="mamba"'):
        deltaproof.run(ssd, "ssd-smoke", gate="log", **own)


def test_mamba_on_tensors_gets_x_in_bf16() -> None:
    torch = pytest.importorskip("torch")
    seen = set()

    def kernel(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
        seen.add((x.dtype, B.dtype, C.dtype, dt.dtype, A.dtype))
        y, states = ssd(*(n.float().numpy() for n in (x[0], dt[0], A, B[0], C[0])))
        return torch.from_numpy(y)[None].bfloat16(), torch.from_numpy(states)

    own = {"base": "bf16", "outputs": ("y", "final_states"), "layout": "mamba", "layouts": ()}
    assert deltaproof.run(kernel, "ssd-smoke", device="cpu", **own).passed
    assert seen == {(torch.bfloat16,) * 3 + (torch.float32,) * 2}


def turned(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
    """States [V,K], in and out."""
    own = None if initial_state is None else np.swapaxes(initial_state, -1, -2)
    o, state = kda(q, k, v, g, beta, own)
    return o, np.swapaxes(state, -1, -2)


def test_states_of_the_other_layout_are_said_or_recognised(tmp_path: Path) -> None:
    own = OWN | {"layouts": ()}
    found = deltaproof.run(turned, ("t65", "initial-state"), state_layout="vk", **own)
    assert found.passed, found.text
    wide = tmp_path / "wide.case"
    wide.write_text(
        "reason = r\nsource = s\nop = kda\nT = 65\nK = 16\nV = 8\ng_scale = 0.02\nbase = fp32\n"
    )
    found = deltaproof.run(turned, str(wide), **own)
    assert found.status == 1 and "state_layout='vk'" in found.text, found.text
    square = tmp_path / "square.case"
    square.write_text(
        "reason = r\nsource = s\nop = kda\nT = 65\nH = 2\nK = 16\nV = 16\ng_scale = 0.02\n"
        "s0_scale = 1\nranks = 1\nbase = fp32\n"
    )
    assert deltaproof.run(turned, str(square), state_layout="vk", **own).passed
    found = deltaproof.run(turned, str(square), **own)
    assert found.status == 1 and 'fits: passes with state_layout="vk"' in found.text, found.text
    found = deltaproof.run(kda, str(square), state_layout="vk", **own)
    assert found.status == 1 and 'fits: passes with state_layout="kv"' in found.text, found.text
    with pytest.raises(ValueError, match="must be 'kv' or 'vk'"):
        deltaproof.run(kda, "t65", state_layout="kvv", **own)


def test_every_output_may_leave_in_a_format_of_its_own(tmp_path: Path) -> None:
    def short(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        o, state = kda(q, k, v, g, beta, initial_state)
        return o.astype(BFLOAT16).astype(np.float32), state

    own = OWN | {"layouts": ()}
    assert deltaproof.run(short, "t65", **own).status == 1
    found = deltaproof.run(short, "t65", out={"o": "bf16"}, report=str(tmp_path), **own)
    assert found.passed and found.record is not None, found.text
    assert {r["policy"]["design"] for r in found.record["runs"]} == {"undeclared,o=bf16"}
    assert (tmp_path / "report.html").exists()
    assert deltaproof.run(short, "t65", out={"o": "bf16"}, design="recurrent", **own).passed
    assert deltaproof.run(short, "t65", out={"o": "fp32"}, **own).status == 1
    with pytest.raises(ValueError, match="out: 'state' is none of o dq"):
        deltaproof.run(short, "t65", out={"state": "bf16"}, **own)
    x = {n: y.astype(np.float32) for n, y in inputs().items()}
    o, state = short(**x)
    said: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}
    made = {"o": o, "final_state": state}
    assert deltaproof.judge(x, made, **said).status == 1
    assert deltaproof.judge(x, made, out={"o": "bf16"}, **said).passed


def test_the_mistake_that_explains_a_failing_run_is_named() -> None:
    def late(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        o, state = kda(q, k, v, g, beta, initial_state)
        return np.roll(o, 1, 0), state

    found = deltaproof.run(late, "t65", **OWN, layouts=())
    assert found.status == 1 and "t65 fits: o is one token late" in found.text, found.text
    assert found.text.index("t65 fits: ") < found.text.index("VERDICT: "), found.text


@pytest.mark.parametrize("when", ["before", "meanwhile", "thread"])
def test_verdicts_stay_where_exit_statuses_are_lost(when: str) -> None:
    """SIGCHLD is ignored: `differ` passed beyond both bounds, and `check` took minutes."""

    def wrong(q, k, v, g, beta):  # noqa: ANN001, ANN202
        if when == "meanwhile":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return kda(q, k, v, g, beta)[0] * np.float32(1.25)

    def differs() -> None:
        found.append(deltaproof.differ(lambda q, k, v, g, beta: kda(q, k, v, g, beta)[0], wrong,
                                       base="fp32"))  # fmt: skip

    found: list[Any] = []
    if when != "meanwhile":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        if when == "before":
            differs()
            assert found[0].status == 1 and found[0].verdict == "beyond", found
            assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
            return
        unseen = pytest.raises(RuntimeError, match="unseen, as SIGCHLD is ignored")
        with unseen, ThreadPoolExecutor(1) as pool:
            pool.submit(differs).result() if when == "thread" else differs()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def test_the_program_takes_no_longer_where_sigchld_is_ignored() -> None:
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    ignoring += "os.execv(sys.argv[1], sys.argv[1:])"
    words = ["check", "t1", "--base=fp32", "--forward", "--run=false"]
    command = [sys.executable, "-c", ignoring, program(), *words]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "exit status 1" in done.stdout, done
    assert time.monotonic() - start < 5
