#!/usr/bin/env python3
"""history.py OUT.html RECORD...: errors over many records, one panel a tensor, the series that moved most first.

A RECORD is a results.json, or a folder in which every results.json below is taken. Records stand in the order of their `created`; the axis names
their commits. A series is one tensor of one run (its ID); a panel shows the runs of a tensor that moved most, as error over its first value. The
table below the panels has every series that moved. Reads records only. Exit status 0, or 2 when fewer than two records can be read.
"""

import io
import math
import os
import sys

sys.path.insert(
    0, os.path.dirname(os.path.abspath(__file__))
)  # where this program's own modules are; -I leaves that out

import files
import record

PANELS, LINES = 24, 6  # tensors shown, runs in one panel


def find(paths):
    for p in paths:
        if os.path.isdir(p):
            yield from (
                os.path.join(d, "results.json")
                for d, _, files in sorted(os.walk(p))
                if "results.json" in files
            )
        else:
            yield p


def series(records):
    """{(tensor, id): [error or None, one a record]}."""
    out = {}
    for i, rec in enumerate(records):
        for run in rec.runs:
            for t in run["tensors"]:
                out.setdefault((t["name"], run["id"]), [None] * len(records))[i] = t.get("rel_fro")
    return out


def moved(values):
    """Spread of a series in decades; failing to be a number, or leaving 0, counts as most."""
    known = [v for v in values if v is not None]
    if len(known) < 2 or all(
        v == known[0] or (math.isnan(v) and math.isnan(known[0])) for v in known
    ):
        return 0.0
    if any(not math.isfinite(v) or v == 0 for v in known):
        return math.inf
    return math.log10(max(known) / min(known))


def draw(panels, labels):
    from markup import data_uri
    from style import inch_grid, look, plain_ticks, plt

    cols = 3
    fig, axs = inch_grid(
        math.ceil(len(panels) / cols), cols, 1.25, hgap=0.75, wgap=0.55, bottom=0.75
    )
    flat = list(axs.flat)
    for ax, (name, runs) in zip(flat, panels):
        for run_id, values in runs:
            at = [
                (i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v) and v > 0
            ]
            first = at[0][1] if at else 1.0
            c, dash, mark = look(
                next((p[6:] for p in run_id.split(",") if p.startswith("chain=")), "")
            )
            ax.plot(
                [i for i, _ in at],
                [v / first for _, v in at],
                color=c,
                linestyle=dash,
                marker=mark,
                markersize=3,
                linewidth=1,
            )
        ax.set_title(name)
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.5), max(high, 2))
        plain_ticks(
            ax.yaxis,
            [
                t
                for t in (1e-6, 1e-4, 0.01, 0.1, 0.5, 1, 2, 10, 100, 1e4, 1e6)
                if min(low, 0.5) <= t <= max(high, 2)
            ],
            "{:g}",
        )
        ax.set_xlim(-0.3, len(labels) - 0.7)
        step = max(1, math.ceil(len(labels) / 8))
        ax.set_xticks(
            range(0, len(labels), step),
            [labels[i] for i in range(0, len(labels), step)],
            rotation=60,
            ha="right",
            fontsize=6,
        )
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    svg = io.StringIO()
    fig.savefig(svg, format="svg", metadata={"Date": None})
    plt.close(fig)
    text = svg.getvalue()
    return data_uri(text[text.index("<svg") :].replace("xlink:href", "href"))


def page(records, all_series):
    labels = [(r.program.get("commit") or "?")[:9] for r in records]
    order = sorted(
        (kv for kv in all_series.items() if moved(kv[1]) > 0), key=lambda kv: (-moved(kv[1]), kv[0])
    )
    panels = {}
    for (name, run_id), values in order:
        if len(panels) == PANELS and name not in panels:
            continue
        if len(panels.setdefault(name, [])) < LINES:
            panels[name].append((run_id, values))
    from markup import policy, render

    style = "body{font:14px sans-serif;max-width:75em;margin:2em auto;padding:0 1em}td,th{padding:1px 8px;text-align:left;font-size:12px}img{max-width:100%;height:auto}"
    rows = [
        (name, run_id, ["–" if v is None else format(v, ".3g") for v in vs])
        for (name, run_id), vs in order
    ]
    return str(
        render(
            "history.html",
            css=style,
            policy=policy(style),
            labels=labels,
            rows=rows,
            of=len(all_series),
            lines=LINES,
            image=draw(list(panels.items()), labels) if panels else None,
        )
    )


def main(argv):
    args = argv[2:] if argv[1:2] == ["--"] else argv[1:]
    if len(args) < 2:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    out, paths = os.path.abspath(args[0]), [os.path.abspath(p) for p in args[1:]]
    os.chdir(
        os.path.dirname(os.path.abspath(__file__))
    )  # matplotlib reads a matplotlibrc of the present folder
    records = []
    for path in find(paths):
        try:
            records.append(record.load(path))
        except record.Malformed as e:
            print(f"history: left out: {e}", file=sys.stderr)
    records.sort(key=lambda r: r.created or "")
    if len(records) < 2:
        print(f"history: {len(records)} record(s) can be read, two are needed", file=sys.stderr)
        return 2
    try:
        files.write(out, page(records, series(records)).encode())
    except OSError as e:
        print(f"history: {out}: {e.strerror}", file=sys.stderr)
        return 2
    except ImportError as e:
        print(
            f"history: {sys.executable} has no {e.name}: `make setup` finds or makes a Python that has it (or set DP_PYTHON)",
            file=sys.stderr,
        )
        return 2
    print(f"{args[0]}: {len(records)} records")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
