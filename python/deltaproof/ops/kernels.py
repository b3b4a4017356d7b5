"""The kernels as a C library (gpu/dp_gpu.h, dp_decode.h, dp_conv.h, dp_abi.h), by ctypes.

`library("cuda")`, `library("cpu")`: libdeltaproof_{cuda,cpu}.so of the wheel, or
of the folder that DELTAPROOF_OPS names (`make ops` builds both). ImportError says how to get one
that is not there. Neither is built against PyTorch: one wheel serves any version."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

from .. import vocabulary
from ..vocabulary import BETAS, GATES  # noqa: F401 - dp_beta and dp_gate, in their order

F32, BF16, F16 = 0, 1, 2  # dpg_dtype
BASE_FP32, BASE_BF16 = 1, 2  # dp_base
CHAIN_FP32, CHAIN_BF16 = 1, 5  # dp_format
AUTO, TOKEN = 0, 3  # dpg_path
AUGMENTED = 1  # dpg_chain_how
KV, VK = 0, 1  # dpg_state_layout
OK, BAD_INPUT, DEVICE = 0, 1, 4  # dp_status
COMM_ID = 128  # DPG_COMM_ID
OF_ROWS = [vocabulary.OWN_NAMES.get(name, name) for name in vocabulary.OF_ROWS]
MODELS = ("gdn", "kda", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr")  # dp_model
DECODE_TOKENS, CONV_PARTS = 8, 4


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """A struct of the headers: fields as (names, type), in their order."""
    each = [(n, kind) for names, kind in fields for n in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": each})


dp_err = _struct("dp_err", ("code", c_int), ("msg", c_char * 2048))
dpg_owners = _struct("dpg_owners", ("parts by_part", c_int), ("cut owner", c_void_p))
dpg_problem = _struct(
    "dpg_problem",
    ("T", c_int64),
    ("H HV K V R Kg Nseq model", c_int),
    ("cu", c_void_p),
    ("scale", c_double),
    ("gate", c_int),
    ("lower_bound", c_double),
    ("beta_form l2norm dtype gdtype odtype ddtype dgdtype", c_int),
    ("A_dtype bias_dtype dA_dtype dbias_dtype", c_int),
    ("own", dpg_owners),
    ("rows", c_void_p),
    ("pairs", c_int),
)
dpg_options = _struct(
    "dpg_options",
    ("base chain path chain_how segments keep backward bwd_path save send_dh_only", c_int),
    ("pair_dg whole_bwd exchange payload segment_chunks", c_int),
)
dpg_tensors = _struct(
    "dpg_tensors",
    ("q k v g beta A_log dt_bias s0 o final_state saved", c_void_p),
    (" ".join(OF_ROWS), c_void_p),
)
dpg_grads = _struct(
    "dpg_grads",
    ("dout dfinal_state dq dk dv dg dbeta dA_log ddt_bias ds0", c_void_p),
    (" ".join("d" + name for name in OF_ROWS), c_void_p),
)
dpg_decode = _struct(
    "dpg_decode",
    ("B T H HV K V R Kg", c_int),
    ("scale", c_float),
    ("gate", c_int),
    ("lower_bound", c_float),
    ("beta_form l2norm dtype gdtype odtype sdtype A_dtype bias_dtype packed layout", c_int),
    ("slots", c_int64),
    ("kept", c_int),
)
dpg_decode_tensors = _struct(
    "dpg_decode_tensors",
    ("q k v g beta A_log dt_bias o states slot accepted length start", c_void_p),
)
dpg_decode_conv = _struct(
    "dpg_decode_conv",
    ("B T D W silu dtype sdtype", c_int),
    ("slots", c_int64),
    ("kept", c_int),
    ("x w bias y states slot accepted length", c_void_p),
)
dpg_conv_problem = _struct(
    "dpg_conv_problem",
    ("T", c_int64),
    ("W silu parts", c_int),
    ("D", c_int * CONV_PARTS),
    ("Nseq", c_int),
    ("cu", c_void_p),
    ("dtype", c_int),
    ("own", dpg_owners),
    ("wdtype", c_int),
)
GATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)
WAIT = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
dpg_comm = _struct(
    "dpg_comm",
    ("self", c_void_p),
    ("rank N device in_order", c_int),
    ("all_gather", GATHER),
    ("hand all_to_all", c_void_p),
    ("wait", WAIT),
    ("abort destroy exchange enter close", c_void_p),
)
dpg_conv_tensors = _struct("dpg_conv_tensors", ("x dy w bias y dx dw dbias", c_void_p))
STRUCTS = (
    dp_err,
    dpg_problem,
    dpg_options,
    dpg_tensors,
    dpg_grads,
    dpg_decode,
    dpg_decode_tensors,
    dpg_decode_conv,
    dpg_conv_problem,
    dpg_conv_tensors,
    dpg_comm,
)

P = c_void_p
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dpg_size_of": (c_size_t, (c_char_p,)),
    "dpg_use_device": (c_int, (c_int, P)),
    "dpg_device_runs": (c_int, (c_char_p, c_size_t)),
    "dpg_plan_create": (c_int, (P, P, P, c_int, c_int, P)),
    "dpg_plan_destroy": (None, (P,)),
    "dpg_plan_connect": (c_int, (P, P, P)),
    "dpg_plan_connected": (c_int, (P,)),
    "dpg_plan_path": (c_int, (P,)),
    "dpg_plan_bwd_path": (c_int, (P,)),
    "dpg_plan_why": (c_char_p, (P,)),
    "dpg_workspace_bytes": (c_size_t, (P,)),
    "dpg_saved_bytes": (c_size_t, (P,)),
    "dpg_forward": (c_int, (P, P, P, P, P, P)),
    "dpg_backward": (c_int, (P, P, P, P, P, P, P)),
    "dpg_states": (c_int, (P, P, c_int, c_int, P, P, P)),
    "dpg_decode_run": (c_int, (P, P, P, P)),
    "dpg_decode_conv_run": (c_int, (P, P, P)),
    "dpg_comm_id": (c_int, (P, P)),
    "dpg_comm_apart": (c_int, (P, P, c_int, c_int, c_int, c_double, P)),
    "dpg_conv_create": (c_int, (P, P, c_int, c_int, P)),
    "dpg_conv_destroy": (None, (P,)),
    "dpg_conv_workspace_bytes": (c_size_t, (P,)),
    "dpg_conv_forward": (c_int, (P, P, P, P, P, P)),
    "dpg_conv_backward": (c_int, (P, P, P, P, P, P)),
}


def _folders() -> list[Path]:
    named = os.environ.get("DELTAPROOF_OPS")
    return [Path(named)] if named else [Path(__file__).parent.parent / "lib"]


@cache
def library(kind: str) -> ctypes.CDLL:
    """The library for tensors of that device type, "cuda" or "cpu". ImportError: none is there."""
    name = f"libdeltaproof_{kind}.so"
    path = next((f / name for f in _folders() if (f / name).exists()), None)
    if path is None:
        build = "make wheel GPU=1" if kind == "cuda" else "make wheel OPS=1"
        raise ImportError(
            f"deltaproof.ops: no {name} in {' or '.join(map(str, _folders()))}. This wheel was "
            f"built without it: take one of `{build}`, or `make ops` in a source tree and "
            f"DELTAPROOF_OPS=build/ops"
        )
    found = ctypes.CDLL(str(path))
    for function, (result, arguments) in SIGNATURES.items():
        entry = getattr(found, function)
        entry.restype, entry.argtypes = result, arguments
    for struct in STRUCTS:
        there = found.dpg_size_of(struct.__name__.encode())
        if there != ctypes.sizeof(struct):
            raise ImportError(
                f"{path}: {struct.__name__} has {there} bytes there and {ctypes.sizeof(struct)} "
                f"here: the library is of another version of deltaproof"
            )
    return found


def succeed(status: int, err: ctypes.Structure) -> None:
    """Raises the error of a status other than OK, and clears err for the next call. That is
    NotImplementedError if the kernels do not serve the call, RuntimeError for the rest."""
    if status == OK:
        return
    message = f"deltaproof.ops: {err.msg.decode(errors='replace')}"
    err.code = OK
    raise (NotImplementedError if status == BAD_INPUT else RuntimeError)(message)
