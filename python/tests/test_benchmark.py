"""A public benchmark's laws of inputs and seven wrong kernels, which its own tolerance passes in
part. Each is red here on each law that shows its fault, and right ones are green."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmark
import deltaproof


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@functools.cache
def judged(kernel: Any, law: Any, cache: str) -> deltaproof.Judgement:
    x = law(np.random.default_rng(3))
    o = kernel(**{n: y.astype(np.float32) for n, y in x.items()})
    told: dict[str, Any] = {"gate": "log", "beta": "plain", "l2norm": False, "cache": cache}
    told["why"] = 0  # which mistake it is, is known
    return deltaproof.judge(x, {"o": o}, base="bf16", design="chunk=64", **told)


# On these the fault is smaller than rounding (keys of norm 0.01; gates of 0.003 where keys erase):
# what it changes of o in doubles, and what right kernels in bf16 are expected to be off by.
LESS = {
    ("inverse_cut", "small"): (3.6e-10, 3.0e-3),
    ("no_delta", "small"): (2.2e-5, 3.0e-3),
    ("no_decay", "long_memory"): (0.0204, 0.0475),
}


@pytest.mark.parametrize("law", benchmark.LAWS)
def test_right_kernels_pass_every_law(law: Any, cache: str) -> None:
    for kernel in benchmark.RIGHT:
        found = judged(kernel, law, cache)
        assert found.passed, found.text


@pytest.mark.parametrize("law", benchmark.LAWS)
@pytest.mark.parametrize("kernel", benchmark.WRONG)
def test_each_wrong_kernel_fails_on_every_law(kernel: Any, law: Any, cache: str) -> None:
    found = judged(kernel, law, cache)
    if (kernel.__name__, law.__name__) in LESS:
        o = found.tensors["o"]
        fault, expected = LESS[kernel.__name__, law.__name__]
        x = {n: y.astype(np.float64) for n, y in law(np.random.default_rng(3)).items()}
        want = benchmark.right(**x)
        own = np.linalg.norm(kernel(**x) - want) / np.linalg.norm(want)
        assert found.passed and o["rel_fro"] < 0.5 * o["expected"]["rel"], found.text
        assert own == pytest.approx(fault, rel=0.05) and own < 0.5 * expected
        assert o["expected"]["rel"] == pytest.approx(expected, rel=0.05)
        return
    assert found.status == 1 and found.failures()[0].startswith("o, "), found.text


def test_its_laws_are_fresh_problems_too() -> None:
    def small(rng: np.random.Generator) -> benchmark.Arrays:
        return benchmark.nominal(rng, T=128, V=16)

    told: dict[str, Any] = {"count": 2, "layouts": ()}
    laws = [small]
    assert deltaproof.run(benchmark.right, "fresh", base="bf16", laws=laws, **told).passed
    assert deltaproof.run(benchmark.zeros, "fresh", base="bf16", laws=laws, **told).status == 1


def test_its_own_tolerance_passes_zeros_and_forgotten_states() -> None:
    """Its tolerance is atol = rtol = 0.05."""
    passes = set()
    for law in benchmark.LAWS:
        x = {n: y.astype(np.float64) for n, y in law(np.random.default_rng(3)).items()}
        want = benchmark.right(**x)
        for kernel in benchmark.WRONG:
            if np.allclose(kernel(**x), want, rtol=benchmark.RTOL, atol=benchmark.ATOL):
                passes.add((kernel.__name__, law.__name__))
    for name in ("zeros", "state_dropped", "state_fades"):
        assert (name, "nominal") in passes and (name, "small") in passes


def test_readme_has_these_errors(cache: str) -> None:
    """Bold: its own tolerance passes; in brackets: the fault is smaller than rounding."""
    readme = Path(__file__).parent.parent.parent / "README.md"
    if not readme.is_file():
        pytest.skip("no README.md beside these tests")
    text = readme.read_text(encoding="utf-8")
    table = text[text.index("| kernel | nominal |") :].split("\n\n")[0].splitlines()[2:]
    for kernel, line in zip(benchmark.WRONG, table, strict=True):
        for law, cell in zip(benchmark.LAWS, line.strip("| ").split(" | ")[1:], strict=True):
            o = judged(kernel, law, cache).tensors["o"]
            x = {n: y.astype(np.float64) for n, y in law(np.random.default_rng(3)).items()}
            tolerated = np.allclose(
                kernel(**x), benchmark.right(**x), rtol=benchmark.RTOL, atol=benchmark.ATOL
            )
            assert ("**" in cell) == tolerated, (kernel, law)
            assert ("(" in cell) == ((kernel.__name__, law.__name__) in LESS), (kernel, law)
            said = float(cell.strip("(*)").replace(",", ""))
            ratio = o["rel_fro"] / o["expected"]["rel"]
            assert abs(said - ratio) < 0.06 * ratio + 0.05, (kernel, law, ratio)
