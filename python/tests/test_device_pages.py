"""Guard pages of a CUDA device. Sizes are tested with a driver that only answers. Kernels that
touch memory beside an array need a device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaproof import device_pages, fresh
from deltaproof.contract import Contract
from deltaproof.kernel_process import KernelProcess
from deltaproof.words import Unsupported

GRAIN, BASE = 1 << 21, 7 << 30


class Driver:
    """Keeps what is asked of it; `fails` answers 2."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.asked = fails, {}

    def __getattr__(self, name: str) -> Any:
        def answer(*args: Any) -> int:
            self.asked[name] = [getattr(x, "value", x) for x in args]
            given = {"cuMemGetAllocationGranularity": GRAIN, "cuMemAddressReserve": BASE}
            if name in given:
                args[0]._obj.value = given[name]
            return 2 if name == self.fails else 0

        return answer


@pytest.mark.parametrize("size", [16, GRAIN - 16, GRAIN, GRAIN + 16])
def test_an_array_ends_where_nothing_is_mapped(size: int) -> None:
    driver = Driver()
    at = device_pages.reserve(size, 0, driver)
    first, mapped = driver.asked["cuMemMap"][:2]
    assert at + size == first + mapped and first <= at < first + GRAIN and at % 16 == 0
    assert driver.asked["cuMemCreate"][1] == driver.asked["cuMemSetAccess"][1] == mapped
    assert first > BASE and first + mapped < BASE + driver.asked["cuMemAddressReserve"][1]


def test_a_driver_that_cannot_is_no_failure_of_a_kernel() -> None:
    with pytest.raises(Unsupported, match="guarded: cuMemCreate answers 2"):
        device_pages.reserve(16, 0, Driver("cuMemCreate"))


KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def touch(x, at, seen, WRITE: tl.constexpr):
    if WRITE:
        tl.store(x + at, 1.0)
    else:
        tl.store(seen, tl.load(x + at))

def kernel(q, k, v, g, beta):
    S, o = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]).float(), []
    for t in range(q.shape[1]):
        S = S * g[:, t].float().exp()[..., None]
        e = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t].float(), S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t].float(), beta[:, t, :, None] * e)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t].float(), S) * q.shape[-1] ** -0.5)
    <touch>
    return torch.stack(o, 1).to(v.dtype)
"""


@pytest.mark.parametrize(
    ("touch", "says"),
    [
        ("pass", ""),
        ("touch[1,](q, q.numel() - 1, torch.empty_like(q), False)", ""),
        ("touch[1,](q, q.numel(), torch.empty_like(q), False)", "CUDA error"),
        ("touch[1,](q, q.numel(), q, True)", "CUDA error"),
        ("touch[1,](q, -1, q, True)", "wrote into its input q, or beside it"),
        ("touch[1,](q, -1, torch.empty_like(q), False)", ""),  # NaN that no result has
    ],
)
def test_a_device_s_kernel_that_leaves_its_arrays_fails(
    tmp_path: Path, touch: str, says: str
) -> None:
    """And the next call has a device again."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def law(rng: Any) -> Any:
        x = {n: rng.standard_normal((20, 2, 16)).astype(np.float32) for n in "qkv"}
        x["g"] = -rng.random((20, 2, 16), dtype=np.float32)
        return x | {"beta": rng.random((20, 2), dtype=np.float32)}

    (tmp_path / "own.py").write_text(KERNEL.replace("<touch>", touch))
    told: dict[str, Any] = {"base": "fp32", "models": ("kda",), "outputs": ("o",)}
    call = KernelProcess(str(tmp_path / "own.py"), "kernel", 90, device="cuda", **told)
    own = Contract(lambda q, k, v, g, beta: None, device="cuda", **told)
    problem = next(iter(fresh.draw(own, [law], 2, 1, False))).problem
    made = [call(problem), call(problem, layout="guarded"), call(problem)]
    call.close()
    for m in made[::2]:  # torch's allocator may have another input there
        assert m.results or ("True" in touch and "wrote into its input" in m.why), m.why
    assert says in made[1].why and bool(made[1].results) == (not says), made[1].why
