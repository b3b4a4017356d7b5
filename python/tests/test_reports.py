"""Public reports of wrong kernels, each modelled in kernels that share no code with ref/ and
harness/ (wrong_kernels.py): a case of their recurrence's sets is red, and the text names the cause,
or the place."""

from dataclasses import dataclass
from typing import Any

import pytest

import deltaproof
from deltaproof.contract import Contract
from deltaproof.themes import case_paths
from wrong_kernels import make

GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "ds0")
OUTPUTS = {
    "forward": ("o", "final_state"),
    "grads": ("o", "final_state", *GRADS),
    "pool": ("o", "pool"),
}


@dataclass(frozen=True)
class Report:
    """where: the report; case: one of the set that is red; says: words of the verdict or of what
    fits; kind: what the kernel gives back."""

    where: str
    fault: str
    case: str
    says: str
    kind: str = "forward"
    of: str = "standard"


REPORTS = (
    Report("slime#1686", "cu-ignored", "gdn-packed-inside", "cu_seqlens were ignored"),
    Report("LlamaFactory#10787", "cu-ignored", "kda-packed-mixed", "cu_seqlens were ignored"),
    Report("aprender#3527", "heads-tiled", "gdn-heads", "heads of q and k were tiled"),
    Report("aprender#3527", "heads-tiled", "kda-heads", "heads of q and k were tiled", "grads"),
    Report("shainet#204", "a-log-twice", "gdn-softplus", "exponentiated twice"),
    Report("shainet#204", "a-log-twice", "kda-softplus", "exponentiated twice", "grads"),
    Report("mlx-lm#1792", "dt-bias-per-head", "kda-softplus", "dt_bias were one number a head"),
    Report("mlx-swift-lm#381", "dk-tail", "gdn-tails", "token 0"),
    Report("mlx-swift-lm#381", "k-over-128", "kda-k192", "token 0"),
    Report("mlx-swift-lm#381", "v-over-128", "gdn-v256", "token 0"),
    Report("unsloth-zoo#776", "grads-of-row0", "gdn-rows", "token 70", "grads", "training"),
    Report("maxtext#5295", "l2-clamp", "gdn-tiny-norms", "clamped at 1e-6"),
    Report("transformers#45513", "s0-lost-multi", "gdn-t129", "initial state were ignored"),
    Report("ollama37#23", "beta-pad", "gdn-heads", "token 64"),
    Report("ollama37#23", "diag-two", "gdn-t64", "token 0"),
    Report("tokenspeed#700", "pad-slot-0", "gdn-slots", "pool: slot 0", "pool", "serving"),
    Report("vllm-ascend#12040", "empty-runs", "gdn-packed-empty", "sequence 0"),
    Report("vllm#26807", "mixed-decode-lost", "gdn-packed-mixed", "sequence"),
    Report("flashinfer#3536", "empty-zero", "gdn-packed-empty", "without tokens is zero"),
    Report("a state read [V,K]", "state-turned", "gdn-packed-inside", "initial state were read"),
    Report("a state written [V,K]", "final-turned", "kda-t129", "final_state is transposed"),
    Report("q scaled by the caller, too", "scale-twice", "gdn-smoke", "scale twice"),
    Report("exp2 for exp", "base-2", "kda-smoke", "powers of 2"),
    Report("fla#885", "undecayed", "gdn-states", "before its decay"),
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: f"{r.where}-{r.case}")
def test_the_fault_of_a_report_is_red_and_named(report: Report, tmp_path: Any) -> None:
    model = report.case.split("-")[0]
    own: dict[str, Any] = {"outputs": OUTPUTS[report.kind], "models": (model,)}
    kernel = make(report.fault)
    in_set = case_paths(report.of, Contract(kernel, base="fp32", **own), str(tmp_path))
    assert any(path.endswith(f"/{report.case}.case") for path in in_set)
    found = deltaproof.run(kernel, report.case, base="fp32", layouts=(), **own)
    assert found.status == 1 and report.says in found.text, found.text


@pytest.mark.parametrize("kind", ["forward", "grads", "pool"])
def test_the_kernel_without_a_fault_passes_the_same_cases(kind: str) -> None:
    for model in ("gdn", "kda"):
        reports = [r for r in REPORTS if r.kind == kind and r.case.startswith(model)]
        if not reports:
            continue
        found = deltaproof.run(
            make(),
            sorted({r.case for r in reports}),
            base="fp32",
            outputs=OUTPUTS[kind],
            models=(model,),
            layouts=(),
        )
        assert found.passed, found.text
