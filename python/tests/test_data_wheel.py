"""The wheel of truth packs: built with a case, installed, and read from there by all readers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from test_packs import readers_of

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
USER = """
import sys, numpy as np
from importlib.resources import files
from deltaproof_packs.deltaproof_pack import check, read
from deltaproof_packs import deltaproof_layouts
folder = files("deltaproof_packs") / sys.argv[1]
pack = read(folder / "delta.pack")
o = pack["truth.o"]
o.tofile(sys.argv[2])
print(check(pack, "o", o), len(check(pack, "o", 0 * o)) > 0, o.shape, folder)
"""


@pytest.mark.skipif(not (TREE / "scripts/data-wheel").exists(), reason="no source tree")
def test_packs_are_found_in_an_installed_wheel(tmp_path: Path) -> None:
    tools = Path("../wheel/pack").resolve()  # of the wheel that these tests run from
    if tools.is_dir():
        (tmp_path / "pack").symlink_to(tools)
    command = [sys.executable, str(TREE / "scripts/data-wheel"), str(tmp_path)]
    done = subprocess.run([*command, "--only=delta"], capture_output=True, text=True)
    if done.returncode == 2:
        pytest.skip(f"pip reaches no index: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, home = done.stdout.splitlines()[-1].split(": ")[0], tmp_path / "home"
    pip = [str(tmp_path / "pack/bin/pip"), "install", "-q", "--no-deps", "--target", str(home)]
    subprocess.run([*pip, wheel], check=True)
    for group, heads in (("fp32", 2), ("fp32-queries", 4)):
        run = [sys.executable, "-c", USER, group, str(tmp_path / "got")]
        own = os.environ | {"PYTHONPATH": str(home)}
        said = subprocess.check_output(run, env=own, text=True).split()
        assert said[:2] == ["[]", "True"] and said[3] == f"{heads},", said
        for program in readers_of(home / "deltaproof_packs", tmp_path).values():
            pack = os.path.join(said[-1], "delta.pack")
            for factor, status in ((1, 0), (0, 1)):
                (factor * np.fromfile(tmp_path / "got")).tofile(tmp_path / "x")
                call = [program, pack, "o", str(tmp_path / "x")]
                assert subprocess.run(call, capture_output=True).returncode == status
