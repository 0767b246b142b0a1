"""What each fusion saves in training: forward and backward, with and without it, in one run.

    python bench/fusions.py            # all
    python bench/fusions.py gelu silu  # only these

Both sides go through ortc's own gradients, lowerings and clean-up, and are timed by turns on the same arrays, with one thread
and with all. Printed are the quickest of 25 runs (what else the machine does can only add to them), their ratio, the bytes
that the backward reads of the forward, and what the targets' tables (passes/targets/*.toml) say. Results must agree.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortc.artifacts import load_rules
from ortc.autodiff import build_gradients
from ortc.compiler import Compilation
from ortc.graph.builder import Builder
from ortc.graph.shapes import static
from ortc.passes import standard
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import keeps, lower, merge_equal
from ortc.recipe import Recipe
from ortc.target import Target, load_target, target_names

ROUNDS = 25
RANDOM = np.random.default_rng(0)

Shapes = dict[str, tuple[int, ...]]
Case = tuple[str, Callable[..., Any], Shapes]


def gelu_exact(op: Any, x: Any) -> Any:
    return (x * (op.Erf(x / float(np.sqrt(2))) + 1.0)) * 0.5


def gelu_tanh(op: Any, x: Any) -> Any:
    return (x * 0.5) * (1.0 + op.Tanh((x + op.Pow(x, 3.0) * 0.044715) * float(np.sqrt(2 / np.pi))))


def layer_norm(op: Any, x: Any, scale: Any, bias: Any) -> Any:
    centred = x - op.ReduceMean(x, [-1], keepdims=1)
    return centred / op.Sqrt(op.ReduceMean(op.Pow(centred, 2.0), [-1], keepdims=1) + 1e-5) * scale + bias


def rms_norm(op: Any, x: Any, scale: Any) -> Any:
    return scale * (x * (1.0 / op.Sqrt(op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1) + 1e-6)))


def silu(op: Any, x: Any) -> Any:
    return x * op.Sigmoid(x)


def bias_gelu(op: Any, x: Any, bias: Any) -> Any:
    return op.Gelu(x + bias)


def attention(op: Any, q: Any, k: Any, v: Any) -> Any:
    """As both exporters write it, with a causal mask that is added."""
    s, t = op.dims(q)[-2], op.dims(k)[-2]
    mask = np.where(np.tri(s, t, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])) * float(op.dims(q)[-1] ** -0.5)
    return op.MatMul(op.Softmax(scores + mask, axis=-1), v)


def attention_where(op: Any, q: Any, k: Any, v: Any) -> Any:
    """With a mask that selects."""
    s, t = op.dims(q)[-2], op.dims(k)[-2]
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])) / float(op.dims(q)[-1] ** 0.5)
    hidden = op.Where(np.logical_not(np.tri(s, t, dtype=bool)), op.const(-np.inf, like=q), scores)
    return op.MatMul(op.Softmax(hidden, axis=-1), v)


def dropped(op: Any, x: Any) -> Any:
    kept = op.const(np.random.default_rng(1).random(op.dims(x)) > 0.1)
    return op.Softmax(x, axis=-1) * op.Where(kept, op.const(1 / 0.9, like=x), op.const(0, like=x))


def heads(batch: int, heads: int, steps: int, size: int) -> Shapes:
    return dict.fromkeys("qkv", (batch, heads, steps, size))


SMALL, LARGE = (8, 64, 256), (4, 128, 3072)
CASES: dict[str, list[Case]] = {
    "gelu": [
        *(("exact", gelu_exact, {"x": s}) for s in (SMALL, LARGE)),
        *(("tanh", gelu_tanh, {"x": s}) for s in (SMALL, LARGE)),
    ],
    "layer-norm": [("", layer_norm, {"x": s, "scale": s[-1:], "bias": s[-1:]}) for s in (SMALL, (4, 128, 768))],
    "rms-norm": [("", rms_norm, {"x": s, "scale": s[-1:]}) for s in (SMALL, (4, 128, 768))],
    "silu": [("", silu, {"x": s}) for s in (SMALL, LARGE)],
    "bias-gelu": [("", bias_gelu, {"x": s, "bias": s[-1:]}) for s in (SMALL, LARGE)],
    "attention-scores": [
        *(("added mask", attention, heads(*sizes)) for sizes in ((8, 4, 64, 16), (4, 12, 128, 64), (1, 12, 512, 64))),
        *(("selecting mask", attention_where, heads(*sizes)) for sizes in ((8, 4, 64, 16), (4, 12, 128, 64))),
    ],
    "attention": [("", attention, heads(*sizes)) for sizes in ((8, 4, 64, 16), (4, 12, 128, 64), (1, 12, 512, 64))],
    "softmax-dropout": [("", dropped, {"x": s}) for s in ((8, 4, 64, 64), (4, 12, 128, 128))],
}


def training_graph(case: Case, fusion: str | None, target: Target) -> tuple[ir.Model, int]:
    """Forward and backward of a case, and the bytes that the backward reads of what the forward makes."""
    _, before, shapes = case
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": target.opset})
    op = Builder(graph)
    values = {n: ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(s)) for n, s in shapes.items()}
    graph.inputs.extend(values.values())
    with op.scope("forward"):
        y = before(op, **values)
    graph.outputs.append(y)
    c = Compilation(infer_shapes(ir.Model(graph, ir_version=target.ir_version)), Recipe(), target)
    if fusion is not None:
        next(step for step in standard() if step.name == fusion).run(c)
        assert c.rewrites, f"{fusion} does not fire"
    [y] = graph.outputs
    gradient = ir.Value(name="dY", type=y.type, shape=y.shape)
    graph.inputs.append(gradient)
    graph.outputs.extend(build_gradients(Builder(graph), {y: gradient}, list(values.values())).values())
    lower(graph, lambda node: not keeps(target, node))
    merge_equal(c.model)
    ir.passes.common.RemoveUnusedNodesPass()(c.model)
    behind = {gradient}
    kept = set()
    for node in graph:
        inputs = [v for v in node.inputs if v is not None]
        if any(v in behind for v in inputs):
            behind.update(node.outputs)
            kept.update(v for v in inputs if v not in behind and (v.producer() is not None or v in graph.inputs))
    return c.model, sum(4 * int(np.prod(static(v) or (0,))) for v in kept)


def compare(case: Case, fusion: str, target: Target, threads: int) -> str:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    sessions, kept = {}, {}
    for side, name in (("apart", None), ("fused", fusion)):
        model, kept[side] = training_graph(case, name, target)
        data = ir.to_proto(model).SerializeToString()
        try:
            sessions[side] = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception:
            return f"{fusion:16s} {case[0]:15s} the installed ONNX Runtime lacks a kernel of target {target.name}"
    feeds = {i.name: RANDOM.standard_normal(i.shape).astype(np.float32) for i in sessions["apart"].get_inputs()}
    results = [session.run(None, feeds) for session in sessions.values()]
    for a, b in zip(*results, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(a).max()), f"{fusion} {case[0]}: the two differ"
    times: dict[str, list[float]] = {side: [] for side in sessions}
    for _ in range(ROUNDS):
        for side, session in sessions.items():
            began = time.perf_counter()
            session.run(None, feeds)
            times[side].append(time.perf_counter() - began)
    apart, fused = (min(times[side]) * 1e3 for side in ("apart", "fused"))
    shape = "x".join(map(str, next(iter(case[2].values()))))
    return (
        f"{fusion:16s} {case[0]:15s} {shape:14s} {threads} threads  apart {apart:8.2f} ms  fused {fused:8.2f} ms  "
        f"ratio {fused / apart:5.2f}  kept {kept['apart'] / 1e6:7.2f} MB, fused {kept['fused'] / 1e6:7.2f} MB"
    )


def main(wanted: list[str]) -> None:
    load_rules()
    print(f"ONNX Runtime {onnxruntime.__version__}, {os.cpu_count()} cores; a ratio below 1: fused is quicker")
    for target in map(load_target, target_names()):
        for fusion, cases in CASES.items():
            if wanted and fusion not in wanted:
                continue
            print(f"# {target.name}: {fusion} is {'on' if target.fusions.get(fusion, True) else 'off'}")
            for case in cases:
                for threads in dict.fromkeys((1, os.cpu_count() or 1)):
                    print(compare(case, fusion, target, threads), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
