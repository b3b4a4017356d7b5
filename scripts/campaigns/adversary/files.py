"""Kernels of every recurrence as files. The plug-in computes in this process from files of inputs.
Its outputs, right or altered, are written in the kernel's formats, and `deltaproof judge` judges
them."""

import array
import collections
import ctypes
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from plugin import Stop
from problems import RECURRENCES, TWINS, write_recurrence

Format = collections.namedtuple("Format", "base chunked recurrent stored")
FORMATS = {
    "bf16": Format("bf16", "chunk64-bf16", "recurrent-bf16", "BF16"),
    "fp16": Format("fp16", "chunk64-fp16-out-fp16", "recurrent-fp16", "F16"),
    "fp32": Format("fp32", "chunk64", "recurrent", "F32"),
    "tf32": Format("fp32", "chunk64-tf32-out-fp32", None, "F32"),
    "tf32-bf16": Format("bf16", "chunk64-tf32", None, "BF16"),
}
CHUNKS = (16, 32, 64, 128, 256)
WIDE = ("final_state", "ds0", "dA_log", "ddt_bias")  # fp32, and not of tokens


def designs_of(fmt, twin=False):
    """Names and texts of the plug-in's designs in a format; the twins compute some of them."""
    _, chunked, recurrent, _ = FORMATS[fmt]
    found = {}
    for fast, name in ((0, ""), (1, "-fast")):
        for c in CHUNKS:
            found["chunk%d%s" % (c, name)] = "%s,chunk=%d,fast=%d" % (chunked, c, fast)
        if recurrent:
            found["recurrent" + name] = "%s,fast=%d" % (recurrent, fast)
    if twin:
        return {n: found[n] for n in ("recurrent", "chunk16", "chunk32", "chunk64") if n in found}
    if fmt in ("bf16", "fp16"):
        found["merged"] = chunked + ",inverse=merged"
        found["merged128-fast"] = chunked + ",inverse=merged,chunk=128,fast=1"
    return found


# ---- files -----------------------------------------------------------------------------------


def from_bf16(raw):
    wide = bytearray(2 * len(raw))
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return array.array("f", bytes(wide))


def read_safetensors(path):
    """{name: (shape, numbers)}, metadata."""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + size])
    meta, found = head.pop("__metadata__", {}), {}
    for name, t in head.items():
        a, b = (8 + size + x for x in t["data_offsets"])
        raw = data[a:b]
        if t["dtype"] == "BF16":
            numbers = from_bf16(raw)
        elif t["dtype"] == "F16":
            numbers = struct.unpack("<%de" % (len(raw) // 2), raw)
        else:
            numbers = array.array({"F32": "f", "F64": "d", "I64": "q"}[t["dtype"]], raw)
        found[name] = (t["shape"], numbers)
    return found, meta


def packed(numbers, dtype):
    if dtype == "F16":
        return struct.pack("<%de" % len(numbers), *numbers)
    wide = array.array("f", numbers).tobytes()
    if dtype == "F32":
        return wide
    raw = bytearray(len(wide) // 2)
    raw[0::2], raw[1::2] = wide[2::4], wide[3::4]
    return bytes(raw)


def to_bf16(x):
    """Nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, numbers)}"""
    head, body = {}, b""
    for name, (dtype, shape, numbers) in tensors.items():
        raw = packed(numbers, dtype)
        head[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)


# ---- the plug-in in this process ---------------------------------------------------------------

P = ctypes.POINTER(ctypes.c_double)
I32, I64, F64, TEXT = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_char_p


def fields(kind, names):
    return [(name, kind) for name in names.split()]


class SubjectProblem(ctypes.Structure):  # deltaproof_subject_problem
    _fields_ = (
        fields(I32, "abi size H HV K V R Kg Nseq gate_form beta_form l2norm backward rank ranks")
        + fields(I64, "T first tokens")
        + fields(F64, "scale lower_bound")
        + fields(TEXT, "input_format base chain")
        + fields(ctypes.POINTER(I64), "cu")
        + fields(P, "q k v g beta A_log dt_bias initial_state do dht")
        + fields(I32, "chunk nslot")
        + fields(ctypes.POINTER(I64), "read_slot write_slot")
        + fields(P, "erase write")
        + fields(I32, "in_turn")
        + fields(P, "lr_a lr_b")
    )


class SubjectTensor(ctypes.Structure):
    _fields_ = [("name", TEXT), ("ndim", I32), ("shape", I64 * 6), ("data", P)]


class SubjectCall(ctypes.Structure):
    _fields_ = [
        ("count", I32),
        ("tensor", ctypes.POINTER(SubjectTensor)),
        ("comm", ctypes.c_void_p),
        ("why", ctypes.c_char_p),
    ]


class Inputs:
    """A case's inputs, as the plug-in takes them."""

    GATES = {"log": 0, "softplus": 1, "lower_bound": 2}
    BETAS = {"plain": 0, "sigmoid": 1, "sigmoid2": 2, "none": 0}

    def __init__(self, path, op, case_hash):
        tensors, meta = read_safetensors(path)
        self.op, self.path, self.hash = op, path, case_hash
        rename = {"b": "erase", "w": "write"} if op == "gdn2" else {}
        tensors = {rename.get(n, n): t for n, t in tensors.items()}
        self.T, self.H, self.K = tensors["q"][0]
        self.R = len(tensors["k"][1]) // len(tensors["q"][1])
        self.HV, self.V = tensors["v"][0][1], tensors["v"][0][-1]
        cu = tensors.pop("cu_seqlens", (None, [0, self.T]))[1]
        self.Kg = len(tensors["g"][1]) // (self.T * self.HV)
        self.has = set(tensors)
        self.arrays = {n: (F64 * len(x))(*x) for n, (_, x) in tensors.items()}
        self.cu, self.Nseq = (I64 * len(cu))(*cu), len(cu) - 1
        p = self.p = SubjectProblem(abi=1, size=ctypes.sizeof(SubjectProblem))
        for name in ("T", "H", "HV", "K", "V", "R", "Kg", "Nseq"):
            setattr(p, name, getattr(self, name))
        p.cu = ctypes.cast(self.cu, ctypes.POINTER(I64))
        p.tokens, p.ranks, p.backward, p.in_turn = self.T, 1, 1, op == "gated-deltaproduct"
        p.gate_form, p.beta_form = self.GATES[meta["gate"]], self.BETAS[meta["beta"]]
        p.l2norm, p.scale = int(meta["l2norm"]), float(meta["scale"])
        p.lower_bound = float(meta.get("lower_bound", 0))
        p.input_format, p.base, p.chain = b"bf16", b"bf16", b"fp32"
        for name, x in self.arrays.items():
            setattr(p, name, ctypes.cast(x, P))

    def shapes(self):
        T, H, HV, K, V, R = self.T, self.H, self.HV, self.K, self.V, self.R
        keys = [R] if R > 1 else []
        gate = [self.Kg] if self.Kg > 1 else []
        found = {"o": [T, HV, V], "final_state": [self.Nseq, HV, K, V], "dq": [T, H, K]}
        found |= {"dk": [T, H, *keys, K], "dv": [T, HV, *keys, V], "dg": [T, HV, *gate]}
        found |= {"dbeta": [T, HV, *keys], "dA_log": [HV], "ddt_bias": [HV, *gate]}
        found |= {"ds0": [self.Nseq, HV, K, V], "derase": [T, HV, K], "dwrite": [T, HV, V]}
        found |= {"dlr_a": [T, HV, K], "dlr_b": [T, HV, K]}
        of = {"dbeta": "beta", "dA_log": "A_log", "ddt_bias": "dt_bias", "derase": "erase"}
        of |= {"dwrite": "write", "dlr_a": "lr_a", "dlr_b": "lr_b"}
        return {n: s for n, s in found.items() if of.get(n, "q") in self.has}

    def run(self, plugin, design):
        """{name: (shape, numbers)} of a right kernel."""
        shapes, call = self.shapes(), SubjectCall()
        tensors = (SubjectTensor * len(shapes))()
        kept = []
        for t, (name, shape) in zip(tensors, shapes.items(), strict=True):
            n = 1
            for s in shape:
                n *= s
            kept.append((F64 * n)())
            t.name, t.data = name.encode(), ctypes.cast(kept[-1], P)
        call.count, call.tensor = len(shapes), tensors
        why = ctypes.create_string_buffer(256)
        call.why = ctypes.cast(why, ctypes.c_char_p)
        os.environ["ADVERSARY_DESIGN"], os.environ["ADVERSARY_FAULT"] = design, ""
        if plugin.lib.deltaproof_subject_run(ctypes.byref(self.p), ctypes.byref(call)):
            raise Stop("%s: %s" % (design, why.value.decode()))
        return {n: (s, list(x)) for (n, s), x in zip(shapes.items(), kept, strict=True)}


# ---- wrong kernels -----------------------------------------------------------------------------


def scaled(shape, x, axis, picked, by):
    """Entries whose index of the axis is picked, times by."""
    after = 1
    for s in shape[axis + 1 :]:
        after *= s
    return [v * by if picked(i // after % shape[axis]) else v for i, v in enumerate(x)]


def faintest(shape, x):
    """First token of the window of 64 that is smallest, but not zero; 0: there is no window."""
    width, found = len(x) // shape[0], []
    for at in range(1, shape[0] - 64, 16):
        found.append((sum(v * v for v in x[at * width : (at + 64) * width]), at))
    return min([f for f in found if f[0]] or [(0, 0)])[1]


def shuffled(shape, x, seed):
    w = shape[-1]
    rows = [x[i : i + w] for i in range(0, len(x), w)]
    before = list(rows)
    random.Random(seed).shuffle(rows)
    return None if rows == before else [v for row in rows for v in row]


def another(name, right):
    """A gradient of the same shape; None: there is none."""
    like = [n for n, (s, x) in right.items() if n[0] == name[0] == "d" and s == right[name][0]]
    return right[like[like.index(name) - 1]][1] if len(like) > 1 else None


def altered(kind, name, right, chunk):
    """The tensor of a wrong kernel; None: it has no such place."""
    tokens, (shape, x) = name not in WIDE, right[name]
    if kind == "another":
        return another(name, right)
    if kind == "swap-heads" and name not in ("dA_log", "ddt_bias") and shape[1] > 1:
        width = len(x) // (shape[0] * shape[1])
        pieces = [x[i : i + width] for i in range(0, len(x), width)]
        step = [i + 1 if (i + 1) % shape[1] else i + 1 - shape[1] for i in range(len(pieces))]
        return [v for i in step for v in pieces[i]]
    if kind == "last-lost" and tokens:
        return scaled(shape, x, 0, lambda t: t == shape[0] - 1, 0)
    if kind == "zeros":
        return [0.0] * len(x)
    if kind == "times-1.5":
        return [1.5 * v for v in x]
    if kind == "shuffled":
        return shuffled(shape, x, name) if len(shape) > 1 else None
    if kind == "head-1.05":
        axis = 0 if name in ("dA_log", "ddt_bias") else 1
        return scaled(shape, x, axis, lambda h: h == shape[axis] - 1, 1.05)
    if kind in ("window-zero", "faint-zero") and tokens:
        at = min(64, shape[0] - 64)
        if kind == "faint-zero":
            at = faintest(shape, x)
        return scaled(shape, x, 0, lambda t: at <= t < at + 64, 0) if at > 0 else None
    if kind == "channel-2%" and len(shape) > 1 + tokens:
        return scaled(shape, x, len(shape) - 1, lambda c: c == shape[-1] // 2, 1.02)
    if kind == "first-1%" and tokens:
        return scaled(shape, x, 0, lambda t: t % chunk == 0, 1.01)
    return None


ALTERATIONS = [
    "zeros",
    "times-1.5",
    "shuffled",
    "head-1.05",
    "window-zero",
    "faint-zero",
    "channel-2%",
    "first-1%",
    "another",
    "swap-heads",
    "last-lost",
    "other-rule",
]


# ---- judging -----------------------------------------------------------------------------------


class Files:
    """Runs of `deltaproof judge`, remembered in OUT/files.jsonl."""

    def __init__(self, a, plugin):
        self.a, self.plugin = a, plugin
        self.path = os.path.join(a.out, "files.jsonl")
        self.lock, self.kernel = threading.Lock(), threading.Lock()
        self.rows = {}
        self.version = name_program(a.program)
        if os.path.exists(self.path):
            with open(self.path) as f:
                rows = [json.loads(line) for line in f if line.endswith("\n")]
            self.rows = {row["id"]: row for row in rows}

    def inputs(self, op, seed):
        problem = write_recurrence(os.path.join(self.a.out, "cases"), op, seed)
        stem = os.path.join(problem.folder, problem.name)
        command = [self.a.program, "inputs", stem + ".case", "-o", stem + ".safetensors"]
        command += ["--recurrence", op] if op in TWINS else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Stop(done.stderr.strip())
        if op not in TWINS:
            return Inputs(stem + ".safetensors", op, problem.hash)
        try:
            from twins import Twin
        except ImportError as e:
            raise Stop("%s: %s" % (op, e)) from e
        return Twin(
            stem + ".safetensors", op, problem.hash, *read_safetensors(stem + ".safetensors")
        )

    def words_of(self, fmt, design):
        """None: there are none."""
        words = self.plugin.declares(design)
        if words is not None and fmt == "fp16":  # the base says these
            words = ",".join(w for w in words.split(",") if not w.endswith("=fp16"))
        return "chunk=64" if words == "" else words

    def command(self, op, inputs, outputs, fmt, design, declared):
        command = [self.a.program, "judge", "--inputs", inputs, "--outputs", outputs]
        command += ["--base", FORMATS[fmt].base, "--why", "0"]
        command += ["--recurrence", op] if op in TWINS else []
        return command + (["--design", self.words_of(fmt, design)] if declared else [])

    def judge(self, what, inputs, outputs, declared):
        """A row: what was judged, its verdict, and those of its tensors with what decided."""
        identity = " ".join(map(str, (self.version, self.plugin.hash, *what, declared)))
        if identity in self.rows:
            return self.rows[identity]
        fmt, design = what[3], what[5]
        command = self.command(what[0], inputs, outputs, fmt, design, declared) + ["--json", "-"]
        command += ["--cache", self.a.cache] if self.a.cache else []
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1")
        )
        row = {"id": identity, "what": what, "declared": declared, "status": done.returncode}
        try:
            text = done.stdout[done.stdout.index("{") :]
            run = json.JSONDecoder().raw_decode(text)[0]["runs"][0]
        except (ValueError, IndexError):
            row |= {"verdict": "error", "tensors": {}, "why": done.stderr[-300:]}
        else:
            row |= {"verdict": run["verdict"], "why": run.get("why", "")[:300]}
            row["tensors"] = {t["name"]: summary(t) for t in run["tensors"]}
        with self.lock:
            self.rows[identity] = row
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
        return row

    def write(self, path, tensors, fmt):
        short = FORMATS[fmt].stored
        made = {}
        for name, (shape, x) in tensors.items():
            dtype = "F32" if name in WIDE else short
            made[name] = (dtype, shape, [to_bf16(v) for v in x] if dtype == "BF16" else x)
        write_safetensors(path, made)

    def one(self, inputs, seed, fmt, name, design, kinds):
        """A kernel, right ("") or altered, declared and undeclared."""
        with self.kernel:  # the environment says the design
            right = inputs.run(self.plugin, design)
        for kind in kinds:
            stem = "%s-%04d-%s-%s%s" % (inputs.op, seed, fmt, name, kind and "-" + kind)
            path = os.path.join(self.a.out, "cases", stem + ".out.safetensors")
            made = altered_all(kind, right, design)
            if kind == "other-rule" and inputs.op in TWINS and "recurrent" in design:
                made = inputs.run(self.plugin, design, True)
            if not made:
                continue
            self.write(path, made, fmt)
            what = [inputs.op, seed, inputs.hash, fmt, name, design, kind]
            for declared in ways(fmt, self.words_of(fmt, design)):
                if declared and self.a.undeclared or not declared and self.a.declared:
                    continue
                row = self.judge(what, inputs.path, path, declared)
                if self.a.keep and not kind and row["verdict"] == "fail":
                    os.makedirs(self.a.keep, exist_ok=True)
                    for kept in (inputs.path, path):
                        shutil.copy(kept, self.a.keep)
            os.remove(path)

    def again(self, row):
        """The command that repeats a false alarm, on the files that were kept."""
        op, seed, _, fmt, name, design, _ = row["what"]
        stem = os.path.join(self.a.keep or ".", "%s-%04d" % (op, seed))
        outputs = "%s-%s-%s.out.safetensors" % (stem, fmt, name)
        command = self.command(op, stem + ".safetensors", outputs, fmt, design, row["declared"])
        return " ".join(["deltaproof", *command[1:]])

    def mine(self):
        """Rows of this program and this plug-in."""
        start = self.version + " " + self.plugin.hash
        return [r for r in self.rows.values() if r["id"].startswith(start)]


def ways(fmt, words):
    """Declared and undeclared; what claims fp32 for all but its operands must say so."""
    return [False] if words is None else [True] if fmt == "tf32" else [True, False]


def name_program(program):
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    with open(program, "rb") as f:
        return "%s %s" % (said, hashlib.sha1(f.read()).hexdigest()[:8])


def summary(t):
    """Verdict, tier, level that decided, its error over its limit, error over bound."""
    e = t.get("expected") or {}
    return [t["verdict"], t.get("tier"), e.get("level"), e.get("excess"), t.get("ratio")]


def altered_all(kind, right, design):
    """All tensors altered, which have a place for it; their verdicts are apart."""
    if not kind:
        return right
    chunk = int((design.split("chunk=")[1:] or ["64"])[0].split(",")[0])
    made = {n: altered(kind, n, right, chunk) for n in right}
    return {n: (right[n][0], x) for n, x in made.items() if x is not None}


# ---- tables ------------------------------------------------------------------------------------


def said(declared):
    return "declared" if declared else "undeclared"


def show_alarms(files, rows):
    """A line a failing tensor of a right kernel, its command, counts by recurrence and design."""
    count, bad, unjudged = (collections.Counter() for _ in range(3))
    for r in rows:
        op, seed, _, fmt, name, _, kind = r["what"]
        key = (op, fmt, name, said(r["declared"]))
        if kind:
            continue
        count[key] += 1
        bad[key] += r["verdict"] == "fail"
        unjudged[key] += r["verdict"] not in ("pass", "fail")
        if r["verdict"] == "error":
            print("ERROR %s %s %s %s: %s" % (*key, r["why"]))
        if r["verdict"] != "fail":
            continue
        print("\nALARM %s-%04d %s %s %s" % (op, seed, fmt, name, key[3]))
        for t, (verdict, tier, level, excess, ratio) in r["tensors"].items():
            if verdict == "fail":
                over = ratio if tier == "bound" else excess
                print("  %-12s %s, %s: %.3g of its limit" % (t, tier, level, over or 0))
        print("  " + files.again(r))
    print("\nright kernels that failed, that were not judged, of how many")
    for key in sorted(count):
        if bad[key] or unjudged[key]:
            print("  %-19s %-9s %-14s %-10s" % key, bad[key], unjudged[key], count[key])
    if count:
        show_worst([r for r in rows if not r["what"][-1]])
    totals = [sum(c.values()) for c in (bad, unjudged, count)]
    print("all: %d failed, %d not judged, of %d" % tuple(totals))


def show_worst(rows):
    """Runs of right kernels, and the largest error over the limit of the expected tier."""
    found = collections.defaultdict(list)
    for r in rows:
        excess = [t[3] or 0 for t in r["tensors"].values()]
        found[r["what"][0], r["what"][3]].append(max(excess, default=0))
    formats = [f for f in FORMATS if any(f == fmt for _, fmt in found)]
    print("\n| recurrence | %s |\n|%s" % (" | ".join(formats), " --- |" * (len(formats) + 1)))
    for op in dict.fromkeys(op for op, _ in found):
        cells = ["%d, %.2f" % (len(x), max(x, default=0)) for x in (found[op, f] for f in formats)]
        print("| %s | %s |" % (op, " | ".join(cells)))


def show_passing(rows):
    """Wrong kernels, by alteration and format: tensors that passed or were unjudged."""
    count = collections.defaultdict(lambda: collections.defaultdict(collections.Counter))
    for r in rows:
        kind = r["what"][-1]
        for t, found in r["tensors"].items() if kind else ():
            count[kind, r["what"][3], said(r["declared"])][t][found[0]] += 1
    if count:
        print("\nwrong kernels: passed (+ unjudged) of how many, by tensor; those not named: none")
    for key, tensors in sorted(count.items()):
        found = []
        for t, c in tensors.items():
            if c["fail"] < c.total():
                unjudged = "+%d" % c["unjudged"] if c["unjudged"] else ""
                found.append("%s %d%s/%d" % (t, c["pass"], unjudged, c.total()))
        print("  %-11s %-9s %-10s" % key, ", ".join(found) or "-")


def command_files(a, plugin):
    files, tasks = Files(a, plugin), []
    kinds = ([] if a.wrong == "only" else [""]) + (ALTERATIONS if a.wrong else [])
    for seed in range(a.seed, a.seed + max(a.generated, 1)):
        for op in a.recurrences or RECURRENCES + TWINS:
            inputs = files.inputs(op, seed)
            for fmt in a.formats or FORMATS:
                for name, design in designs_of(fmt, op in TWINS).items():
                    if not a.designs or name in a.designs:
                        tasks.append((inputs, seed, fmt, name, design, kinds))
    end = time.time() + a.seconds

    def work(task):
        if time.time() < end:
            files.one(*task)

    with ThreadPoolExecutor(a.jobs) as pool:
        list(pool.map(work, tasks))
    show_alarms(files, files.mine())
    show_passing(files.mine())
    return 0
