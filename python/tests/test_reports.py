"""Public reports of wrong kernels, each modelled in kernels that share no code with ref/ and
harness/ (wrong_kernels.py). A case of their recurrence's sets is red, and the text names the cause,
or the place."""

import importlib
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

import deltaproof
from deltaproof import themes
from deltaproof.contract import Contract
from deltaproof.themes import case_paths
from wrong_kernels import by_chunks, make

GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "ds0")
OUTPUTS = {
    "forward": ("o", "final_state"),
    "grads": ("o", "final_state", *GRADS),
    "pool": ("o", "pool"),
    "h": ("o", "final_state", "h"),
}


@dataclass(frozen=True)
class Report:
    """A reported fault: `where` is the report, `case` a case that fails, `says` words of the
    verdict or of the mistake. The results that the kernel returns are `kind`."""

    where: str
    fault: str
    case: str
    says: str
    kind: str = "forward"
    of: str = "standard"


REPORTS = (  # the first one is LlamaFactory#10787, too
    Report("slime#1686", "cu-ignored", "gdn-packed-inside", "cu_seqlens were ignored"),
    Report("aprender#3527", "heads-tiled", "gdn-heads", "heads of q and k were tiled"),
    Report("shainet#204", "a-log-twice", "gdn-softplus", "exponentiated twice"),
    Report("mlx-lm#1792", "dt-bias-per-head", "kda-softplus", "dt_bias were one number a head"),
    Report("mlx-swift-lm#381", "dk-tail", "gdn-tails", "token 0"),
    Report("mlx-swift-lm#381", "k-over-128", "kda-k192", "token 0"),
    Report("unsloth-zoo#776", "grads-of-row0", "gdn-rows", "token 70", "grads", "training"),
    Report("maxtext#5295", "l2-clamp", "gdn-tiny-norms", "clamped at 1e-6"),
    Report("transformers#45513", "s0-lost-multi", "gdn-t129", "initial state were ignored"),
    Report("ollama37#23", "beta-pad", "gdn-heads", "token 64"),
    Report("ollama37#23", "diag-two", "gdn-states", "token 0"),
    Report("tokenspeed#700", "pad-slot-0", "gdn-slots", "pool: slot 0", "pool", "serving"),
    Report("vllm-ascend#12040", "empty-runs", "gdn-packed-empty", "sequence 0"),
    Report("vllm#26807", "mixed-decode-lost", "gdn-packed-mixed", "sequence"),
    Report("flashinfer#3536", "empty-zero", "gdn-packed-empty", "without tokens is zero"),
    Report("a state read [V,K]", "state-turned", "gdn-packed-inside", "initial state were read"),
    Report("a state written [V,K]", "final-turned", "kda-t129", "final_state is transposed"),
    Report("q scaled by the caller, too", "scale-twice", "gdn-smoke", "scale twice"),
    Report("exp2 for exp", "base-2", "kda-smoke", "powers of 2"),
    Report("beta in bf16", "beta-bf16", "gdn-t65", "beta were rounded to bf16"),
    Report("eps of a norm", "l2-eps", "gdn-small-norms", "eps = 1e-5 in the norm"),
    Report("eps of a norm", "l2-outside", "gdn-tiny-norms", "eps = 1e-6 outside the root"),
    Report("keys normed unasked", "keys-normed", "gdn-key-norms", "dbeta at token 0", "grads"),
    Report("inputs in bf16", "q-bf16", "gdn-t65", "dv: ", "grads"),
    Report("inputs in bf16", "do-bf16", "kda-states", "dv: ", "grads"),
    Report("values in fp16", "v-float16", "gdn-mild", "NaN or Inf"),
    Report("gradients in fp16", "do-float16", "gdn-t65", "dbeta at token 0", "grads"),
    Report("norms in fp16", "l2-float16", "kda-tiny-norms", "o: "),
    Report("a bound of its own", "bound-5", "gdn-lower-bound", "o: "),
    Report("rates from 1 on", "a-log-above-0", "kda-softplus-rates", "o: "),
    Report("a state that keys moved", "channels-dead", "kda-moved", "final_state"),
    Report("a state not read", "s0-ignored", "kda-states", "initial state were ignored"),
    Report("flashinfer#3145", "slot-wraps-4", "gdn-slots", "pool: slot", "pool", "serving"),
    Report("vllm-ascend#17003", "first-call", "gdn-smoke", "token 159"),
    Report("shainet#170", "w-ungated", "gdn-states", "o at token 0"),
    Report("fla#104", "equal-sums", "gdn-no-decay", "token 1"),
    Report("cuLA#38", "stale-tail", "kda-t129", "final_state"),
    Report("flashinfer#4896", "h-late", "gdn-t129", "h: ", "h"),
    Report("vllm#40956", "h-turned", "gdn-packed-inside", "token"),
    Report("fla#885", "undecayed", "gdn-states", "before its decay"),
)


# Tests of reports that no case of a set shows, or that take another call. A report whose row
# ends in "asked" is red where a user asks for it, all others by what `run` of a set does by itself,
# the layouts of a run on a CPU and the check of the set large among it.
ELSEWHERE = {
    "mamba#884": "test_batches::test_an_offset_of_32_bits_wraps_in_a_far_layout",
    "transformers#46773": "test_batches::test_a_mask_leaves_out_what_stands_in_front_of_a_row",
    "vllm#51562": "test_batches::test_what_lies_where_no_state_is_means_nothing",
    "vllm#56196": "test_drafts::test_states_of_convolutions_lie_in_slots asked",
    "vllm#56419": "test_drafts::test_what_a_rollback_gets_wrong_is_red",
    "fla#623": "test_heads::test_a_gate_per_value_channel",
    "flashinfer#3886": "test_heads::test_several_query_heads_a_key_head",
    "fla#945": "test_reports::test_a_race_of_one_call_in_ten_is_red_on_cases_in_a_row",
    "flashinfer#3698": "test_reports::test_a_hang_is_red",
    "fla#906": "test_reports::test_the_set_large_makes_that_check_by_itself",
    "sparkinfer#1071": "test_reports::test_the_set_large_makes_that_check_by_itself",
}


def test_all_32_reports_have_a_test() -> None:
    """A report has a row of REPORTS or an existing test. One fault fails only in a case of a
    program with convolutions."""
    of_projects = {r.where for r in REPORTS if "#" in r.where} | set(ELSEWHERE)
    assert len(of_projects) == 32, sorted(of_projects)
    asked = 0
    for name in ELSEWHERE.values():
        module, test = name.split()[0].split("::")
        assert hasattr(importlib.import_module(module), test), name
        asked += name.endswith(" asked")
    assert asked == 1


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: f"{r.where}-{r.case}")
def test_the_fault_of_a_report_is_red_and_named(report: Report, tmp_path: Any) -> None:
    model = report.case.split("-")[0]
    own: dict[str, Any] = {"outputs": OUTPUTS[report.kind], "models": (model,)}
    kernel = make(report.fault)
    in_set = case_paths(report.of, Contract(kernel, base="fp32", **own), str(tmp_path))
    assert any(path.endswith(f"/{report.case}.case") for path in in_set)
    found = deltaproof.run(kernel, report.case, base="fp32", layouts=(), **own)
    assert found.status == 1 and report.says in found.text, found.text


def test_a_race_of_one_call_in_ten_is_red_on_cases_in_a_row(tmp_path: Any) -> None:
    """fla#945, triton#10590."""
    own: dict[str, Any] = {"outputs": OUTPUTS["forward"], "models": ("gdn",)}
    cases = case_paths("standard", Contract(make(), base="fp32", **own), str(tmp_path))[:9]
    found = deltaproof.run(make("race"), cases, base="fp32", layouts=(), **own)
    assert found.status == 1, found.text


def test_a_hang_is_red() -> None:
    """flashinfer#3698."""
    found = deltaproof.run(
        make("hang"), "gdn-t1", base="fp32", models=("gdn",), layouts=(), limit=1
    )
    assert found.status == 1 and re.search(r"the call took \d+\.\d s, limit=1\b", found.text)


def test_what_only_long_inputs_show_is_seen_by_check() -> None:
    """mamba#884 in small: an offset of 13 bits for 32."""
    own: dict[str, Any] = {"tokens": 512, "base": "fp32", "models": ("gdn",)}
    checks = deltaproof.check(make("wrap"), case="gdn-smoke", **own)
    assert [x.name for x in checks if x.verdict == "fail"], checks


@pytest.mark.parametrize("fault", ["", "tail", "window"])
def test_the_set_large_makes_that_check_by_itself(fault: str, monkeypatch: Any) -> None:
    """fla#906, sparkinfer#1071 in small: 512 tokens for 131,072, faults from 300 on; of its cases a
    small one."""
    small = [
        replace(t, sets=("large",) if t.name == "t65" else ())
        for t in themes.THEMES
        if t.name in ("t65", "smoke")
    ]
    monkeypatch.setattr(themes, "THEMES", tuple(small))
    own: dict[str, Any] = {"base": "fp32", "models": ("gdn",), "layouts": (), "tokens": 512}
    found = deltaproof.run(make(fault), "large", **own)
    assert found.status == bool(fault) and len(found.checks) > 5, found.text
    assert found.passed == (not fault), found.checks
    assert bool(fault) == ("check of 512 tokens: " in found.text), found.text


@pytest.mark.parametrize(
    "fault, case, says",
    [
        ("cu-ignored", "gdn-packed-inside", "cu_seqlens were ignored"),
        ("undecayed", "gdn-states", "before its decay"),
        ("a-log-twice", "kda-softplus", "exponentiated twice"),
        ("", "gdn-t64", ""),
    ],
)
def test_bisect_names_the_cause(fault: str, case: str, says: str) -> None:
    own: dict[str, Any] = {"outputs": ("o", "final_state"), "models": (case.split("-")[0],)}
    found = deltaproof.bisect(make(fault), case, base="fp32", **own)
    assert found.status == bool(fault) and says in found.text, found.text
    assert ("fits: " in found.text) == bool(fault), found.text


def test_a_one_token_row_from_what_was_there_before_is_red() -> None:
    """vllm#51562."""
    cases = ["gdn-kept-bf16", "gdn-first-one"]
    own: dict[str, Any] = {"outputs": OUTPUTS["forward"], "models": ("gdn",)}
    found = deltaproof.run(make("first-token-stale"), cases, base="fp32", layouts=(), **own)
    assert found.status == 1 and "token 0" in found.text, found.text


@pytest.mark.parametrize("kind", ["forward", "grads", "pool", "h"])
def test_the_kernel_without_a_fault_passes_the_same_cases(kind: str) -> None:
    for model in ("gdn", "kda"):
        reports = [r for r in REPORTS if r.kind == kind and r.case.startswith(model)]
        if not reports:
            continue
        found = deltaproof.run(
            by_chunks() if kind == "h" else make(),
            sorted({r.case for r in reports}),
            base="fp32",
            outputs=OUTPUTS[kind],
            models=(model,),
            layouts=(),
        )
        assert found.passed, found.text
