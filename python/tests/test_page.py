"""The page and the summary on runs that fail, and on those that were not judged."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

import deltaproof
from kernels import inputs, kda

SAID: dict[str, Any] = {"base": "fp32", "gate": "log", "beta": "plain", "l2norm": False}


def page(folder: Path) -> str:
    """The text of the page, without markup."""
    whole = re.sub(r"<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", whole)).split())


def test_a_card_says_where_each_failing_tensor_begins_to_fail(tmp_path: Path) -> None:
    x = {n: np.concatenate([a, a]) for n, a in inputs(V=16).items()}
    o, state = kda(**x)
    o[130:] *= np.float32(1.01)
    made = {"o": o, "final_state": state * np.float32(1.01)}
    assert deltaproof.judge(x, made, out=str(tmp_path), **SAID).status == 1
    said = page(tmp_path)
    assert "o is first beyond its limit at tokens 128 to 191, in 2 of 4 windows" in said, said
    title, sentence = re.findall(
        r"Failures .*? (o|final_state) of outputs.*?: (?:error of )?(o|final_state) (?::|is)", said
    )[0]
    assert title == sentence, said
    other = {"o": "final_state", "final_state": "o"}[title]
    assert f"{other} fails, too" in said, said
    assert "shape T 200" in said and "base fp32" in said
    assert " Findings " not in said, "an empty heading"
    assert "/ undeclared / file" in said, "a label of a run with an empty word"


def test_the_design_that_explains_a_run_is_not_in_its_label(tmp_path: Path) -> None:
    x = inputs(V=16)
    o, state = kda(**x)
    o[:, 1] *= np.float32(1.04)
    made = {"o": deltaproof.to_bf16(o), "final_state": state}
    assert deltaproof.judge(x, made, out=str(tmp_path), **{**SAID, "base": "bf16"}).status == 1
    said = page(tmp_path)
    assert "explained by chunk=" in said, said
    assert "o, 1 rank, bf16 / fp32 / undeclared / file" in said, "a label too long for its table"
    assert "Nearest to a bound, of those that pass: final_state at" in said, said


def test_the_mistake_that_fits_stands_in_the_page(tmp_path: Path) -> None:
    x = inputs(V=16)
    late = np.roll(kda(**x)[0], 1, 0)
    assert deltaproof.judge(x, {"o": late}, out=str(tmp_path), **SAID).status == 1
    assert "Fits : o is one token late" in page(tmp_path)


def test_the_page_of_a_run_says_where_it_begins_in_which_settings_and_what_fits(
    tmp_path: Path,
) -> None:
    def undecayed(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        g = g.copy()
        g[64::64] = 0  # the first token of a chunk does not decay the state
        return kda(q, k, v, g, beta, initial_state)

    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}
    found = deltaproof.run(undecayed, "kda-corr", report=str(tmp_path), **own)
    assert found.status == 1 and "begins:  o at token 64, head 0, a chunk border" in found.text
    said = page(tmp_path)
    assert "the first row of o beyond its bound is token 64, head 0, a chunk border" in said, said
    assert "inputs bf16 gate log beta plain l2norm False" in said, said

    def late(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None) -> Any:
        o, state = kda(q, k, v, g, beta, initial_state)
        return np.roll(o, 1, 0), state

    assert deltaproof.run(late, "t65", report=str(tmp_path), **own).status == 1
    assert "Fits : o is one token late" in page(tmp_path)


def test_the_summary_says_what_was_not_judged_and_the_record_is_small(tmp_path: Path) -> None:
    cases = ("t65", "smoke-kda")
    own: dict[str, Any] = {"base": "fp32", "outputs": ("o", "final_state"), "layouts": ()}
    found = deltaproof.run(kda, cases, out=str(tmp_path), **own)
    assert "smallest error that fails: " in found.text, found.text
    summary = (tmp_path / "summary.md").read_text()
    assert "| not judged | runs |" in summary and "gate softplus" in summary, summary
    text = (tmp_path / "results.json").read_text()
    assert text.count("\n") == 1
    tensors = json.loads(text)["runs"][0]["tensors"]
    for t in tensors:
        assert "windows" not in t and "per_head" not in t
        levels = [k for k, v in t["expected"].items() if isinstance(v, dict)]
        assert levels == [t["expected"]["level"]]
