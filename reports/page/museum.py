"""The sections of the page on deliberate faults: DIR/museum.json and DIR/kernels.json."""

from typing import Any

from markupsafe import Markup

from page.render import render
from say.museum import place_of, problem_of, sentences
from say.names import plural


def faults(m: dict[str, Any]) -> Markup:
    return render(
        "museum.html", m=m, sentences=sentences(m), problem_of=problem_of, place_of=place_of
    )


def kernels(m: dict[str, Any]) -> Markup:
    rows = m["faults"]
    return render(
        "kernels.html",
        m=m,
        seen=sum(x["red"] > 0 for x in rows),
        right=sum(x["right"] for x in rows),
        of=plural(len(rows), "fault"),
        runs=plural(m["clean"]["runs"], "run"),
        problem_of=problem_of,
    )
