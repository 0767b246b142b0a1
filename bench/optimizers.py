"""An optimizer's update of large parameters in chunks and by the target's own kernel, beside the same in one piece.

`python bench/optimizers.py [--threads N]`: all run alternately on parameters of the sizes of a small GPT. Printed are medians,
the ratios, and the memory that a process with one of them takes beyond its arrays.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortc.artifacts import load_rules
from ortc.compiler import Compilation, new_graph, of, role, set_role
from ortc.passes import optimizer
from ortc.plan import ParameterInfo
from ortc.recipe import parse_recipe
from ortc.target import load_target

SHAPES = {"wte": (50257, 768), "wpe": (1024, 768)} | {
    f"{kind}.{layer}": shape
    for layer in range(4)
    for kind, shape in {"qkv": (768, 2304), "proj": (768, 768), "up": (768, 3072), "down": (3072, 768), "bias": (768,)}.items()
}


WAYS = ("whole", "chunks", "kernel")


def graph(name: str, way: str) -> ir.Model:
    """The optimizer's graph; "whole" and "chunks" are of plain operators."""
    target = load_target("ort-training")
    if way != "kernel":
        target = target.model_copy(update={"kernels": {}})
    train = new_graph("train", target.opset, target.ir_version)
    infos = []
    for key, shape in SHAPES.items():
        value = ir.Value(name=key, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        train.graph.inputs.append(set_role(value, "parameter", of=key))
        infos.append(ParameterInfo(name=key, role="parameter", dtype="float32", shape=list(shape), trainable=True, reason=""))
    c = Compilation(train, parse_recipe({"optimizer": {"name": name}}), target, parameters=infos, stages=[{"train": train}])
    chunk = optimizer._chunk
    optimizer._chunk = chunk if way != "whole" else lambda elements: None  # type: ignore[assignment]
    try:
        optimizer.BuildOptimizer().run(c)
    finally:
        optimizer._chunk = chunk
    return c.stages[0]["optimizer"]


class Side:
    """One way, in memory of its own."""

    def __init__(self, name: str, way: str, threads: int) -> None:
        model = graph(name, way)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        data = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        binding, random, self.arrays = session.io_binding(), np.random.default_rng(0), {}
        for value in model.graph.inputs:
            shape = value.shape.numpy()  # type: ignore[union-attr]
            if role(value) == "scalar":
                array = np.array({"step": 10, "lr": 1e-3}[of(value)], value.dtype.numpy())  # type: ignore[union-attr]
            else:
                array = random.random(int(np.prod(shape)), np.float32).reshape(shape)
            self.arrays[of(value), value.metadata_props.get("ortc.slot"), role(value)] = array
            binding.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for value in model.graph.outputs:
            array = self.arrays[of(value), value.metadata_props.get("ortc.slot"), role(value)]
            binding.bind_ortvalue_output(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self.run = lambda: session.run_with_iobinding(binding)


def peak(name: str, way: str, threads: int) -> float:
    """GB that the process takes beyond its arrays."""
    side = Side(name, way, threads)
    for _ in range(2):
        side.run()
    own = sum(a.nbytes for a in side.arrays.values())
    status = Path("/proc/self/status").read_text()
    return (int(status.split("VmHWM:")[1].split()[0]) * 1024 - own) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    load_rules()
    if arguments.peak:
        print(peak(arguments.peak[0], arguments.peak[1], arguments.threads))
        return
    count = sum(map(np.prod, SHAPES.values()))
    print(f"onnxruntime {onnxruntime.__version__}, {arguments.threads} threads, {count:,} parameters")
    for name in ("adamw", "lion", "rmsprop"):
        own = any(op.domain for op in graph(name, "kernel").graph) and onnxruntime.__version__.startswith("1.19.")
        ways = WAYS if own else WAYS[:2]
        sides = {way: Side(name, way, arguments.threads) for way in ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(9):
            for way, side in sides.items():
                start = time.perf_counter()
                side.run()
                times[way].append(time.perf_counter() - start)
        whole = sides["whole"].arrays
        for side in sides.values():
            for key, array in side.arrays.items():  # the kernel has 1 - β in float32, 1e-5 from 0.001
                np.testing.assert_allclose(array.reshape(-1), whole[key].reshape(-1), rtol=2e-5, atol=5e-6)
        del sides, side, whole
        medians = {way: statistics.median(taken[2:]) for way, taken in times.items()}
        command = [sys.executable, __file__, "--threads", str(arguments.threads), "--peak", name]
        for way, median in medians.items():
            beside = float(subprocess.run([*command, way], capture_output=True, text=True, check=True).stdout)
            ratio = median / medians["whole"]
            print(f"{name:8} {way:6} {median * 1e3:4.0f} ms, {ratio:.2f} of whole; {beside:.2f} GB beside the arrays")


if __name__ == "__main__":
    main()
