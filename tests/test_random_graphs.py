"""Random models: ortc's gradients against finite differences in float64, and between targets, shapes known and unknown.

Everything is compared with something that is not ortc's: the loss of the user's own model, computed by ONNX's reference
evaluator in float64, and ONNX Runtime's kernels in float32. A model at or next to a kink or a jump has no derivative to compare
with and is rejected; how many were is counted, and few must be.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gradcheck import TARGETS
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from random_graphs import Drawn, models

from ortc.artifacts import compiled_graphs
from ortc.compiler import of, role
from ortc.errors import ModelError, RecipeError
from ortc.grad import STEP, difference
from ortc.passes import SESSIONS
from ortc.passes.reference import evaluator, widened
from ortc.recipe import LossTerm, Recipe
from ortc.runtime.stage import open_session

ROUNDING = 2e-5  # of the largest entry: some hundred roundings in float32
COMPARED, KINK = "compared", "at a kink"
Arrays = Mapping[str, np.ndarray]


def train_graph(model: onnx.ModelProto, data: list[str], target: str) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The compiled training graph, and which of its outputs is the gradient of what."""
    recipe = Recipe(loss=[LossTerm(name="none", output="loss")], wrt=data, target=target)
    graph = compiled_graphs(ir.from_proto(model), recipe)["train"]
    gradients = {v.name or "": of(v) for v in graph.graph.outputs if role(v) == "gradient"}
    proto = ir.to_proto(graph)
    onnx.checker.check_model(proto)
    return proto, gradients


def with_symbols(drawn: Drawn, how: str) -> onnx.ModelProto:
    """The model with names for sizes: each input's first (``batch``), or all, the same for equal sizes or not."""
    model = onnx.ModelProto.FromString(drawn.model.SerializeToString())
    for value in model.graph.input:
        for axis, d in enumerate(value.type.tensor_type.shape.dim):
            if value.name in drawn.data and (axis == 0 or how != "batch"):
                d.dim_param = f"size_{d.dim_value}" if how == "equal names" else f"{value.name}_{axis}"
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def in_double(graph: onnx.ModelProto, names: Mapping[str, str], arrays: Arrays) -> dict[str, np.ndarray]:
    """Gradients by ONNX's reference, which also compares every value's shape with what the graph declares."""
    wanted = [v.name for v in graph.graph.input]
    outputs = evaluator(widened(graph)).run(None, {n: arrays[n] for n in wanted}, check_shape_annotations=True)
    found = zip([v.name for v in graph.graph.output], outputs, strict=True)
    return {names[n]: np.asarray(y) for n, y in found if n in names}


def forward(drawn: Drawn) -> float | None:
    """The loss of the user's own model in ONNX Runtime; None where a kernel refuses it, as some do scalars or sizes of 0."""
    try:
        return float(in_runtime(drawn.model, {}, drawn.arrays, TARGETS[0].name)["loss"])
    except Exception:
        return None


def in_runtime(graph: onnx.ModelProto, names: Mapping[str, str], arrays: Arrays, target: str) -> dict[str, np.ndarray]:
    """Gradients and the loss by ONNX Runtime."""
    session = open_session(graph.SerializeToString(), "train", target, SESSIONS.others, threads=1)
    outputs = [v.name for v in session.get_outputs()]
    found = zip(outputs, session.run(None, {v.name: arrays[v.name] for v in session.get_inputs()}), strict=True)
    return {names.get(n, n): np.asarray(y) for n, y in found}


def check(drawn: Drawn, symbols: str) -> str:
    """Assert that every gradient is right; what became of the example."""
    leaves = {**{n: drawn.arrays[n] for n in drawn.data}, **drawn.parameters}
    double = {n: a.astype(np.float64) for n, a in leaves.items()}
    fixed = {n: a for n, a in drawn.arrays.items() if n not in leaves}
    random = np.random.default_rng(0)
    along = {n: random.standard_normal(a.shape) for n, a in double.items()}
    user = evaluator(widened(drawn.model))

    def loss(h: float) -> float:
        return float(user.run(["loss"], {**fixed, **{n: a + h * along[n] for n, a in double.items()}})[0])

    try:
        graph, names = train_graph(widened(drawn.model), drawn.data, "onnxruntime")
    except ModelError as error:
        if "is unknown" in str(error) and len(drawn.arrays) > len(drawn.data):  # what is fed decides on a rank
            return "refused, a rank unknown"
        raise
    exact = in_double(graph, names, {**fixed, **double})
    for name, g in exact.items():
        assert g.shape == leaves[name].shape, f"d{name}"
    slope = sum(float(np.sum(g * along[n])) for n, g in exact.items())
    scale = 1 + sum(float(np.abs(g * along[n]).sum()) for n, g in exact.items())
    here = loss(0)
    single = forward(drawn)
    if single is None:
        return "ONNX Runtime cannot run the model itself"
    if not abs(single - here) <= 1e-4 * max(1.0, abs(here)):
        return "ONNX Runtime computes the model itself otherwise"
    if abs(loss(STEP) - 2 * here + loss(-STEP)) > 1e-3 * STEP * scale:
        return KINK
    numeric, smooth = difference(loss, here, slope, 2e-6 * scale)
    if not smooth:
        return KINK
    assert abs(numeric - slope) <= 2e-6 * scale, f"along a random direction {slope}, by differences {numeric}"

    near = {n: a * (1 + 1e-6 * random.standard_normal(a.shape)) for n, a in double.items()}
    moved = in_double(graph, names, {**fixed, **near})
    refused = ""
    for target in TARGETS:
        # Sizes of 0 are compared where they are unknown: what is known of them becomes constants, see Sketch.leaf.
        for how in ("static", symbols) if all(a.size for a in leaves.values()) else ("other names",):
            model = drawn.model if how == "static" else with_symbols(drawn, how)
            try:
                compiled, names = train_graph(model, drawn.data, target.name)
                if how != "static" and target.name == "onnxruntime":
                    wide, wide_names = train_graph(widened(model), drawn.data, target.name)
            except (ModelError, RecipeError) as error:
                if how == "static" or "unknown" not in str(error):
                    raise
                refused = "refused, a size unknown"
                continue
            if how != "static" and target.name == "onnxruntime":
                for name, g in in_double(wide, wide_names, {**fixed, **double}).items():
                    np.testing.assert_allclose(g, exact[name], rtol=1e-9, atol=1e-9, err_msg=f"{how} d{name}")
            got = in_runtime(compiled, names, {**drawn.arrays, **drawn.parameters}, target.name)
            for name, want in exact.items():
                error = np.abs(got[name] - want).max(initial=0)
                limit = ROUNDING * max(1.0, np.abs(want).max(initial=0)) + 10 * np.abs(moved[name] - want).max(initial=0)
                assert got[name].shape == want.shape, f"{target.name} {how} d{name}"
                assert error <= limit, f"{target.name} {how} d{name}: {got[name]} for {want}"
    return refused or COMPARED


def search(examples: int) -> Counter[str]:
    """Check this many random models, always the same ones; how many became what."""
    became: Counter[str] = Counter()

    # Without shrinking, which takes minutes: what is found is small anyway.
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(models(), st.sampled_from(["batch", "other names", "equal names"]))
    def compare(drawn: Drawn, symbols: str) -> None:
        note(onnx.printer.to_text(drawn.model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = check(drawn, symbols)
        became[result] += 1
        event(result)

    compare()
    return became


@pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_gradients_of_random_models(examples):
    became = search(examples)
    assert became[COMPARED] >= 0.85 * sum(became.values()), dict(became)
    assert became[KINK] <= 0.05 * sum(became.values()), dict(became)


def test_a_size_of_0_known_when_compiling():
    """The gradient that arrives is a constant of no elements, beyond which an optimiser of ONNX Runtime reads."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[2,3,0] x) => (float loss) {
      t = Tanh(x) loss = ReduceSum<keepdims = 0>(t) }"""
    graph, names = train_graph(onnx.parser.parse_model(text), ["x"], "onnxruntime")
    assert in_runtime(graph, names, {"x": np.zeros((2, 3, 0), np.float32)}, "onnxruntime")["x"].shape == (2, 3, 0)
