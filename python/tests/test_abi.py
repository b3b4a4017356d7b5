"""deltaproof.ops: structs by ctypes have the sizes of the headers. Needs no kernels, no PyTorch."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("DELTAPROOF_TREE", Path(__file__).resolve().parents[2]))


def test_structs_have_the_sizes_of_the_headers(tmp_path: Path) -> None:
    if shutil.which("cc") is None or not (ROOT / "gpu/dp_gpu.h").exists():
        pytest.skip("needs cc and the headers of a source tree")
    place = ROOT / "python/deltaproof/ops/kernels.py"
    spec = importlib.util.spec_from_file_location("deltaproof.ops.kernels", place)
    assert spec and spec.loader
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    here = {s.__name__: ctypes.sizeof(s) for s in kernels.STRUCTS}
    says = "".join(f'printf("{name} %zu\\n", sizeof({name}));' for name in here)
    source = '#include "dp_conv.h"\n#include "dp_decode.h"\n#include <stdio.h>\n'
    (tmp_path / "sizes.c").write_text(f"{source}int main(void) {{ {says} }}\n")
    program = tmp_path / "sizes"
    subprocess.run(
        ["cc", "-std=c11", f"-I{ROOT}", f"-I{ROOT / 'gpu'}", tmp_path / "sizes.c", "-o", program],
        check=True,
    )
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert here == {name: int(size) for name, size in map(str.split, said.splitlines())}
