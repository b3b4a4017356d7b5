"""HTML that escapes by default: Jinja2 templates (templates/) with autoescape, and H for what is put together in Python.

    H("<b>{}</b>", x)          markup in the first argument, which is a constant of this program; whatever is put into it is escaped unless it is markup itself
    render(name, **values)     a template
    data_uri(svg)              an SVG as the address of an image
    policy(style)              a Content-Security-Policy for a page whose one style element is this text: nothing else may be loaded, no script runs
"""
import base64
import hashlib
import os
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_templates = Environment(loader=FileSystemLoader(os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")), autoescape=True, undefined=StrictUndefined,
                         trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


def H(text, *args, **kwargs):
    return Markup(text).format(*args, **kwargs)


def join(between, parts):
    return Markup(between).join(parts)


def render(name, **values):
    return Markup(_templates.get_template(name).render(**values))


def data_uri(svg):
    """What quote leaves as it is has no double quote and no ampersand, so it may stand in an attribute as it is, and in half of the bytes."""
    return Markup("data:image/svg+xml," + quote(svg, safe=" !'()*+,-./;=<>?@[]^_`{|}~$"))


def policy(style):
    digest = base64.b64encode(hashlib.sha256(str(style).encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
