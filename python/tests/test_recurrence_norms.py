"""Norms in a user's own rows. A numpy kernel shares no code with the program, with right norms and
with wrong ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaproof import Recurrence, assert_explained, judge, run, to_bf16

EPS = 0.03
NORMED = Recurrence(
    "normed",
    query="q",
    gate="g",
    keys=("k", "p"),
    values=("v",),
    number="beta",
    rows=({"write": "k", "read": "p", "value": "v", "strength": "beta"},),
    norm=("q", "k", "p"),
    eps=EPS,
)
T, H, K, V = 70, 2, 16, 24
Arrays = dict[str, np.ndarray]
Norm = Callable[[np.ndarray, str], tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]]


def inputs() -> Arrays:
    rng = np.random.default_rng(9)
    x = {n: 0.2 * rng.standard_normal((T, H, K)) for n in ("q", "k")}
    x["p"] = x["k"] * rng.uniform(0.3, 1, (T, H, 1))
    x["g"] = -0.1 * np.abs(rng.standard_normal((T, H, K)))
    x["beta"] = rng.uniform(0.3, 1, (T, H))
    x |= {n: rng.standard_normal((T, H, V)) for n in ("v", "do")}
    return {n: to_bf16(a).astype(np.float32) for n, a in x.items()}


def norm(x: np.ndarray, name: str, *, of: str = "qkp", chain: bool = True,
         eps: float = EPS, outside: bool = False, stored: bool = False,
         which: str = "l2", at0: float = 0) -> Any:  # fmt: skip
    """Rows over their norms, and the gradient of the rows from that of the result. at0: the slope
    of |x| at 0."""
    if name not in of:
        return x, lambda d: d
    n, l1 = (K if which == "rms" else 1), which == "l1"
    total = (np.abs(x) if l1 else x * x / n).sum(-1, keepdims=True) + (0 if outside else eps)
    size = total if l1 else np.sqrt(total)
    rstd = 1 / (size + (eps if outside else 0))
    y = to_bf16(x * rstd).astype(np.float64) if stored else x * rstd
    slope = np.where(y == 0, at0, np.sign(y)) if l1 else y / n
    return y, lambda d: rstd * (d - slope * (y * d).sum(-1, keepdims=True)) if chain else rstd * d


def kernel(x: Arrays, **how: Any) -> Arrays:
    """S <- diag(exp g) S;  S <- S + k' beta (v - p S);  q, k, p over their norms."""
    T, H, K, V = *x["k"].shape, x["v"].shape[-1]
    x = {n: a.astype(np.float64) for n, a in x.items()}
    (q, to_q), (k, to_k), (p, to_p) = (norm(x[n], n, **how) for n in ("q", "k", "p"))
    S, states, left = np.zeros((H, K, V)), [], []
    y = {f"d{n}": np.zeros(x[n].shape) for n in ("q", "k", "p", "v", "g", "beta")}
    y["o"] = np.zeros((T, H, V))
    for t in range(T):
        S = np.exp(x["g"][t])[..., None] * S
        states.append(S)
        left.append(x["v"][t] - np.einsum("hk,hkv->hv", p[t], S))
        S = S + k[t][..., None] * (x["beta"][t][:, None] * left[t])[:, None, :]
        y["o"][t] = K**-0.5 * np.einsum("hk,hkv->hv", q[t], S)
        states.append(S)
    G = np.zeros_like(S)
    for t in reversed(range(T)):
        beta, do = x["beta"][t][:, None], x["do"][t]
        y["dq"][t] = K**-0.5 * np.einsum("hkv,hv->hk", states[2 * t + 1], do)
        G = G + K**-0.5 * q[t][..., None] * do[:, None, :]
        du = np.einsum("hkv,hk->hv", G, k[t])
        y["dk"][t] = np.einsum("hkv,hv->hk", G, beta * left[t])
        y["dbeta"][t] = (du * left[t]).sum(-1)
        y["dv"][t] = beta * du
        y["dp"][t] = -np.einsum("hkv,hv->hk", states[2 * t], y["dv"][t])
        G = G - p[t][..., None] * y["dv"][t][:, None, :]
        y["dg"][t] = (G * states[2 * t]).sum(-1)
        G = np.exp(x["g"][t])[..., None] * G
    y |= {"dq": to_q(y["dq"]), "dk": to_k(y["dk"]), "dp": to_p(y["dp"])}
    return {n: a.astype(np.float32) for n, a in y.items()}


def verdict(base: str, claimed: Recurrence = NORMED, **how: Any) -> Any:
    y = kernel(inputs(), **how)
    y = {n: to_bf16(a) for n, a in y.items()} if base == "bf16" else y
    x = {n: to_bf16(a) if base == "bf16" else a for n, a in inputs().items()}
    return judge(x, y, recurrence=claimed, base=base, gate="log")


def failed(found: Any) -> set[str]:
    return {n for n, t in found.tensors.items() if t["verdict"] == "fail"}


@pytest.mark.parametrize(("base", "stored"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_right_norms_pass_whether_stored_or_not(base: str, stored: bool) -> None:
    found = verdict(base, stored=stored)
    assert found.passed, found.text
    assert {t["verdict"] for t in found.tensors.values()} == {"pass"}, found.text


WRONG: dict[str, dict[str, Any]] = {
    "no norm": {"of": ""},
    "q alone": {"of": "q"},
    "k alone": {"of": "k"},
    "p without": {"of": "qk"},
    "no eps": {"eps": 0},
    "eps outside the root": {"outside": True},
    "eps of another": {"eps": 1.2 * EPS},
}
NAMED = {
    "no norm": "passes without norms",
    "p without": "passes with `norm q k eps 0.03`",
    "no eps": "passes with `norm q k p eps 1e-12`",
}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_norm_fails_and_is_named(base: str, name: str) -> None:
    found = verdict(base, **WRONG[name])
    assert found.status == 1, found.text
    assert base == "bf16" or NAMED.get(name, "") in " ".join(found.text.split()), found.text


@pytest.mark.parametrize("base", ["fp32", "bf16"])
@pytest.mark.parametrize(("which", "of"), [("rms", "q"), ("l1", "qkp")])
def test_other_norms_pass_where_they_are_claimed_and_are_named(
    base: str, which: str, of: str
) -> None:
    how: dict[str, Any] = {"which": which, "of": of, "stored": base == "bf16"}
    assert verdict(base, replace(NORMED, norm=(which, *of)), **how).passed
    found = verdict(base, replace(NORMED, norm=tuple(of)), **how)
    assert found.status == 1, found.text
    said = f"passes with `norm {which} {' '.join(of)} eps 0.03`"
    assert base == "bf16" or said in " ".join(found.text.split()), found.text


@pytest.mark.parametrize("which", ["l1", "rms", "l2"])
def test_zeros_and_rows_of_zeros_have_their_gradients(which: str) -> None:
    x = inputs()
    for n in ("q", "k", "p"):
        x[n][5, :, ::3], x[n][9, 0], x[n][11, 1] = 0, 0, -0.0
    claimed = replace(NORMED, norm=(which, "q", "k", "p"))
    said: dict[str, Any] = {"recurrence": claimed, "base": "fp32", "gate": "log", "ranks": 2}
    assert_explained(x, kernel(x, which=which), **said)
    if which == "l1":  # |x| has the slope 0 at 0
        assert failed(judge(x, kernel(x, which=which, at0=1), **said)) == {"dq", "dk", "dp"}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_a_gradient_that_lacks_that_of_the_norm_fails_alone(base: str) -> None:
    found = verdict(base, chain=False)
    failed = {n for n, t in found.tensors.items() if t["verdict"] == "fail"}
    assert failed == {"dq", "dk", "dp"}, found.text


def test_inputs_over_their_norms_are_judged_without() -> None:
    x = inputs()
    y = kernel(x)
    units = x | {n: norm(x[n].astype(np.float64), n)[0] for n in ("q", "k", "p")}
    own = {n: y[n] for n in ("o", "dv", "dg", "dbeta")}
    said: dict[str, Any] = {"recurrence": NORMED, "base": "fp32", "gate": "log"}
    assert_explained(units, own, l2norm=False, **said)
    assert judge(x, own, l2norm=False, **said).status == 1


def of_queries(x: Arrays, n: int) -> tuple[Arrays, Arrays]:
    """n query heads a value head: one pass each; gradients of all but queries add up."""
    rng = np.random.default_rng(4)
    x = x | {"q": 0.2 * rng.standard_normal((T, H * n, K)).astype(np.float32)}
    x["do"] = rng.standard_normal((T, H * n, V)).astype(np.float32)
    passes = [kernel(x | {s: x[s][:, j::n] for s in ("q", "do")}) for j in range(n)]
    y = {name: sum(p[name] for p in passes) for name in passes[0]}
    for name in ("o", "dq"):
        rows = np.stack([p[name] for p in passes], 2)
        y[name] = rows.reshape(T, H * n, rows.shape[-1])
    return x, y


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_query_heads_each_over_its_norm(ranks: int) -> None:
    x, y = of_queries(inputs(), 3)
    del y["dg"]  # of raw gates alone
    said: dict[str, Any] = {"recurrence": NORMED, "base": "fp32", "gate": "log", "ranks": ranks}
    assert assert_explained(x, y, **said)["dk"]["verdict"] == "pass"
    y["dp"] = y["dp"] * np.float32(1.001)
    assert failed(judge(x, y, **said)) == {"dp"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gates_above_0_and_one_that_clamps_them(ranks: int) -> None:
    x = inputs()
    x["g"] = (x["g"] + 0.08).astype(np.float32)
    said: dict[str, Any] = {"recurrence": NORMED, "base": "fp32", "gate": "log", "ranks": ranks}
    assert_explained(x, kernel(x), **said)
    clamped = kernel(x | {"g": np.minimum(x["g"], 0)})
    assert {"o", "dq", "dk", "dp", "dv", "dg"} <= failed(judge(x, clamped, **said))


@pytest.mark.parametrize("written", [False, True])
def test_cases_have_the_norms_of_the_rows(written: bool, tmp_path: Path) -> None:
    case = tmp_path / "own.case"
    case.write_text("reason = a\nsource = b\nop = dplr\nT = 70\nH = 2\nK = 16\nV = 8\n")

    def verdicts(names: str) -> set[str]:
        def own(q: Any, k: Any, p: Any, v: Any, g: Any, beta: Any, do: Any) -> Arrays:
            x = {"q": q, "k": k, "p": p, "v": v, "g": g, "beta": beta, "do": do}
            return kernel(x, of=names)

        said: dict[str, Any] = {"base": "fp32", "gate": "log", "outputs": ("dq", "dk", "dp")}
        of = str(case) if written else "dplr-t65"
        return set(run(own, of, recurrence=NORMED, layouts=(), **said).verdicts().values())

    assert verdicts("qkp") == {"pass"} and verdicts("kp") == {"fail"}
