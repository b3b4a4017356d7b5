"""Tables of the results: false alarms, and power."""
import math
from collections import Counter, defaultdict

from plugin import TENSORS
from runs import columns, judged
from search import SIZE_TEXT, SIZES


def worst_of(tensors):
    """Largest error over its limit: of the bound, and of the expected tier."""
    bound = max([t["bound"] for t in tensors if t["bound"] == t["bound"]], default=math.nan)
    excess = max([t["excess"] for t in tensors if t["excess"] == t["excess"]], default=math.nan)
    return bound, excess


def failures_of(row):
    return {n: t for n, t in row["tensors"].items() if t["verdict"] == "fail"}


def alarm_line(design, rows):
    failed = [r for r in rows if r["verdict"] == "fail"]
    tensors = [t for r in rows for t in r["tensors"].values()]
    counts = Counter("%s by %s" % (n, t["tier"]) for r in failed for n, t in failures_of(r).items())
    bound, excess = worst_of(tensors)
    skipped = sum(not judged(r) for r in rows)
    said = ", ".join("%s %d" % c for c in counts.most_common(5))
    return "%-26s %6d %7d %7d %9.2f %9.2f  %s" % (design, len(rows) - skipped, skipped,
                                                 len(failed), bound, excess, said)


def count_problems(rows):
    """Which problems the failures are on."""
    failed = [r for r in rows if r["verdict"] == "fail"]
    lines = ["failures by problem:"]
    for name, n in Counter(columns(r)["problem"] for r in failed).most_common():
        which = sorted({r["design"] for r in failed if columns(r)["problem"] == name})
        lines.append("  %-18s %3d: %s" % (name, n, " ".join(which)))
    return lines if failed else []


def table_alarms(rows):
    """(a) false alarms by design, then by tensor and tier."""
    designs = defaultdict(list)
    for r in rows:
        designs[r["design"]].append(r)
    lines = ["(a) False alarms: correct designs, undeclared. / bound, / limit: largest error over",
             "    its bound, and over the limit of the expected tier.", ""]
    for base in ("fp32", "bf16"):
        lines.append("%-26s %6s %7s %7s %9s %9s  %s" % (
            "base %s: design" % base, "runs", "skipped", "failed", "/ bound", "/ limit",
            "tensors that failed, by tier"))
        lines += [alarm_line(d, rs) for d, rs in designs.items() if rs[0]["base"] == base] + [""]
    lines.append("%-12s %-5s %8s %16s %16s %9s %9s" % (
        "tensor", "base", "judged", "failed by bound", "by expected", "/ bound", "/ limit"))
    for base in ("fp32", "bf16"):
        lines += [x for x in (tensor_line(name, base, rows) for name in TENSORS) if x]
    failed = sum(r["verdict"] == "fail" for r in rows)
    problems = len({columns(r)["problem"] for r in rows})
    lines += ["", "%d runs of %d designs on %d problems, %d failed"
              % (sum(map(judged, rows)), len(designs), problems, failed), ""]
    return lines + count_problems(rows)


def tensor_line(name, base, rows):
    mine = [r["tensors"][name] for r in rows if r["base"] == base and name in r["tensors"]]
    if not mine:
        return None
    failed = Counter(t["tier"] for t in mine if t["verdict"] == "fail")
    judged_ones = sum(t["verdict"] in ("pass", "fail") for t in mine)
    return "%-12s %-5s %8d %16d %16d %9.2f %9.2f" % (name, base, judged_ones, failed["bound"],
                                                    failed["expected"], *worst_of(mine))


def quantile(xs, q):
    xs = sorted(xs)
    return xs[min(len(xs) - 1, math.ceil(q * len(xs)) - 1)]


class Trial:
    """One problem and fault: sizes that were run, and the smallest that failed."""

    def __init__(self, rows):
        rows = sorted(rows, key=lambda r: columns(r)["size"])
        self.applies = any(map(judged, rows))
        failed = [r for r in rows if r["verdict"] == "fail"]
        self.row = failed[0] if failed else None
        self.threshold = columns(self.row)["size"] if failed else math.inf
        passed = [columns(r)["size"] for r in rows if r["verdict"] == "pass"]
        self.monotone = not failed or not passed or max(passed) < self.threshold

    def tensor(self, name):
        """The tensor that the fault is in; for a fault of the arithmetic, the one furthest off."""
        if name:
            return self.row["tensors"][name]
        off = [t for t in self.row["tensors"].values() if t["verdict"] == "fail"]
        return max(off, key=lambda t: t["times"] if t["times"] == t["times"] else 0)

    def named(self):
        return self.row["why"].split(":")[0]

    def right_place(self):
        """Is what the verdict names (a row by its bound, else a window of 64 tokens) in the place
        of the fault?"""
        place, said = self.row["place"], said_place(self.row["why"])
        if not place or not said:
            return None
        first, count = int(place["token"]), int(place["tokens"])
        width = 64 if self.row["tier"] == "expected" else 1
        token = int(said.get("token", -1))
        here = count == 0 or (first - width < token < first + count)
        return said.get("head") == place["head"] and here


def said_place(why):
    """{'rank': '0', 'token': '5', 'head': '1'} of '.. (rank 0, sequence 0, token 5, head 1)'."""
    for part in why.split("(")[1:]:
        if part.startswith("rank "):
            words = part.split(")")[0].replace(",", "").split()
            return dict(zip(words[::2], words[1::2]))
    return None


def show(x, smallest=-1):
    return "never" if x == math.inf else "%s%.3g" % ("<=" if x <= smallest else "", x)


def share_of(answers):
    answers = [x for x in answers if x is not None]
    return "%3.0f%%" % (100 * sum(answers) / len(answers)) if answers else "   -"


def power_line(fault, sizes, trials):
    trials = [t for t in trials if t.applies]
    if not trials:
        return "%-22s %6d" % (fault, 0)
    tensor = fault.partition(".")[2]
    seen = [t for t in trials if t.row]
    limits = [t.threshold for t in trials]
    off = [t.tensor(tensor) for t in seen]
    times = [show(quantile([x[key] for x in off], 0.5)) if seen else ""
             for key in ("times", "window")]
    named = Counter(t.named() for t in seen)
    right = share_of([t.named() == tensor for t in seen] if tensor else [])
    most = " ".join("%s %d" % x for x in named.most_common(3)) if not tensor else ""
    return "%-22s %6d %5.0f%% %9s %9s %9s %9s %7s %7s  %s" % (
        fault, len(trials), 100 * len(seen) / len(trials), show(quantile(limits, 0.5), sizes[0]),
        show(quantile(limits, 0.99), sizes[0]), *times, right,
        share_of([t.right_place() for t in seen]), most)


def power_head(base, design):
    return ["base %s, design %s" % (base, design),
            "%-22s %6s %6s %9s %9s %9s %9s %7s %7s  %s"
            % ("fault", "runs", "seen", "half", "99%", "/ tensor", "/ window", "tensor", "place",
               "named first")]


def trials_of(rows):
    """Rows by base and design, fault, and trial."""
    grouped = defaultdict(list)
    for r in rows:
        c = columns(r)
        grouped[r["base"], r["design"], c["fault"], c["problem"], c["seed"]].append(r)
    by_fault = defaultdict(list)
    for (base, design, fault, *_), rs in grouped.items():
        by_fault[base, design, fault].append(Trial(rs))
    return by_fault


POWER_HEAD = """\
(b) Power: the smallest size at which half and 99 of 100 runs fail (never: they do not at the
    largest that was tried; <=: the smallest that was). seen: runs that fail at some size.
    / tensor, / window: error of the tensor and of its worst window at the smallest size that
    fails, over the expected ones, median. tensor, place: the verdict names the right tensor
    first; the right head, and row or window of tokens."""


def table_power(plugin, rows):
    """(b) sizes at which half and 99 of 100 runs fail."""
    lines = POWER_HEAD.split("\n") + [""]
    by_fault = trials_of(rows)
    for base, design in sorted({k[:2] for k in by_fault}):
        lines += power_head(base, design)
        scale = None
        for fault in [f for f in plugin.expand([]) if (base, design, f) in by_fault]:
            if plugin.scale(fault) != scale:
                scale = plugin.scale(fault)
                lines.append("  size: " + SIZE_TEXT[scale])
            lines.append(power_line(fault, SIZES[scale], by_fault[base, design, fault]))
        lines.append("")
    searches = [t for ts in by_fault.values() for t in ts]
    odd = sum(not t.monotone for t in searches)
    return lines + ["%d searches, %d runs; %d where a larger size passed than one that failed"
                    % (len(searches), len(rows), odd)]


def tables(plugin, program, rows, ranks):
    """All tables of the rows of this program and this plug-in, as one text."""
    rows = [r for r in rows if columns(r)["program"] == program]
    rows = [r for r in rows if columns(r)["plugin"] == plugin.hash]
    clean = [r for r in rows if not columns(r)["fault"] and columns(r)["ranks"] == ranks]
    faulty = [r for r in rows if columns(r)["fault"]]
    lines = ["%s, plug-in %s" % (program, plugin.hash), ""]
    lines += table_alarms(clean) + [""] if clean else []
    lines += table_power(plugin, faulty) if faulty else []
    return "\n".join(line.rstrip() for line in lines) + "\n"
