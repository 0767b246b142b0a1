"""The losses and their gradients against PyTorch's float64 values (made by tests/data/make_losses.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.artifacts import compile_graphs
from ortc.compiler import of, role
from ortc.recipe import parse_recipe

FOLDER = Path(__file__).parent / "data"
CASES = json.loads((FOLDER / "losses.json").read_text())


@pytest.fixture(scope="module")
def stored():
    with np.load(FOLDER / "losses.npz") as archive:
        return {key: archive[key] for key in archive.files}


def identity_model(shape: tuple[int, ...], symbolic: bool) -> ir.Model:
    """y = x: the gradient of the input is the loss's own."""
    dims = ", ".join(f"d{i}" if symbolic and i != 1 else str(n) for i, n in enumerate(shape))
    body = "{ z = Neg(x) y = Neg(z) }"
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]> g (float[{dims}] x) => (float[{dims}] y) {body}')


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_pytorchs(name, symbolic, stored):
    case = CASES[name]
    output, labels = stored[f"{name}/output"], stored[f"{name}/labels"]
    options = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in case["options"].items()}
    options = {k: stored[v].tolist() if isinstance(v, str) and v in stored else v for k, v in options.items()}
    recipe = parse_recipe({"loss": [{"name": case["loss"], "options": options}], "wrt": ["x"]})
    train = compile_graphs(identity_model(output.shape, symbolic), recipe).stages[0]["train"]
    session = onnxruntime.InferenceSession(ir.to_proto(train).SerializeToString())
    feeds = {"x": output.astype(np.float32)}
    for value in train.graph.inputs:
        if role(value) == "label":
            feeds[value.name] = labels if labels.dtype == np.int64 else labels.astype(np.float32)
    results = dict(zip([(role(v), of(v)) for v in train.graph.outputs], session.run(None, feeds), strict=True))
    gradient = stored[f"{name}/grad"]
    assert float(session.run(None, feeds)[0]) == pytest.approx(float(stored[f"{name}/loss"]), rel=1e-5)
    np.testing.assert_allclose(results["gradient", "x"], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max())
