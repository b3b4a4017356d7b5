"""The tensors of a problem by name, with their axes: inputs as files name them, results by their
own name, and of stages. `deltaproof list --tensors` prints them (ref/vocabulary/tensors.c; a test
compares). Which of them are gradients, and which axes one has, is asked here and nowhere else."""

from __future__ import annotations

RECURRENCES = ("kda", "gdn", "mkda", "gdn2", "gla", "ssd", "gated-deltaproduct", "dplr")
GATES = ("log", "softplus", "lower_bound")
BETAS = ("plain", "sigmoid", "sigmoid2", "none")
INPUTS = {
    "q": "T,H,K",
    "k": "T,H,R,K",
    "v": "T,HV,R,V",
    "g": "T,HV,Kg",
    "beta": "T,HV,R",
    "A_log": "HV",
    "dt_bias": "HV,Kg",
    "initial_state": "Nseq,HV,K,V",
    "do": "T,HV,V",
    "dht": "Nseq,HV,K,V",
    "b": "T,HV,K",
    "w": "T,HV,V",
    "lr_a": "T,HV,K",
    "lr_b": "T,HV,K",
    "number": "T,HV,R",
    "angle": "T,HV,P",
    "value3": "T,HV,V",
    "value4": "T,HV,V",
}
RESULTS = {
    "o": "T,HV,V",
    "final_state": "Nseq,HV,K,V",
    "dq": "T,H,K",
    "dk": "T,H,R,K",
    "dv": "T,HV,R,V",
    "dg": "T,HV,Kg",
    "dbeta": "T,HV,R",
    "dA_log": "HV",
    "ddt_bias": "HV,Kg",
    "ds0": "Nseq,HV,K,V",
    "derase": "T,HV,K",
    "dwrite": "T,HV,V",
    "dlr_a": "T,HV,K",
    "dlr_b": "T,HV,K",
    "dnumber": "T,HV,R",
    "dangle": "T,HV,P",
    "dvalue3": "T,HV,V",
    "dvalue4": "T,HV,V",
}
STAGES = (
    *("gcum", "Akk", "Aqk", "w", "u", "kg", "qg", "M", "H", "S_in", "h", "v_new"),
    *("dv_local", "dM", "dH", "dS_out", "dh", "dv_new"),
)
ALL = INPUTS | RESULTS
LEAVING = tuple(name for name, axes in RESULTS.items() if axes.startswith("T,"))
INCOMING = {"do": "o", "dht": "final_state"}  # a gradient that comes in: the result that it is of
OWN_NAMES = {"initial_state": "s0", "b": "erase", "w": "write"}  # where files have another
GRADIENT_OF = {  # a gradient that comes out: the input that it is of
    "d" + OWN_NAMES.get(name, name): name for name in INPUTS if name not in INCOMING
}
OF_ROWS = tuple(INPUTS)[tuple(INPUTS).index("b") :]  # of a token's rows, beside k, v and beta
TOKENS = tuple(name for name, axes in INPUTS.items() if axes.startswith("T,"))


def unit_axes(name: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """Places of an input's axes whose size is said and is 1: {"R": 1, "Kg": 128}."""
    return tuple(i for i, a in enumerate(INPUTS[name].split(",")) if sizes.get(a) == 1)


def least_axes(name: str) -> tuple[int, str]:
    """For a tensor with tokens: (the least number of axes that it has, their names). All others: 0,
    since an axis of one sequence or one head may be left out."""
    axes = [a for a in ALL.get(name, "").split(",") if a not in ("R", "Kg")]
    return (len(axes), f"[{','.join(axes)}]") if axes[0] == "T" else (0, "")
