"""Rows of the speed table. K = V = 128 and bf16 everywhere; SSD has values of 64.
Standard library only.

Contracts, the same for every kernel of a row. KDA: lower-bound gate, L2 norm and beta's sigmoid
inside. GDN and SSD take log gates and betas, and normalise inside. `given`: the caller has made the
gates, the betas and unit rows. Decode: everything inside, states in place. A kernel whose contract
differs says so in its own row.
"""

import dataclasses

BIAS = {"slow": -14.0, "usual": -4.0, "forgetting": 0.0}  # of a gate: gpu/bench/bench.h


@dataclasses.dataclass(frozen=True)
class Row:
    op: str  # kda, gdn or ssd
    part: str  # forward, backward or decode
    B: int  # sequences
    T: int  # tokens of each
    H: int
    HV: int
    gates: str = "usual"
    given: bool = False
    states: bool = False  # final states are results too
    dtype: str = ""  # decode: the states'

    @property
    def name(self):
        heads = f"{self.HV}" if self.H == self.HV else f"{self.H}/{self.HV}"
        size = f"B {self.B}" if self.part == "decode" else f"{self.B} x {self.T}"
        notes = [
            f"{self.dtype} states" if self.dtype else "",
            f"{self.gates} gates" if self.gates != "usual" else "",
            "states out" if self.states else "",
            "rows given" if self.given else "",
        ]
        return ", ".join([f"{self.op} {self.part} {size}, heads {heads}", *(x for x in notes if x)])

    @property
    def tokens(self):
        return self.B * self.T

    @property
    def bias(self):
        return BIAS[self.gates]

    @property
    def compiled_as(self):
        """Rows alike in this share what just-in-time compilers make."""
        return (
            self.op,
            self.part,
            self.H,
            self.HV,
            self.given,
            self.dtype,
            self.B > 1,
            self.states,
        )

    def small(self):
        """A row that compiles the same in little memory."""
        return dataclasses.replace(self, B=min(self.B, 2), T=min(self.T, 1024))


def forward(op, B, T, HV, H=None, **more):
    return Row(op, "forward", B, T, H or HV, HV, **more)


def given_too(rows):
    """Each row, and where the caller normalises."""
    return [x for r in rows for x in (r, dataclasses.replace(r, given=True))]


# where batches are packed: sequences, tokens of each, value heads
PACKED = (
    (1, 4096, 2),
    (1, 4096, 16),
    (4, 1024, 16),
    (16, 16, 16),
    (16, 256, 4),
    (16, 4096, 4),
    (64, 64, 8),
    (64, 1024, 2),
    (256, 16, 16),
    (256, 256, 2),
    (256, 1024, 4),
)
GROUPED = ((16, 64), (8, 32), (2, 8))  # query heads, value heads

ISSUE = [
    forward("kda", 1, 8192, 64),
    forward("kda", 1, 8192, 64, gates="forgetting"),
    forward("kda", 1, 131072, 8),
    forward("kda", 1, 131072, 8, gates="slow"),
    forward("kda", 1, 131072, 8, gates="forgetting"),
    forward("kda", 1, 8192, 8),
    forward("kda", 8, 1024, 32, states=True),
    forward("kda", 1, 8192, 64, given=True),
    forward("kda", 1, 131072, 8, gates="forgetting", given=True),
    Row("kda", "backward", 1, 8192, 64, 64),
    Row("kda", "backward", 1, 8192, 64, 64, given=True),
    Row("kda", "backward", 1, 131072, 8, 8),
    Row("gdn", "backward", 1, 8192, 64, 64),
    *given_too(
        [
            forward("gdn", 1, 8192, 64),
            forward("gdn", 1, 8192, 8),
            forward("gdn", 1, 131072, 8, gates="slow"),
            forward("gdn", 8, 1024, 32, states=True),
            forward("gdn", 64, 128, 32, states=True),
        ]
    ),
    forward("gdn", 1, 131072, 8),
    forward("ssd", 1, 8192, 64, 1),
]
GROUPS = given_too(
    [
        forward("gdn", B, T, HV, H, states=True)
        for H, HV in GROUPED
        for B, T in ((1, 8192), (1, 32768), (8, 1024))
    ]
)
BATCHES = [forward("kda", B, T, HV, states=True) for B, T, HV in PACKED] + given_too(
    [forward("gdn", B, T, HV, states=True) for B, T, HV in PACKED]
)
DECODE = [
    Row(op, "decode", B, 1, 32, 32, dtype=dtype)
    for op in ("kda", "gdn")
    for dtype in ("fp32", "bf16")
    for B in (1, 8, 32, 128, 256, 1024)
]
SETS = {"issue": ISSUE, "decode": DECODE, "groups": GROUPS, "batches": BATCHES}
ROWS = [r for rows in SETS.values() for r in rows]
BY_NAME = {r.name: r for r in ROWS}

# bytes of a token: q and k of a query head, v and o of a value head, gates of one
GATES = {"kda": 258, "gdn": 8, "ssd": 4}


def floor_bytes(r):
    """Every input read once, every output written once; a decode step reads and writes states."""
    V = 64 if r.op == "ssd" else 128
    rows = 2 * (2 * 128 * r.H + V * r.HV)
    gates = (516 if r.op == "kda" and r.given else GATES[r.op]) * r.HV
    o, state = 2 * V * r.HV, 128 * V * r.HV
    if r.part == "decode":
        return r.B * (rows + gates + o + 2 * state * (4 if r.dtype == "fp32" else 2))
    final = 4 * state * r.B if r.states else 0
    twice = 2 if r.part == "backward" else 1  # inputs, and their gradients
    return r.tokens * (twice * (rows + gates) + o) + final
