"""All figures of a record, in the order of the page."""

from draw.chain import chain_plots
from draw.maps import map_plots
from draw.plot import Plot, stem
from draw.state import state_plots
from draw.tokens import token_plots
from read.record import Record
from say.select import heads


def plots(rec: Record) -> list[Plot]:
    out = chain_plots(rec) + state_plots(rec)
    for case in heads(rec):
        out += token_plots(rec, case)
    out += map_plots(rec)
    taken: set[str] = set()
    for plot in out:
        plot.name = stem(plot.name, taken)
    return out
