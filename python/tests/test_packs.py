"""Truth packs: what the three readers say of right and wrong results is what judge says, restricted
to the levels that a pack carries."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof import packs
from deltaproof.pack_readers import deltaproof_pack as reader
from deltaproof.tensors import load

HERE = os.path.dirname(reader.__file__)
LEVELS = ("row", "window", "rank", "tensor")
CASES = {
    "small": "op = kda\nT = 150\nHV = 2\nK = 16\nV = 16\ng_scale = 0.05\ns0_scale = 1\n",
    "packed": "op = gdn\nT = 130\nHV = 2\nK = 16\nV = 32\ncu_seqlens = 0,40,130\nbackward = no\n",
}
MAIN = """
#include "deltaproof_pack.%s"
#ifdef __cplusplus
#include <cstdio>
#endif
int main(int argc, char **argv) {
    static double got[1 << 20];
    FILE *f = fopen(argv[3], "rb");
    const long n = (long)fread(got, 8, 1 << 20, f);
    if (argc != 4) return 9;
#ifdef __cplusplus
    const deltaproof::Pack pack(argv[1]);
    const auto broken = pack.check(argv[2], std::vector<double>(got, got + n));
    for (const auto &x : broken) std::printf("%%s\\n", x.c_str());
    return broken.empty() ? 0 : 1;
#else
    dp_pack p;
    char why[200] = "";
    if (dp_pack_read(&p, argv[1])) return 2;
    const int red = dp_pack_check(&p, argv[2], got, n, why, sizeof why);
    if (red) printf("%%s\\n", why);
    return free(p.data), red;
#endif
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    files = []
    for name, text in CASES.items():
        files.append(str(folder / f"{name}.case"))
        Path(files[-1]).write_text("reason = r\nsource = s\n" + text)
    index = packs.pack(files, "bf16", "chunk=64", str(folder / "out"))
    assert index["version"] == 1 and set(index["cases"]) == set(CASES)
    return folder / "out"


def readers_of(headers: str | Path, folder: Path) -> dict[str, str]:
    """Programs of the C and the C++ reader, where there are compilers."""
    out = {}
    for kind, ending, compiler, standard in (
        ("h", "c", "cc", "c99"), ("hpp", "cc", "c++", "c++17"),
    ):  # fmt: skip
        if shutil.which(compiler) is None:
            continue
        source, program = folder / f"read_{kind}.{ending}", str(folder / f"read_{kind}")
        source.write_text(MAIN % kind)
        flags = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{headers}"]
        subprocess.run([compiler, *flags, str(source), "-o", program, "-lm"], check=True)
        out[kind] = program
    return out


def _wrong(name: str, x: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Results that are off by more and less, in all, a row, a head, a window, and by rounding."""
    noise = rng.standard_normal(x.shape) * np.sqrt((x**2).mean())
    out = {"right": x, "zeros": 0 * x, "nan": np.where(np.arange(x.size) == 7, np.nan, x.ravel())}
    for k in range(-13, 0, 3):
        out[f"noise 2^{k}"] = x + noise * 2.0**k
        out[f"factor 2^{k}"] = x * (1 + 2.0**k)
        row, half = noise.copy(), noise.copy()
        row[1:] = 0
        half[len(half) // 2 :] = 0
        out[f"row 2^{k}"], out[f"half 2^{k}"] = x + row * 2.0**k, x + half * 2.0**k
    return {n: y.reshape(x.shape) for n, y in out.items()}


def _restricted(case: Path, name: str, results: dict[str, Any], told: Any) -> float:
    """The largest error over its limit that judge finds by the bound and the pack's levels."""
    inputs = {n[3:]: x for n, x in load(str(case)).items() if n.startswith("in.")}
    cu = inputs.pop("cu_seqlens", None)
    settings = {n: told[n] for n in ("gate", "beta")} | {"l2norm": told["l2norm"] == "1"}
    found = deltaproof.judge(
        inputs, results, base="bf16", design="chunk=64", scale=float(told["scale"]),
        cu_seqlens=None if cu is None else [int(n) for n in cu], unjudged=[name], **settings,
    )  # fmt: skip
    t = found.tensors[name]
    shares = [float(t.get("ratio") or 0)]
    shares += [x["ratio"] / x["limit"] for n, x in t["expected"].items() if n in LEVELS]
    return max(shares)


@pytest.mark.parametrize("case", CASES)
def test_readers_say_what_judge_says(case: str, made: Path, tmp_path: Path) -> None:
    programs, rng, seen = readers_of(HERE, tmp_path), np.random.default_rng(1), set()
    pack, told = reader.read(str(made / f"{case}.pack")), made / f"{case}.safetensors"
    settings = json.loads((made / "pack.json").read_text())["cases"][case]["settings"]
    for name in ("o", "final_state"):
        truth = pack[f"truth.{name}"]
        for kind, x in _wrong(name, truth, rng).items():
            broken = reader.check(pack, name, x)
            x.tofile(tmp_path / "got")
            for language, program in programs.items():
                done = subprocess.run(
                    [program, str(made / f"{case}.pack"), name, str(tmp_path / "got")],
                    capture_output=True, text=True,
                )  # fmt: skip
                assert done.returncode == bool(broken), (name, kind, language, broken, done.stdout)
                first = done.stdout.split(":")[0].removesuffix("_most")
                assert not broken or first.split("_")[0].split(" ")[0] in broken[0], done.stdout
            if kind == "nan":
                assert broken
                continue
            share = _restricted(told, name, {name: x}, settings)
            assert share < 1.01 or broken, (name, kind, share)
            # judge asks a second set of draws about what the first would fail
            assert share > 0.8 or not broken, (name, kind, share, broken)
            seen.add((name, bool(broken)))
    assert seen == {(n, b) for n in ("o", "final_state") for b in (False, True)}


def test_readers_are_short_and_both_files_hold_the_same(made: Path) -> None:
    for name in ("py", "h", "hpp"):
        with open(os.path.join(HERE, f"deltaproof_pack.{name}"), encoding="utf-8") as f:
            assert len(f.readlines()) <= 80
    a, b = reader.read(str(made / "small.pack")), load(str(made / "small.safetensors"))
    assert set(a) == set(b)
    for n, x in b.items():
        assert np.array_equal(a[n], x.astype(np.float64)), n
    broken = reader.check(
        a | {"limit.o.bound": np.full(300, np.inf)}, "o", 0 * a["truth.o"] + np.nan
    )
    assert broken[0] == "bound 0: nan times its limit"
    with pytest.raises(ValueError, match="no truth pack of version 1"):
        reader.read(str(made / "small.safetensors"))
    with pytest.raises(ValueError, match="no-such-case"):
        packs.pack(["no-such-case"], "bf16", "chunk=64", str(made / "x"))
