"""Problems: the cases that the plug-in fits, and generated ones of any seed."""

import hashlib
import json
import os
import random
import struct

from plugin import Stop

TWINS = ["rwkv7", "comba", "oja", "mamba3"]  # twins.py
RECURRENCES = ["gdn", "kda", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr"]


class Problem:
    """A case file: name, folder, text, keys."""

    def __init__(self, path):
        self.folder, name = os.path.split(path)
        self.name = name[: -len(".case")]
        try:
            with open(path) as f:
                self.text = f.read()
        except OSError as e:
            raise Stop("%s: %s" % (path, e.strerror)) from e
        lines = [line.split("#")[0] for line in self.text.split("\n")]
        pairs = [line.split("=", 1) for line in lines if "=" in line]
        self.keys = {k.strip(): v.strip() for k, v in pairs}
        self.hash = hashlib.sha1(self.text.encode()).hexdigest()[:8]

    def recorded_shape(self):
        """q in the safetensors file: tokens first, key width last."""
        path = os.path.join(self.folder, self.keys["data"])
        try:
            with open(path, "rb") as f:
                size = struct.unpack("<Q", f.read(8))[0]
                head = json.loads(f.read(size))
        except (OSError, ValueError, struct.error) as e:
            raise Stop("%s: data = %s: %s" % (self.name, self.keys["data"], e)) from e
        return [n for n in head["q"]["shape"] if n > 1]

    def cost(self):
        """State entries that are touched: tokens, heads, key and value width."""
        number = {k: int(v) for k, v in self.keys.items() if v.isdigit()}
        T, K = number.get("T"), number.get("K")
        if "data" in self.keys:
            shape = self.recorded_shape()
            T, K = T or shape[0], K or shape[-1]
        heads = number.get("HV", number.get("H", 1))
        return T * heads * K * number.get("V", K)

    def fits(self, most):
        if self.keys.get("op") not in RECURRENCES:
            return False
        return self.keys.get("nonfinite") != "allow" and self.cost() <= most

    def exact(self):
        return self.keys.get("keys") == "exact"


GATES = ("log", "log", "softplus", "softplus", "lower_bound")


def gate_lines(rng, forms=GATES):
    gate = rng.choice(forms)
    lines = ["gate = " + gate]
    if gate == "log":
        lines.append("g_scale = %g" % rng.choice([1e-4, 1e-3, 0.01, 0.05, 0.3, 2]))
    if gate == "softplus":
        lines.append("g_mean = %g" % rng.choice([-6, -4, -2, 0]))
    if gate == "lower_bound":
        lines += ["lower_bound = -5", "g_mean = %g" % rng.choice([-6, -3, 0])]
    if rng.random() < 0.4:
        lines.append("g_head_spread = %g" % rng.choice([2, 4]))
    return lines


def beta_lines(rng, R):
    if R > 1:
        return ["beta = plain", "beta_lo = 0.05", "beta_hi = %g" % (2 / R)]
    form = rng.choice(["plain", "sigmoid", "sigmoid2"])
    if form != "plain":
        return ["beta = " + form]
    low = rng.choice([0.01, 0.3, 0.8])
    return ["beta = plain", "beta_lo = %g" % low, "beta_hi = %g" % (low + 0.19)]


MOSTLY_KDA = ["kda", "kda", "kda", "gdn", "mkda"]
BY_BETA = ("gdn", "kda", "mkda", "gated-deltaproduct")
MANY_KEYS = ("mkda", "gated-deltaproduct")


def generated_text(seed, ops):
    """A random problem, the same for the same seed on every machine."""
    rng = random.Random("adversary %d" % seed)
    op = rng.choice(ops)
    R = rng.choice([2, 4]) if op in MANY_KEYS else 1
    T, H = 2 * rng.choice([33, 48, 64, 81, 100, 128, 150]), rng.choice([1, 1, 2])
    lines = [
        "reason = generated problem",
        "source = scripts/campaigns/adversary/run",
        "op = " + op,
        "seed = %d" % (70000 + seed),
        "T = %d" % T,
        "H = %d" % H,
        "HV = %d" % (H if op == "dplr" else H * rng.choice([1, 2, 2])),
        "K = %d" % rng.choice([16, 32, 32, 48]),
        "V = %d" % rng.choice([16, 32, 48]),
        "R = %d" % R,
        "dtype = %s" % rng.choice(["bf16", "bf16", "bf16", "fp32"]),
        "ranks = 1,2",
        "base = fp32,bf16",
        "chain = fp32",
    ]
    lines += gate_lines(rng) + (beta_lines(rng, R) if op in BY_BETA else [])
    if rng.random() < 0.5 and op != "dplr":
        lines.append("l2norm = yes")
    if rng.random() < 0.4:
        lines.append("s0_scale = 0.5")
    if rng.random() < 0.4:
        lines.append("dstate = yes")
    if rng.random() < 0.3:
        cuts = sorted(rng.sample(range(1, T), 3))
        cuts.insert(1, cuts[0])  # an empty sequence
        lines.append("cu_seqlens = " + ",".join(map(str, [0] + cuts + [T])))
    return "\n".join(lines) + "\n"


def small_shape(rng, ops):
    """One sequence of random length or several, in chunks that are cut short: most of a kernel's
    branches in 1 to 110 tokens."""
    T, HV, R = rng.randrange(1, 111), rng.choice([1, 1, 2]), rng.choice([2, 4])
    op = rng.choice(ops)
    lines = ["op = " + op, "T = %d" % T, "H = 1", "HV = %d" % (1 if op == "dplr" else HV)]
    lines += ["K = %d" % rng.choice([8, 16, 24, 32]), "V = %d" % rng.choice([8, 16, 32])]
    if op in MANY_KEYS:
        lines.append("R = %d" % R)
    if T > 8 and rng.random() < 0.3:
        cuts = sorted(rng.sample(range(1, T), 2))
        lines.append("cu_seqlens = " + ",".join(map(str, [0] + cuts + [T])))
    return op, lines, R if op in MANY_KEYS else 1


def small_text(seed, ops):
    """A random problem that takes a tenth of a second, with the hard laws of keys and values."""
    rng = random.Random("small %d" % seed)
    op, shape, R = small_shape(rng, ops)
    dtype = rng.choice(["bf16", "bf16", "bf16", "fp32"])
    lines = ["reason = small generated problem", "source = scripts/campaigns/adversary/run"] + shape
    lines += ["seed = %d" % (900000 + seed), "dtype = " + dtype]
    lines += ["keys = %s" % rng.choice(["random", "random", "correlated", "subspace"])]
    lines += ["ranks = 1", "base = fp32,bf16", "chain = fp32"]
    lines += gate_lines(rng) + (beta_lines(rng, R) if op in BY_BETA else [])
    chances = [
        ("l2norm = yes", 0 if op == "dplr" else 0.5),
        ("s0_scale = 0.5", 0.4),
        ("dstate = yes", 0.4),
    ]
    lines += [line for line, chance in chances if rng.random() < chance]
    return "\n".join(lines) + "\n"


def recurrence_text(op, seed):
    """A random problem of a recurrence, in which states are of moderate size."""
    rng = random.Random("%s %d" % (op, seed))
    R = rng.choice([2, 3]) if op in MANY_KEYS else 1
    T = rng.choice([70, 96, 130, 200, 300, 520, 700])
    H = rng.choice([1, 2]) if T < 300 else 1
    HV = H if op in ("dplr", *TWINS) else H * rng.choice([1, 2])
    lines = [
        "reason = generated problem",
        "source = adversary/run files",
        "op = " + ("dplr" if op in TWINS else op),
    ]
    lines += ["seed = %d" % (50000 + seed), "T = %d" % T, "H = %d" % H, "HV = %d" % HV]
    lines += ["K = %d" % rng.choice([16, 32]), "V = %d" % rng.choice([16, 24, 32])]
    lines += ["R = %d" % R, "dtype = bf16", "ranks = 1", "base = fp32,bf16", "chain = fp32"]
    lines += gate_lines(rng, ["log"] if op in TWINS else GATES)
    lines += beta_lines(rng, R) if op in BY_BETA else []
    if op not in ("dplr", "gla", "ssd", *TWINS):
        lines += ["l2norm = yes", "keys = %s" % rng.choice(["random", "correlated", "subspace"])]
    elif rng.random() < 0.3:
        lines.append("qk_decades = 3")
    lines += [s for s in ("s0_scale = 0.5", "dstate = yes") if rng.random() < 0.5]
    if rng.random() < 0.4:
        cuts = sorted(rng.sample(range(1, T), 2))
        lines.append("cu_seqlens = " + ",".join(map(str, [0] + cuts + [T])))
    return "\n".join(lines) + "\n"


def write_recurrence(folder, op, seed):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "%s-%04d.case" % (op, seed))
    with open(path, "w") as f:
        f.write(recurrence_text(op, seed))
    return Problem(path)


def write_generated(folder, seed, small, ops):
    os.makedirs(folder, exist_ok=True)
    name = "small-%06d.case" if small else "adversary-%05d.case"
    path = os.path.join(folder, name % seed)
    with open(path, "w") as f:
        f.write((small_text if small else generated_text)(seed, ops or MOSTLY_KDA))
    return Problem(path)


def all_cases(folder, most):
    names = sorted(f for f in os.listdir(folder) if f.endswith(".case"))
    found = [Problem(os.path.join(folder, n)) for n in names]
    return [p for p in found if p.fits(most)]


def choose_problems(a):
    """Problems of the options --cases, --most, --generated, --small and --seed, in an order that
    mixes them."""
    folder = os.path.abspath(a.folder)
    if a.cases == "all":
        found = all_cases(folder, a.most)
    else:
        names = [n for n in a.cases.split(",") if n]
        found = [Problem(os.path.join(folder, n + ".case")) for n in names]
    seeds = range(a.seed, a.seed + a.generated)
    found += [
        write_generated(os.path.join(a.out, "cases"), s, a.small, a.recurrences) for s in seeds
    ]
    return sorted(found, key=lambda p: hashlib.sha1(p.name.encode()).digest())
