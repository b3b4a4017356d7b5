"""seeds.py OUT RECORD: seeds of the fuzzers of judge and of records (called by the script `seeds`,
which has put small files into OUT/tmp)."""

import json
import os
import struct
import sys
from typing import Any

FLA = {
    "gate": "-exp(A_log)*softplus(g+dt_bias)",
    "beta": "sigmoid(beta)",
    "qk": "l2norm inside kernel",
    "scale": "0.125",
}
PLAIN = {"ranks": "1", "base": "bf16", "claim": "fp32"}


def safetensors(tensors: dict[str, Any], meta: dict[str, str] | None = None) -> bytes:
    """{name: (dtype, shape)}: zeros."""
    size = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}
    header, at = ({"__metadata__": meta} if meta else {}), 0
    for name, (dtype, shape) in tensors.items():
        n = size[dtype]
        for d in shape:
            n *= d
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def judge_input(options: bytes, given: bytes, results: bytes) -> bytes:
    return struct.pack("<HI", len(options), len(given)) + options + given + results


def outputs(T: int, HV: int, K: int, V: int, dtype: str = "F32") -> dict[str, Any]:
    return {
        "o": (dtype, [1, T, HV, V]),
        "final_state": ("F32", [1, HV, K, V]),
        "dq": (dtype, [1, T, 1, K]),
        "dk": (dtype, [T, 1, K]),
        "dv": (dtype, [T, HV, V]),
        "dbeta": ("F32", [T, HV]),
    }


def results_of(HV: int) -> list[tuple[bytes, bytes]]:
    """(options of judge, outputs) for three tokens, or two, of a case with HV value heads."""
    o = {"o": ("F32", [3, HV, 2])}
    ranks = {
        "o": ("BF16", [3, HV, 2]),
        "M": ("F32", [3, HV, 2, 2]),
        "S_in": ("F32", [3, HV, 2, 2]),
        "h": ("F32", [3, HV, 2, 2]),
    }
    words = {"design": "recurrent", "claim_drop": "1e-6"}
    two = {"o": ("F64", [2, HV, 2]), "dh0": ("F32", [1, HV, 2, 2])}
    return [
        (b"base fp32\n", safetensors(outputs(3, HV, 2, 2))),
        (b"ranks 3\nclaim tf32\nbase bf16\n", safetensors(ranks)),
        (b"", safetensors({"ht": ("F16", [1, HV, 2, 2])}, PLAIN)),
        (
            b"design chunk=128,state=bf16\ndrop 20\nbase fp16\n",
            safetensors({"o": ("BF16", [3, HV, 2])}, words),
        ),
        (b"base fp32\n", safetensors(o, {"claim_drop": "2"})),
        (b"base fp32\n", safetensors(o, {"claim_drop": "nan"})),
        (b"tokens 2\nscale 0x1p-3\nstate_layout vk\nbase bf16\n", safetensors(two)),
    ]


SETTINGS = b"gate log\nbeta plain\nl2norm 0\nbase fp32\nranks 1\n"
FLA_INPUTS = {
    "q": ("BF16", [1, 2, 1, 2]),
    "k": ("BF16", [1, 2, 1, 2]),
    "v": ("BF16", [1, 2, 1, 2]),
    "g": ("BF16", [1, 2, 1, 2]),
    "beta": ("BF16", [1, 2, 1]),
    "A_log": ("F32", [1]),
    "dt_bias": ("F32", [2]),
    "cu_seqlens": ("I64", [2]),
}
STAGES = {
    "gcum": ("F32", [2, 1, 2]),
    "w": ("BF16", [2, 1, 2]),
    "u": ("BF16", [2, 1, 2]),
    "Aqk": ("F32", [2, 1, 64]),
}


def others() -> dict[str, tuple[bytes, bytes, bytes]]:
    """name: (options, inputs, outputs)"""
    plain = {k: v for k, v in FLA_INPUTS.items() if k not in ("A_log", "dt_bias", "cu_seqlens")}
    o = {"o": ("BF16", [1, 2, 1, 2])}
    factors, products = {"factors": ("F32", [2, 2, 2])}, {"M": ("F32", [2, 2, 2])}
    return {
        "fla": (b"", safetensors(FLA_INPUTS, FLA), safetensors(o, PLAIN)),
        "chain": (b"claim fp32\n", safetensors(factors), safetensors(products)),
        "stages": (SETTINGS, safetensors(plain), safetensors(STAGES)),
    }


def judge(out: Any) -> None:
    cases = {"kda": 1, "heads": 2, "bound": 1, "gdn": 1, "mkda": 1, "forward": 1}
    for name, HV in cases.items():
        with open(os.path.join(out, "tmp", name + ".safetensors"), "rb") as f:
            given = f.read()
        for i, (options, results) in enumerate(results_of(HV)):
            with open(os.path.join(out, "judge", f"{name}-{i}"), "wb") as f:
                f.write(judge_input(options, given, results))
    for name, parts in others().items():
        with open(os.path.join(out, "judge", name), "wb") as f:
            f.write(judge_input(*parts))


def records(out: str, path: str) -> None:
    whole = []
    for p in (path, os.path.join(out, "tmp", "t1.json"), os.path.join(out, "tmp", "conv.json")):
        with open(p, encoding="utf-8") as f:
            whole.append(json.load(f))
    n = 0
    for r in whole:
        for run in r["runs"]:
            small = {
                **r,
                "cases": [],
                "runs": [
                    {
                        **run,
                        "tensors": [
                            {
                                k: v
                                for k, v in t.items()
                                if k not in ("windows", "per_head", "expected")
                            }
                            for t in run.get("tensors", [])[:4]
                        ],
                    }
                ],
            }
            text = json.dumps(small, separators=(",", ":"))
            if len(text) < 2000:
                with open(os.path.join(out, "record", f"{n}"), "w", encoding="utf-8") as f:
                    f.write(text + ("\0" + text if n % 2 else ""))
                n += 1


def cases(out: str) -> None:
    """Cases with their data, behind a NUL."""
    conv = {
        "x": ("F32", [1, 4, 2]),
        "w": ("F32", [2, 2]),
        "bias": ("F32", [2]),
        "y": ("F32", [4, 2]),
    }
    with open(os.path.join(out, "tmp", "kda.safetensors"), "rb") as f:
        kda = f.read()
    parts = {
        "data-kda": (b"op = kda\ndata = d.safetensors\nbackward = no\n", kda),
        "data-conv": (b"op = conv\ndata = d.safetensors\nranks = 1,2\n", safetensors(conv)),
        "data-step": (
            b"op = step\nT = 4\nK = 2\nV = 2\nconv = k\nconv_data = d.safetensors\n",
            safetensors({"x": ("F32", [4, 2]), "weight": ("F32", [2, 2])}),
        ),
        "data-packed": (
            b"op = kda\ndata = d.safetensors\ngate = softplus\n",
            safetensors(
                {
                    "q": ("BF16", [3, 2]),
                    "k": ("BF16", [3, 2]),
                    "v": ("BF16", [3, 2]),
                    "g": ("F32", [3, 2]),
                    "beta": ("F32", [3, 1]),
                    "A_log": ("F32", [1]),
                    "dt_bias": ("F32", [1, 2]),
                    "cu_seqlens": ("I32", [3]),
                    "do": ("BF16", [3, 2]),
                    "o": ("BF16", [3, 2]),
                }
            ),
        ),
    }
    for name, (text, data) in parts.items():
        with open(os.path.join(out, "case", name), "wb") as f:
            f.write(b"reason = r\nsource = s\n" + text + b"\0" + data)


if __name__ == "__main__":
    judge(sys.argv[1])
    cases(sys.argv[1])
    records(*sys.argv[1:])
