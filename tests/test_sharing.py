"""Weights that an exporter merged although they are two, wrote twice although they are one, or folded anew for each call."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortc.artifacts import compile_graphs
from ortc.passes.normalise import prepare
from ortc.passes.sharing import TORCH_FOLDED_FROM, tie_copies, unmerge
from ortc.recipe import parse_recipe

SCOPES = "pkg.torch.onnx.name_scopes"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
RANDOM = np.random.default_rng(3).standard_normal((4, 3)).astype(np.float32)


def model_of(
    body: str, weights: dict[str, np.ndarray], output: str = "float[n,3] y", producer: str | None = "pytorch"
) -> ir.Model:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]> g (float[n,3] x) => ({output}) {{ {body} }}')
    model.producer_name = producer
    graph = model.graph
    made = {v.name: v for n in graph for v in n.outputs}
    for name, array in weights.items():
        value = next((v for n in graph for v in n.inputs if v is not None and v.name == name and v.name not in made), None)
        assert value is not None, name
        value.const_value = ir.tensor(array, name=name)
        value.shape, value.dtype = ir.Shape(array.shape), value.const_value.dtype
        graph.register_initializer(value)
    return prepare(model)


def norms(values: np.ndarray) -> ir.Model:
    """Two norms of two modules, whose weights the exporter found equal."""
    body = '"a" = Mul(x, "first.weight") "b" = Mul(a, "first.weight") y = Tanh(b)'
    model = model_of(body, {"first.weight": values})
    for node, module in zip(model.graph, ("first", "second"), strict=False):
        node.metadata_props[SCOPES] = f"['', '{module}', 'mul']"
    return model


def test_equal_weights_of_two_modules_are_two():
    model = norms(np.ones(3, np.float32))
    assert unmerge(model) == ["second.weight"]
    assert [n.inputs[1].name for n in list(model.graph)[:2]] == ["first.weight", "second.weight"]


def test_a_weight_that_is_really_shared_stays_one():
    assert unmerge(norms(np.array([0.5, -1.0, 2.0], np.float32))) == []


def test_an_identity_of_a_merged_weight_is_a_weight():
    body = '"second.weight" = Identity("first.weight") a = Mul(x, "first.weight") y = Mul(a, "second.weight")'
    model = model_of(body, {"first.weight": np.zeros(3, np.float32)})
    assert unmerge(model) == ["second.weight"]
    assert sorted(model.graph.initializers) == ["first.weight", "second.weight"]


def test_a_transposed_copy_follows_its_weight():
    body = 'e = Gather("table", i) s = Add(e, x) y = MatMul(s, "onnx::MatMul_9")'
    model = model_of(body, {"table": RANDOM, "i": np.array([0, 1]), "onnx::MatMul_9": RANDOM.T.copy()}, "float[n,4] y")
    assert tie_copies(model) == {"onnx::MatMul_9": "table"}
    assert "onnx::MatMul_9" not in model.graph.initializers


def test_equal_sizes_do_not_tie():
    body = 'e = Gather("table", i) s = Add(e, x) y = MatMul(s, "onnx::MatMul_9")'
    model = model_of(body, {"table": RANDOM, "i": np.array([0, 1]), "onnx::MatMul_9": RANDOM.T + 1}, "float[n,4] y")
    assert tie_copies(model) == {}


def test_a_weight_folded_for_each_call_is_one():
    square = RANDOM[:3].copy()
    model = model_of("a = MatMul(x, val_1) y = MatMul(a, val_2)", {"val_1": square, "val_2": square.copy()})
    for name in ("val_1", "val_2"):
        model.graph.initializers[name].metadata_props[TORCH_FOLDED_FROM] = "['layer.weight']"
    tie_copies(model)
    assert list(model.graph.initializers) == ["val_1"]


@pytest.mark.parametrize(
    ("producer", "mark", "trains"),
    [("pytorch", None, True), (None, None, False), ("pytorch", "PARAMETER", True), ("pytorch", "BUFFER", False)],
)
def test_a_scalar_trains_where_the_exporter_says_that_it_is_a_weight(producer, mark, trains):
    model = model_of('a = Mul(x, "scale") y = Mul(a, w)', {"scale": np.float32(2), "w": RANDOM[0]}, producer=producer)
    if mark:
        model.graph.initializers["scale"].metadata_props[KIND] = mark
        model.graph.initializers["w"].metadata_props[KIND] = "PARAMETER"
    c = compile_graphs(model, parse_recipe({"loss": [{"name": "mse"}]}))
    assert [p.name for p in c.parameters if p.trainable] == (["scale", "w"] if trains else ["w"])
