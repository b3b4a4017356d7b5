"""Capture: calls of linear-attention functions in a running program, as files that
`deltaproof judge DIR` judges. Activations are users' data: nothing is kept unless somebody asks.

    with deltaproof.capture("fla", out=DIR, every=100):
        model(..)

or, for a server that knows nothing of this module,

    DELTAPROOF_CAPTURE=fla,transformers DELTAPROOF_CAPTURE_OUT=DIR DELTAPROOF_CAPTURE_EVERY=100 \\
    PYTHONPATH=$(python -m deltaproof capture-path) COMMAND

A hook never stops the run. Its errors are counted; DIR/capture-PID.json has the first messages and
the number of calls.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from .tensors import is_torch, save
from .words import text_of

KDA = ("chunk_kda", "fused_recurrent_kda")
GDN = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
KIMI = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
KNOWN = {
    "fla": ("fla.ops", (*KDA, *GDN)),
    "transformers": (
        "transformers.models",
        (
            *KIMI,
            *(f"torch_{x}" for x in (*KDA, "recurrent_kda", *GDN)),
            "torch_recurrent_gated_delta_rule",
        ),
    ),
}
ALIASES = {"query": "q", "key": "k", "value": "v", "b": "beta"}
ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
HEADED = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "final_state": 1}  # else axis -2, or -1
MOST = 64 << 20  # bytes of one call
MOST_SAID = 5


class Capture:
    """what: "fla", "transformers", dotted names of functions, or several. In one layer it
    keeps a function's first call and, by `every`, each so many further ones. A call has
    `most` bytes at most, else heads are left out; `total` bounds all of them."""

    def __init__(
        self, what: str | Sequence[str], out: str, every: int = 1, most: int = MOST,
        total: int = 4 << 30,
    ) -> None:  # fmt: skip
        self.targets = [_target(x) for x in ([what] if isinstance(what, str) else what)]
        if int(every) < 1:
            raise ValueError(f"every={every!r}: must be a whole number from 1 on")
        self.out, self.every, self.most, self.total = out, int(every), most, total
        self.calls = self.kept = self.too_large = self.errors = self.bytes = 0
        self.said: list[str] = []
        self.count: dict[str, int] = {}
        self.lock, self.inside = threading.Lock(), threading.local()
        self.undo: list[tuple[Any, str, Any]] = []
        os.makedirs(out, exist_ok=True)

    # ---- hooks --------------------------------------------------------------------------------

    def __enter__(self) -> Capture:
        for module in list(sys.modules.values()):
            self.hook(module)
        self.finder = _Finder(self)
        sys.meta_path.insert(0, self.finder)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self.finder)
        for owner, name, fn in reversed(self.undo):
            setattr(owner, name, fn)
        self.undo = []
        told = {n: getattr(self, n) for n in ("calls", "kept", "too_large", "errors", "said")}
        with open(os.path.join(self.out, f"capture-{os.getpid()}.json"), "w") as f:
            json.dump(told, f, indent=1)

    def hook(self, module: Any) -> None:
        """Every function of it that is asked for, in every module that has it by now."""
        name = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or not isinstance(name, str):
            return
        for prefix, names in self.targets:
            if name == prefix or name.startswith(prefix + "."):
                for fn in names:
                    found = vars(module).get(fn)
                    if callable(found) and not hasattr(found, "deltaproof_of"):
                        self._replace(found, self._hooked(fn, found))

    def _replace(self, found: Any, hooked: Any) -> None:
        for module in list(sys.modules.values()):
            for name, x in list(getattr(module, "__dict__", {}).items()):
                if x is found and isinstance(module, ModuleType):
                    setattr(module, name, hooked)
                    self.undo.append((module, name, found))

    def _hooked(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*a: Any, **b: Any) -> Any:
            if getattr(self.inside, "now", False):  # one that is asked for calls another
                return fn(*a, **b)
            self.inside.now = True
            try:
                before = self._before(name, fn, a, b)
                result = fn(*a, **b)
                if before:
                    self._after(before, result)
                return result
            finally:
                self.inside.now = False

        call.deltaproof_of = fn  # type: ignore[attr-defined]
        return call

    def _wrong(self, e: BaseException) -> None:
        self.errors += 1
        if len(self.said) < MOST_SAID:
            self.said.append(text_of(e)[:300])

    def _before(self, name: str, fn: Any, a: Any, b: Any) -> dict[str, Any] | None:
        try:
            layer = _layer()
            key = f"{name}-{layer}"
            with self.lock:
                n = self.count[key] = self.count.get(key, -1) + 1
                self.calls += 1
            if n % self.every or _recording():
                return None
            given = inspect.signature(fn).bind(*a, **b)
            given.apply_defaults()
            args = dict(given.arguments)
            args |= args.pop("kwargs", {})
            args = {ALIASES.get(x, x): y for x, y in args.items()}
            inputs = {n: _copy(args[n]) for n in ARRAYS if hasattr(args.get(n), "shape")}
            told = _settings(args, name)
            return {"key": key, "n": n, "layer": layer, "inputs": inputs, "told": told}
        except Exception as e:
            self._wrong(e)
            return None

    def _after(self, x: dict[str, Any], result: Any) -> None:
        try:
            results = result if isinstance(result, tuple | list) else (result,)
            made = zip(("o", "final_state"), results, strict=False)
            outputs = {n: _copy(y) for n, y in made if hasattr(y, "shape")}
            inputs, outputs = fewer_heads(x["inputs"], outputs, self.most)
            size = _size(inputs) + _size(outputs)
            if size > self.most or self.bytes + size > self.total:
                self.too_large += 1
                return
            rank = os.environ.get("RANK", "0")
            file = f"{x['key']}-rank{rank}-{os.getpid()}-{x['n']}.capture"
            file = "".join(c if c.isalnum() or c in "._-" else "_" for c in file)
            named = {f"in.{n}": y for n, y in inputs.items()}
            named |= {f"out.{n}": y for n, y in outputs.items()}
            told = {**x["told"], "layer": x["layer"], "rank": rank, "call": str(x["n"])}
            save(os.path.join(self.out, file), named, told)
            self.kept, self.bytes = self.kept + 1, self.bytes + size
        except Exception as e:
            self._wrong(e)


def capture(what: str | Sequence[str], out: str, **settings: Any) -> Capture:
    """A context in which calls of those functions are kept in the folder `out` (class Capture)."""
    return Capture(what, out, **settings)


def _target(what: str) -> tuple[str, tuple[str, ...]]:
    if what in KNOWN:
        return KNOWN[what]
    module, _, name = what.rpartition(".")
    if not module or not name.isidentifier():
        raise ValueError(f"{what!r}: must be {' or '.join(KNOWN)} or a dotted name of a function")
    return module, (name,)


class _Finder(importlib.abc.MetaPathFinder):
    """Modules that are imported later are hooked when they have run."""

    def __init__(self, owner: Capture) -> None:
        self.owner, self.busy = owner, threading.local()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        wanted = [p for p, _ in self.owner.targets if name == p or name.startswith(p + ".")]
        if not wanted or getattr(self.busy, "now", False):
            return None
        self.busy.now = True
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        finally:
            self.busy.now = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                self.owner.hook(module)
            except Exception as e:
                self.owner._wrong(e)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---- one call -----------------------------------------------------------------------------------


def _copy(x: Any) -> Any:
    return x.detach().clone() if is_torch(x) else x.copy()


def _size(arrays: Mapping[str, Any]) -> int:
    return sum(int(x.nbytes) for x in arrays.values())


def _recording() -> bool:
    """Does the current stream record a graph? Nothing may be read then."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _layer() -> str:
    """Class, and layer_idx if there is one, of the module whose method called."""
    frame = sys._getframe(3)
    for _ in range(12):
        own = frame.f_locals.get("self")
        if own is not None and hasattr(own, "forward") and hasattr(own, "training"):
            index = getattr(own, "layer_idx", None)
            return type(own).__name__ + ("" if index is None else f".{index}")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "none"


def _settings(args: Mapping[str, Any], name: str) -> dict[str, str]:
    """As `judge` takes them, by FLA's names of arguments."""
    lower = args.get("lower_bound")
    raw = bool(args.get("use_gate_in_kernel"))
    gate = ("lower_bound" if lower is not None else "softplus") if raw else "log"
    sigmoid = bool(args.get("use_beta_sigmoid_in_kernel"))
    two = bool(args.get("allow_neg_eigval")) and sigmoid
    out = {"function": name, "gate": gate, "recurrence": "gdn" if "gated" in name else "kda"}
    out["beta"] = "sigmoid2" if two else "sigmoid" if sigmoid else "plain"
    out["l2norm"] = str(int(bool(args.get("use_qk_l2norm_in_kernel"))))
    if lower is not None and raw:
        out["lower_bound"] = repr(float(lower))
    if args.get("scale") is not None:
        out["scale"] = repr(float(args["scale"]))
    vk = args.get("state_v_first") or args.get("transpose_state_layout")
    return out | ({"state_layout": "vk"} if vk else {})


def fewer_heads(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], most: int, keep: Sequence[int] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key heads `keep`, else as many of the first as have at most that many bytes, with the
    value heads that read them."""
    H, HV = inputs["k"].shape[2], inputs["v"].shape[2]
    size = _size(inputs) + _size(outputs)
    n = H if size <= most else max(1, int(H * most / size))
    heads = list(keep) or list(range(n))
    if len(heads) == H:
        return dict(inputs), dict(outputs)
    group = HV // H
    values = [h * group + i for h in heads for i in range(group)]

    def cut(name: str, x: Any) -> Any:
        if name == "cu_seqlens":
            return x
        axis = HEADED.get(name, 2)
        return (
            x.take(values if x.shape[axis] == HV and name not in ("q", "k") else heads, axis)
            if not is_torch(x)
            else _select(x, axis, heads if name in ("q", "k") else values)
        )

    return {n: cut(n, x) for n, x in inputs.items()}, {n: cut(n, x) for n, x in outputs.items()}


def _select(x: Any, axis: int, which: Sequence[int]) -> Any:
    import torch

    return x.index_select(axis, torch.tensor(which, device=x.device))


def from_environment() -> Capture | None:
    """The capture of the variables DELTAPROOF_CAPTURE, _OUT, _EVERY, until the process ends."""
    what = os.environ.get("DELTAPROOF_CAPTURE")
    if not what:
        return None
    out = os.environ.get("DELTAPROOF_CAPTURE_OUT", "deltaproof-capture")
    own = Capture(what.split(","), out, int(os.environ.get("DELTAPROOF_CAPTURE_EVERY", "1")))
    own.__enter__()
    atexit.register(own.__exit__)
    return own
