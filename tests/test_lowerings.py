"""Lowerings of standard operators against ONNX's reference, and the gradients that come of them against differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ortc.artifacts import load_rules
from ortc.autodiff import loss_gradients
from ortc.graph.builder import Builder
from ortc.passes.inference import infer_shapes
from ortc.passes.pipeline import lower

load_rules()

# ONNX's reference samples in float32: a smaller step would drown in rounding.
STEP = 1e-3
RANDOM = np.random.default_rng(8)
DEFORM = {
    "plain": ({"X": (1, 2, 4, 5), "W": (3, 2, 2, 2), "offset": (1, 8, 3, 4)}, {}),
    "all": (
        {"X": (2, 4, 5, 5), "W": (4, 2, 3, 2), "offset": (2, 24, 3, 2), "B": (4,), "mask": (2, 12, 3, 2)},
        {"group": 2, "offset_group": 2, "strides": [2, 3], "pads": [1, 0, 1, 1], "dilations": [1, 2]},
    ),
}


def deform_model(name: str, dtype: int, symbolic: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    shapes, attributes = DEFORM[name]
    arrays = {k: np.random.default_rng(len(k)).standard_normal(s) for k, s in shapes.items()}
    inputs = []
    for key, shape in shapes.items():
        free = [f"{key}{i}" for i in range(4)] if symbolic and key in ("offset", "mask") else list(shape)
        free = ["n", shape[1], "h", "w"] if symbolic and key == "X" else free
        inputs.append(helper.make_tensor_value_info(key, dtype, free))
    node = helper.make_node(
        "DeformConv", [k if k in shapes else "" for k in ("X", "W", "offset", "B", "mask")], ["y"], **attributes
    )
    while node.input and not node.input[-1]:
        node.input.pop()
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", dtype, [None] * 4)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), arrays


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", sorted(DEFORM))
def test_deformable_convolution(name, symbolic):
    reference, arrays = deform_model(name, onnx.TensorProto.DOUBLE, False)
    evaluator = ReferenceEvaluator(reference)
    want = evaluator.run(None, arrays)[0]
    weights = RANDOM.standard_normal(want.shape)

    model = infer_shapes(ir.from_proto(deform_model(name, onnx.TensorProto.FLOAT, symbolic)[0]))
    graph = model.graph
    lower(graph, lambda n: True)
    op = Builder(graph)
    with op.scope("loss"):
        loss = op.ReduceSum(op.Mul(graph.outputs[0], weights.astype(np.float32)), keepdims=0)
    gradients = loss_gradients(op, loss, list(graph.inputs))
    graph.outputs.extend(gradients[v] for v in graph.inputs)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    got, *found = session.run(None, {k: v.astype(np.float32) for k, v in arrays.items()})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    for key, gradient in zip(arrays, found, strict=True):
        direction = RANDOM.standard_normal(arrays[key].shape)
        moved = [evaluator.run(None, {**arrays, key: arrays[key] + s * STEP * direction})[0] for s in (1, -1)]
        numeric = float(((moved[0] - moved[1]) * weights).sum()) / (2 * STEP)
        assert float((gradient * direction).sum()) == pytest.approx(numeric, rel=2e-4, abs=2e-4), key


@pytest.mark.parametrize("shape", [[2, 3, 7, 9], ["n", "c", "h", "w"]])
@pytest.mark.parametrize(("pooled", "scale"), [([2, 3], 1.0), ([3, 3], 0.5)])
def test_max_roi_pool_is_the_kernel_and_its_gradient_goes_to_the_largest(shape, pooled, scale):
    X = np.random.default_rng(2).standard_normal((2, 3, 7, 9)).astype(np.float32)
    rois = np.array([[0, 1, 1, 6, 5], [1, 0, 0, 8, 6], [1, 3, 2, 3, 2], [0, 4, 3, 20, 20]], np.float32)
    node = helper.make_node("MaxRoiPool", ["X", "rois"], ["y"], pooled_shape=pooled, spatial_scale=scale)
    inputs = [helper.make_tensor_value_info("X", 1, shape), helper.make_tensor_value_info("rois", 1, ["r", 5])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    want = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"X": X, "rois": rois})[0]

    model = infer_shapes(ir.from_proto(proto))
    lower(model.graph, lambda n: True)
    op = Builder(model.graph)
    y = model.graph.outputs[0]
    loss = op.ReduceSum(op.Mul(y, y), keepdims=0)
    gradient = loss_gradients(op, loss, [model.graph.inputs[0]])[model.graph.inputs[0]]
    model.graph.outputs.append(gradient)
    made, dX = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"X": X, "rois": rois})
    np.testing.assert_allclose(made, want, atol=1e-6)
    expected = np.zeros_like(X)  # all elements differ, so that each largest one has its place
    for r, c, i, j in np.ndindex(*want.shape):
        at = np.argwhere(X[int(rois[r, 0]), c] == want[r, c, i, j])
        if len(at):
            expected[(int(rois[r, 0]), c, *at[0])] += 2 * want[r, c, i, j]
    np.testing.assert_allclose(dX, expected, atol=1e-5)
