"""The common mistake that would explain a failing run of a Python function, and a tighter claim of
a passing one. It is the program's own search (harness/run/hypotheses.h), on the inputs and outputs
of one call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from .contract import Contract
from .limits import LONGEST
from .program import ran
from .server import About, Server, run_program
from .tensors import save
from .vocabulary import INPUTS, unit_axes
from .words import in_python


def _settings(given: dict[str, Any], sequences: Any) -> dict[str, Any]:
    """A problem's, as metadata of its file."""
    out = {"gate": given["gate"], "beta": given["beta_form"], "l2norm": int(given["l2norm"])}
    out["scale"] = repr(given["scale"])
    if given["gate"] == "lower_bound":
        out["lower_bound"] = repr(given["lower_bound"])
    if len(sequences):
        out["cu_seqlens"] = ",".join(str(int(n)) for n in sequences)
    return out


def fits(
    contract: Contract, about: About, case: str, limit: float, options: Sequence[str]
) -> list[str]:
    """Lines "fits: .." or "tighter claim: .." of the case, which is run once more. Nothing where it
    takes several calls, a session."""
    server = Server(contract, about, limit)
    with tempfile.TemporaryDirectory(prefix="deltaproof-") as folder:
        paths = [os.path.join(folder, x) for x in ("in.safetensors", "out.safetensors")]
        to = [f"--json={folder}/again.json", f"--limit={LONGEST:.0f}", "--again=0"]
        run_program(["run", case, *to, *options], server)
        if server.calls != 1 or server.last is None:
            return []
        problem, made = server.last
        sizes = {a: problem.settings[a] for a in ("R", "Kg")}
        arrays = {
            n: x.squeeze(unit_axes(n, sizes)) for n, x in problem.arrays.items() if n in INPUTS
        }
        sequences = problem.arrays.get("cu_seqlens", ())
        save(paths[0], arrays, _settings(dict(problem.settings), sequences))
        save(paths[1], made)
        command = ["judge", f"--inputs={paths[0]}", f"--outputs={paths[1]}"]
        command += [f"--base={about.base}", *(x for x in options if x.startswith("--cache="))]
        command += [f"--design={about.design}"] if about.design is not None else []
        text = ran(*command).stdout
    said = [in_python(x) for x in text.splitlines() if x.startswith(("fits: ", "tighter claim: "))]
    if contract.state_layout == "vk":  # the files are [K,V]: their other layout is this one
        said = [x.replace('state_layout="vk"', 'state_layout="kv"') for x in said]
    return said
