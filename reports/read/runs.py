"""Runs of the program, for a script that asks it many questions.

    Program(path, args).record(words..)   the record of `run` with these words
    .json(words..)                        what a command writes to --json
    .call(words..)                        a command's status and output; alone: on one core
    .cases                                the folder of cases: --cases, or the project's
CannotRun: it has no answer; the text says why.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from typing import Any, ClassVar

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class CannotRun(Exception):
    """The program has no answer."""


class Program:
    running: ClassVar[set[subprocess.Popen[str]]] = set()
    stopped: ClassVar[bool] = False

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        self.path = path
        self.cases = args.cases or os.path.join(HOME, "cases")
        self.cache = ["--cache", args.cache] if args.cache else []
        self.rows = ["--recurrence", args.recurrence] if args.recurrence else []
        said = self.call("--version").stdout
        found = re.search(r"\((.*)\)", said)
        self.commit = found[1] if found else "unknown"

    def call(
        self, *words: str, alone: bool = False, fault: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"DELTAPROOF_ALONE": str(os.getpid())}  # it ends with this process
        if alone:
            env["OMP_NUM_THREADS"] = "1"
        if fault:
            env["DPG_FAULT"] = fault
        line = [self.path, *words, *(self.rows if words[1:] else [])]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            line, stdout=pipe, stderr=pipe, text=True, env=env, errors="replace"
        ) as p:
            self.running.add(p)
            try:
                if self.stopped:
                    raise CannotRun("interrupted")
                said = p.communicate()
            except BaseException:
                p.terminate()
                raise
            finally:
                self.running.discard(p)
        return subprocess.CompletedProcess(line, p.returncode, *said)

    @classmethod
    def stop(cls) -> None:
        """Ends what runs, in every thread; nothing begins after it."""
        cls.stopped = True
        for p in list(cls.running):
            p.terminate()

    def json(self, *words: str) -> Any:
        made = self.call(*words, "--json", "-")
        if made.returncode:
            raise CannotRun(reason(made.stderr))
        return json.loads(made.stdout)

    def record(self, *words: str, alone: bool = False, fault: str | None = None) -> dict[str, Any]:
        """Killed: a record without runs, `died` is the signal. `said`: standard error."""
        with tempfile.TemporaryDirectory(prefix="deltaproof-") as folder:
            file = os.path.join(folder, "results.json")
            made = self.call("run", *words, *self.cache, "--json", file, alone=alone, fault=fault)
            if made.returncode < 0:
                return {"runs": [], "cases": [], "errors": 0, "died": -made.returncode, "said": ""}
            if not os.path.exists(file):
                raise CannotRun(reason(made.stderr))
            with open(file) as f:
                return {**json.load(f), "said": made.stderr}


def reason(stderr: str) -> str:
    said = stderr.split("\nTry `")[0]  # which names --help
    last = said.strip().rsplit("\n", 1)[-1] or "ended without a word"
    return re.sub(r"^deltaproof( \w+)?: (museum: )?", "", last)
