"""The plug-in: builds it when its sources changed, and reads its tables of designs and faults."""

import ctypes
import hashlib
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
CFLAGS = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off"]
TENSORS = [
    *("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "ds0"),
    *("derase", "dwrite", "dlr_a", "dlr_b"),
]


class Stop(Exception):
    """Errors that end the program with a message and status 2."""


class Plugin:
    """The built library, its tables, and the self-check program. library: one that was built from
    these sources elsewhere."""

    def __init__(self, out, library=None):
        self.sources = sorted(f for f in os.listdir(HERE) if f.endswith((".c", ".h")))
        self.library = os.path.abspath(library or os.path.join(out, "libadversary.so"))
        self.checker = os.path.abspath(os.path.join(out, "check"))
        self.hash = self.hash_sources()
        modules = [f for f in self.sources if f.endswith(".c") and f != "check.c"]
        if not library:
            self.compile(modules, self.library, ["-fPIC", "-shared", "-Wl,-Bsymbolic"])
        try:
            lib = self.lib = ctypes.CDLL(self.library)
        except OSError as e:
            raise Stop("%s: %s" % (self.library, e)) from e
        lib.adversary_says.restype, lib.adversary_says.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        self.designs = self.table(lib.adversary_designs)
        self.faults = self.table(lib.adversary_faults)

    def hash_sources(self):
        h = hashlib.sha1(" ".join(CFLAGS).encode())
        for name in self.sources:
            with open(os.path.join(HERE, name), "rb") as f:
                h.update(f.read())
        return h.hexdigest()[:12]

    def compile(self, modules, to, flags):
        stamp = to + ".hash"
        if os.path.exists(to) and os.path.exists(stamp):
            with open(stamp) as f:
                if f.read() == self.hash:
                    return
        files = [os.path.join(HERE, m) for m in modules]
        command = [
            os.environ.get("CC", "cc"),
            *CFLAGS,
            "-I",
            os.path.join(ROOT, "harness"),
            *files,
            *flags,
            "-o",
            to + ".new",
            "-lm",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as e:
            raise Stop("%s: %s" % (command[0], e.strerror)) from e
        if done.returncode:
            raise Stop("cannot build %s:\n%s" % (to, done.stderr))
        os.replace(to + ".new", to)  # another process may run the old one
        with open(stamp, "w") as f:
            f.write(self.hash)

    def table(self, function):
        function.restype = ctypes.c_char_p
        lines = function().decode().strip("\n").split("\n")
        return {line.split("\t")[0]: line.split("\t")[1:] for line in lines}

    def check(self, designs):
        self.compile(["check.c"], self.checker, [self.library])
        return subprocess.run([self.checker, *designs]).returncode

    def says(self, design):
        """The fields of NAME[,KEY=VALUE..]: its base, its declaration, its roundings."""
        said = self.lib.adversary_says(design.encode()).decode()
        if not said:
            raise Stop("no design '%s'; there are %s" % (design, " ".join(self.designs)))
        return said.split("\t")

    def base(self, design):
        return self.says(design)[0]

    def declares(self, design):
        """The words by which it declares itself; None: there are none for it."""
        words = self.says(design)[1]
        return None if words == "-" else words

    def rounds_state(self, design):
        return self.says(design)[2] == "state"

    def expand(self, names):
        """Faults with their tensors: NAME, NAME.TENSOR, or all."""
        out = []
        for name in names or self.faults:
            fault, _, tensor = name.partition(".")
            if fault not in self.faults:
                raise Stop("no fault '%s'; there are %s" % (fault, " ".join(self.faults)))
            tensors = self.faults[fault][0].split()
            if tensor and (tensor not in TENSORS or not tensors):
                raise Stop("fault '%s': it has no tensor '%s'" % (name, tensor))
            out += [name] if tensor or not tensors else [fault + "." + t for t in tensors]
        return out

    def scale(self, fault):
        return self.faults[fault.partition(".")[0]][1]

    def ranks(self, fault):
        return int(self.faults[fault.partition(".")[0]][2])
