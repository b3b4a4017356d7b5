"""A record's facts about a kernel's surroundings: versions, driver, GPU, CUDA kernels."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

# Distributions whose versions decide what a kernel computes.
_MODULES = ("numpy", "torch", "triton", "fla", "cutlass", "tilelang", "jax")
MOST_KERNELS = 40
LONGEST_NAME = 120


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as f:
            return f.readline().strip().removeprefix("NVRM version: ")
    except OSError:
        return None


def _torch_device() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def surroundings() -> dict[str, str]:
    """{"python", "numpy", "torch", .., "driver", "gpu"}: those that are known. Modules that this
    process has not loaded took no part in what it computed, and are left out."""
    notes = {"python": platform.python_version()}
    for name in _MODULES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            notes[name] = str(version)
    driver = _driver()
    if driver:
        notes["driver"] = driver
    return notes | _torch_device()


def kernels_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """(what call returns, names of the CUDA kernels that ran in it, in order of time spent), by
    PyTorch's profiler. Without PyTorch on a CUDA device: no names."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return call(), []
    activity = torch.profiler.ProfilerActivity.CUDA
    with warnings.catch_warnings():
        # PyTorch 2.11 warns of every profile that is one cycle long.
        warnings.filterwarnings("ignore", message="(Warning: )?Profiler clears events")
        with torch.profiler.profile(activities=[activity]) as profile:
            result = call()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda e: -_device_time(e))
    names = dict.fromkeys(short_name(e.key) for e in events if _runs(e))
    return result, list(names)


def short_name(name: str) -> str:
    """A kernel's name without its arguments; template arguments only where they are short."""
    out, depth = "", 0
    for c in name.removeprefix("void ").replace("(anonymous namespace)", "{anonymous}"):
        if c == "(" and depth == 0:
            break
        depth += (c == "<") - (c == ">")
        out += c
    return out if len(out) <= LONGEST_NAME else out[: out.find("<")] + "<..>"


def _device_time(event: Any) -> float:
    """Microseconds on the device; PyTorch renamed the field in 2.6."""
    return float(getattr(event, "self_device_time_total", 0))


def _runs(event: Any) -> bool:
    """Is it a kernel, no copy and no fill?"""
    return _device_time(event) > 0 and not event.key.startswith(("Memcpy", "Memset"))


def note_options(notes: dict[str, str], kernels: list[str]) -> list[str]:
    """--note options of the program."""
    more = {f"kernel{i}": name for i, name in enumerate(kernels[:MOST_KERNELS])}
    return [f"--note={k}={v}" for k, v in (notes | more).items()]
