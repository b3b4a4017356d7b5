"""Text tables of the results: false alarms, and power."""

import math

from search import SIZE_TEXT
from stats import DECLARED, UNDECLARED, WAYS, alarms_of, powers_of

ALARMS_HEAD = """\
(a) False alarms: right kernels. / bound, / limit: largest error over its bound, and over the limit
    of the expected tier. A kernel that rounds its state and does not say so ought to fail, and so
    may one whose inverse is a sum of powers more than 4 times as large as the inverse."""

POWER_HEAD = """\
(b) Power: the smallest size at which half and 99 of 100 runs fail (never: they do not at the
    largest that was tried; <=: the smallest that was). seen: runs that fail at some size. tensor,
    place: the verdict names the right tensor first; the right head, and row or window of tokens."""


def table_alarms(plugin, rows):
    lines, found = ALARMS_HEAD.split("\n") + [""], alarms_of(plugin, rows)
    for way in WAYS:
        if way not in found:
            continue
        lines.append(
            "%-31s %6s %8s %7s %7s %6s %8s %8s  %s"
            % (
                way,
                "runs",
                "tensors",
                "failed",
                "skipped",
                "errors",
                "/ bound",
                "/ limit",
                "failed",
            )
        )
        lines += [
            "%-4s %-26s %6d %8d %7d %7d %6d %8.2f %8.2f  %s"
            % (
                *k,
                len(a.runs),
                a.tensors,
                len(a.failed),
                a.skipped,
                len(a.errors),
                a.bound,
                a.excess,
                a.said(),
            )
            for k, a in found[way].items()
        ]
        runs, tensors, failed = totals(found[way].values())
        lines += ["%-31s %6d %8d %7d" % ("all", runs, tensors, failed), ""]
    return lines


def totals(alarms):
    alarms = list(alarms)
    return (
        sum(len(a.runs) for a in alarms),
        sum(a.tensors for a in alarms),
        sum(len(a.failed) for a in alarms),
    )


def list_failures(plugin, rows):
    """Every failure of a right kernel but those that ought to fail, and every error."""
    lines, found = [], alarms_of(plugin, rows)
    for way in (DECLARED, UNDECLARED):
        lines += [
            "%s %s %s %s on %d: %s" % (way, *k, r["problem"], r["ranks"], r["why"][:300])
            for k, a in found.get(way, {}).items()
            for r in a.failed
        ]
    lines += [
        "error %s %s %s: %s" % (r["design"], r["problem"], r["fault"], r["why"])
        for r in rows
        if r["verdict"] == "error"
    ]
    return ["failures:"] + lines + [""] if lines else []


def show(x, smallest=-1):
    return (
        "-"
        if x != x
        else "never"
        if x == math.inf
        else "%s%.3g" % ("<=" if x <= smallest else "", x)
    )


def percent(x):
    return "-" if x != x else "%.0f%%" % (100 * x)


def power_line(fault, p):
    most = " ".join("%s %d" % x for x in p.named.most_common(3)) if "." not in fault else ""
    return "%-22s %6d %6s %9s %9s %7s %7s  %s" % (
        fault,
        p.trials,
        percent(p.seen / p.trials) if p.trials else "-",
        show(p.at(0.5), p.sizes[0]),
        show(p.at(0.99), p.sizes[0]),
        percent(p.tensor),
        percent(p.place),
        most,
    )


def table_power(plugin, rows):
    lines = POWER_HEAD.split("\n") + [""]
    found = powers_of(plugin, rows)
    for base, design in sorted(found):
        faults, scale = found[base, design], None
        lines += [
            "base %s, design %s" % (base, design),
            "%-22s %6s %6s %9s %9s %7s %7s  %s"
            % ("fault", "runs", "seen", "half", "99%", "tensor", "place", "named first"),
        ]
        for fault in [f for f in plugin.expand([]) if f in faults]:
            if plugin.scale(fault) != scale:
                scale = plugin.scale(fault)
                lines.append("  size: " + SIZE_TEXT[scale])
            lines.append(power_line(fault, faults[fault]))
        lines.append("")
    odd = sum(p.odd for faults in found.values() for p in faults.values())
    runs = sum(bool(r["fault"]) for r in rows)
    return lines + [
        "%d runs; %d searches where a larger size passed than one that failed" % (runs, odd)
    ]


def tables(plugin, program, rows):
    """All tables of these rows as one text."""
    lines = ["%s, plug-in %s" % (program, plugin.hash), ""]
    lines += table_alarms(plugin, rows) + list_failures(plugin, rows)
    lines += table_power(plugin, rows) if any(r["fault"] for r in rows) else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def summary_of(plugin, rows):
    """Totals of false alarms and the designs that failed; of each fault and design, half and
    99%."""
    lines, found, powers = [], alarms_of(plugin, rows), powers_of(plugin, rows)
    for way, alarms in found.items():
        lines.append("%s: %d runs, %d tensors, %d failed" % (way, *totals(alarms.values())))
        lines += [
            "  %s %s: %d of %d, / limit %.2f, %s"
            % (*k, len(a.failed), len(a.runs), a.excess, a.said(2))
            for k, a in alarms.items()
            if a.failed and way in (DECLARED, UNDECLARED)
        ][:12]
    errors = sum(r["verdict"] == "error" for r in rows)
    lines += ["%d runs ended without a record" % errors] if errors else []
    for key in sorted(powers):
        faults = [f for f in plugin.expand([]) if f in powers[key] and powers[key][f].trials]
        cells = [
            "%s %s, %s" % (f, show(powers[key][f].at(0.5)), show(powers[key][f].at(0.99)))
            for f in faults
        ]
        trials = sum(powers[key][f].trials for f in faults)
        lines.append("%s %s, %d searches: sizes seen by half, by 99 of 100" % (*key, trials))
        lines += ["  " + "; ".join(cells[i : i + 5]) for i in range(0, len(cells), 5)]
    return lines
