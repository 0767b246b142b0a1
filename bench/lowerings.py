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
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower
from ortc.target import load_target, target_names

ROUNDS = 15
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def conv(batch: int, channels: int, made: int, size: int, kernel: int, stride: int) -> tuple[str, list[Any], dict[str, Any]]:
    pad, out = kernel // 2, (size - 1) // stride + 1
    arrays = [normal(batch, made, out, out), normal(batch, channels, size, size), normal(made, channels, kernel, kernel)]
    attributes = {"pads": [pad] * 4, "strides": [stride] * 2, "dilations": [1, 1], "kernel_shape": [kernel] * 2}
    return f"{kernel}x{kernel} stride {stride}, {channels} to {made} of {size}²", arrays, attributes


def classes(rows: int, count: int) -> tuple[str, list[Any], dict[str, Any]]:
    return f"[{rows}, {count}]", [normal(rows, count), RANDOM.integers(0, count, rows)], {}


# Operator -> which of its outputs are asked for, and the cases.
CASES: dict[str, tuple[Sequence[str], list[tuple[str, list[Any], dict[str, Any]]]]] = {
    "com.microsoft::ConvGrad": (
        ("", "dW"),
        [conv(8, 64, 64, 56, 3, 1), conv(8, 512, 512, 7, 3, 1), conv(8, 64, 128, 56, 3, 2), conv(8, 3, 64, 112, 7, 2)],
    ),
    "SoftmaxCrossEntropyLoss": (("loss", "log_prob"), [classes(64, 10), classes(512, 1000), classes(512, 50257)]),
}


def models(name: str, outputs: Sequence[str], arrays: list[Any], attributes: dict[str, Any]) -> dict[str, bytes]:
    """The node alone, and its lowering."""
    domain, _, op_type = name.rpartition("::")
    inputs = [
        helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for i, a in enumerate(arrays)
    ]
    node = helper.make_node(op_type, [i.name for i in inputs], list(outputs), domain=domain, **attributes)
    made = [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in outputs if o]
    imports = [helper.make_opsetid("", 21), *([helper.make_opsetid(domain, 1)] if domain else [])]
    kernel = helper.make_model(helper.make_graph([node], "g", inputs, made), opset_imports=imports, ir_version=10)
    written = infer_shapes(ir.from_proto(kernel))
    lower(written.graph, lambda n: True)
    return {"kernel": kernel.SerializeToString(), "lowering": ir.to_proto(written).SerializeToString()}


def compare(name: str, outputs: Sequence[str], case: tuple[str, list[Any], dict[str, Any]], threads: int) -> str:
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
