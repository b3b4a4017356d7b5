"""One figure of the report, not yet drawn."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure


@dataclass
class Plot:
    name: str  # file stem and anchor: letters, digits, '.', '-', '_'
    title: str
    caption: str  # plain text; what to see
    draw: Callable[[], Figure]
    # Tables (maps.heat_table) that show the same in the page; None: the page shows the picture.
    table: Callable[[], list[dict[str, Any]]] | None = None


def stem(name: str, taken: set[str]) -> str:
    """A file name for a case. Special characters are replaced, long names cut; equal results get a
    number."""
    short = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100].lstrip(".") or "figure"
    out, n = short, 1
    while out in taken:
        n += 1
        out = f"{short}-{n}"
    taken.add(out)
    return out
