"""Kernels in the forms of public benchmarks, as functions that `run` and `score` take.

kernelbench(module)     a file with the class ModelNew, or Model: KernelBench's tasks
gpu_mode(module)        a file with custom_kernel(data): GPU MODE's tasks

`flashinfer_evaluator` judges solutions of flashinfer-bench, `onnx_problem` a node of ONNX.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

NAMES = ("q", "k", "v", "g", "beta")


def kernelbench(module: ModuleType) -> Callable[..., Any]:
    """The model's forward on q, k, v, g, beta with an axis of batch; beta has q's format, as the
    KDA task has it. A model is made for every shape. Its sizes come from the names of its
    parameters (B, T, H, K, V, chunk_size), else from the file's own get_init_inputs()."""
    cls = getattr(module, "ModelNew", None) or module.Model
    takes = inspect.signature(cls.__init__).parameters
    models: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        import torch

        sizes = dict(zip("BTHK", q.shape, strict=True)) | {"V": v.shape[-1]}
        sizes |= {"chunk_size": 64, "CHUNK_SIZE": 64}
        key = (tuple(q.shape), v.shape[-1], q.device)
        if key not in models:
            own = {n: sizes[n] for n in takes if n in sizes}
            unknown = [n for n, p in takes.items() if n not in ("self", *sizes)
                       and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]  # fmt: skip
            made = cls(*module.get_init_inputs()) if unknown else cls(**own)
            models[key] = made.to(q.device).eval()
        with torch.no_grad():
            return models[key](q, k, v, g, beta.to(q.dtype))

    return kernel


def gpu_mode(module: ModuleType) -> Callable[..., Any]:
    """custom_kernel of a tuple of inputs, or, where the task writes into its last one, of those and
    an output of NaN."""
    call = module.custom_kernel

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        got = call((q, k, v, g, beta))
        return got[0] if isinstance(got, tuple | list) else got

    return kernel


# Arguments of flashinfer-bench's definitions of gated delta nets, by their names there.
FLASHINFER = {"state": "initial_state", "a": "g", "b": "beta", "output": "o", "out": "o",
              "new_state": "final_state", "final_state": "final_state"}  # fmt: skip


def flashinfer_evaluator(base: str = "bf16", **settings: Any) -> Any:
    """An evaluator of flashinfer-bench whose correctness is `judge`'s, for definitions with the
    inputs q, k, v and g or a; settings: of `judge`. Register it:
    flashinfer_bench.bench.evaluators.registry._EVALUATORS.append(flashinfer_evaluator(..)). A trace
    then holds, beside the benchmark's errors, extra["deltaproof"]: the verdict and its text."""
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.bench.utils import make_eval
    from flashinfer_bench.data import Correctness, EvaluationStatus

    class Deltaproof(DefaultEvaluator):  # type: ignore[misc]
        @classmethod
        def can_evaluate(cls, definition: Any) -> bool:
            return {"q", "k", "v"} <= set(definition.inputs) and bool(
                {"g", "a"} & set(definition.inputs)
            )

        @classmethod
        def check_correctness(
            cls, definition: Any, sol_runnable: Any, inputs: Any, ref_outputs: Any, cfg: Any,
            log_path: str, device: str,
        ) -> Any:  # fmt: skip
            seen: list[Any] = []

            def keep(*given: Any) -> Any:
                seen.append([x.clone() if hasattr(x, "clone") else x for x in given])
                result = sol_runnable(*given)
                seen[-1] = (seen[-1], result)
                return result

            keep.metadata = sol_runnable.metadata  # type: ignore[attr-defined]
            found = super().check_correctness(
                definition=definition, sol_runnable=keep, inputs=inputs, ref_outputs=ref_outputs,
                cfg=cfg, log_path=log_path, device=device,
            )  # fmt: skip
            if not seen or not isinstance(seen[-1], tuple):
                return found
            verdicts = [_judged_flashinfer(definition, i, o, base, settings) for i, o in seen]
            worst = max(verdicts, key=lambda x: (x.status == 1, x.status))
            errors = found[0] or Correctness()
            told = {"status": worst.status, "text": worst.text, "failures": worst.failures()}
            errors = errors.model_copy(update={"extra": {"deltaproof": told}})
            if worst.status == 0:
                return errors, None
            status = EvaluationStatus.INCORRECT_NUMERICAL
            return errors, make_eval(
                status=status, device=device, log_path=log_path, correctness=errors
            )

    return Deltaproof


def _judged_flashinfer(
    definition: Any, given: Any, result: Any, base: str, settings: dict[str, Any]
) -> Any:
    from .judging import judge

    names = list(definition.inputs)
    arrays = {FLASHINFER.get(n, n): x for n, x in zip(names, given, strict=False)}
    told = dict(settings)
    if isinstance(arrays.get("scale"), int | float):
        told.setdefault("scale", float(arrays["scale"]))
    inputs = {n: x for n, x in arrays.items() if hasattr(x, "shape")}
    if not isinstance(result, dict):
        values = result if isinstance(result, tuple | list) else (result,)
        result = dict(zip(definition.outputs, values, strict=False))
    outputs = {FLASHINFER.get(n, n): x for n, x in result.items()}
    return judge(inputs, outputs, base=base, **told)


ONNX = {"query": "q", "key": "k", "value": "v", "past_state": "initial_state", "decay": "g",
        "beta": "beta", "output": "o", "present_state": "final_state"}  # fmt: skip


def onnx_problem(
    inputs: Mapping[str, Any], attributes: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(inputs, outputs, settings) of `judge` of a node LinearAttention (opset 27), from its inputs,
    attributes and outputs by their names there. Right for the rules linear, gated, delta and
    gated_delta, which the inputs decay and beta tell apart."""
    heads = attributes["kv_num_heads"]
    count = {"query": attributes["q_num_heads"], "output": attributes["q_num_heads"]}
    B, T = inputs["query"].shape[:2]
    made: list[dict[str, Any]] = [{}, {}]
    for arrays, into in zip((inputs, outputs), made, strict=True):
        for name, x in arrays.items():
            if name == "beta":
                into["beta"] = np.broadcast_to(x, (B, T, heads))  # [B,T,1] is every head's
            else:
                y = x if x.ndim == 4 else x.reshape(B, T, count.get(name, heads), -1)
                into[ONNX[name]] = y
    given, results = made
    if "decay" in inputs and given["g"].shape[-1] == 1:
        given["g"] = given["g"][..., 0]
    settings: dict[str, Any] = {"gate": "log", "l2norm": False}
    settings["beta"] = "plain" if "beta" in inputs else "none"
    if attributes.get("scale"):
        settings["scale"] = float(attributes["scale"])
    return given, results, settings
