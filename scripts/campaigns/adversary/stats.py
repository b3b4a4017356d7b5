"""The results: false alarms by design, power by fault."""

import math
from collections import Counter, defaultdict

from runs import judged
from search import SIZES

DECLARED, UNDECLARED, UNSAID = "declared", "undeclared", "state rounded, unsaid"
CANCELLED = "powers that cancel"
WAYS = (DECLARED, UNDECLARED, UNSAID, CANCELLED)
MOST_GROWN = 4  # an inverse from powers that large has lost two bits: no right kernel makes it so


def largest(tensors, key):
    return max([t[key] for t in tensors if t[key] == t[key]], default=math.nan)


def quantile(xs, q):
    xs = sorted(xs)
    return xs[min(len(xs) - 1, math.ceil(q * len(xs)) - 1)]


class Alarms:
    """Runs of right kernels: of one design, said or unsaid, or of one tensor."""

    def __init__(self, rows, tensor=None):
        self.runs = [r for r in rows if judged(r)]
        self.skipped = sum(r["verdict"] in ("none", "skipped", "unjudged") for r in rows)
        self.errors = [r for r in rows if r["verdict"] == "error"]
        self.failed = [r for r in self.runs if r["verdict"] == "fail"]
        tensors = [t for r in self.runs for t in r["tensors"].values()]
        self.tensors = sum(t["verdict"] in ("pass", "fail") for t in tensors)
        self.bound, self.excess = largest(tensors, "bound"), largest(tensors, "excess")

    def said(self, most=4):
        """'dg by expected 3, ..': the tensors that failed, by tier."""
        counts = Counter()
        for r in self.failed:
            counts.update(
                "%s by %s"
                % (n, t["level"] if t["tier"] == "expected" and t.get("level") else t["tier"])
                for n, t in r["tensors"].items()
                if t["verdict"] == "fail"
            )
        return ", ".join("%s %d" % c for c in counts.most_common(most))


def way_of(plugin, row):
    """Is a failure of that right kernel a false alarm? One that rounds its state has to say so, and
    one whose inverse is a sum of powers is right where they do not cancel."""
    if row.get("grown", 0) > MOST_GROWN:
        return CANCELLED
    if row["declared"]:
        return DECLARED
    return UNSAID if plugin.rounds_state(row["design"]) else UNDECLARED


def alarms_of(plugin, rows):
    """Alarms by declaration, base and design, in the order of the designs."""
    grouped = defaultdict(list)
    for r in rows:
        if not r["fault"]:
            grouped[way_of(plugin, r), r["base"], r["design"]].append(r)
    order = {d: i for i, d in enumerate(plugin.designs)}
    out = defaultdict(dict)
    for way, base, design in sorted(grouped, key=lambda k: (k[1] == "bf16", order.get(k[2], 999))):
        out[way][base, design] = Alarms(grouped[way, base, design])
    return out


class Trial:
    """One problem, fault and seed: the smallest size that failed."""

    def __init__(self, rows, sizes):
        verdict = {r["size"]: r for r in rows}
        self.applies = any(map(judged, rows))
        failed = [s for s in sizes if s in verdict and verdict[s]["verdict"] == "fail"]
        self.row = verdict[failed[0]] if failed else None
        self.threshold = failed[0] if failed else math.inf
        at = sizes.index(failed[0]) if failed else len(sizes)
        below = verdict.get(sizes[at - 1]) if at else None
        # what the search was not given the time for is no measurement
        self.whole = at == 0 or (below is not None and below["verdict"] != "error")
        passed = [s for s in verdict if verdict[s]["verdict"] == "pass"]
        self.monotone = not failed or not passed or max(passed) < self.threshold

    def named(self):
        return self.row["why"].split(":")[0]

    def right_place(self):
        """Is what the verdict names (a row by its bound, else a window of 64 tokens) in the place
        of the fault? None: the fault has no place, or the verdict names none."""
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
            return dict(zip(words[::2], words[1::2], strict=False))
    return None


def share(answers):
    answers = [x for x in answers if x is not None]
    return sum(answers) / len(answers) if answers else math.nan


class Power:
    """One fault in one design, over problems and seeds."""

    def __init__(self, fault, trials, sizes):
        trials = [t for t in trials if t.applies and t.whole]
        tensor = fault.partition(".")[2]
        seen = [t for t in trials if t.row]
        self.trials, self.sizes, self.seen = len(trials), sizes, len(seen)
        self.limits = [t.threshold for t in trials]
        self.odd = sum(not t.monotone for t in trials)
        self.tensor = share([t.named() == tensor for t in seen]) if tensor else math.nan
        self.place = share([t.right_place() for t in seen])
        self.named = Counter(t.named() for t in seen)

    def at(self, share_that_fails):
        """The smallest size at which that share of the runs fails."""
        return quantile(self.limits, share_that_fails) if self.limits else math.nan

    def failing(self, size):
        """Share of the runs that fails at a size."""
        return share([x <= size for x in self.limits])


def powers_of(plugin, rows):
    """{(base, design): {fault: Power}}; every design as it was run: declared where it can be."""
    grouped = defaultdict(list)
    for r in rows:
        if r["fault"]:
            grouped[r["base"], r["design"], r["fault"], r["problem"], r["seed"]].append(r)
    trials = defaultdict(list)
    for (base, design, fault, *_), rs in grouped.items():
        trials[base, design, fault].append(Trial(rs, SIZES[plugin.scale(fault)]))
    out = defaultdict(dict)
    for (base, design, fault), ts in trials.items():
        out[base, design][fault] = Power(fault, ts, SIZES[plugin.scale(fault)])
    return out
