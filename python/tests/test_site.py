"""scripts/site: the documents build as a site, and a broken link fails it. Skipped where MkDocs
Material is not installed."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.skipif(not (TREE / "scripts/site").is_file(), reason="no source tree here"),
    pytest.mark.skipif(not importlib.util.find_spec("material"), reason="no MkDocs Material"),
]


def site(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tree / "scripts/site", out]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_documents_build_as_a_site_whose_links_hold(tmp_path: Path) -> None:
    built = site(TREE, tmp_path)
    assert built.returncode == 0, built.stdout
    assert (tmp_path / "html/index.html").is_file()
    assert (tmp_path / "html/reports/verdicts.html").is_file()


@pytest.mark.parametrize("link", ["nothing.md", "README.md#nowhere", "nofolder/"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    tree = tmp_path / "tree"
    for name in ("README.md", "scripts/site", "FINDINGS.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, tree / name)
    (tree / "README.md").write_text(f"# A\n\n[x]({link})\n", encoding="utf-8")
    broken = site(tree, tmp_path / "out")
    assert broken.returncode == 1 and link.split("#")[0] in broken.stdout, broken.stdout
