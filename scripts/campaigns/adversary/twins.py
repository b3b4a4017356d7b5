"""RWKV-7, Comba, gated Oja and Mamba-3 from their papers, in numpy: token by token, and in chunks
whose products round their operands to a format. A tape has the gradients of that arithmetic; in
fp64 a complex step checks them. No code and no file of the program is read."""

import numpy as np
from plugin import Stop

LETTERS = {"bf16": 16, "tf32": 13}  # bits of fp32 that are dropped


def rounded(x, fmt):
    """Nearest even; only fp32 is rounded."""
    if x.dtype != np.float32 or not fmt:
        return x
    if fmt == "fp16":
        return x.astype(np.float16).astype(np.float32)
    drop, bits = LETTERS[fmt], np.ascontiguousarray(x).view(np.uint32)
    kept = bits + ((1 << drop - 1) - 1) + (bits >> drop & 1)
    return (kept >> drop << drop).astype(np.uint32).view(np.float32)


# ---- reverse mode --------------------------------------------------------------------------------


class Node:
    """A number of the tape; `back` are calls that bring a gradient to its operands."""

    def __init__(self, tape, x, back=None):
        self.tape, self.x, self.d = tape, x, None
        if back:
            tape.append((self, back))

    def take(self, d, at=()):
        if self.d is None:
            self.d = np.zeros_like(self.x)
        if at == ():  # summed over what was broadcast
            d = d.sum(axis=tuple(range(d.ndim - self.x.ndim)))
            wide = tuple(i for i, n in enumerate(self.x.shape) if n < d.shape[i])
            d = d.sum(axis=wide, keepdims=True)
        self.d[at] += d

    def __add__(self, o):
        return Node(self.tape, self.x + o.x, lambda d: (self.take(d), o.take(d)))

    def __sub__(self, o):
        return Node(self.tape, self.x - o.x, lambda d: (self.take(d), o.take(-d)))

    def __mul__(self, o):
        o = o if isinstance(o, Node) else Node(self.tape, np.asarray(o, self.x.dtype))
        return Node(self.tape, self.x * o.x, lambda d: (self.take(d * o.x), o.take(d * self.x)))

    def __getitem__(self, at):
        return Node(self.tape, self.x[at], lambda d: self.take(d, at))

    def map(self, f, slope):
        y = f(self.x)
        return Node(self.tape, y, lambda d: self.take(d * slope(self.x, y)))

    def exp(self):
        return self.map(np.exp, lambda x, y: y)

    def sums(self):
        """Over tokens so far."""
        y = np.cumsum(self.x, 0, self.x.dtype)
        return Node(self.tape, y, lambda d: self.take(np.cumsum(d[::-1], 0, d.dtype)[::-1]))

    def inverse(self):
        y = np.linalg.inv(self.x)
        z = y.swapaxes(-1, -2)
        return Node(self.tape, y, lambda d: self.take(-(z @ d @ z)))


def join(nodes, stack=False):
    x = [n.x[None] if stack else n.x for n in nodes]
    ends = np.cumsum([0] + [len(a) for a in x])

    def back(d):
        for n, a, b in zip(nodes, ends, ends[1:], strict=False):
            n.take(d[a] if stack else d[a:b])

    return Node(nodes[0].tape, np.concatenate(x), back)


def dot(spec, a, b, fmt=None):
    """Einsum of two; every index is in two of a, b and the result."""
    (of_a, of_b), of_y = spec.split("->")[0].split(","), spec.split("->")[1]
    x, z = rounded(a.x, fmt), rounded(b.x, fmt)

    def back(d):
        d = rounded(d, fmt)
        a.take(np.einsum("%s,%s->%s" % (of_y, of_b, of_a), d, z))
        b.take(np.einsum("%s,%s->%s" % (of_y, of_a, of_b), d, x))

    return Node(a.tape, np.einsum(spec, x, z), back)


# ---- token by token: the state [H,K,V] after token i; `other` is a wrong rule --------------------


def write(k, v):
    return dot("hk,hv->hkv", k, v)


def read(k, S):
    return dot("hk,hkv->hv", k, S)


def comba(S, x, i, other):
    """S <- a S + b k (v - p' S), p being what is read of the state before it decays."""
    kept = S * x["g"][i][:, None, None].exp()
    error = x["v"][i] - read(x["p"][i], kept if other else S)
    return kept + write(x["k"][i], error * x["beta"][i][:, None])


def rwkv7(S, x, i, other):
    """S <- (diag(w) - (a kk)' kk) S + k' v; w is the log of the decay."""
    kept = S * x["w"][i][:, :, None].exp()
    gone = write(x["kk"][i] * x["a"][i], read(x["kk"][i], kept if other else S))
    return kept - gone + write(x["k"][i], x["v"][i])


def oja(S, x, i, other):
    """S <- diag(exp gv) S, then S + v' b (k - v S): v is normed, and k is its value."""
    kept = S * x["gv"][i][:, :, None].exp()
    error = x["k"][i] - read(x["v"][i], S if other else kept)
    return kept + write(x["v"][i], error * x["beta"][i][:, None])


def mamba3(S, x, i, other):
    """h <- a (h + beta B' x of the token before) + gamma B' x, B and C rotated by their angles."""
    decay = x["g"][i][:, None, None].exp()
    new = S * decay + write(x["B"][i], x["x"][i] * x["gamma"][i][:, None])
    if i == 0 or other:
        return new
    return new + write(x["B"][i - 1], x["x"][i - 1] * x["beta"][i][:, None]) * decay


def rotate(x):
    """B and C of Mamba-3, pair by pair; channels without an angle stay."""
    P, K = x["theta"].x.shape[-1], x["C"].x.shape[-1]
    both, cross = np.zeros((P, K)), np.zeros((K, K))
    for i in range(P):
        both[i, 2 * i : 2 * i + 2] = 1
        cross[2 * i + 1, 2 * i], cross[2 * i, 2 * i + 1] = -1, 1
    tape, real = x["C"].tape, x["C"].x.dtype
    both, cross = Node(tape, both.astype(real)), Node(tape, cross.astype(real))
    phi = dot("thp,pk->thk", x["theta"].sums(), both)
    cos, sin = phi.map(np.cos, lambda p, y: -np.sin(p)), phi.map(np.sin, lambda p, y: np.cos(p))
    turned = {n: x[n] * cos + dot("thk,kj->thj", x[n], cross) * sin for n in "BC"}
    return x | turned


# ---- in chunks: q, gates, corrections (write, read, strength, strength x value), (write, value) --


def before(a):
    return join([a[:1] * 0, a[:-1]])


def chunk_rows(op, x):
    one = {n: a[:, :, None] for n, a in x.items() if a.x.ndim == 2}
    if op == "comba":
        return x["q"], one["g"], [(x["k"], x["p"], one["beta"], x["v"] * one["beta"])], []
    if op == "rwkv7":
        ones = x["v"][:, :, :1] * 0
        ones.x += 1
        row = (x["kk"] * x["a"], x["kk"], ones, x["v"] * 0)
        return x["r"], x["w"], [row], [(x["k"], x["v"])]
    if op == "oja":
        return x["q"], x["gv"], [(x["v"], x["v"], one["beta"], x["k"] * one["beta"])], []
    past = (before(x["B"]) * one["g"].exp(), before(x["x"]) * one["beta"])
    return x["C"], one["g"], [], [(x["B"], x["x"] * one["gamma"]), past]


def chunk(op, S, rows, scale, fmt):
    """Outputs of a chunk and its last state."""
    q, g, correcting, writes = rows
    n, G, tape = len(q.x), g.sums(), q.tape
    i = np.arange(n)

    def pairs(to, seen):  # exp(to_i - G_j) where i sees j
        seen = seen[:, :, None, None]
        far = Node(tape, np.where(seen, 0, -1e30).astype(G.x.dtype))
        return ((to[:, None] - G[None]) * seen + far).exp()

    upto, left, end = pairs(G, i[:, None] >= i), list(writes), G[-1]
    for w, p, s, target in correcting:
        to = G if op == "oja" else G - g
        past = pairs(to, i[:, None] > i)
        seen = dot("ihk,hkv->ihv", p * to.exp(), S, fmt)
        for k, v in writes:
            A = dot("ihk,ijhk->hij", p, past * k[None])
            seen = seen + dot("hij,jhv->ihv", A, v, fmt)
        A = dot("ihk,ijhk->hij", p * s, past * w[None])
        solve = (A + Node(tape, np.eye(n, dtype=G.x.dtype))).inverse()
        left.append((w, dot("hij,jhv->ihv", solve, target - seen * s, fmt)))
    if op == "oja":
        o = dot("hkv,ihv->ihk", S, q, fmt) * (G.exp() * scale)
    else:
        q = q * scale  # nothing rounds do once more
        o = dot("ihk,hkv->ihv", q * G.exp(), S, fmt)
    S = S * end[:, :, None].exp()
    for k, v in left:
        if op == "oja":
            o = o + dot("hij,ijhk->ihk", dot("ihv,jhv->hij", q, v, fmt) * scale, upto * k[None])
        else:
            o = o + dot("hij,jhv->ihv", dot("ihk,ijhk->hij", q, upto * k[None]), v, fmt)
        S = S + dot("jhk,jhv->hkv", (end[None] - G).exp() * k, v, fmt)
    return o, S


# ---- a problem -----------------------------------------------------------------------------------

STEPS = {"rwkv7": rwkv7, "comba": comba, "oja": oja, "mamba3": mamba3}
STATES = {"rwkv7": "rv", "comba": "qv", "oja": "vk", "mamba3": "Cx"}  # their widths
QUERY = {"rwkv7": "r", "mamba3": "C"}
OTHERS = ("do", "dht", "initial_state")


def grad(leaf):
    return np.zeros_like(leaf.x) if leaf.d is None else leaf.d


def cut(rows, s):
    return [cut(r, s) for r in rows] if isinstance(rows, (list, tuple)) else rows[s]


class Twin:
    """A problem of one of the four, as Inputs of files.py is one of the eight."""

    def __init__(self, path, op, case_hash, tensors, meta):
        self.path, self.op, self.hash, self.scale = path, op, case_hash, float(meta["scale"])
        self.query = QUERY.get(op, "q")
        x = self.x = {n: np.array(a, np.float32).reshape(s) for n, (s, a) in tensors.items()}
        ends = x.pop("cu_seqlens", [0, len(x["do"])])
        self.cu = list(zip(map(int, ends), map(int, ends[1:]), strict=False))
        K, V = (x[n] for n in STATES[op])
        for n in ("initial_state", "dht"):
            x.setdefault(n, np.zeros((len(self.cu), *K.shape[1:], V.shape[2]), np.float32))
        self.check()

    def outputs(self, x, size, fmt=None, other=False):
        """Tape, leaves, o and last states; size: of chunks, 0: token by token."""
        tape = []
        leaves = {n: Node(tape, a) for n, a in x.items()}
        o, ends = [], []
        for n, (a, b) in enumerate(self.cu):
            own = {m: leaf[a:b] for m, leaf in leaves.items() if m not in OTHERS}
            own = rotate(own) if self.op == "mamba3" else own
            S = leaves["initial_state"][n]
            for i in range(0 if size else b - a):
                S = STEPS[self.op](S, own, i, other)
                q = own[self.query][i] * self.scale
                o.append((dot("hkv,hv->hk", S, q) if self.op == "oja" else read(q, S))[None])
            rows = chunk_rows(self.op, own)
            for c in range(0, b - a, size) if size else ():
                one, S = chunk(self.op, S, cut(rows, slice(c, c + size)), self.scale, fmt)
                o.append(one)
            ends.append(S)
        return tape, leaves, join(o), join(ends, stack=True)

    def results(self, x, *how):
        """{name: numbers}"""
        tape, leaves, o, final = self.outputs(x, *how)
        o.d, final.d = x["do"].copy(), x["dht"].copy()
        for node, back in reversed(tape):
            if node.d is not None:
                back(node.d)
        found = {"o": o.x, "final_state": final.x, "ds0": grad(leaves["initial_state"])}
        return found | {"d" + n: grad(a) for n, a in leaves.items() if n not in OTHERS}

    def check(self):
        """In fp64: loops and chunks agree, and the gradients with a complex step."""
        x = {n: a.astype(np.float64) for n, a in self.x.items()}
        rng, found = np.random.default_rng(1), [self.results(x, size) for size in (0, 24)]
        for n, y in found[0].items():
            if not np.abs(y - found[1][n]).max() <= 1e-9 * np.abs(y).max():
                raise Stop("%s: %s of loop and chunks differ" % (self.op, n))
        names = {"d" + n: n for n in x if n not in OTHERS} | {"ds0": "initial_state"}
        by = {n: rng.standard_normal(x[n].shape) for n in names.values()}
        _, _, o, final = self.outputs(x | {n: x[n] + 1e-30j * y for n, y in by.items()}, 0)
        step = (o.x * x["do"]).sum().imag + (final.x * x["dht"]).sum().imag
        terms = np.concatenate([(found[0][d] * by[n]).ravel() for d, n in names.items()])
        if not abs(step * 1e30 - terms.sum()) <= 1e-12 * np.abs(terms).sum():
            raise Stop("%s: gradients are not the complex step's" % self.op)

    def run(self, _, design, other=False):
        """{name: (shape, numbers)}"""
        size = 0 if "recurrent" in design else int(design.split("chunk=")[1].split(",")[0])
        fmt = next((f for f in ("bf16", "fp16", "tf32") if f in design and size), None)
        y = self.results(self.x, size, fmt, other)
        return {n: (list(a.shape), a.ravel().tolist()) for n, a in y.items()}
