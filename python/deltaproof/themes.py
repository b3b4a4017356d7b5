"""Sets of cases, one for each recurrence. Every case is a theme of the table below in the op of the
recurrence and the form that the function computes (`gdn-packed-empty`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .contract import WIDE, Contract
from .mamba import exact_case
from .prefixes import NAME, nested
from .program import put
from .tensors import save
from .vocabulary import GRADIENT_OF
from .vocabulary import RECURRENCES as MODELS
from .words import names_of

SETS = ("smoke", "standard", "serving", "training", "large")
LOWER_BOUND = -5

# Gates by strength: keys of a case with log gates, and the mean of a raw one.
DECAYS: dict[str, tuple[dict[str, object], float]] = {
    "none": ({"g_scale": 0}, -60),
    "slow": ({"g_scale": 0.001}, -7),
    "weak": ({"g_scale": 0.02}, -4),
    "mild": ({"g_scale": 0.1}, -2),
    "strong": ({"g_uniform": 5}, 2),
    "killing": ({"g_uniform": 20}, 5),
}
RAW = {"gate": "softplus", "beta": "sigmoid", "l2norm": "yes"}  # as models are served
LOG = {"gate": "log", "beta": "plain", "l2norm": "no"}
# The parameter without which a function gets no such key of Theme.also.
NEEDS = {"cu_seqlens": "cu_seqlens", "s0_scale": "initial_state", "dstate": "initial_state",
         "scale": "scale", "gate": "lower_bound"}  # fmt: skip
SETTINGS = ("gate", "beta_form", "l2norm")
OF_WIDTHS = ("tails", "k192", "v256", "k256", "value-gates", "checkpoints")
LARGEST = 1 << 22  # entries of the states of a case in a function's own widths


@dataclass(frozen=True)
class Theme:
    """A kind of case in a set.

    - keys: keys of a case file, on top of H = 1, HV = 2, K = V = 32
    - raw: the form for a function that computes several (RAW, else LOG)
    - form: the form of activations that the theme is about
    - betas: their law; a recurrence without betas has no such case
    - needs: a parameter or setting that only some functions have
    - also: further keys, and settings, for the functions that take what these are about (NEEDS)"""

    name: str
    reason: str
    keys: dict[str, object]
    decay: str = "weak"
    raw: bool = False
    form: dict[str, str] = field(default_factory=dict)
    betas: str = ""
    sets: tuple[str, ...] = ("standard",)
    needs: str = ""
    models: tuple[str, ...] = MODELS
    also: dict[str, object] = field(default_factory=dict)


def _t(n: int, **keys: object) -> dict[str, object]:
    return {"T": n, **keys}


def _packed(*ends: int, **keys: object) -> dict[str, object]:
    return _t(ends[-1], cu_seqlens=",".join(str(n) for n in (0, *ends)), **keys)


def _states(keys: dict[str, object]) -> dict[str, object]:
    return {**keys, "s0_scale": 0.5, "dstate": "yes"}


def _columns(tokens: int, channels: int) -> dict[str, object]:
    """Value heads of width 1 that are channels of one head: a beta a token."""
    betas = ", ".join(f"beta[{t},*,0] {(t * 37 % 59 + 3) / 64}" for t in range(tokens))
    return _t(tokens, H=1, HV=channels, K=32, V=1, s0_scale=0.5, override=betas)


def _readers(tokens: int, *ends: int) -> dict[str, object]:
    """Every second token only reads."""
    off = ", ".join(f"g[{t},*,*] 0, beta[{t},*,*] 0" for t in range(1, tokens, 2))
    return _packed(*ends, H=2, HV=2, K=16, s0_scale=0.5, override=off)


BOTH = ("standard", "training")
STATE: dict[str, object] = {"s0_scale": 0.5}  # without a gradient of the last one
THEMES: tuple[Theme, ...] = (
    # lengths
    Theme(
        *("smoke", "grouped heads and a few chunks", _t(160, H=2, HV=4, K=16)),
        sets=("smoke", *BOTH),
    ),
    Theme("t1", "one token, with a state", _t(1, H=2, K=128),
          sets=("smoke", "standard"), also=STATE),
    Theme("short", "fewer tokens than a tile has, with a state; K = 96 and V = 80",
          _states(_t(13, K=96, V=80, H=2, HV=4)), raw=True, sets=BOTH),
    Theme("t63", "one token less than a chunk", _t(63, HV=3, K=64), raw=True),
    Theme("t64", "one chunk, with a state", _t(64, K=128),
          also=STATE | {"scale": 0.31}),
    Theme("t65", "one token more than a chunk; inputs of the base's format",
          _t(65, dtype="base"), raw=True, sets=("smoke", *BOTH)),
    Theme("t129", "two chunks and a token, with a state", _states(_t(129, HV=4)),
          also={"l2norm": "yes"}),
    Theme("long", "sixteen chunks that remember", _t(1024, H=2, K=16), "slow", sets=BOTH,
          also=STATE | {"l2norm": "yes"}),
    # widths and heads
    Theme("heads", "six value heads of two, each with rates of its own",
          _t(96, H=2, HV=6, K=16, V=64, g_head_spread=3), raw=True, sets=BOTH),
    Theme("tails", "widths that no power of two divides", _t(80, K=40, V=20), raw=True, sets=BOTH,
          also=STATE | {"cu_seqlens": "0,33,80"}),
    Theme("k192", "keys of more channels than 128", _t(70, H=2, K=192, V=16),
          also=STATE),
    Theme("v256", "values of more channels than 128", _t(66, HV=1, K=128, V=256), raw=True,
          also=STATE | {"cu_seqlens": "0,3,66"}),
    Theme("wide", "widths of tensor cores, packed", _t(72, H=2, HV=4, K=64), raw=True, sets=BOTH,
          also=STATE | {"cu_seqlens": "0,6,72"}),
    Theme("model", "heads as most models have them, packed", _t(130, HV=1, K=128), raw=True,
          also=STATE | {"cu_seqlens": "0,1,130"}),
    # packings
    Theme("packed-inside", "sequences that begin and end inside chunks",
          _states(_packed(37, 91, 104, 180, H=3, HV=3, K=16)), sets=BOTH),
    Theme("packed-aligned", "sequences that begin where chunks do, one of five chunks",
          _packed(64, 384, H=2, K=16), raw=True, also={"scale": 0.31}),
    Theme("rows", "sequences of one length: rows of a batch, where the function has that axis",
          _states(_packed(70, 140, 210, H=2, HV=4, K=16, V=32)), raw=True, sets=BOTH,
          also={"gate": "lower_bound"}),
    Theme("packed-empty", "empty sequences first, last and between, whose states must stay",
          _states(_packed(0, 50, 50, 50, 114, 180, 180, HV=4, K=16, V=48)), raw=True, sets=BOTH),
    Theme("packed-ones", "sequences of one token, as a batch of decode steps, of many heads",
          _states(_packed(*range(1, 66), H=4, HV=32, K=16)), raw=True),
    Theme("packed-mixed", "decode rows beside prefill rows, with states and without tokens",
          _states(_packed(0, 1, 2, 71, 71, 72, 140, 156, 157, H=2, HV=10, K=16, V=24)), raw=True,
          also={"scale": 0.31}),
    # states
    Theme("states", "a state that outlives chunks, V > K; inputs of the base's format",
          _states(_t(150, H=2, K=16, V=48, dtype="base")), "slow", sets=BOTH),
    Theme("states-raw", "the same of raw gates and normed keys; values and gradients near 1e-6",
          _states(_t(150, K=64, v_scale=1e-6)), "slow", raw=True, sets=BOTH,
          also={"scale": 0.31}),
    Theme("symmetric", "values near the keys: a state stored [V,K] and read [K,V]",
          _t(128, v_from_k=0.01)),
    # gates
    Theme("no-decay", "gates that forget nothing", _t(130, H=2, HV=4, K=64, V=16), "none"),
    Theme("mild", "gates of common strength; values and gradients beyond the range of fp16",
          _t(130, H=2, v_scale=1e5), "mild", sets=BOTH),
    Theme("strong", "log gates in (-5, 0], packed", _t(130, K=64), "strong", sets=BOTH,
          also=STATE | {"cu_seqlens": "0,37,130"}),
    Theme("killing", "log gates in (-20, 0], packed", _t(96, H=2, HV=6), "killing",
          also=STATE | {"cu_seqlens": "0,17,18,83,83,92,96"}),
    Theme("held", "gates that keep one value for 64 tokens", _t(192, H=2, K=16, V=32,
          g_hold=64), "slow", also={"beta_form": "sigmoid"}),
    Theme("softplus", "raw gates with A_log and dt_bias, packed; dstate without a first state",
          _t(130, H=2, dstate="yes"), raw=True, form=RAW, sets=BOTH,
          also={"cu_seqlens": "0,50,130"}),
    Theme("softplus-ends", "raw gates around -9, times a large rate",
          _t(130, HV=8, K=16, g_mean=-9, g_scale=2, A_log=7), form=RAW),
    Theme("softplus-rates", "A_log from 2.8 down to -8, raw gates on either side of 0",
          _t(96, HV=8, K=16, g_mean=8, g_scale=4, g_head_spread=1 / 16), form=RAW, sets=BOTH),
    Theme("softplus-bare", "raw gates without parameters", _t(96, gate_params="no"),
          form={"gate": "softplus"}, also=STATE),
    Theme("no-bias", "raw gates with A_log alone", _t(72, H=2, K=16, gate_params="rates"), raw=True,
          sets=BOTH, also=STATE),
    Theme("lower-bound", "a bounded gate, of another bound where the function takes it",
          _t(70, HV=1, K=128, lower_bound=-3), form={"gate": "lower_bound"}, sets=BOTH,
          also={"scale": 0.31}),
    # keys and betas
    Theme("small-norms", "rows whose squared norms are about that of eps",
          _t(128, H=2, qk_decades=5), form={"l2norm": "yes"}, sets=BOTH),
    Theme("tiny-norms", "rows far below eps, rows of zeros, keys of norms up to 5,000",
          _t(96, K=128, V=16, qk_decades=9, k_scale=1000, override="q[5,*,*] 0, k[40,*,*,*] 0"),
          form={"l2norm": "yes"}),
    Theme("key-norms", "keys as they are, of norms up to 1.4", _t(130, HV=3, k_scale=1.4),
          form={"l2norm": "no"}, sets=BOTH),
    Theme("correlated", "keys that are nearly equal, erased by nearly all", _t(128,
          HV=1, K=64, keys="correlated"), "slow", betas="one"),
    Theme("subspace", "keys in half of the channels", _t(128, H=16, HV=16, K=16,
          keys="subspace"), "slow", also=STATE),
    Theme("moved", "keys move the state out of the half of the channels that is killed next",
          _t(128, keys="moved", s0_scale=1), "", betas="one", models=("kda",)),
    Theme("repeated", "every token four times: what is read before the decay differs",
          _t(128, HV=1, K=16, V=128, repeat=4), betas="one"),
    Theme("small-betas", "betas over many decades", _t(48, H=3, HV=3, K=8), betas="small",
          also=STATE),
    Theme("reflected", "betas up to 2; a gradient as behind a sum: PyTorch's has strides of 0",
          _t(96, H=2, HV=6, override="do[*,*,*] 1"), raw=True, betas="two", sets=BOTH,
          also=STATE | {"gate": "lower_bound", "cu_seqlens": "0,40,96"}),
    Theme("scaled", "another scale than K^-1/2, in the shape of t65; the same keys, other gates",
          _t(65, scale=0.31), "slow", raw=True),
    # heads of other layouts
    Theme("value-gates", "a gate per value channel: heads of one channel", _columns(90, 24),
          form=LOG, needs="gv", models=("gdn",)),
    Theme("queries", "tokens that only read: further query heads of the one before",
          _readers(90, 34, 90), form=LOG, needs="queries", models=("kda", "gdn")),
    Theme("checkpoints", "states behind every N tokens: sequences that are beginnings of others",
          {}, raw=True, needs="checkpoints", models=("kda", "gdn"), sets=("standard", "serving")),
    # where nothing rounds
    Theme("exact", "nothing rounds: errors are 0", _states(_t(144, H=2, HV=4, K=16, V=48,
          keys="exact")), "", form=LOG),
    Theme("exact-packed", "the same of packed sequences", _states(_packed(30, 30, 64, 130, 150,
          HV=2, K=16, V=32, keys="exact")), "", form=LOG),
    # serving
    Theme("decode", "prefill, then steps of one token, of slots that end at their times",
          _packed(70, 70, 92, 150, H=2, K=16, session="48,12x1,4,1"), raw=True, sets=("serving",)),
    Theme("pieces", "a prompt in pieces, from stored states",
          _packed(150, 228, K=16, s0_scale=0.5, session="50,64,18,1,31"), sets=("serving",)),
    Theme("kept-bf16", "states kept in bf16 between calls, of one sequence", _t(40, H=2,
          session="16,8,1", session_state="bf16"), sets=("serving",)),
    Theme("kept-e4m3", "the same in fp8 with a scale a row", _packed(40, 70, 100,
          session="16,8,1", session_state="e4m3-row"), sets=("serving",)),
    Theme("first-one", "first a call of one token, of sequences that have no state yet",
          _packed(10, 20, 30, session="1,5,1"), raw=True, sets=("serving",)),
    Theme("kept-int8", "in int8 with a scale a block of 32 columns, in a pool", _packed(40, 70,
          V=48, session="16,8,1", session_slots=4, session_state="int8-block"), sets=("serving",)),
    Theme("first-one-slots", "the same from slots in which others' states lie",
          _packed(10, 20, 30, K=128, session="1,5,1", session_slots=5), raw=True,
          sets=("serving",)),
    Theme("prefix", "continuations of one stored prefix", _packed(60, 130, 190, K=16,
          session="24,16,4-3,1", session_prefix=40), sets=("serving",)),
    Theme("slots", "states in slots, other slots to read and to write, padding",
          _packed(40, 40, 62, 76, 96, H=2, HV=4, s0_scale=0.5, session="12,4-2,3,1,4-0,2x1,2",
          session_slots=7), raw=True, sets=("serving",)),
    Theme("slots-prefix", "continuations read the slot of one prefix, which must stay",
          _packed(34, 60, 90, K=32, V=16, s0_scale=0.5, session="10,6,4-3,5,1", session_prefix=16,
          session_slots=5), sets=("serving",)),
    Theme("drafts", "windows of drafted tokens, some of which none is accepted in",
          _packed(70, 120, H=2, K=16, session="24,4-2,4-0,3,6-1,6,5-4,2x6-3,1,4-3"), raw=True,
          sets=("serving",)),
    Theme("staggered", "prompts beside single tokens in one call, of sequences that come and end",
          _packed(44, 70, 98, K=64, s0_scale=0.5, session="20,4x1,6,1", session_stagger=3),
          raw=True, betas="two", sets=("serving",), also={"gate": "lower_bound"}),
    Theme("draft-slots", "windows beside prompts, in a pool with a slot for every drafted token",
          _packed(60, 110, 128, K=16, session="20,4-2,1,3-1,4-3,2,5-1,4-2", session_slots=17,
          session_stagger=2), raw=True, sets=("serving",)),
    Theme("ring", "tokens replayed from a ring, a state written in some calls alone",
          _packed(26, 26, 44, 70, K=16, s0_scale=0.5, session="9,2,4x1,3,1", session_slots=6,
          session_ring=5), raw=True, needs="ring_tokens", sets=("serving",)),
    Theme("ring-prefix", "the same from one stored prefix", _packed(26, 44, 70, K=16, s0_scale=0.5,
          session="9,2,4x1,3,1", session_slots=5, session_prefix=11, session_ring=5), raw=True,
          needs="ring_tokens", sets=("serving",)),
    Theme("batch-decode", "a batch of decode rows beside prefill rows", _packed(1, 2, 3, 68, 69,
          134, H=2, HV=16, K=16, s0_scale=0.5), raw=True, sets=("serving",), also={"scale": 0.31}),
    # devices
    Theme("model-head", "heads as models have them", _states(_t(512, H=2, HV=4, K=128, V=128)),
          raw=True, sets=("large",)),
    Theme("model-packed", "the same of packed sequences", _states(_packed(1, 200, 200, 263, 512,
          H=2, K=128, V=128)), raw=True, sets=("large",)),
    Theme("many-heads", "more heads than a device has blocks at once",
          _t(96, H=16, HV=64, K=64, V=64), raw=True, sets=("large",)),
    Theme("many-chunks", "64 chunks that remember", _t(4096, HV=1, K=64, V=64), "slow", raw=True,
          sets=("large",)),
    Theme("k256", "K and V of 256", _states(_t(128, HV=1, K=256, V=256)), raw=True,
          sets=("large",)),
)  # fmt: skip


def _beta_keys(betas: str, op: str, form: str) -> dict[str, object] | None:
    """Keys for betas of that kind; None: the recurrence has none."""
    if not betas:
        return {}
    if op in ("gla", "ssd", "dplr"):
        return None
    if form == "plain":
        if betas == "small":
            return {"beta_lo": 0, "beta_hi": 1e-3} if op == "gdn2" else {"beta_decades": 12}
        share = 2 if op == "mkda" else 1  # two keys of a token erase at once
        lo, hi = {"one": (0.95, 1.0), "two": (0.0, 2.0)}[betas]
        return {"beta_lo": lo / share, "beta_hi": hi / share}
    lo, hi = {"one": (4, 1), "two": (1, 2), "small": (-8, 5)}[betas]
    if form == "sigmoid2" and op == "mkda":
        lo -= 4
    return {"beta_lo": lo, "beta_hi": hi}


def _claimed(keys: dict[str, object], contract: Contract) -> dict[str, object]:
    """The keys that fit the function's claim and parameters."""
    left_out = {"dtype"} if contract.base not in WIDE else set()
    left_out |= {"v_scale"} if contract.base == "fp16" or contract.narrow else set()
    own: dict[str, object] = {} if contract.takes("lower_bound") else {"lower_bound": LOWER_BOUND}
    own |= {"dtype": contract.base}
    if contract.base == "fp16" and "qk_decades" in keys:  # in which smaller rows have few bits
        own |= {"qk_decades": 3}
    if keys["gate"] == "lower_bound":  # a sigmoid of -100 is no number of fp32
        own |= {"g_head_spread": 1.3}
    return {n: own.get(n, x) for n, x in keys.items() if n not in left_out}


def _form(theme: Theme, op: str, contract: Contract) -> dict[str, str]:
    """The gate, beta and norm of the case: what the theme is about, else the function's one, else
    the theme's choice."""
    free = contract.free_settings()
    form = dict(RAW if theme.raw else LOG) | contract.form()
    if theme.betas == "two" and "beta_form" in free and theme.raw:
        form["beta"] = "sigmoid2"
    also = _also(theme, contract)
    form |= {n.removesuffix("_form"): str(x) for n, x in also.items() if n in free}
    form |= theme.form
    if op in ("gdn2", "gla", "ssd", "dplr"):
        form["beta"] = "plain"
    if op == "dplr":
        form["l2norm"] = "yes" if contract.recurrence and contract.l2norm else "no"
    return form


def _also(theme: Theme, contract: Contract) -> dict[str, object]:
    return {n: x for n, x in theme.also.items() if contract.may_get(NEEDS.get(n, n))}


def _serves(theme: Theme, contract: Contract) -> bool:
    """Has the function what the theme needs? One that knows states in slots alone is a server's of
    these."""
    slots = contract.takes("pool") and not contract.takes("initial_state")
    if slots and theme.sets == ("serving",) and "session_slots" not in theme.keys:
        return False
    has = {n: contract.takes(n) for n in ("gv", "ring_tokens")} | {"queries": contract.queries > 1}
    return (has | {"": True, "checkpoints": contract.checkpoints > 0})[theme.needs]


def _has_widths(theme: Theme, K: int) -> bool:
    """May the theme have these? Where nothing rounds, K^-1/2 is a power of 2."""
    power_of_4 = K & (K - 1) == 0 and K.bit_length() % 2 == 1
    return theme.name not in OF_WIDTHS and (power_of_4 or not theme.name.startswith("exact"))


def _widened(keys: dict[str, object], widths: tuple[int, int]) -> dict[str, object]:
    """The case in these widths, with half of its heads until its states are small enough."""
    K, V = widths
    sequences = max(str(keys.get("cu_seqlens", "")).count(","), 1)
    H, HV = (int(str(keys[n])) for n in ("H", "HV"))
    while HV % 2 == 0 and HV > 2 and sequences * HV * K * V > LARGEST:
        H, HV = (H // 2 if H % 2 == 0 else H), HV // 2
    return {**keys, "K": K, "V": V, "HV": HV, "H": H if HV % H == 0 else 1}


def _text(theme: Theme, op: str, contract: Contract) -> str | None:
    """The case file of a theme for one recurrence; None: it has no such case."""
    if op not in theme.models or not _serves(theme, contract):
        return None
    if contract.widths and not _has_widths(theme, contract.widths[0]):
        return None
    if op == "dplr" and ("exact" in theme.name or theme.form.get("l2norm") and not theme.raw):
        return None
    looks_back = contract.recurrence and contract.recurrence.looks_back
    if looks_back and "-" in str(theme.keys.get("session")):
        return None  # a roll-back needs more than a state
    form = _form(theme, op, contract)
    betas = _beta_keys(theme.betas, op, form["beta"])
    if betas is None:
        return None
    log, mean = DECAYS.get(theme.decay, ({}, 0.0))
    gates = log if form["gate"] == "log" else {"g_mean": mean}
    keys: dict[str, object] = {"H": 1, "HV": 2, "K": 32, "V": 32, **form, **gates, **betas}
    keys |= {"R": 2} if op in ("mkda", "gated-deltaproduct") else {}
    keys |= {"lower_bound": LOWER_BOUND} if form["gate"] == "lower_bound" else {}
    keys |= {} if "V" in theme.keys else {"V": theme.keys.get("K", 32)}
    keys |= theme.keys
    keys |= {n: x for n, x in _also(theme, contract).items() if n not in SETTINGS}
    keys = _claimed(keys, contract)
    keys = _widened(keys, contract.widths) if contract.widths else keys
    if theme.needs == "checkpoints":  # shapes and laws are those of its data
        keys = {**form, "data": NAME, "backward": "no"}
        keys |= {"lower_bound": LOWER_BOUND} if form["gate"] == "lower_bound" else {}
        keys["seed"] = contract.checkpoints
    if op == "dplr":
        keys["H"] = keys["HV"]
    if form["gate"] == "log":
        keys = {n: x for n, x in keys.items() if n not in ("g_mean", "gate_params")}
    if "session" in keys or not set(GRADIENT_OF) & set(contract.writes()):
        keys |= {} if "session" in keys else {"backward": "no"}
        keys = {n: x for n, x in keys.items() if n != "dstate" and not str(x).startswith("do[")}
    if contract.autograd and "final_state" not in contract.outputs:
        keys.pop("dstate", None)
    if contract.base == "fp16" and form["gate"] != "log" and theme.decay in ("none", ""):
        keys |= {"unjudged": "dg, dA_log, ddt_bias: fp16 has no numbers so small"}
    lines = {"reason": theme.reason, "source": f"python/deltaproof/themes.py: {theme.name}"}
    return "".join(f"{n} = {x}\n" for n, x in {**lines, "op": op, **keys}.items())


def _cases(contract: Contract) -> Iterator[tuple[str, Theme, str]]:
    """(name, theme, text) of each case that the function's recurrences have."""
    for op in (m for m in MODELS if m in contract.models):
        for theme in THEMES:
            text = _text(theme, op, contract)
            if text is not None:
                yield f"{op}-{theme.name}", theme, text


def _written(name: str, text: str, folder: str, contract: Contract) -> str:
    """The path of the case file, below a folder named after its text: two contracts differ."""
    path = _file_of(name, text, folder, contract)
    exact = contract.layout == "mamba" and "gate = log\n" in text and "l2norm = no\n" in text
    return exact_case(path) if exact else path


def _file_of(name: str, text: str, folder: str, contract: Contract) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = os.path.join(folder, "themes", digest, f"{name}.case")
    if f"data = {NAME}" in text and not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        op, raw = name.split("-")[0], "gate = log" not in text
        save(os.path.join(os.path.dirname(path), NAME), nested(op, raw, contract.checkpoints))
    return put(path, text)


def case_paths(cases: str | Sequence[str], contract: Contract, folder: str) -> list[str]:
    """The arguments of the program: for a set the files of its cases, which are written below the
    folder; for a case, that case."""
    asked = names_of("cases", cases)
    have = list(_cases(contract)) if set(asked) - _in_tree(asked) else []
    out: list[str] = []
    for name in asked:
        if name in SETS:
            found = [(n, text) for n, theme, text in have if name in theme.sets]
            out += [_written(n, text, folder, contract) for n, text in found]
            out += ["kda-typical"] * (name == "standard" and "kda" in contract.models)
        else:
            found = [(n, text) for n, _, text in have if n == name]
            out += [_written(n, text, folder, contract) for n, text in found] or [name]
    return out


def _in_tree(asked: Sequence[str]) -> set[str]:
    """Names that are files."""
    return {x for x in asked if os.path.isfile(x)}
