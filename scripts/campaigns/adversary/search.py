"""The smallest size of a fault that fails, by bisection over a list of sizes."""

from plugin import TENSORS
from runs import judged

DECADE = (1, 2, 5)
SIZES = {
    "times": [1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 80, 120, 200, 400],
    "relative": [float("%de%d" % (m, e)) for e in range(-7, 0) for m in DECADE] + [1.0],
    "share": [0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
    "ulps": [2.0**e for e in range(-4, 11)],
    "count": [2.0**e for e in range(0, 9)],
}
SIZE_TEXT = {
    "times": "times the expected error (l2-eps: times 1e-6)",
    "relative": "relative",
    "share": "share of the wrong value",
    "ulps": "ulps of the format that the design writes",
    "count": "how many",
}


class Search:
    """One fault in one design with one seed, on problem after problem. It begins at the size where
    it ended in the middle of the cases before, and takes detection to be monotone in the size."""

    def __init__(self, runner, fault, design, declared, seed):
        self.runner, self.fault, self.seed = runner, fault, seed
        self.design, self.declared = design, declared
        self.sizes = SIZES[runner.plugin.scale(fault)]
        self.ranks = runner.plugin.ranks(fault)
        self.found = []

    def clean(self, problem):
        """The right kernel on the same ranks."""
        return self.runner.run(problem, self.design, self.declared, self.ranks)

    def row(self, problem, i, units):
        return self.runner.run(
            problem,
            self.design,
            self.declared,
            self.ranks,
            self.fault,
            self.sizes[i],
            self.seed,
            units,
        )

    def start(self):
        last = len(self.sizes) - 1
        found = sorted(self.found)
        return min(found[len(found) // 2] if found else last // 2, last)

    def on(self, problem):
        """In units of the errors that are expected of the right kernel."""
        clean = self.clean(problem)
        if clean["verdict"] != "pass":
            return  # a false alarm, or no such run
        units = {n: clean["tensors"].get(n, {}).get("expected", 0) for n in TENSORS}
        units = {n: expected for n, expected in units.items() if expected > 0}
        low, high, at, step, acts = -1, len(self.sizes), self.start(), 1, False
        while high - low > 1:  # low passes, high fails
            row = self.row(problem, at, units)
            if row["verdict"] == "error":
                return
            acts |= judged(row)  # of this size, it may change no bit
            if row["verdict"] == "fail":
                high = at
            else:
                low = at
            if low < 0:
                at = max(0, high - step)
            elif high == len(self.sizes):
                at = min(high - 1, low + step)
            else:
                at = (low + high) // 2
            step *= 2
        if acts:
            self.found.append(high)
