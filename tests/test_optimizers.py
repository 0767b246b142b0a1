"""The optimizers against stored trajectories of 20 steps (made by tests/data/make_optimizers.py).

PyTorch computes the stored values in float64; its own float32 run differs from them by up to ``float32_differs_by``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.compiler import Compilation, new_graph, of, role, set_role
from ortc.errors import RecipeError
from ortc.passes.optimizer import BuildOptimizer
from ortc.plan import ParameterInfo
from ortc.recipe import parse_recipe
from ortc.target import load_target

FOLDER = Path(__file__).parent / "data"
SETTINGS = json.loads((FOLDER / "optimizers.json").read_text())


def optimizer_graph(shapes: dict[str, tuple[int, ...]], name: str, options: dict, **recipe) -> ir.Model:
    """The optimizer's graph for parameters of these shapes."""
    target = load_target("ort-training")
    model = new_graph("model", target.opset, target.ir_version)
    infos = []
    for key, shape in shapes.items():
        value = ir.Value(name=key, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        model.graph.inputs.append(set_role(value, "parameter", of=key))
        infos.append(ParameterInfo(name=key, role="parameter", dtype="float32", shape=list(shape), trainable=True, reason=""))
    fields = {"optimizer": {"name": name, "options": options, "decay_all": True, **recipe}}
    c = Compilation(model, parse_recipe(fields), target, parameters=infos, stages=[{"train": model}])
    BuildOptimizer().run(c)
    return c.stages[0]["optimizer"]


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_trajectory(setting):
    info = SETTINGS[setting]
    with np.load(FOLDER / "optimizers.npz") as archive:
        stored = {k.removeprefix(f"{setting}/"): archive[k] for k in archive.files if k.startswith(f"{setting}/")}
    now = {p: stored[f"init/{p}"].astype(np.float32) for p in info["parameters"]}
    shapes = {p: v.shape for p, v in now.items()}
    model = optimizer_graph(shapes, info["optimizer"], info["options"], max_value=info.get("max_value"))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    states = {}
    for step in range(20):
        feeds = {}
        for value in model.graph.inputs:
            key = of(value)
            feeds[value.name] = {
                "parameter": lambda key=key: now[key],
                "gradient": lambda key=key, step=step: stored[f"grad/{key}"][step].astype(np.float32),
                "state": lambda key=key, v=value: states.get((key, v.metadata_props["ortc.slot"]), np.zeros(v.shape.numpy(), np.float32)),
                "scalar": lambda key=key, step=step: (
                    np.array(step + 1, np.int64) if key == "step" else np.array(stored["lr"][step], np.float32)
                ),
            }[role(value)]()
        for value, result in zip(model.graph.outputs, session.run(None, feeds), strict=True):
            if role(value) == "parameter":
                now[of(value)] = result
            else:
                states[of(value), value.metadata_props["ortc.slot"]] = result
        for p in info["parameters"]:
            want = stored[f"after/{p}"][step]
            # The lr itself is rounded to float32: 6e-8 of a step, next to what PyTorch's float32 run differs by.
            limit = max(1e-6, 1.5 * info.get("float32_differs_by", 0.0))
            assert np.abs(now[p] - want).max() <= limit * max(1.0, np.abs(want).max()), f"{p} at step {step + 1}"


def test_nothing_reads_an_input_after_its_new_value_is_made():
    """Outputs are bound to their inputs' memory, so the order of the graph must not read old values late."""
    for name, info in SETTINGS.items():
        graph = optimizer_graph({"w": (4, 3), "b": (5,)}, info["optimizer"], info["options"]).graph
        order = {node: i for i, node in enumerate(graph)}
        made = {(role(v), of(v), v.metadata_props.get("ortc.slot")): order[v.producer()] for v in graph.outputs}
        for value in graph.inputs:
            key = (role(value), of(value), value.metadata_props.get("ortc.slot"))
            for use in value.uses():
                assert key not in made or order[use.node] <= made[key], f"{name}: {value.name} is read by {use.node.name}"


def test_a_group_has_its_own_rate_and_decay():
    shapes = {"w": (2, 2), "special": (2, 2)}
    groups = [{"match": ["spec*"], "lr_scale": 0.5, "weight_decay": 0.0}]
    target = load_target("ort-training")
    model = new_graph("model", target.opset, target.ir_version)
    infos = []
    for i, (key, shape) in enumerate(shapes.items()):
        value = ir.Value(name=key, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        model.graph.inputs.append(set_role(value, "parameter", of=key))
        info = ParameterInfo(name=key, role="parameter", dtype="float32", shape=list(shape), trainable=True, reason="")
        infos.append(info.model_copy(update={"group": 0 if i else None}))
    recipe = parse_recipe({"optimizer": {"name": "sgd", "options": {"weight_decay": 0.1}}, "groups": groups})
    c = Compilation(model, recipe, target, parameters=infos, stages=[{"train": model}])
    BuildOptimizer().run(c)
    graph = c.stages[0]["optimizer"]
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString())
    ones = np.ones((2, 2), np.float32)
    feeds = {v.name: ones for v in graph.graph.inputs if role(v) != "scalar"}
    feeds |= {"step": np.array(1), "lr": np.array(0.1, np.float32)}
    outputs = dict(zip([of(v) for v in graph.graph.outputs], session.run(None, feeds), strict=True))
    np.testing.assert_allclose(outputs["w"], 1 - 0.1 * 1.1, rtol=1e-6)
    np.testing.assert_allclose(outputs["special"], 1 - 0.05, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "adamz"}, "there is no optimizer 'adamz'"),
        ({"name": "adam", "options": {"beta3": 1.0}}, "there is no option 'beta3'"),
        ({"name": "sgd", "options": {"nesterov": 2}}, "nesterov must be a bool"),
        ({"name": "sgd", "options": {"momentum": "high"}}, "momentum must be a float"),
        ({"name": "lamb", "options": {"min_ratio": 2.0, "max_ratio": 1.0}}, "min_ratio <= max_ratio must hold"),
    ],
)
def test_wrong_options_are_told(optimizer, message):
    with pytest.raises(RecipeError, match=message):
        optimizer_graph({"w": (2,)}, optimizer["name"], optimizer.get("options", {}))
