"""check_page.py PAGE: does the page hold anything but what this project's templates write? Prints what does not belong there; exit status 1 then.

Tags and attributes are those of the templates, addresses lead into the page, to its figures, or are images of its own; a policy forbids the rest.
"""
import re
import sys
from html.parser import HTMLParser

TAGS = set("html head meta title style body header footer h1 h2 h3 h4 p dl dt dd ul li a b i strong code span figure figcaption img div table caption thead tbody tr th td section details summary br".split())
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "id", "class", "href", "src", "alt", "open", "colspan"}


class Check(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.wrong, self.policy, self.style = [], "", False

    def handle_starttag(self, tag, attrs):
        if tag not in TAGS:
            self.wrong.append(f"tag {tag}")
        for name, value in attrs:
            if name not in ATTRIBUTES:
                self.wrong.append(f"attribute {name} of {tag}")
            if name == "href" and not re.fullmatch(r"#[A-Za-z0-9_.-]+|figures/[A-Za-z0-9._-]+\.(png|pdf)", value or ""):
                self.wrong.append(f"link to {value!r}")
            if name == "src" and not (value or "").startswith("data:image/svg+xml,"):
                self.wrong.append(f"image {value!r}")
        d = dict(attrs)
        if d.get("http-equiv") == "Content-Security-Policy":
            self.policy = d["content"]


page = open(sys.argv[1], encoding="utf-8").read()
c = Check()
c.feed(page)
if not c.policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-") or "unsafe" in c.policy:
    c.wrong.append(f"policy {c.policy!r}")
if len(re.findall("<style>", page)) != 1:
    c.wrong.append("more than one style element")
print("\n".join(c.wrong))
sys.exit(1 if c.wrong else 0)
