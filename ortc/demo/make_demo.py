"""Makes the demo's files anew, with the same contents: ``pip install scikit-learn && python make_demo.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).parent
CLASSES = 10
EVAL_SHARE = 0.2
SEED = 0


def make_data() -> None:
    """Write the two data files: ``x`` float32 [N, 1, 8, 8] in 0..1 and ``labels`` int64 [N]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images / 16).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    rng = np.random.default_rng(SEED)
    held_out = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: round(len(members) * EVAL_SHARE)]] = True
    np.savez_compressed(FOLDER / "digits_train.npz", x=x[~held_out], labels=labels[~held_out])
    np.savez_compressed(FOLDER / "digits_eval.npz", x=x[held_out], labels=labels[held_out])


def make_model() -> None:
    """Write the network: two convolutions with batch norm, pooling, a hidden layer with dropout, ten classes.

    Weights are normal with variance 2 / fan-in (He et al. 2015, arXiv:1502.01852), biases zero.
    """
    rng = np.random.default_rng(SEED)
    weights: dict[str, np.ndarray] = {}

    def he(name: str, *shape: int) -> str:
        fan_in = int(np.prod(shape[1:]))
        weights[name] = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype(np.float32)
        return name

    def filled(name: str, value: float, *shape: int) -> str:
        weights[name] = np.full(shape, value, np.float32)
        return name

    def convolution(layer: str, source: str, channels_in: int, channels: int) -> list[onnx.NodeProto]:
        weight = he(f"{layer}.weight", channels, channels_in, 3, 3)
        norm = [
            filled(f"{layer}.norm.{name}", value, channels)
            for name, value in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1))
        ]
        return [
            node("Conv", [source, weight], layer, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            node("BatchNormalization", [layer, *norm], f"{layer}.norm"),
            node("Relu", [f"{layer}.norm"], f"{layer}.relu"),
        ]

    def linear(layer: str, source: str, size_in: int, size: int) -> onnx.NodeProto:
        weight = he(f"{layer}.weight", size, size_in)
        return node("Gemm", [source, weight, filled(f"{layer}.bias", 0, size)], layer, transB=1)

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op_type, inputs, [output], name=output, **attributes)

    nodes = [
        *convolution("conv1", "x", 1, 32),
        *convolution("conv2", "conv1.relu", 32, 64),
        node("MaxPool", ["conv2.relu"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["pool"], "flat"),
        linear("hidden", "flat", 64 * 4 * 4, 128),
        node("Relu", ["hidden"], "hidden.relu"),
        node("Dropout", ["hidden.relu", filled("dropout.ratio", 0.5)], "dropout"),
        linear("logits", "dropout", 128, CLASSES),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, FOLDER / "digits.onnx")


if __name__ == "__main__":
    make_data()
    make_model()
