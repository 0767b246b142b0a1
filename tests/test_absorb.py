"""Products that read transposed operands, and scatters that add to a sum: the same values, from fewer nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer
from ortc.standalone import rewrite_model

TARGET = TARGETS[-1].name
MODELS = Path(__file__).parent / "data" / "models"
HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


def absorbed(folder: Path, inputs: str, nodes: str, outputs: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model, and what the pass makes of it."""
    model = onnx.parser.parse_model(f"{HEAD} f ({inputs}) => ({outputs}) {{ {nodes} }}")
    onnx.save(model, folder / "before.onnx")
    rewrite_model(folder / "before.onnx", folder / "after.onnx", ["absorb"])
    return model, onnx.load(folder / "after.onnx")


def values(model: onnx.ModelProto) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(random.standard_normal(shape)).astype(kind)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def operators(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node))


SWAP, SWAP3, SWAP4 = "[1, 0]", "[0, 2, 1]", "[0, 1, 3, 2]"


def transpose(value: str, perm: str) -> str:
    return f"{value}t = Transpose <perm = {perm}> ({value})"


# inputs, nodes, what is left
TAKEN = {
    "both": ("float[4,N] a, float[5,4] b", f"{transpose('a', SWAP)} {transpose('b', SWAP)} y = MatMul (at, bt)", {"Gemm": 1}),
    "by default": ("float[4,N] a, float[4,5] b", "at = Transpose (a) y = MatMul (at, b)", {"Gemm": 1}),
    "of a batch": ("float[2,4,N] a, float[2,4,5] b", f"{transpose('a', SWAP3)} y = MatMul (at, b)", {"FusedMatMul": 1}),
    "with a matrix": ("float[2,N,4] a, float[5,4] b", f"{transpose('b', SWAP)} y = MatMul (a, bt)", {"FusedMatMul": 1}),
    "spread over a batch": (
        "float[2,1,N,4] a, float[3,5,4] b", f"{transpose('b', SWAP3)} y = MatMul (a, bt)", {"FusedMatMul": 1}
    ),
    "heads": (
        "float[2,3,N,4] a, float[2,5,3,4] b", f"{transpose('b', '[0, 2, 3, 1]')} y = MatMul (a, bt)",
        {"FusedMatMul": 1, "Transpose": 1},
    ),
    "flags": (
        "float[N,4] a, float[4,5] b, float[5] c",
        f"{transpose('a', SWAP)} {transpose('b', SWAP)} y = Gemm <transA = 1, transB = 1, alpha = 0.5, beta = 2.0> (at, bt, c)",
        {"Gemm": 1},
    ),
    "flags of a batch": (
        "float[2,N,4] a, float[2,4,5] b",
        f"{transpose('a', SWAP3)} y = com.microsoft.FusedMatMul <transA = 1, alpha = 3.0> (at, b)",
        {"FusedMatMul": 1},
    ),
    "twice": (
        "float[2,N,3,4] a, float[2,3,4,5] b",
        f"{transpose('a', '[0, 2, 1, 3]')} {transpose('at', SWAP4)} {transpose('att', SWAP4)} y = MatMul (attt, b)",
        {"Transpose": 1, "MatMul": 1},
    ),
    "back": ("float[N,4] a, float[4,5] b", "at = Transpose (a) att = Transpose (at) y = MatMul (att, b)", {"MatMul": 1}),
    "double Gemm": ("double[4,N] a, double[4,5] b, double[5] c", "at = Transpose (a) y = Gemm (at, b, c)", {"Gemm": 1}),
}  # fmt: skip
LEFT = {
    "no kernel": ("double[4,N] a, double[4,5] b", "at = Transpose (a) y = MatMul (at, b)"),
    "a vector": ("float[4] a, float[5,4] b", "bt = Transpose (b) y = MatMul (a, bt)"),
    "rows are not whole": ("float[2,N,4] a, float[4,2,5] b", f"{transpose('b', '[1, 0, 2]')} y = MatMul (a, bt)"),
    "batches of rows": (
        "float[N,2,4] a, float[2,5,4] b",
        f"{transpose('b', SWAP3)} y = com.microsoft.FusedMatMul <transBatchA = 1> (a, bt)",
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_products_take_transposed_operands(case: str, tmp_path: Path):
    inputs, nodes, left = TAKEN[case]
    before, after = absorbed(tmp_path, inputs, nodes, f"{inputs.split('[')[0]} y")
    assert operators(after) == left
    np.testing.assert_allclose(*(values(model)[0] for model in (after, before)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", LEFT)
def test_others_stay(case: str, tmp_path: Path):
    inputs, nodes = LEFT[case]
    before, after = absorbed(tmp_path, inputs, nodes, f"{inputs.split('[')[0]} y")
    assert operators(after) == operators(before)


def test_a_transpose_that_others_read_stays(tmp_path: Path):
    nodes = "at = Transpose (a) y = MatMul (at, b) z = Relu (at)"
    before, after = absorbed(tmp_path, "float[4,N] a, float[4,5] b", nodes, "float[N,5] y, float[N,4] z")
    assert operators(after) == {"Transpose": 1, "Gemm": 1, "Relu": 1}
    for x, y in zip(values(before), values(after), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_a_transpose_that_is_an_output_stays(tmp_path: Path):
    nodes = "at = Transpose (a) att = Transpose (at)"
    before, after = absorbed(tmp_path, "float[4,N] a", nodes, "float[N,4] at, float[4,N] att")
    for x, y in zip(values(before), values(after), strict=True):
        np.testing.assert_array_equal(x, y)


def test_inside_of_branches(tmp_path: Path):
    nodes = (
        "y = If (c) <then_branch = g () => (float[4,4] u) { at = Transpose (a) u = MatMul (at, b) }, "
        "else_branch = h () => (float[4,4] v) { bt = Transpose (b) v = MatMul (bt, a) }>"
    )
    before, after = absorbed(tmp_path, "bool c, float[4,4] a, float[4,4] b", nodes, "float[4,4] y")
    inside = [[n.op_type for n in a.g.node] for node in after.graph.node for a in node.attribute]
    assert inside == [["Gemm"], ["Gemm"]]
    np.testing.assert_allclose(values(after)[0], values(before)[0], rtol=1e-6)


# ---- in training -------------------------------------------------------------------------------------------------------


def gradients(name: str, folder: Path, off: list[str]) -> tuple[float, dict[str, np.ndarray], onnx.GraphProto, int]:
    recipe = {"target": TARGETS[-1].name, "loss": [{"name": "cross_entropy", "options": {"axis": -1}}], "passes": {"off": off}}
    plan = compile(MODELS / f"{name}.onnx", folder, parse_recipe(recipe))
    random = np.random.default_rng(0)
    with Trainer(folder, threads=1) as trainer:
        shapes = {n: [d if isinstance(d, int) else 8 for d in p.shape] for n, p in trainer.inputs.ports.items()}
        loss, found = trainer.gradients({n: random.integers(0, 2, shape) for n, shape in shapes.items()})
    memory = plan.stages[0].phases["train"].memory
    return loss, found, onnx.load(folder / plan.stages[0].phases["train"].file).graph, memory.peak_bytes


def swapped(graph: onnx.GraphProto) -> list[str]:
    """Products' operands that are a transpose of the last two axes, or end with what was not the end."""
    perms = {n.output[0]: list(n.attribute[0].ints) for n in graph.node if n.op_type == "Transpose"}
    read = [v for n in graph.node if n.op_type in ("MatMul", "Gemm", "FusedMatMul") for v in n.input]
    return [v for v in read if v in perms and perms[v][-2] == len(perms[v]) - 1]


@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "bert.dynamo", "tied.legacy"])
def test_gradients_are_the_same(name: str, tmp_path: Path):
    loss, found, graph, peak = gradients(name, tmp_path / "with", [])
    other, expected, apart, most = gradients(name, tmp_path / "without", ["absorb"])
    assert loss == pytest.approx(other, rel=1e-6)
    for parameter, gradient in expected.items():
        np.testing.assert_allclose(found[parameter], gradient, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())
    assert not swapped(graph)
    assert len(swapped(apart)) > 4
    if name.startswith("gpt2"):
        assert peak < most


def test_a_tied_table_has_its_rows_added_to_the_products_gradient(tmp_path: Path):
    _, _, graph, _ = gradients("gpt2_eager.legacy", tmp_path / "o", [])
    made = {output: node for node in graph.node for output in node.output}
    [gradient] = [node for output, node in made.items() if output.endswith("wte.weight.grad")]
    assert gradient.op_type == "ScatterElements"
    assert made[gradient.input[0]].op_type == "Gemm"


def test_rows_are_added_to_gradients_that_are_zero_already(tmp_path: Path):
    """A table's gradient is a memory of the runtime's, with zeros in it before each step; nothing makes or copies zeros."""
    text = "m (int64[n,4] ids) => (float[n,4,3] y) { rows = Gather (table, ids) y = MatMul (rows, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    random = np.random.default_rng(0)
    table, w = (random.standard_normal(shape).astype(np.float32) for shape in ((9, 5), (5, 3)))
    model.graph.initializer.extend([onnx.numpy_helper.from_array(table, "table"), onnx.numpy_helper.from_array(w, "w")])
    onnx.save(model, tmp_path / "m.onnx")
    recipe = {"target": TARGET, "loss": [{"name": "mse"}], "optimizer": {"name": "sgd"}, "learning_rate": {"base": 0.0}}
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        plan = compile(tmp_path / "m.onnx", folder, parse_recipe({**recipe, "pipeline": {"micro_batches": parts}}))
        totals = [p.of for p in plan.stages[0].phases["train"].inputs if p.role == "gradient"]
        assert totals == (["table"] if TARGET == "ort-training" else []) if parts == 1 else ["table", "w"]
        nodes = onnx.load(folder / "stage-0/train.onnx").graph.node
        if totals:
            [scatter] = [node for node in nodes if node.op_type == "ScatterElements"]
            assert scatter.input[0] == "table.total"
        with Trainer(folder, threads=1) as trainer:
            for ids in ([[0, 3, 3, 8], [8, 8, 1, 0]], [[2, 2, 2, 2], [5, 4, 2, 6]]):
                ids = np.array(ids)
                labels = random.standard_normal((2, 4, 3)).astype(np.float32)
                trainer.step({"ids": ids, "labels": labels})
                want = np.zeros((9, 5))
                np.add.at(want, ids, 2 / labels.size * (table.astype(np.float64)[ids] @ w - labels) @ w.T)
                np.testing.assert_allclose(trainer._gradients()["table"], want, rtol=1e-5, atol=1e-7)
