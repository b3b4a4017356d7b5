"""Build hook of pyproject.toml. Builds the program with make (no GPU) and puts it into the wheel,
with its bridge, the interface header, the cases and the report's code.

    deltaproof/bin/deltaproof   deltaproof/lib/bridge.so   deltaproof/include/
    deltaproof/share/deltaproof/{cases,reports}             (harness/base/home.c finds them there)

DELTAPROOF_WITH_OPS=cpu puts the library of deltaproof.ops for CPU tensors into deltaproof/lib,
=cuda also the library for CUDA tensors (nvcc). It runs on Hopper and, by PTX, on all devices from
capability 8.0 on.

DELTAPROOF_PROGRAM names a folder where program and bridge are built; else they are built in
DELTAPROOF_BUILD (default build/wheel). The wheel that pip makes of a source
tree uses this machine's libraries; `make wheel` makes one that carries them (auditwheel).
"""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REPORTS = (
    "report.py",
    "ci.py",
    "compare.py",
    "explain.py",
    "history.py",
    "index.py",
    "kernels.py",
    "museum.py",
    "prices.py",
    "read",
    "say",
    "draw",
    "page",
)


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        build = Path(os.environ.get("DELTAPROOF_BUILD") or root / "build" / "wheel").absolute()
        if os.environ.get("DELTAPROOF_PROGRAM"):
            build = Path(os.environ["DELTAPROOF_PROGRAM"]).absolute()
        else:
            self._make(root, build)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        into = build_data["force_include"]
        into[str(build / "deltaproof")] = "deltaproof/bin/deltaproof"
        into[str(build / "bridge.so")] = "deltaproof/lib/bridge.so"
        header = "deltaproof_subject.h"
        into[str(root / "harness" / header)] = f"deltaproof/include/{header}"
        into[str(root / "cases")] = "deltaproof/share/deltaproof/cases"
        for made in self._libraries(root, build):
            into[str(made)] = f"deltaproof/lib/{made.name}"
        for name in REPORTS:
            if (root / "reports" / name).exists():
                into[str(root / "reports" / name)] = f"deltaproof/share/deltaproof/reports/{name}"

    def _make(self, root: Path, build: Path) -> None:
        check = subprocess.run(
            [root / "scripts" / "setup", "--check"], text=True, stderr=subprocess.PIPE, check=False
        )
        if check.returncode:
            raise SystemExit(f"deltaproof is built from C here. {check.stderr.strip()}")
        command = ["make", "-C", root, "GPU=0", f"BUILD={build}", "program"]
        subprocess.run(command, check=True)

    def _libraries(self, root: Path, build: Path) -> list[Path]:
        """Libraries of deltaproof.ops, as DELTAPROOF_WITH_OPS asks for."""
        kinds = {"cpu": ["cpu"], "cuda": ["cpu", "cuda"]}.get(
            os.environ.get("DELTAPROOF_WITH_OPS", ""), []
        )
        made = [build / "ops" / f"libdeltaproof_{kind}.so" for kind in kinds]
        if made:
            settings = [f"GPU={int('cuda' in kinds)}", "GPU_ARCHS=90a", "GPU_PTX=80"]
            settings += ["NVCCFLAGS=-O3", "CPU_ARCH=", f"BUILD={build}", "ops"]
            subprocess.run(["make", "-C", root, *settings], check=True)
        missing = [str(m) for m in made if not m.exists()]
        if missing:
            raise SystemExit(f"deltaproof.ops: not built, as there is no nvcc: {missing}")
        return made
