"""check_page.py PAGE: does the page hold anything but what this project's templates write? Prints
what
does not belong there; exit status 1 then.

Tags and attributes are those of the templates. Addresses point into the page or to its figures, or
are its own images. The only script is the file of the templates, letter by letter, and the policy
allows no other. The data beside it are base64.
"""

import base64
import hashlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "header",
    "nav",
    "main",
    "section",
    "article",
    "footer",
    "noscript",
    "h1",
    "h2",
    "h3",
    "p",
    "dl",
    "dt",
    "dd",
    "ul",
    "li",
    "a",
    "b",
    "i",
    "strong",
    "code",
    "span",
    "figure",
    "figcaption",
    "img",
    "svg",
    "path",
    "div",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "br",
    "form",
    "label",
    "select",
    "input",
    "button",
    "script",
}
ATTRIBUTES = {
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "id",
    "class",
    "href",
    "src",
    "alt",
    "open",
    "colspan",
    "scope",
    "tabindex",
    "role",
    "hidden",
    "type",
    "autocomplete",
    "viewbox",
    "preserveaspectratio",
    "d",
}
LINK = r"#[A-Za-z0-9_.-]+|figures/[A-Za-z0-9._-]+\.(png|pdf)"
SCRIPT = Path(__file__).parents[3] / "reports" / "page" / "templates" / "page.js"


class Check(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS:
            self.wrong.append(f"tag {tag}")
        for name, value in attrs:
            if name not in ATTRIBUTES and not name.startswith("aria-"):
                self.wrong.append(f"attribute {name} of {tag}")
            if name == "href" and not re.fullmatch(LINK, value or ""):
                self.wrong.append(f"link to {value!r}")
            if name == "src" and not (value or "").startswith("data:image/svg+xml,"):
                self.wrong.append(f"image {value!r}")
            if name == "d" and not re.fullmatch(r"[MVHhz0-9. -]*", value or ""):
                self.wrong.append(f"path {value!r}")
        d = dict(attrs)
        if d.get("http-equiv") == "Content-Security-Policy":
            self.policy = d["content"] or ""


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check(page: str) -> list[str]:
    c = Check()
    c.feed(page)
    styles = re.findall(r"<style>(.*?)</style>", page, re.S)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.S)
    run = [text for how, text in scripts if how != ' type="text/plain" id="data"']
    allowed = "".join(f" script-src {digest(text)};" for text in run)
    policy = (
        f"default-src 'none'; img-src data:; style-src {digest(''.join(styles))};{allowed}"
        " base-uri 'none'; form-action 'none'"
    )
    if c.policy != policy:
        c.wrong.append(f"policy {c.policy!r}, expected {policy!r}")
    if len(styles) != 1:
        c.wrong.append(f"{len(styles)} style elements")
    if run not in ([], [SCRIPT.read_text(encoding="utf-8")]):
        c.wrong.append(f"scripts that are not {SCRIPT.name}: {run!r:.200}")
    data = [text for how, text in scripts if text not in run]
    if any(not re.fullmatch(r"[A-Za-z0-9+/=]*", text) for text in data):
        c.wrong.append("data that are not base64")
    return c.wrong


if __name__ == "__main__":
    found = check(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(found))
    sys.exit(1 if found else 0)
