"""The page of the field: a row a kernel, a row a case and a column a kernel, and what failed."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from page.render import plain_page
from say.names import finite

STANDARD = ("8192", "131072")  # tokens of the two timed shapes, as field.json names them

NO_TIME = "- / -"


@dataclass(frozen=True)
class Cell:
    """A case of a kernel. over: the largest error over expected of its tensors."""

    verdict: str
    over: str


def largest_over(judged: dict[str, Any]) -> str:
    over = [t.get("over_expected") for t in judged["tensors"]]
    most = max((float(x) for x in over if finite(x)), default=None)
    return "" if most is None else f"{most:.3g}" if most >= 100 else f"{most:.2g}"


def bits_and_over(kernel: dict[str, Any], gradients: bool) -> str:
    """Medians over the cases passed, of o or of the gradients of inputs."""
    tensors = [
        t
        for j in kernel["judged"]
        if j["verdict"] == "pass"
        for t in j["tensors"]
        if (t["name"].startswith("d") if gradients else t["name"] == "o")
    ]
    bits = [-math.log2(t["error"]) for t in tensors if finite(t.get("error")) and t["error"] > 0]
    over = [t["over_expected"] for t in tensors if finite(t.get("over_expected"))]
    if not bits or not over:
        return "–"
    return f"{statistics.median(bits):.1f} / {statistics.median(over):.2f}"


def of_verdict(kernel: dict[str, Any], verdict: str) -> list[dict[str, Any]]:
    return [j for j in kernel["judged"] if j["verdict"] == verdict]


def grid(kernels: list[dict[str, Any]]) -> list[tuple[str, list[Cell | None]]]:
    """(case, a cell a kernel, None where it was not served), cases that fail first."""
    cells = [{j["case"]: Cell(j["verdict"], largest_over(j)) for j in k["judged"]} for k in kernels]
    cases = {c for of in cells for c in of}

    def order(case: str) -> tuple[int, str]:
        return -sum(case in of and of[case].verdict == "fail" for of in cells), case

    return [(c, [of.get(c) for of in cells]) for c in sorted(cases, key=order)]


def failures(kernel: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [
        (j["case"], [t for t in j["tensors"] if t["verdict"] == "fail"])
        for j in of_verdict(kernel, "fail")
    ]


def page(field: dict[str, Any]) -> str:
    return plain_page(
        "field.html",
        field=field,
        standard=STANDARD,
        timed=[k["kernel"] for k in field["kernels"] if set(k["speed"].values()) - {NO_TIME}],
        grid=grid(field["kernels"]),
        of_verdict=of_verdict,
        bits_and_over=bits_and_over,
        failures=failures,
    )
