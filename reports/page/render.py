"""HTML from templates, which escape all that is put into them, and the policy of a page.

- render(name, **values): a template of templates/
- data_uri(svg): an SVG as the address of an image
- policy(style, script): a Content-Security-Policy for a page with this style element and this
  script; nothing else is loaded, nothing else runs
"""

import base64
import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from say.verdicts import verdict_word

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters["verdict_word"] = verdict_word


def render(name: str, **values: Any) -> Markup:
    return Markup(_templates.get_template(name).render(**values))


def plain_page(name: str, **values: Any) -> str:
    """A whole page in the common style, without a script."""
    css = own_text("page.css")
    return str(render(name, css=css, policy=policy(css), **values))


def data_uri(svg: str) -> Markup:
    """Characters that quote leaves include no double quote and no ampersand. So they may stand in
    an attribute directly, and in half of the bytes."""
    return Markup("data:image/svg+xml," + quote(svg, safe=" !'()*+,-./;=<>?@[]^_`{|}~$"))


def own_text(name: str) -> Markup:
    """A style sheet or script of templates/."""
    return Markup((Path(__file__).parent / "templates" / name).read_text(encoding="utf-8"))


def policy(style: str, script: str | None = None) -> str:
    allowed = f" script-src {_digest(script)};" if script else ""
    return (
        f"default-src 'none'; img-src data:; style-src {_digest(style)};{allowed}"
        " base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode()}'"
