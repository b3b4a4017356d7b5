"""Signatures of FLA's functions that `deltaproof.ops` has, as fla-core 0.6.0 has them: each line a
name, then its arguments with their defaults. `python fla_signatures.py WHEEL` prints them for a
wheel."""

import ast
import sys
import zipfile

FILES = {
    "fla/modules/causal_conv1d/ops.py": ["causal_conv1d"],
    "fla/ops/gated_delta_product/chunk.py": ["chunk_gated_delta_product"],
    "fla/ops/gated_delta_rule/chunk.py": ["chunk_gated_delta_rule"],
    "fla/ops/gated_delta_rule/fused_recurrent.py": ["fused_recurrent_gated_delta_rule"],
    "fla/ops/gdn2/chunk.py": ["chunk_gdn2"],
    "fla/ops/generalized_delta_rule/dplr/chunk.py": ["chunk_dplr_delta_rule"],
    "fla/ops/gla/chunk.py": ["chunk_gla"],
    "fla/ops/kda/chunk.py": ["chunk_kda"],
    "fla/ops/kda/fused_recurrent.py": ["fused_recurrent_kda"],
    "fla/ops/rwkv7/chunk.py": ["chunk_rwkv7"],
    "fla/ops/simple_gla/chunk.py": ["chunk_simple_gla"],
}


def of(text: str, names: list[str]) -> list[str]:
    found = []
    for f in ast.walk(ast.parse(text)):
        if not isinstance(f, ast.FunctionDef) or f.name not in names:
            continue
        bare = f.args
        for a in (*bare.args, *bare.kwonlyargs, *([bare.kwarg] if bare.kwarg else [])):
            a.annotation = None
        found.append(f"{f.name} {ast.unparse(bare)}")
    return found


def of_wheel(path: str) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        return [s for file, names in FILES.items() for s in of(wheel.read(file).decode(), names)]


if __name__ == "__main__":
    print("\n".join(of_wheel(sys.argv[1])))
