"""Judge a delta-rule kernel (GDN, KDA, MKDA) from Python: one call, for pytest or anything else.
Needs numpy and the program build/deltaproof.

    from deltaproof import assert_explained

    def test_my_kernel():
        q, k, v, g, beta = make_inputs()                     # numpy arrays or PyTorch tensors on
        any device, FLA's layouts: [T,H,K] or [1,T,H,K]
        o, state = my_kernel(q, k, v, g, beta)
        assert_explained(dict(q=q, k=k, v=v, g=g, beta=beta), dict(o=o, final_state=state),
        base="bf16", gate="log", beta="plain", l2norm=False)

It passes when every output lies within the bound of the formats that `base` and `claim` name, as
derived from the inputs; it raises AssertionError with
the program's own table otherwise, and ValueError when the program cannot judge (a missing setting,
a shape: its message names them). Names of tensors:
`deltaproof judge --help`; with `do` among the inputs outputs may be gradients, and any stage (w, u,
h, M, ..) is an output too.

The program is $DELTAPROOF, else build/deltaproof of the repository that this file lies in, else
`deltaproof` on the PATH. Truths are kept in
$XDG_CACHE_HOME/deltaproof (~/.cache/deltaproof), so that a test whose inputs do not change pays for
its truth once.
"""

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int32": "I32",
    "int64": "I64",
    "bfloat16": "BF16",
}


class BF16:
    """bf16 numbers held as their 16 bits: BF16(uint16 array). Arrays of ml_dtypes and tensors of
    PyTorch need no wrapping."""

    def __init__(self, bits: npt.ArrayLike) -> None:
        self.bits = np.ascontiguousarray(bits, dtype=np.uint16)


def to_bf16(x: npt.ArrayLike) -> BF16:
    """Nearest bf16, ties to even, of a float32 array, as BF16."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return BF16(
        np.where(nan, (u >> 16) | 0x40, (u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    )


def _bytes(name: str, x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, bytes) of an array, a BF16, or a PyTorch tensor."""
    if isinstance(x, BF16):
        return "BF16", x.bits.shape, x.bits.tobytes()
    if hasattr(x, "detach"):  # PyTorch, which this module never imports
        x = x.detach().cpu().contiguous()
        if str(x.dtype) == "torch.bfloat16":
            import torch

            return "BF16", tuple(x.shape), x.view(torch.int16).numpy().tobytes()
        x = x.numpy()
    x = np.ascontiguousarray(x)
    if x.dtype.name not in _NAMES:
        raise ValueError(f"{name}: dtype {x.dtype} is none of {', '.join(_NAMES)}")
    return _NAMES[x.dtype.name], x.shape, x.tobytes()


def save(path: str, tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    """Write {name: array} as safetensors."""
    header, blobs, at = {}, [], 0
    if metadata:
        header["__metadata__"] = {str(k): str(v) for k, v in metadata.items()}
    for name, x in tensors.items():
        dtype, shape, data = _bytes(name, x)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(blobs)


def program() -> str:
    here = os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "deltaproof"
    )
    found = os.environ.get("DELTAPROOF") or (
        here if os.path.exists(here) else shutil.which("deltaproof")
    )
    if not found:
        raise FileNotFoundError(
            "the program deltaproof is not built (make), nor on the PATH; name it with the "
            "variable DELTAPROOF"
        )
    return found


def judge(
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    ranks: int | None = None,
    base: str | None = None,
    claim: str | None = None,
    gate: str | None = None,
    lower_bound: float | None = None,
    beta: str | None = None,
    l2norm: bool | None = None,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_layout: str | None = None,
    cache: str | None = None,
) -> tuple[int, dict[str, Any] | None, str]:
    """(exit status, record or None, what the program printed). Settings as `deltaproof judge
    --help` has them; None: not given."""
    settings = {
        "ranks": ranks,
        "base": base,
        "claim": claim,
        "gate": gate,
        "lower-bound": lower_bound,
        "beta": beta,
        "l2norm": None if l2norm is None else int(l2norm),
        "scale": scale,
        "state-layout": state_layout,
        "cu-seqlens": None if cu_seqlens is None else ",".join(str(int(x)) for x in cu_seqlens),
    }
    cache = cache or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "deltaproof"
    )
    with tempfile.TemporaryDirectory() as d:
        paths = [
            os.path.join(d, x)
            for x in ("inputs.safetensors", "outputs.safetensors", "results.json")
        ]
        save(paths[0], inputs), save(paths[1], outputs)
        command = [
            program(),
            "judge",
            "--inputs",
            paths[0],
            "--outputs",
            paths[1],
            "--json",
            paths[2],
            "--cache",
            cache,
        ]
        for k, v in settings.items():
            command += [] if v is None else [f"--{k}={v}"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        record = None
        if os.path.exists(paths[2]):
            with open(paths[2], encoding="utf-8") as f:
                record = json.load(f)
        return done.returncode, record, done.stdout.replace(d + os.sep, "")


def assert_explained(
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    claim: str | None = None,
    ranks: int | None = None,
    base: str | None = None,
    unjudged: Collection[str] = (),
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Raise AssertionError unless every output is as close to the truth as the claimed formats
    explain; ValueError when that cannot be judged.

    base: formats of everything but the M chain, "bf16" "fp32" "fp64"; claim: of the M chain, from 3
    ranks on. settings: gate, beta, l2norm, ... as
    judge() above. unjudged: names of outputs whose bound may be too wide to say anything; any other
    such output raises, since it was not tested.
    Returns {output: {"rel_fro", "ratio", "bound", ..}} as the record has them."""
    __tracebackhide__ = True  # pytest shows the caller's line
    status, record, text = judge(inputs, outputs, ranks=ranks, base=base, claim=claim, **settings)
    runs = record["runs"] if record else []
    if status not in (0, 1) and not runs:
        raise ValueError(text.strip())
    tensors = {t["name"]: t for t in runs[0]["tensors"]}
    vacuous = [n for n, t in tensors.items() if t["verdict"] == "unjudged" and n not in unjudged]
    if status == 1:
        raise AssertionError("deltaproof: not explained by the claimed formats\n" + text)
    if vacuous:
        raise AssertionError(
            f"deltaproof: {', '.join(vacuous)}: the bound is too wide to say anything (name "
            f"such outputs in `unjudged` to let them pass)\n{text}"
        )
    return tensors
