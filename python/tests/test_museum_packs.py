"""Packs are red on the museum's outputs wherever judge, restricted to their levels, is."""

from pathlib import Path

import pytest

from museum_packs import compared, faults

EVERY = 12  # of the faults; scripts/campaigns/README.md has the count of all


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_packs_are_red_where_judge_is_on_their_levels(base: str, tmp_path: Path) -> None:
    seen = set()
    for fault in faults()[base == "bf16" :: EVERY]:
        folder = tmp_path / fault
        folder.mkdir()
        run = ["t63", "--ranks=3", "--chain=fp32", f"--base={base}", f"--fault={fault}"]
        for name, verdict, wanted, broken in compared(str(folder), run):
            assert wanted is None or wanted == bool(broken), (fault, name, broken)
            assert verdict != "pass" or not broken, (fault, name, broken)
            seen.add((verdict, bool(broken)))
    assert {("fail", True), ("pass", False)} <= seen
