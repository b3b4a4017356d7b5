"""scripts/site: the documents build as a site, and a broken reference fails it. Skipped where
MkDocs Material is not installed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deltaproof
from deltaproof.vocabulary import RECURRENCES

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
pytestmark = pytest.mark.skipif(not (TREE / "scripts/site").is_file(), reason="no source tree here")
material = pytest.mark.skipif(not importlib.util.find_spec("material"), reason="no MkDocs Material")


def site(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tree / "scripts/site", out]
    env = os.environ | {"DELTAPROOF": deltaproof.program()}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def listed(option: str) -> str:
    command = [deltaproof.program(), "list", option]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@material
def test_the_documents_build_as_a_site_whose_links_hold(tmp_path: Path) -> None:
    built = site(TREE, tmp_path)
    assert built.returncode == 0, built.stdout
    assert (tmp_path / "html/index.html").is_file()
    assert (tmp_path / "html/reports/verdicts.html").is_file()
    page = (tmp_path / "html/recurrences/gdn2.html").read_text(encoding="utf-8")
    text = (tmp_path / "html/cases/keys.html").read_text(encoding="utf-8")
    assert "session_prefix" in text and "slots of the pool" in text
    assert "(write o v - (erase o k) S)" in page and "smoke-gdn2" in page


def test_the_formula_of_each_recurrence_is_that_of_its_rows() -> None:
    said = {x.split(":")[0]: x for x in listed("--recurrences").split("\n\n")}
    assert set(said) == set(RECURRENCES)
    for name, formula in {
        "kda": "S <- diag(exp g) S\n  S <- S + k' beta (v - k S)",
        "gdn": "S <- exp(g) S\n  S <- S + k' beta (v - k S)",
        "gla": "S <- S + k' v\n",
        "gdn2": "S <- S + k' (write o v - (erase o k) S)",
        "mkda": "S <- S + sum over j = 1 .. R of k_j' beta_j (v_j - k_j S)",
        "dplr": "S <- diag(exp g) S + lr_b' (lr_a S) + k' v",
    }.items():
        assert formula in said[name], said[name]
    assert "g      [T,HV]" in said["ssd"] and "beta" not in said["ssd"]


def test_every_word_of_a_verdict_is_explained() -> None:
    run = json.loads(listed("--schema"))["$defs"]["run"]["properties"]
    words = set(run["verdict"]["enum"]) | {"exact", "bound", "expected", "sum", "bits"}
    source = (TREE / "harness/search/differ.c").read_text(encoding="utf-8")
    words |= set(re.findall(r'"(\w+)"', re.findall(r"dp_differ_names\[.*?};", source, re.S)[0]))
    source = (TREE / "python/deltaproof/cp_check.py").read_text(encoding="utf-8")
    words |= set(
        re.findall(r"^    (\w+) {3,}\w", source.split("Verdicts:")[1].split("Exit")[0], re.M)
    )
    page = (TREE / "harness/VERDICTS.md").read_text(encoding="utf-8")
    assert len(words) >= 19 and not [x for x in words if f"`{x}`" not in page], words


@material
@pytest.mark.parametrize("link", ["nothing.md", "README.md#nowhere", "nofolder/"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    tree = tmp_path / "tree"
    for name in ("README.md", "scripts/site", "FINDINGS.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, tree / name)
    (tree / "README.md").write_text(f"# A\n\n[x]({link})\n", encoding="utf-8")
    broken = site(tree, tmp_path / "out")
    assert broken.returncode == 1 and link.split("#")[0] in broken.stdout, broken.stdout
