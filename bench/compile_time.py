"""Compile time and memory over the size of the model.

    python bench/compile_time.py            # 400 to 40,000 nodes, GPT-2 of 12 layers, 2 GB of weights
    python bench/compile_time.py 400 4000   # only these numbers of nodes

Every model is a chain of pre-norm transformer blocks with its weights in an external, sparse file; it compiles in a process of
its own. Prints seconds from file to artifacts (imports included, and without them), seconds per 1,000 nodes relative to the
smallest model, and the peak of resident memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 17
MEASURE = """
import json, resource, sys, time
start = time.perf_counter()
import ortc.artifacts
imported = time.perf_counter()
ortc.artifacts.compile(sys.argv[1], sys.argv[2])
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"total": done - start, "compile": done - imported, "peak": peak}))
"""


class Writer:
    """Nodes and weights of one model; weights are holes of one sparse file."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.size = 0

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        name = f"n{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=name, **attributes))
        return name

    def weight(self, *shape: int) -> str:
        tensor = onnx.TensorProto(name=f"w{len(self.weights)}", data_type=TensorProto.FLOAT, dims=shape)
        length = 4 * int(np.prod(shape))
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", self.size), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.size += length
        self.weights.append(tensor)
        return tensor.name

    def constant(self, name: str, values: list[int] | np.ndarray) -> str:
        self.weights.append(onnx.numpy_helper.from_array(np.asarray(values), name))
        return name


def transformer(folder: Path, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> tuple[Path, int]:
    """Write a decoder of GPT-2's shape; returns its file and its number of nodes."""
    w = Writer()
    split = w.constant("split", [0, 0, heads, width // heads])
    merge = w.constant("merge", [0, 0, width])
    scale = w.constant("scale", np.array((width // heads) ** -0.5, np.float32))
    x = w.node("Add", w.node("Gather", w.weight(vocabulary, width), "ids"), w.weight(positions, width))
    for _ in range(layers):
        h = w.node("LayerNormalization", x, w.weight(width), w.weight(width), axis=-1)
        q, k, v = (
            w.node("Reshape", w.node("Add", w.node("MatMul", h, w.weight(width, width)), w.weight(width)), split) for _ in "qkv"
        )
        scores = w.node("MatMul", w.node("Transpose", q, perm=[0, 2, 1, 3]), w.node("Transpose", k, perm=[0, 2, 3, 1]))
        mixed = w.node(
            "MatMul", w.node("Softmax", w.node("Mul", scores, scale), axis=-1), w.node("Transpose", v, perm=[0, 2, 1, 3])
        )
        joined = w.node("Reshape", w.node("Transpose", mixed, perm=[0, 2, 1, 3]), merge)
        x = w.node("Add", x, w.node("Add", w.node("MatMul", joined, w.weight(width, width)), w.weight(width)))
        h = w.node("LayerNormalization", x, w.weight(width), w.weight(width), axis=-1)
        up = w.node("Tanh", w.node("Add", w.node("MatMul", h, w.weight(width, 4 * width)), w.weight(4 * width)))
        x = w.node("Add", x, w.node("Add", w.node("MatMul", up, w.weight(4 * width, width)), w.weight(width)))
    logits = w.node("MatMul", x, w.weight(width, vocabulary))
    graph = helper.make_graph(
        w.nodes,
        "decoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", positions])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", positions, vocabulary])],
        w.weights,
    )
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8).SerializeToString())
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(w.size)
    return path, len(w.nodes)


def measure(layers: int, width: int, heads: int, vocabulary: int, positions: int) -> dict[str, float]:
    """Compile a model in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, nodes = transformer(folder, layers, width, heads, vocabulary, positions)
        weights = (folder / "weights.bin").stat().st_size
        command = [sys.executable, "-c", MEASURE, str(path), str(folder / "stages")]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return {**result, "nodes": nodes, "weights": weights}


def report(title: str, row: dict[str, float], first: dict[str, float] | None) -> None:
    each = row["compile"] / row["nodes"]
    relative = f"{each / (first['compile'] / first['nodes']):6.2f}" if first else ""
    print(
        f"{title:>22} {row['nodes']:>8.0f} {row['weights'] / 1e6:>10.0f} {row['total']:>8.2f} {row['compile']:>9.2f} "
        f"{1000 * each:>10.3f} {relative:>6} {row['peak']:>8.0f}",
        flush=True,
    )


def main(sizes: list[int]) -> None:
    columns = (
        ("nodes", 8),
        ("weights MB", 10),
        ("total s", 8),
        ("compile s", 9),
        ("s/1k nodes", 10),
        ("ratio", 6),
        ("peak MB", 8),
    )
    print(f"{'model':>22} " + " ".join(f"{name:>{width}}" for name, width in columns))
    first = None
    for size in sizes or [400, 4000, 40000]:
        row = measure(layers=round(size / 34), width=8, heads=2, vocabulary=16, positions=8)
        first = first or row
        report("chain", row, first)
    if not sizes:
        report("GPT-2, 12 layers", measure(12, 768, 12, 50257, 1024), None)
        report("2 GB of weights", measure(24, 1344, 12, 16384, 1024), None)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
