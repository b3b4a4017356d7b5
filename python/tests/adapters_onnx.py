"""ONNX's LinearAttention: its formulas written again, the real evaluators, and its node tests."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deltaproof.pack_readers.deltaproof_layouts import ONNX as ORDER


def formulas(feeds: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, Any]:
    """Written from the operator's text, in float32."""
    HQ, H = attributes["q_num_heads"], attributes["kv_num_heads"]
    B, T = feeds["query"].shape[:2]
    q, k, v = (feeds[n].reshape(B, T, h, -1) for n, h in zip(ORDER, (HQ, H, H), strict=False))
    S = feeds.get("past_state", np.zeros((B, H, k.shape[-1], v.shape[-1]), np.float32))
    scale = np.float32(attributes.get("scale") or q.shape[-1] ** -0.5)
    o = np.zeros((B, T, HQ, v.shape[-1]), np.float32)
    for t in range(T):
        if "decay" in feeds:
            S = S * np.exp(feeds["decay"][:, t].reshape(B, H, -1, 1))
        e = v[:, t]
        if "beta" in feeds:
            e = feeds["beta"][:, t, :, None] * (e - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, ..., None] * e[:, :, None]
        for h in range(HQ):
            o[:, t, h] = scale * np.einsum("bkv,bk->bv", S[:, h // (HQ // H)], q[:, t, h])
    return o.reshape(B, T, -1), S


def model(feeds: dict[str, Any], attributes: dict[str, Any]) -> Any:
    onnx = pytest.importorskip("onnx", minversion="1.23", reason="onnx 1.23 is not installed")
    given = [n if n in feeds else "" for n in ORDER]
    while not given[-1]:
        given.pop()
    kind = {2: onnx.TensorProto.FLOAT16, 4: onnx.TensorProto.FLOAT}
    info = onnx.helper.make_tensor_value_info
    results = ["output", "present_state"]
    node = onnx.helper.make_node("LinearAttention", given, results, **attributes)
    ins = [info(n, kind[x.dtype.itemsize], x.shape) for n, x in feeds.items()]
    out = kind[feeds["query"].dtype.itemsize]
    outs = [info(n, out, None) for n in results]
    graph = onnx.helper.make_graph([node], "pack", ins, outs)
    opset = [onnx.helper.make_opsetid("", 27)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=11)


def reference(feeds: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, Any]:
    built = model(feeds, attributes)
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator(built)
    return tuple(evaluator.run(None, feeds))  # type: ignore[return-value]


def runtime(feeds: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, Any]:
    rt = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    built = model(feeds, attributes).SerializeToString()
    return tuple(rt.InferenceSession(built, providers=["CPUExecutionProvider"]).run(None, feeds))


def node_tests() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(name, inputs, attributes, outputs) of every test of the operator that the package has."""
    onnx = pytest.importorskip("onnx", minversion="1.23", reason="onnx 1.23 is not installed")
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases("LinearAttention"):
        if not case.name.startswith("test_linear_attention") or case.name.endswith("_expanded"):
            continue
        (node,) = case.model.graph.node
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {n: x.decode() if isinstance(x, bytes) else x for n, x in attributes.items()}
        for inputs, outputs in case.data_sets:
            feeds = dict(zip((n for n in node.input if n), inputs, strict=True))
            feeds = {o: feeds[n] for o, n in zip(ORDER, node.input, strict=False) if n}
            yield (case.name, feeds, attributes,
                   dict(zip(("output", "present_state"), outputs, strict=False)))  # fmt: skip


def base_of(feeds: dict[str, Any]) -> tuple[str, str]:
    """Base and design of an evaluator in float32."""
    if feeds["query"].dtype == np.float16:
        return "fp32", "recurrent,out=fp16,final_state=fp16"
    return "fp32", "recurrent"
