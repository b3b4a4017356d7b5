"""report_browser.py PAGE NODES BYTES: tests a report in headless Chromium. Prints errors; exit
status 1 then, 77 where there is no Chromium.

The page is opened at 1400 and 390 pixels, in light and dark:

- no message in the console, no sideways scrolling, at most NODES nodes and BYTES bytes
- filters, references, keys and the panel of a run work; the page prints
- landmarks, names and heads of tables are there; contrast is at least 4.5 to 1
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser import Browser, Page, program

READY = 5000  # ms until the table of results stands; on an idle machine it is a tenth of that

ASK = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
COLUMN = "[...document.querySelectorAll('#rows tbody tr')].map(r => r.cells[{}].textContent)"


def looks(p: Page, wrong: list[str], where: str, nodes: int) -> None:
    say = lambda bad, what: wrong.append(f"{where}: {what}") if bad else None
    wide = p.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    say(wide > 0, f"{wide} pixels too wide")
    count = p.run("document.querySelectorAll('*').length")
    say(count > nodes, f"{count} nodes, more than {nodes}")
    for name in ("contrast", "access"):
        found = p.run(f"{ASK.rstrip()}.{name}()")
        say(found, f"{name}: {found}")
    say(p.console, f"console: {p.console}")


def choose(p: Page, field: str, value: str) -> None:
    p.run(
        f"(() => {{ const e = document.getElementById('f-{field}'); e.value = {value!r};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def values(p: Page, field: str) -> list[str]:
    return p.run(f"[...document.getElementById('f-{field}').options].map(o => o.value)")


def pause(p: Page) -> None:
    p.run("new Promise(done => setTimeout(done, 60))")


def filters(p: Page, wrong: list[str]) -> None:
    reset = "document.querySelector('#filter button').click()"
    p.run(reset)
    pause(p)
    everything = p.run("document.getElementById('count').textContent")
    for field, column in (("tensor", 1), ("ranks", 3), ("verdict", 0), ("case", 2)):
        for value in values(p, field)[1:4]:
            choose(p, field, value)
            shown = p.run(COLUMN.format(column))
            if value.startswith("!"):
                holds = all(x != value[1:] for x in shown)
            elif field == "case":
                holds = all(x.startswith(value + ":") for x in shown)
            else:
                holds = all(x.lower() == value.lower() for x in shown)
            if not shown or not holds:
                wrong.append(f"filter {field} = {value} shows {sorted(set(shown))[:5]}")
            choose(p, field, "")
    choose(p, "text", "nothing is called so")
    if p.run("document.querySelectorAll('#rows tbody tr').length"):
        wrong.append("a text that nothing holds leaves rows")
    p.run(reset)
    pause(p)
    if p.run("document.getElementById('count').textContent") != everything:
        wrong.append("the button `all` does not bring all back")


def links(p: Page, wrong: list[str]) -> None:
    first = "document.querySelector('#rows tbody a')"
    name = p.run(f"{first}.textContent")
    p.run(f"{first}.click()")
    pause(p)
    panel = p.run("(e => e.hidden ? '' : e.innerText)(document.getElementById('run'))")
    if name not in panel:
        wrong.append(f"the link to {name} shows {panel[:200]!r}")
    if not p.run("document.activeElement.id === 'run'"):
        wrong.append("the panel of a run does not get the focus")
    p.run("location.hash = document.querySelector('a[href^=\"#case-\"]').hash")
    pause(p)
    if p.run("document.getElementById('f-case').value") == "":
        wrong.append("a link to a case does not filter")


def keys(p: Page, wrong: list[str]) -> None:
    """The first tab stop skips the head; every stop is visible."""
    p.run("document.body.focus(), scrollTo(0, 0)")
    stops = []
    for _ in range(12):
        p.key("Tab")
        stops.append(
            p.run(
                "(e => [e.tagName, e.className, Math.round(e.getBoundingClientRect().width),"
                " getComputedStyle(e).outlineStyle])(document.activeElement)"
            )
        )
    if stops[0][:2] != ["A", "skip"]:
        wrong.append(f"the first stop of the Tab key is {stops[0]}")
    unseen = [s for s in stops if s[2] == 0 or s[3] == "none"]
    if unseen:
        wrong.append(f"stops that cannot be seen: {unseen[:3]}")


def prints(p: Page, wrong: list[str]) -> None:
    with tempfile.TemporaryDirectory() as d:
        out = os.path.join(d, "page.pdf")
        p.pdf(out)
        if not Path(out).read_bytes().startswith(b"%PDF"):
            wrong.append("does not print")
    p.call("Emulation.setEmulatedMedia", media="print")
    if p.run("getComputedStyle(document.querySelector('nav')).display") != "none":
        wrong.append("the contents are printed")
    if p.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)":
        wrong.append("the paper is not white")


def check(page: str, nodes: int, size: int) -> list[str]:
    wrong: list[Any] = []
    if os.path.getsize(page) > size:
        wrong.append(f"{os.path.getsize(page)} bytes, more than {size}")
    with Browser("120s") as b:
        p = b.open(page, 1400)
        ready = int(p.run("document.documentElement.dataset.ready") or -1)
        if not 0 <= ready <= READY:
            wrong.append(f"the table of results stands after {ready} ms")
        looks(p, wrong, "1400", nodes)
        keys(p, wrong)
        filters(p, wrong)
        links(p, wrong)
        looks(p, wrong, "1400, a run shown", nodes)
        prints(p, wrong)
        for width, dark in ((390, False), (1400, True)):
            looks(b.open(page, width, dark=dark), wrong, f"{width}{', dark' * dark}", nodes)
    print(f"ready after {ready} ms, {os.path.getsize(page)} bytes")
    return wrong


if __name__ == "__main__":
    if not program():
        print("no Chromium on the PATH, and DP_CHROMIUM names none")
        sys.exit(77)
    found = check(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("\n".join(found))
    sys.exit(1 if found else 0)
