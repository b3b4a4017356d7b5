"""How a Python function is called as a kernel: which arrays it gets, what it gives back.

A function names the arrays that it wants by its parameters, as a pytest function names fixtures:

    def my_kernel(q, k, v, g, beta, initial_state=None, scale=1.0): ...

Arrays, with T tokens, H query/key heads, HV value heads, widths K and V, N packed sequences:
    q k [T,H,K]   v [T,HV,V]   g [T,HV,K], GDN, SSD and gated DeltaProduct [T,HV]
    beta [T,HV] (GDN-2: b [T,HV,K] and w [T,HV,V] in its place; GLA, SSD: none)
    DPLR, RWKV-7: lr_a, lr_b [T,HV,K] (FLA's a and b) in place of beta; H = HV
    MKDA, gated DeltaProduct: k [T,H,R,K], v [T,HV,R,V], beta [T,HV,R]
    A_log [HV]   dt_bias [HV,K], GDN [HV]   initial_state [N,HV,K,V]
    do [T,HV,V]   dht [N,HV,K,V]   cu_seqlens [N+1] (of one sequence that is not
    empty: where the function requires it)
A state that the function requires (it has no default), or whose gradient autograd gives, is zero
where a case has none. If no gradient reaches such zeros, none is judged. Another array that it
requires skips the case.
Settings, by name too: scale, lower_bound, gate ("log" "softplus" "lower_bound"), beta_form ("plain"
"sigmoid" "sigmoid2" "none"), l2norm (bool), backward (bool). A scale that is None by default is
left out where it is K^-1/2 (but of SSD and of rows of one's own). A function that takes any name
(`**`) gets another scale than that. Where `check` asks for a length
that the declared design names (design="chunks=16:32"): chunk, tokens a chunk.
A function with "pool" among its outputs gets a pool in place of initial_state, in a session whose
states lie in slots (cases/README.md, Sessions). The arrays are pool [slots,HV,K,V], read_slot [N],
write_slot [N] (-1: padding, for which nothing may be written). Slots that no sequence owns are NaN.
It returns the pool; slots that write_slot does not name must keep their bits.
One that takes draft_slots [N,D] and accepted [N] rolls back by itself, as vLLM's kernels do
(ssm_state_indices, num_accepted_tokens). Sequence i begins from slot draft_slots[i, accepted[i]-1].
In a call of at most D tokens it writes the state after token j to draft_slots[i, j]. In a longer
call it writes the last state to draft_slots[i, 0]. A sequence without tokens has -1 and 0, and a
token without meaning. With parents [T] drafted tokens are a tree. Each continues from the state
after the token of its sequence at that place, -1: from the first. One that takes ring_slot [N] and
ring_tokens [N] replays tokens (key session_ring of a case): the slot ring_slot[i] of the pool is
the function's own. Where write_slot is -1 beside a read_slot, it begins from the state there and
the ring_tokens[i] tokens that it left in the ring. It adds the call's tokens to the ring and writes
no state. Else it writes the state, and the ring is empty then. A function that takes
has_initial_state [N] is told which sequences have a state. The slot, or the row of initial_state,
of a sequence without one is NaN. A function that takes `gv` [T,H,V] has a gate per value channel in
place of g. It has H = HV and beta [T,H]; its cases have one key head (gdn-value-gates). One with
several query heads a key head (Contract.queries) gets q [T,H*queries,K], and returns o
[T,HV*queries,V].
With an axis of batch (Contract.batch) packed sequences of one length are its rows, [B,T,H,K],
without cu_seqlens. A function that takes attention_mask [B,T] gets sequences of any lengths so, 1
where a row has a token and 0 before it. Padded entries mean nothing and must not change the state.
o and gradients there are ignored, or must be zero (Contract.masked).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from . import mamba
from .guards import inputs_of, kept_of, look, look_at_inputs, look_at_kept
from .heads import by_columns, by_queries, has_columns
from .layouts import arrange
from .prefixes import by_checkpoints
from .recurrence import Recurrence
from .tensors import BFLOAT16, copy_of, is_torch, to_numpy
from .vocabulary import (
    BETAS,
    GATES,
    GRADIENT_OF,
    INCOMING,
    INPUTS,
    LEAVING,
    RECURRENCES,
    RESULTS,
    STAGES,
    TOKENS,
    unit_axes,
)
from .words import Unsupported, names_of, one_of, text_of, truth_of

SHORT = ("q", "k", "v", "do")  # in the case's own format; all others are fp32 at least
WIDE = ("fp32", "fp64")
BASES = ("bf16", "fp16", *WIDE)
ONE_GATE = ("gdn", "ssd", "gated-deltaproduct")  # whose gates have no axis of channels
INTEGERS = (
    "cu_seqlens",
    "read_slot",
    "write_slot",
    "draft_slots",
    "accepted",
    "parents",
    "ring_slot",
    "ring_tokens",
)
STATES = ("initial_state", "dht", "pool", "final_state", "ds0", "checkpoints")
READ_WRITE = ("read_slot", "write_slot")
OPTIONAL = (*INTEGERS, "pool", "chunk")
OUTPUTS = (*RESULTS, "pool", "states", "checkpoints", *STAGES)
FORMATS = {"bf16": BFLOAT16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
SETTINGS = ("scale", "lower_bound", "gate", "beta_form", "l2norm", "backward")


@dataclass(frozen=True)
class Problem:
    """One call: arrays by name as in the head of this file but with every axis (k [T,H,R,K]). Also
    the settings, and the wanted outputs with their shapes."""

    arrays: Mapping[str, npt.NDArray[Any]]
    settings: Mapping[str, Any]
    input_format: str  # "bf16", "fp32", "fp64": what q k v g beta do need
    wanted: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Contract:
    """The computation of a function, and the form of its arrays.

    - outputs: names of the results in their order, unless the function returns {name: array}.
    - models, gate, beta, l2norm: the one form that it computes. If it takes one as a parameter
      (`gate`, `beta_form`, `l2norm`), it computes all forms. Other problems are skipped, with the
      reason. With gate "exp" the function gets exp(g), a step's decay, of cases with log gates, and
      returns the gradient of the decay.
    - autograd: PyTorch computes the gradients of the results.
    - device: None for numpy arrays (bf16 inputs are float32 of equal value), else "cpu", "cuda", ..
      for PyTorch tensors, q k v do in the case's own format (base fp16: that), others float32.
      With autograd and a base wider than bf16 all are float32: PyTorch gives a gradient the dtype
      of its tensor.
    - batch: all arrays with tokens begin with a batch axis (default: with PyTorch). Its length is 1
      except for sequences of one length, and with attention_mask.
    - masked: "any" ignores results where the mask is 0; "zero" requires zeros there.
    - layout: "mamba" means that fn takes and returns arrays by the names of mamba.py.
    - memory: layout of every array there (layouts.py).
    - queries: query heads a key head.
    - widths: K and V, where the function serves these alone. The cases of its sets have them, with
      fewer heads where states would be large. Problems of others are skipped.
    - checkpoints: tokens between the states of the output "checkpoints", [sum of T_i //
      checkpoints, HV,K,V]. They are the states after every so many tokens of each sequence.
    - state_layout: last axes of initial_state, dht, pool and their results, "kv" or "vk".
    - base: formats that fn claims.
    - narrow: the design keeps something in fp16, whose range cases must not leave.
    - guards: results that change after the call, and states, are checked, too (guards.py).
    - recurrence: a user's own; parameters, outputs and gradients have its names. Then models, beta
      and l2norm are not used.

    An array has the address of the previous call's, if it has its name, shape and dtype. So a
    kernel that caches by address reads stale values. Results of a call must outlive the next one.
    """

    fn: Callable[..., Any]
    outputs: Sequence[str] = ("o",)
    models: Sequence[str] = ("kda",)
    gate: str = "log"
    beta: str = "plain"
    l2norm: bool = False
    autograd: bool = False
    device: str | None = None
    batch: bool | None = None
    masked: str = "any"
    queries: int = 1
    widths: tuple[int, int] | None = None
    checkpoints: int = 0
    layout: str = "fla"
    memory: str = "contiguous"
    state_layout: str = "kv"
    base: str = "bf16"
    narrow: bool = False
    guards: bool = False
    recurrence: Recurrence | None = None
    _memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kept: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn={self.fn!r}: must be a function")
        if not isinstance(self.recurrence, Recurrence | None):
            raise TypeError(f"recurrence={self.recurrence!r}: must be a deltaproof.Recurrence")
        _check_device(self.device)
        if self.recurrence and getattr(self.fn, "recurrence", None) != self.recurrence:
            own, back = self.recurrence.names(), self.recurrence.in_problem()
            known = [own.get(n, n) for n in OUTPUTS]
            outputs = [back.get(n, n) for n in names_of("outputs", self.outputs, known)]
            object.__setattr__(self, "outputs", outputs)
            object.__setattr__(self, "fn", self.recurrence.wrapped(self.fn))
            object.__setattr__(self, "models", ("dplr",))  # whose cases have what rows may have
            object.__setattr__(self, "l2norm", bool(self.recurrence.norm))
        object.__setattr__(self, "outputs", tuple(names_of("outputs", self.outputs, OUTPUTS)))
        object.__setattr__(self, "models", tuple(names_of("models", self.models, RECURRENCES)))
        one_of("base", self.base, BASES)
        one_of("gate", self.gate, (*GATES, "exp"))
        one_of("beta", self.beta, BETAS)
        if self.state_layout not in ("kv", "vk"):
            raise ValueError(f"state_layout={self.state_layout!r}: must be 'kv' or 'vk'")
        if self.masked not in ("any", "zero"):
            raise ValueError(f"masked={self.masked!r}: must be 'any' or 'zero'")
        for name in ("l2norm", "autograd") + ("batch",) * (self.batch is not None):
            object.__setattr__(self, name, truth_of(name, getattr(self, name)))
        for name in ("outputs", "models"):
            if not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r}: name at least one")
        if len(set(self.outputs)) < len(self.outputs):
            raise ValueError(f"outputs={self.outputs!r}: one of them stands twice")
        if not _is_whole(self.queries) or self.queries < 1:
            raise ValueError(f"queries={self.queries!r}: must be a whole number from 1 on")
        if self.widths is not None:
            pair = tuple(self.widths) if isinstance(self.widths, tuple | list) else ()
            if len(pair) != 2 or not all(_is_whole(n) and 1 <= n <= 512 for n in pair):
                raise ValueError(f"widths={self.widths!r}: must be (K, V), from 1 to 512 each")
            object.__setattr__(self, "widths", pair)
        asked = _is_whole(self.checkpoints) and self.checkpoints > 0
        if asked != ("checkpoints" in self.outputs) or not (asked or self.checkpoints == 0):
            raise ValueError(
                f"checkpoints={self.checkpoints!r}: must be the number of tokens between the "
                "states of the output 'checkpoints'"
            )

    def writes(self) -> list[str]:
        """Outputs that a program may ask for."""
        if not self.autograd:
            own = {"drafts": "draft_slots", "trees": "parents", "ring": "ring_tokens"}
            outputs = [x for x in self.outputs if x != "checkpoints"]
            return [*outputs, *(x for x, n in own.items() if self.takes(n))]
        takes, anything = _parameters(self.fn)
        outputs = [x for x in self.outputs if x != "checkpoints"]
        return outputs + [d for d, n in GRADIENT_OF.items() if anything or n in takes]

    def said(self) -> list[str]:
        """The same, by the names that the program has for them."""
        own = self.recurrence.names() if self.recurrence else {}
        return [own.get(n, n) for n in self.writes()]

    def free_settings(self) -> set[str]:
        """Settings of which the function computes all forms: it takes them as parameters."""
        return {"gate", "beta_form", "l2norm"} & set(_parameters(self.fn)[0])

    def gate_form(self) -> str:
        """The gate of the cases that the function is for."""
        return "log" if self.gate == "exp" else self.gate

    def form(self) -> dict[str, str]:
        """Keys of a case for the settings that the function takes in one form alone."""
        free, norm = self.free_settings(), ("no", "yes")[self.l2norm]
        own = {"gate": self.gate_form(), "beta_form": self.beta, "l2norm": norm}
        return {n.removesuffix("_form"): x for n, x in own.items() if n not in free}

    def takes(self, name: str) -> bool:
        return name in _parameters(self.fn)[0]

    def may_get(self, name: str) -> bool:
        """Has fn a parameter of that name, or takes it any?"""
        takes, anything = _parameters(self.fn)
        return anything or name in takes

    def call(self, problem: Problem) -> dict[str, npt.NDArray[np.float64]]:
        """{name: array in the shape that is wanted}. Unsupported; whatever fn raises; ValueError
        where it returns something else than it says."""
        if self.recurrence:
            own, back = self.recurrence.names(), self.recurrence.in_problem()
            wanted = {back.get(n, n): s for n, s in problem.wanted.items()}
            made = self._called(replace(problem, wanted=wanted))
            return {own.get(n, n): x for n, x in made.items()}
        return self._called(problem)

    def _called(self, problem: Problem) -> dict[str, npt.NDArray[np.float64]]:
        if self.takes("gv") and has_columns(problem) and "pool" not in problem.arrays:
            return by_columns(self._call, problem)
        if self.checkpoints and not set(problem.wanted) & set(GRADIENT_OF):
            return by_checkpoints(self._call, problem, self.checkpoints)
        if self.queries == 1:
            return self._call(problem)
        if problem.arrays["v"].shape[1] > problem.arrays["q"].shape[1]:
            raise Unsupported("query heads beside grouped value heads")
        if set(problem.wanted) & set(GRADIENT_OF):
            raise Unsupported("gradients of several query heads a key head")
        return by_queries(self._call, problem, self.queries)

    def _call(self, problem: Problem) -> dict[str, npt.NDArray[np.float64]]:
        rows = self._rows(problem)
        given = self._arguments(problem, rows)
        before = inputs_of(given, self.guards)
        result = self._named(self.fn(**given))
        returned = dict(result)
        look_at_kept(self._kept)
        look(given, before, result) if self.guards else look_at_inputs(given, before, result)
        if self.autograd and any(n in GRADIENT_OF for n in problem.wanted):
            made = {n: copy_of(x) for n, x in result.items()}  # as the forward left them
            result = made | self._gradients(result, given, problem, rows)
            look_at_inputs(given, before, result)
        if "has_initial_state" in given and "pool" in result:
            result["pool"] = _nothing_again(problem, to_numpy(result["pool"], "pool"))
        if rows is not None:
            result |= {n: self._tokens(n, x, rows) for n, x in result.items() if n in LEAVING}
        wanted = dict(problem.wanted)
        if self.autograd and "ds0" not in result and "initial_state" not in problem.arrays:
            wanted.pop("ds0", None)
        made = {n: self._fit(n, result, shape) for n, shape in wanted.items()}
        self._kept[:] = kept_of(given, {n: x for n, x in returned.items() if n in made})
        if "dg" in made and self._decays(problem):  # of the log, not of the decay
            g = problem.arrays["gv" if "gv" in problem.arrays else "g"]
            made["dg"] = made["dg"] * np.exp(g).reshape(made["dg"].shape)
        return made

    def _decays(self, problem: Problem) -> bool:
        """Does the function get exp(g) in place of g?"""
        return self.gate == "exp" and problem.settings["gate"] == "log"

    def _turned(self, name: str) -> bool:
        return self.state_layout == "vk" and name in STATES

    # ---- what goes in ---------------------------------------------------------------------------

    def _axis(self, name: str) -> int | None:
        """The axis of tokens in what the function gets by that name."""
        return int(self.has_batch()) if name in (*TOKENS, "gv") else None

    def has_batch(self) -> bool:
        if self.batch is not None:
            return self.batch
        return self.device is not None or "attention_mask" in _parameters(self.fn)[0]

    def _rows(self, problem: Problem) -> npt.NDArray[Any] | None:
        """Tokens by row and place [B,T], -1 where there is none; None: one row has all."""
        cu, takes = problem.arrays.get("cu_seqlens"), _parameters(self.fn)[0]
        masks = "attention_mask" in takes
        if not self.has_batch() or "cu_seqlens" in _required(self.fn):
            return None
        if cu is None:
            return np.arange(len(problem.arrays["q"]))[None] if masks else None
        lengths = np.diff(cu)
        if not masks and (lengths != lengths[0]).any():
            return None
        place = np.arange(lengths.max()) - (lengths.max() - lengths)[:, None]
        return np.where(place < 0, -1, cu[:-1, None] + place)

    def _arguments(self, problem: Problem, rows: npt.NDArray[Any] | None) -> dict[str, Any]:
        takes, anything = _parameters(self.fn)
        self._check(problem, takes)
        out = {}
        arrays = dict(problem.arrays)
        if rows is not None:
            arrays.pop("cu_seqlens", None)
        if "draft_slots" in takes and "draft_slots" in arrays:  # which say the other two
            arrays = {n: x for n, x in arrays.items() if n in takes or n not in READ_WRITE}
        if rows is not None and "attention_mask" in takes:
            mask = (rows >= 0).astype(np.int64)
            out["attention_mask"] = self._placed("attention_mask", self._on_device(mask))
        if self._wants_zeros(problem, takes):
            arrays["initial_state"] = _zeros(problem)
        if "cu_seqlens" in _required(self.fn):
            arrays.setdefault("cu_seqlens", np.array([0, len(problem.arrays["v"])], np.int64))
        told, all_have = "has_initial_state", "ds0" in problem.wanted
        if told in (_required(self.fn) if all_have else takes):
            has = np.ones(_sequences(problem), bool) if all_have else _nothing(problem, arrays)
            out[told] = self._placed(told, self._on_device(has))
        for name, x in arrays.items():
            if anything or name in takes:
                out[name] = self._array(name, x, problem, rows)
            elif name not in INCOMING:
                raise Unsupported(f"the function takes no `{self._own_name(name)}`")
        settings = {n: problem.settings[n] for n in SETTINGS}
        usual = not self.recurrence and problem.settings["recurrence"] != "ssd"
        if usual and self._standard(problem) and _default(self.fn, "scale") is None:
            del settings["scale"]
        if anything and not self._standard(problem):
            takes = [*takes, "scale"]
        settings |= {"gate": "exp"} if self._decays(problem) else {}
        asked = {"chunk": problem.settings["chunk"]} if problem.settings["chunk"] else {}
        out |= asked | {n: x for n, x in settings.items() if n in takes}
        needs = (*INPUTS, *OPTIONAL, "gv")
        required = [n for n in _required(self.fn) if n not in out]
        lacks = [n for n in required if n.removeprefix("previous_") in needs]
        if lacks:
            lack = self._own_name(lacks[0])
            raise Unsupported(f"the function requires `{lack}`, which this case does not have")
        return out

    def _own_name(self, name: str) -> str:
        return self.recurrence.names().get(name, name) if self.recurrence else name

    def _wants_zeros(self, problem: Problem, takes: Sequence[str]) -> bool:
        """Where a case has no state: does fn require one, or is its gradient wanted?"""
        if "initial_state" not in takes or {"initial_state", "pool"} & set(problem.arrays):
            return False
        required = "initial_state" in _required(self.fn)
        return required or (self.autograd and "ds0" in problem.wanted)

    def _check(self, problem: Problem, takes: Sequence[str]) -> None:
        s = problem.settings
        model = s["recurrence"]
        if model not in (self.recurrence and (self.recurrence.name,) or self.models):
            raise Unsupported(f"model {model}, the function computes {' '.join(self.models)}")
        for parameter, form, own in (
            ("gate", s["gate"], self.gate_form()),
            ("beta_form", s["beta_form"], self._beta(s)),
            ("l2norm", s["l2norm"], self.l2norm),
        ):
            if form != own and parameter not in takes:
                raise Unsupported(f"{parameter} {form}, the function computes {own}")
        K, V = problem.arrays["q"].shape[-1], problem.arrays["v"].shape[-1]
        if self.widths and self.widths != (K, V):
            raise Unsupported(f"K = {K}, V = {V}: not the function's widths")
        if s["chunk"] and "chunk" not in takes:
            raise Unsupported("the function takes no `chunk`, which its design says")
        if not self._standard(problem) and not self.may_get("scale"):
            raise Unsupported("the function takes no `scale`, and this case's is not K^-1/2")

    def _standard(self, problem: Problem) -> bool:
        """Is the scale K^-1/2?"""
        along = self.recurrence and self.recurrence.along_values
        K = problem.arrays["do" if along else "q"].shape[-1]
        return bool(abs(problem.settings["scale"] * K**0.5 - 1) < 1e-12)

    def _beta(self, settings: Mapping[str, Any]) -> str:
        if self.recurrence:
            return str(settings["beta_form"])
        return "none" if settings["recurrence"] in ("gla", "ssd") else self.beta

    def _array(
        self,
        name: str,
        x: npt.NDArray[Any],
        problem: Problem,
        rows: npt.NDArray[Any] | None = None,
    ) -> Any:
        if name in INTEGERS:
            return self._placed(name, self._on_device(x.copy()))
        fmt = problem.input_format if name.removeprefix("previous_") in SHORT else "fp32"
        fmt = "fp32" if fmt == "bf16" and self.autograd and self.base in WIDE else fmt
        fmt = "fp16" if fmt == "bf16" and self.base == "fp16" and self.device is not None else fmt
        fmt = "fp64" if problem.input_format == "fp64" or not _holds(name, x) else fmt
        x = np.exp(x) if name in ("g", "gv") and self._decays(problem) else x
        # the shapes of the head of this file: no axis R where there is one key, no Kg in GDN
        own = self.recurrence
        one_gate = own.per_head if own else problem.settings["recurrence"] in ONE_GATE
        sizes = {"R": problem.settings["R"], "Kg": problem.settings["Kg"] if one_gate else 0}
        units = unit_axes(name, sizes) if name in INPUTS else ()
        x = x.squeeze(tuple(a for a in units if x.shape[a : a + 1] == (1,)))
        dtype = FORMATS[fmt]
        y = x.astype(np.float32 if self.device is None and fmt == "bf16" else dtype)
        if self._turned(name):
            y = np.ascontiguousarray(np.swapaxes(y, -1, -2))
        if self._axis(name):
            y = y[None] if rows is None else _in_rows(name, y, rows)
        apart = 2 if name in ("k", "v") else 1
        laid = arrange(self._on_device(y), self.memory, apart, self._axis(name))
        t = self._placed(name, laid)
        if self.autograd and name not in INCOMING:
            t.requires_grad_(True)
        return t

    def _placed(self, name: str, x: Any) -> Any:
        """The same numbers at the address of the last array of that name, if they fit there."""
        kept = self._memory.setdefault(name, x)
        if (kept.shape, kept.dtype) != (x.shape, x.dtype):
            kept = self._memory[name] = x
        if kept is not x:
            kept[...] = x
        return kept.detach() if is_torch(kept) else kept

    def _on_device(self, x: npt.NDArray[Any]) -> Any:
        if self.device is None:
            return x
        import torch

        if x.dtype == BFLOAT16:
            t = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        else:
            t = torch.from_numpy(x.copy())
        return t.to(self.device)

    # ---- what comes out -------------------------------------------------------------------------

    def _named(self, result: Any) -> dict[str, Any]:
        if isinstance(result, Mapping):
            return dict(result)
        values = result if isinstance(result, tuple | list) else (result,)
        if len(values) != len(self.outputs):
            raise ValueError(
                f"the function returns {len(values)} arrays, outputs names {len(self.outputs)}: "
                f"{' '.join(self.outputs)} (say outputs=('o', 'final_state') or what it returns)"
            )
        return dict(zip(self.outputs, values, strict=True))

    def _tokens(self, name: str, x: Any, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows of a result that are tokens, in their order."""
        y = to_numpy(x, name)
        if y.shape[:2] != rows.shape:
            shape = ", ".join(str(n) for n in y.shape)
            raise ValueError(
                f"{name} has the shape [{shape}], must begin with [{rows.shape[0]}, "
                f"{rows.shape[1]}]: rows of a batch, tokens"
            )
        if self.masked == "zero" and y[rows < 0].any():
            raise ValueError(f"{name} is not 0 where attention_mask is")
        return y[rows >= 0]

    def _seed(self, name: str, x: npt.NDArray[Any], rows: npt.NDArray[Any] | None, of: Any) -> Any:
        """The gradient of a result, in its shape and the layout of memory. Equal numbers have
        strides of 0, as behind a sum."""
        y = np.swapaxes(x, -1, -2) if self._turned(name) else x
        y = _in_rows(name, y, rows) if rows is not None and name in TOKENS else y
        t = self._on_device(np.ascontiguousarray(y, np.float32)).reshape(of.shape).to(of.dtype)
        if y.size and (y == y.flat[0]).all():
            memory = t.new_full((t.numel(),), float("nan"))
            memory[0] = t.flatten()[0]
            return memory[0].expand(t.shape)
        return arrange(t, self.memory, tokens=self._axis(name))

    def _fit(
        self, name: str, result: Mapping[str, Any], shape: tuple[int, ...]
    ) -> npt.NDArray[np.float64]:
        if not self._turned(name):
            return _fit(name, result, shape)
        return np.swapaxes(_fit(name, result, (*shape[:-2], shape[-1], shape[-2])), -1, -2)

    def _gradients(
        self,
        result: dict[str, Any],
        given: dict[str, Any],
        problem: Problem,
        rows: npt.NDArray[Any] | None,
    ) -> dict[str, Any]:
        import torch

        heads = {n: d for d, n in INCOMING.items() if d in problem.arrays and n in result}
        seeds = [self._seed(d, problem.arrays[d], rows, result[n]) for n, d in heads.items()]
        if "dht" in problem.arrays and "final_state" not in result:
            raise Unsupported("the gradient of a final state that the function does not return")
        torch.autograd.backward([result[n] for n in heads], seeds)
        of = {d: n for d, n in GRADIENT_OF.items() if n in given}
        for d, n in of.items():
            if d in problem.wanted and n in problem.arrays and given[n].grad is None:
                raise ValueError(f"{d}: no gradient reaches `{n}`: the function does not use it")
        return {d: given[n].grad for d, n in of.items() if given[n].grad is not None}


def _is_whole(n: object) -> bool:
    return isinstance(n, int | float | np.number) and n == int(n)


def _check_device(device: str | None) -> None:
    """ValueError: PyTorch is not installed, or does not have the device."""
    if device is None:
        return
    try:
        import torch

        getattr(torch, "empty", lambda *_, **__: None)(0, device=device)
    except Exception as e:
        raise ValueError(f"device={device!r}: {text_of(e)}") from e


def contract_of(caller: str, fn: Callable[..., Any], base: str, given: dict[str, Any]) -> Contract:
    """The contract of the further arguments of `caller`. TypeError: it has none of that name."""
    own = {"fn", "base", "memory", "narrow", "guards"}
    known = {x.name for x in fields(Contract) if x.init} - own
    for name in given.keys() - known:
        like = get_close_matches(name, known, 1)
        hint = f"; did you mean {like[0]}?" if like else f"; known are {', '.join(sorted(known))}"
        raise TypeError(f"{caller}() has no argument {name!r}{hint}")
    layout = given.get("layout", "fla")
    one_of("layout", layout, ("fla", "mamba"))
    if layout == "mamba":
        for name in (*mamba.SAID, "autograd"):
            if name in given:
                raise ValueError(f'{name}={given[name]!r}: not with layout="mamba"')
        outputs = names_of("outputs", given.get("outputs", "y"), (*mamba.MADE, *STAGES))
        fn, outputs = mamba.as_function(fn, outputs, base)
        given = given | {"models": "ssd", "state_layout": "vk", "outputs": outputs}
    contract = Contract(fn, base=base, **given)
    _check_parameters(contract.fn)
    return contract


def _check_parameters(fn: Callable[..., Any]) -> None:
    """ValueError: no call could be made, whatever the case."""
    known = {*INPUTS, *OPTIONAL, *SETTINGS, "gv", "has_initial_state", "attention_mask"}
    for name in _required(fn):
        if name.removeprefix("previous_") not in known:
            raise ValueError(f"fn requires `{name}`, which is no array and no setting of a call")
    for x in inspect.signature(fn).parameters.values():
        if x.kind is x.POSITIONAL_ONLY and x.default is x.empty:
            raise ValueError(f"fn takes `{x.name}` by position alone: arrays are given by name")


def _in_rows(name: str, x: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[T,..] as [B,T,..]; where a row has no token lies another's, of gradients that come in 0."""
    nobody = rows < 0
    y = x[np.where(nobody, np.arange(rows.shape[1]) * 7 % len(x), rows)]
    if name in INCOMING:
        y[nobody] = 0
    return y


def _holds(name: str, x: npt.NDArray[Any]) -> bool:
    """Does float32 hold the array? Slots of a pool, which may be of any format, keep their bits."""
    return name != "pool" or np.array_equal(x.astype(np.float32), x, equal_nan=True)


def _fresh(problem: Problem) -> list[int]:
    """Slots that are read by sequences without a state: zeros in the problem."""
    pool = problem.arrays["pool"]
    return [int(s) for s in problem.arrays["read_slot"] if s >= 0 and not pool[s].any()]


def _nothing(problem: Problem, arrays: dict[str, Any]) -> npt.NDArray[Any]:
    """Which sequences have a state [N]; in `arrays` states that are none become NaN."""
    if "pool" in arrays:
        pool, fresh = arrays["pool"].copy(), _fresh(problem)
        pool[fresh] = np.nan
        arrays["pool"] = pool
        reads = problem.arrays["read_slot"]
        return np.array([s >= 0 and s not in fresh for s in reads], bool)
    states = arrays.get("initial_state", _zeros(problem)).copy()
    has = states.any(axis=(1, 2, 3))
    states[~has] = np.nan
    arrays["initial_state"] = states
    return np.asarray(has, bool)


def _nothing_again(problem: Problem, pool: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Slots that were NaN for want of a state, and still are, as the program has them: zeros."""
    kept = [s for s in _fresh(problem) if s not in problem.arrays["write_slot"]]
    kept = [s for s in kept if np.isnan(pool[s].astype(np.float64)).all()]
    out = pool.copy()
    out[kept] = 0
    return out


def _zeros(problem: Problem) -> npt.NDArray[Any]:
    v, K = problem.arrays["v"], problem.arrays["q"].shape[-1]
    return np.zeros((_sequences(problem), v.shape[1], K, v.shape[-1]))


def _sequences(problem: Problem) -> int:
    return max(len(problem.arrays.get("cu_seqlens", ())) - 1, 1)


def _required(fn: Callable[..., Any]) -> list[str]:
    """Names that fn takes and has no default for."""
    own = inspect.signature(fn).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in own if p.kind in named and p.default is p.empty]


def _default(fn: Callable[..., Any], name: str) -> Any:
    """The default of a parameter, its name where it has none."""
    p = inspect.signature(fn).parameters.get(name)
    return name if p is None or p.default is p.empty else p.default


def _parameters(fn: Callable[..., Any]) -> tuple[list[str], bool]:
    """(names that fn takes, whether it takes any name)."""
    kinds = inspect.signature(fn).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in kinds.values())
    return [n for n, p in kinds.items() if p.kind is not p.VAR_KEYWORD], anything


def _fit(name: str, result: Mapping[str, Any], shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    if result.get(name) is None:
        raise ValueError(f"the function returned no {name}")
    x = to_numpy(result[name], name).astype(np.float64)
    own, want = [[n for n in s if n != 1] for s in (x.shape, shape)]
    if own != want:
        turned = name in STATES and own == [
            n for n in (*shape[:-2], shape[-1], shape[-2]) if n != 1
        ]
        hint = ": are states [V,K] (state_layout='vk') or [K,V] ('kv')?" if turned else ""
        raise ValueError(f"{name} has the shape {list(x.shape)}, must be {list(shape)}{hint}")
    return x.reshape(shape)
