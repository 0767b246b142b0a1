"""LSTM and GRU in training: with the target's operators that give the gates, and without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS
from onnx import numpy_helper

from ortc.artifacts import compile
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer

HIDDEN, STEPS, BATCH, WIDTH = 4, 5, 3, 6

# Attributes, further inputs, outputs, and how many layers of one direction it takes with gates; 0 where it stays as it is.
CASES = {
    "lstm": ("LSTM", "", "", "y, last, cell", 1),
    "lstm, last states only": ("LSTM", "", "", ", last, cell", 1),
    "lstm from states": ("LSTM", "", ", , h0, c0", "y, last, cell", 1),
    "lstm backwards": ("LSTM", 'direction = "reverse"', ", , h0, c0", "y, last, cell", 1),
    "lstm in both directions": ("LSTM", 'direction = "bidirectional"', ", , h0, c0", "y, last, cell", 2),
    "lstm with its activations": ("LSTM", 'activations = ["Sigmoid", "Tanh", "Tanh"]', "", "y, last, cell", 1),
    "gru": ("GRU", "", "", "y, last", 1),
    "gru, linear before": ("GRU", "linear_before_reset = 1", "", "y, last", 1),
    "gru in both directions": ("GRU", 'linear_before_reset = 1, direction = "bidirectional"', ", , h0", "y, last", 2),
    "lstm of other activations": ("LSTM", 'activations = ["Sigmoid", "Softsign", "Tanh"]', "", "y, last, cell", 0),
    "lstm, clipped": ("LSTM", "clip = 0.5", "", "y, last, cell", 0),
    "lstm, coupled": ("LSTM", "input_forget = 1", "", "y, last, cell", 0),
    "lstm with peepholes": ("LSTM", "", ", , h0, c0, P", "y, last, cell", 0),
    "lstm of short sequences": ("LSTM", "", ", lens", "y, last, cell", 0),
}


def write(path: Path, case: str) -> None:
    """One layer; y is the sum of what it gives."""
    kind, attributes, more, outputs, _ = CASES[case]
    gates, directions = (4 if kind == "LSTM" else 3), 1 + ("bidirectional" in attributes)
    parts = []
    if outputs.startswith("y"):
        parts += ["t = Transpose <perm = [0, 2, 1, 3]> (y)", "s0 = ReduceMean <axes = [0, 2], keepdims = 0> (t)"]
    for i, name in enumerate(outputs.split(", ")[1:], 1):
        parts += [f"s{i} = ReduceMean <axes = [0], keepdims = 0> ({name})"]
    sums = [line.split(" = ")[0] for line in parts if line.startswith("s")]
    attributes = ", ".join(filter(None, [f"hidden_size = {HIDDEN}", attributes]))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[{STEPS},N,{WIDTH}] x) => (float[N,{HIDDEN}] out) {{
            {outputs} = {kind} <{attributes}> (x, W, R, B{more})
            {" ".join(parts)}
            out = Sum ({", ".join(sums)})
        }}"""
    )
    numbers = np.random.default_rng(3)
    shapes = {"W": (gates * HIDDEN, WIDTH), "R": (gates * HIDDEN, HIDDEN), "B": (2 * gates * HIDDEN,)}
    shapes |= {name: (BATCH, HIDDEN) for name in ("h0", "c0") if name in more} | ({"P": (3 * HIDDEN,)} if "P" in more else {})
    for name, shape in shapes.items():
        array = numbers.standard_normal((directions, *shape)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    if "lens" in more:
        model.graph.initializer.append(numpy_helper.from_array(np.array([5, 2, 3], np.int32), "lens"))
    onnx.save(model, path)


@pytest.mark.skipif(len(TARGETS) < 2, reason="the target with such kernels is not installed")
@pytest.mark.parametrize("case", CASES)
def test_gradients_with_and_without_kept_gates(case: str, tmp_path: Path) -> None:
    write(tmp_path / "model.onnx", case)
    numbers = np.random.default_rng(4)
    batch = {"x": numbers.standard_normal((STEPS, BATCH, WIDTH)), "labels": numbers.standard_normal((BATCH, HIDDEN))}
    found, kinds = {}, {}
    for target in TARGETS:
        recipe = {"loss": [{"name": "mse"}], "target": target.name}
        folder = tmp_path / target.name
        compile(tmp_path / "model.onnx", folder, parse_recipe(recipe))
        kinds[target.name] = Counter(n.op_type for n in onnx.load(folder / "stage-0" / "train.onnx").graph.node)
        with Trainer(folder) as trainer:
            loss, gradients = trainer.gradients({name: array.astype(np.float32) for name, array in batch.items()})
            found[target.name] = {"loss": np.array(loss), **{name: g.copy() for name, g in gradients.items()}}
    kind, *_, layers = CASES[case]
    assert kinds["onnxruntime"][kind] == 1
    assert kinds["ort-training"][f"{kind}Training"] == layers
    assert kinds["ort-training"][kind] == (not layers)
    assert found["onnxruntime"].keys() == found["ort-training"].keys()
    for name, want in found["onnxruntime"].items():
        got = found["ort-training"][name]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(1, np.abs(want).max()), err_msg=name)
