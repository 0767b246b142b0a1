"""Operators that a target may run by its own kernel or written in others: which is quicker, in one run.

    python bench/lowerings.py

Both are timed by turns on the same arrays, with one thread and with all; the medians, their ratio, and what the target's table
(passes/targets/*.toml) takes. Results must agree. A kernel that the installed ONNX Runtime lacks is said to be missing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper

from ortc.artifacts import load_rules
from ortc.graph.builder import Builder
from ortc.graph.names import take_place
from ortc.passes.gradients import convolution
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower
from ortc.target import load_target, target_names

ROUNDS = 15
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


Case = tuple[str, list[Any], dict[str, Any]]  # what it is, inputs, attributes


def conv(
    batch: int,
    channels: int,
    made: int,
    size: int,
    kernel: int,
    stride: int,
    *,
    axes: int = 2,
    group: int = 1,
    pad: int | None = None,
) -> Case:
    pad = kernel // 2 if pad is None else pad
    out = (size + 2 * pad - kernel) // stride + 1
    shapes = (batch, made, *[out] * axes), (batch, channels, *[size] * axes), (made, channels // group, *[kernel] * axes)
    window = {"pads": [pad] * 2 * axes, "strides": [stride] * axes, "dilations": [1] * axes, "kernel_shape": [kernel] * axes}
    label = f"{'x'.join([str(kernel)] * axes)} stride {stride}, {channels} to {made} of {size}{' ²³'[axes - 1].strip()}"
    label += f" by {group}" * (group > 1) + " unpadded" * (pad < kernel // 2)
    return label, [normal(*shape) for shape in shapes], {**window, "group": group}


def input_gradient(batch: int, channels: int, made: int, size: int, kernel: int, **more: int) -> Case:
    """Of a convolution with stride 1, as its transpose with the weights as they are."""
    label, (dy, _, weights), attributes = conv(batch, channels, made, size, kernel, 1, **more)
    return label, [dy, weights], attributes


def transposed(channels: int, size: int, kernel: int, stride: int) -> Case:
    label, (dy, _, weights), attributes = conv(32, channels, channels, size, kernel, stride, axes=1)
    return label, [dy, weights], attributes


def batch_norm(channels: int, size: int) -> Case:
    """A gradient: of arrays alone, statistics are any numbers."""
    x = normal(8, channels, size, size)
    return f"{channels} of {size}²", [normal(*x.shape), x, *(normal(channels) for _ in range(3))], {"epsilon": 1e-5}


def classes(rows: int, count: int) -> Case:
    return f"[{rows}, {count}]", [normal(rows, count), RANDOM.integers(0, count, rows)], {}


# The gradient of a convolution's input: what ConvTranspose does, by a Conv with the weights turned round.
TURNED_ROUND = "Conv turned round"

# Operator -> which of its outputs are asked for, and the cases.
CASES: dict[str, tuple[Sequence[str], list[Case]]] = {
    "com.microsoft::ConvGrad": (
        ("", "dW"),
        [
            *(conv(8, 64, 64, 56, 3, 1), conv(8, 512, 512, 7, 3, 1), conv(8, 64, 128, 56, 3, 2), conv(8, 3, 64, 112, 7, 2)),
            *(conv(8, 144, 144, 32, 3, 1, group=144), conv(32, 64, 64, 256, 3, 1, axes=1), conv(2, 16, 16, 24, 3, 1, axes=3)),
        ],
    ),
    TURNED_ROUND: (
        ("dX",),
        [
            *(input_gradient(8, 64, 64, 56, 3), input_gradient(8, 512, 512, 7, 3), input_gradient(8, 96, 16, 64, 1)),
            *(input_gradient(8, 96, 96, 64, 3, group=96), input_gradient(8, 384, 384, 8, 7, group=384)),
            *(input_gradient(32, 64, 64, 256, 3, axes=1), input_gradient(2, 16, 16, 24, 3, axes=3)),
            *(input_gradient(64, 32, 64, 14, 3, pad=0), input_gradient(8, 64, 64, 64, 5, pad=0)),
        ],
    ),
    "com.microsoft::BatchNormalizationGrad": (("dX", "dscale", "dB"), [batch_norm(64, 112), batch_norm(384, 8)]),
    "ConvTranspose": (("Y",), [transposed(64, 256, 3, 2), transposed(256, 1000, 4, 2)]),
    "SoftmaxCrossEntropyLoss": (("loss", "log_prob"), [classes(64, 10), classes(512, 1000), classes(512, 50257)]),
}


def models(name: str, outputs: Sequence[str], arrays: list[Any], attributes: dict[str, Any]) -> dict[str, bytes]:
    """The node alone, and written in others."""
    domain, _, op_type = ("ConvTranspose" if name == TURNED_ROUND else name).rpartition("::")
    inputs = [
        helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for i, a in enumerate(arrays)
    ]
    node = helper.make_node(op_type, [i.name for i in inputs], list(outputs), domain=domain, **attributes)
    made = [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in outputs if o]
    imports = [helper.make_opsetid("", 21), *([helper.make_opsetid(domain, 1)] if domain else [])]
    kernel = helper.make_model(helper.make_graph([node], "g", inputs, made), opset_imports=imports, ir_version=10)
    written = infer_shapes(ir.from_proto(kernel))
    if name == TURNED_ROUND:
        turn_round(written.graph, attributes)
    else:
        lower(written.graph, lambda n: True)
    return {"kernel": kernel.SerializeToString(), "lowering": ir.to_proto(written).SerializeToString()}


def turn_round(graph: ir.Graph, attributes: dict[str, Any]) -> None:
    """Put a convolution, as gradients have it, in the place of a ConvTranspose."""
    [node], [dy, weights], op = list(graph), graph.inputs, Builder(graph)
    reach = [(k - 1) * d for k, d in zip(attributes["kernel_shape"], attributes["dilations"], strict=True)]
    with op.scope("turned", before=node):
        made = convolution.turned_round(
            op, weights, dy, reach, attributes["group"], attributes["pads"], attributes["dilations"]
        )
    take_place(node.outputs[0], made)
    graph.remove(node, safe=True)


def compare(name: str, outputs: Sequence[str], case: Case, threads: int) -> str:
    label, arrays, attributes = case
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    sessions = {}
    for side, model in models(name, outputs, arrays, attributes).items():
        try:
            sessions[side] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception:
            return f"{name:28s} {label:36s} the installed ONNX Runtime has no {side}"
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    results = {side: session.run(None, feeds) for side, session in sessions.items()}
    for a, b in zip(*results.values(), strict=True):
        assert np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(a).max()), f"{name} {label}: the two differ"
    times: dict[str, list[float]] = {side: [] for side in sessions}
    for _ in range(ROUNDS):
        for side, session in sessions.items():
            began = time.perf_counter()
            session.run(None, feeds)
            times[side].append(time.perf_counter() - began)
    kernel, lowering = (statistics.median(times[side]) * 1e3 for side in ("kernel", "lowering"))
    told = f"kernel {kernel:8.2f} ms  lowering {lowering:8.2f} ms  ratio {kernel / lowering:.2f}"
    return f"{name:28s} {label:36s} {threads} threads  {told}"


def main() -> None:
    load_rules()
    print(f"ONNX Runtime {onnxruntime.__version__}, {os.cpu_count()} cores; a ratio above 1: the lowering is quicker")
    for name, (outputs, cases) in CASES.items():
        kept = [t for t in target_names() if load_target(t).kernels.get(name)]
        print(f"# {name}: the table takes the kernel on {', '.join(kept) or 'no target'}")
        for case in cases:
            for threads in dict.fromkeys((1, os.cpu_count() or 1)):
                print(compare(name, outputs, case, threads), flush=True)


if __name__ == "__main__":
    main()
