"""``ortc diff``: equal is what computes the same, and what differs is said in the words of graphs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from timing import seconds

from ortc.artifacts import compile
from ortc.diff import Change, diff_models, diff_texts
from ortc.graph.names import all_graphs
from ortc.graph.text import graph_text
from ortc.recipe import parse_recipe
from ortc.source import load_model

pytestmark = pytest.mark.compiler

MODELS = Path(__file__).parent / "data" / "models"

TEXT = """\
<ir_version: 10, opset_import: ["": 21]>
g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}> {
   product = MatMul (x, w)
   sum = Add (product, b)
   active = LeakyRelu <alpha: float = 0.1> (sum)
   y = Mul (active, sum)
}
"""


def changes(a: str, b: str) -> list[Change]:
    return [c for found in diff_models(ir.from_onnx_text(a), ir.from_onnx_text(b)).files.values() for c in found]


def scrambled(model: ir.Model, seed: int = 0) -> ir.Model:
    """Other names for nodes, values and weights, and the nodes in another order."""
    rng = random.Random(seed)
    for graph in all_graphs(model.graph):
        for node in graph:
            node.name = f"n{rng.random()}"
            for value in node.outputs:
                if value.name and not value.is_graph_output():
                    value.name = f"v{rng.random()}"
    for value in list(model.graph.initializers.values()):
        value.name = f"w{rng.random()}"
    nodes = list(model.graph)
    model.graph.remove(nodes)
    rng.shuffle(nodes)
    model.graph.extend(nodes)
    model.graph.sort()
    return model


@pytest.mark.parametrize("name", [p.stem for p in sorted(MODELS.glob("*.onnx"))])
def test_other_names_and_another_order_are_no_difference(name):
    path = MODELS / f"{name}.onnx"
    found = diff_models(load_model(path), scrambled(load_model(path)))
    assert not found, str(found)[:2000]
    assert found.renamed > len(load_model(path).graph) // 2
    assert str(found) == f"equal; {found.renamed} nodes or weights have another name, which is no difference"


@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.dynamo", "bert.dynamo", "lstm.legacy"])
def test_one_node_more_is_one_node_added_and_one_edge(name):
    """Whatever names the rest has by now, and however much lies behind it."""
    path = MODELS / f"{name}.onnx"
    changed = scrambled(load_model(path))
    reader = next(n for n in changed.graph if n.inputs and n.inputs[0] is not None and n.inputs[0].producer() is not None)
    new = ir.node("Neg", [reader.inputs[0]], name="new")
    changed.graph.insert_before(reader, new)
    reader.replace_input_with(0, new.outputs[0])
    found = [c for part in diff_models(load_model(path), changed).files.values() for c in part]
    assert [(c.kind, c.what) for c in found] == [("+", "node"), ("~", "node")]
    assert found[0].name == "new"
    assert len(found[1].details) == 1
    assert found[1].details[0].startswith("input 0: ")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("alpha: float = 0.1", "alpha: float = 0.2", [("~", "node", "active", "attribute alpha: 0.1")]),
        ("Add (product, b)", "Sub (product, b)", [("~", "node", "sum", "operator Add -> Sub")]),
        ("Mul (active, sum)", "Mul (active, product)", [("~", "node", "y", "input 1: sum -> product")]),
        ("b = {1, 2}", "b = {1, 3}", [("~", "weight", "b", "float32[2]: [1.0, 2.0] -> [1.0, 3.0]")]),
        ("{1, 2, 3, 4, 5, 6}", "{1, 2, 3, 4, 5, 8}", [("~", "weight", "w", "float32[3,2]: 1 of 6 elements differ")]),
        ("float[N,3] x", "float[M,3] x", [("~", "input", "x", "float32[N,3] -> float32[M,3]")]),
        ('"": 21', '"": 20', [("~", "opset", "ai.onnx", "version 21 -> 20")]),
    ],
)  # fmt: skip
def test_what_differs_is_named(old, new, expected):
    assert old in TEXT
    found = changes(TEXT, TEXT.replace(old, new))
    assert [(c.kind, c.what, c.name) for c in found] == [row[:3] for row in expected]
    assert found[0].details[0].startswith(expected[0][3])


def test_names_of_inputs_and_outputs_are_a_difference():
    found = changes(TEXT, TEXT.replace("x)", "data)").replace("(x, w)", "(data, w)"))
    assert [(c.kind, c.what, c.details) for c in found] == [("~", "input", ("name x -> data",))]
    found = changes(TEXT, TEXT.replace(" y)", " out)").replace("y = Mul", "out = Mul"))
    assert [(c.kind, c.what, c.details) for c in found] == [("~", "output", ("name y -> out",))]


def test_weights_of_other_names_and_values_in_the_same_place_are_one_change():
    found = changes(TEXT, TEXT.replace("float[2] b = {1, 2}", "float[2] c = {5, 6}").replace("(product, b)", "(product, c)"))
    assert [(c.kind, c.what, c.name) for c in found] == [("~", "weight", "b")]
    assert found[0].details == ("name b -> c", "float32[2]: [1.0, 2.0] -> [5.0, 6.0]")


def test_two_weights_that_are_swapped_are_other_edges():
    two = TEXT.replace("b = {1, 2}>", "b = {1, 2}, float[2] c = {1, 3}>").replace("Mul (active, sum)", "Mul (active, c)")
    swapped = two.replace("(product, b)", "(product, §)").replace("(active, c)", "(active, b)").replace("§", "c")
    details = [d for c in changes(two, swapped) for d in c.details]
    assert details == ["input 1: b -> c", "input 1: c -> b"]


def test_equal_expressions_that_only_one_graph_has_merged():
    twice = TEXT.replace("y = Mul (active, sum)", "again = Add (product, b)\n   y = Mul (active, again)")
    found = changes(twice, TEXT)
    assert [(c.kind, c.what, c.name) for c in found] == [("-", "node", "again")]


BRANCHES = """\
<ir_version: 10, opset_import: ["": 21]>
g (bool c, float[3] x) => (float[3] y) {
   z = Neg (x)
   y = If (c) <
      then_branch = a () => (float[3] p) { p = Mul (z, x) },
      else_branch = b () => (float[3] q) { q = Abs (z) }
   >
}
"""


def test_a_nested_graph_is_compared_where_it_is():
    found = changes(BRANCHES, BRANCHES.replace("q = Abs (z)", "q = Abs (x)"))
    assert [(c.kind, c.what, c.name, c.details) for c in found] == [
        ("~", "node", "y.else_branch / q", ("input 0: z -> x",)),
    ]
    renamed = BRANCHES.replace("z = Neg", "zz = Neg").replace("(z", "(zz").replace(" p)", " pp)").replace("p = Mul", "pp = Mul")
    assert [(c.kind, c.what, c.details) for c in changes(BRANCHES, renamed)] == [("~", "output", ("name p -> pp",))]


def test_a_name_cannot_write_to_the_terminal():
    model = ir.from_onnx_text(TEXT)
    model.graph[0].name = "\x1b[2J\nortc: fine"
    model.graph[0].op_type = "Gemm"
    text = str(diff_models(ir.from_onnx_text(TEXT), model))
    assert "\x1b" not in text
    assert "\nortc" not in text


def chain(count: int, extra: int | None = None) -> onnx.ModelProto:
    nodes, value = [], "x"
    for i in range(count):
        nodes.append(helper.make_node("Tanh" if i % 2 else "Exp", [value], [f"v{i}"]))
        value = f"v{i}"
        if i == extra:
            nodes.append(helper.make_node("Neg", [value], ["extra"]))
            value = "extra"
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])] for name in ("x", value)]
    return helper.make_model(helper.make_graph(nodes, "g", *ports), opset_imports=[helper.make_opsetid("", 17)])


def test_linear_in_nodes():
    def compared(count: int, times: int) -> float:
        a, b = ir.from_proto(chain(count)), ir.from_proto(chain(count, count // 2))
        found = []
        taken = seconds(lambda: found.append(diff_models(a, b)), times)
        assert all(len(each.files[""]) == 2 for each in found)
        return taken

    compared(100, 1)
    small, large = compared(1_000, 5), compared(16_000, 2)
    assert large < 16 * 3 * small, f"1,000 nodes {small:.3f} s, 16,000 {large:.3f} s"  # a quadratic one: 256 times as long


# ---- folders, and the command ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("diff")
    model = MODELS / "mlp.legacy.onnx"
    compile(model, root / "a")
    compile(model, root / "same")
    compile(model, root / "clipped", parse_recipe({"optimizer": {"max_value": 1.0}, "parameters": {"freeze": ["fc1*"]}}))
    proto = onnx.load_model(model)
    tensor = proto.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
    onnx.save(proto, root / "mlp.legacy.onnx")
    compile(root / "mlp.legacy.onnx", root / "weights")
    return root


def test_equal_folders(ortc, folders):
    assert ortc("diff", folders / "a", folders / "same") == (0, "equal\n", "")


def test_another_recipe(ortc, folders):
    code, out, err = ortc("diff", folders / "a", folders / "clipped")
    assert (code, err) == (1, "")
    assert "~ field recipe.optimizer.max_value\n        None -> 1.0" in out
    assert "~ field parameters.fc1.weight.trainable\n        True -> False" in out
    assert "  - output fc1.weight.grad" in out
    assert "  + node " in out.partition("stage-0/optimizer:")[2], "the clipping"


def test_other_initial_weights(ortc, folders):
    code, out, _ = ortc("diff", folders / "a", folders / "weights")
    assert code == 1
    name = onnx.load_model(MODELS / "mlp.legacy.onnx").graph.initializer[0].name
    assert out.splitlines()[0] == "checkpoint/step-0:"
    assert out.splitlines()[1] == f"  ~ weight {name}"
    assert "elements differ, by up to 0.5" in out
    assert out.splitlines()[-1] == "1 weight changed"


def test_two_models(ortc, folders):
    code, out, _ = ortc("diff", MODELS / "mlp.legacy.onnx", folders / "mlp.legacy.onnx")
    assert code == 1
    assert out.endswith("1 weight changed\n")
    assert ortc("diff", MODELS / "mlp.legacy.onnx", MODELS / "mlp.legacy.onnx")[:2] == (0, "equal\n")


def test_mistakes(ortc, folders, tmp_path):
    def message(*arguments):
        code, out, err = ortc("diff", *arguments)
        assert (code, out) == (2, "")
        return err

    assert "there is no" in message(folders / "a", folders / "nothing")
    assert "is a folder and" in message(folders / "a", MODELS / "mlp.legacy.onnx")
    assert "has no plan.json" in message(folders / "a", tmp_path)
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    assert "not an ONNX file" in message(MODELS / "mlp.legacy.onnx", tmp_path / "x.onnx")


def test_a_damaged_checkpoint_is_told(ortc, folders, tmp_path):
    compile(MODELS / "mlp.legacy.onnx", tmp_path / "b")
    weights = tmp_path / "b" / "checkpoint" / "step-0" / "parameters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    code, _, err = ortc("diff", folders / "a", tmp_path / "b")
    assert code == 2
    assert "no safetensors file, or it is damaged" in err


def test_a_changed_graph_file_is_compared_as_it_is(ortc, folders, tmp_path):
    compile(MODELS / "mlp.legacy.onnx", tmp_path / "b")
    file = tmp_path / "b" / json.loads((tmp_path / "b" / "plan.json").read_text())["stages"][0]["phases"]["eval"]["file"]
    proto = onnx.load_model(file)
    next(n for n in proto.graph.node if n.op_type == "Relu").op_type = "Tanh"
    onnx.save(proto, file)
    code, out, _ = ortc("diff", folders / "a", tmp_path / "b")
    assert code == 1
    assert "operator Relu -> Tanh" in out


# ---- golden texts ----------------------------------------------------------------------------------------------------


def test_a_golden_shows_the_graphs_difference():
    a = graph_text(ir.from_onnx_text(TEXT))
    lines = diff_texts("train.onnx", a, a.replace("LeakyRelu", "Elu"))
    assert lines[0] == "train.onnx, expected -> compiled:"
    assert "      operator LeakyRelu -> Elu" in "\n".join(lines)
    assert diff_texts("train.onnx", a, a) == []


def test_a_golden_where_only_names_differ_shows_the_text():
    a = graph_text(ir.from_onnx_text(TEXT))
    lines = diff_texts("train.onnx", a, a.replace("active", "hot"))
    assert lines[0] == "the graphs are equal; names, their order, or tags in comments differ:"
    assert any(line.startswith("+   hot = LeakyRelu <alpha: float = 0.1> (sum)") for line in lines)


def test_a_golden_that_is_no_graph_shows_the_text():
    assert diff_texts("train.onnx", "old\n", "new\n")[-2:] == ["-old", "+new"]
