"""The section of the page on states kept in short formats between calls: DIR/carry.json."""

from typing import Any

from markupsafe import Markup

from draw.carried import figure
from draw.files import svg
from draw.style import plt
from page.render import data_uri, render
from say.carry import details, sentences, table
from say.names import whole


def carried(rows: list[dict[str, Any]]) -> Markup:
    fig = figure(rows)
    picture = data_uri(svg(fig))
    plt.close(fig)
    return render(
        "carry.html",
        first=rows[0],
        sentences=sentences(rows),
        table=table(rows),
        details=details(rows),
        picture=picture,
        whole=whole,
    )
