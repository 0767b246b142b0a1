"""The optimizers against stored trajectories of 20 steps (made by tests/data/make_optimizers.py).

PyTorch computes the stored values in float64; its own float32 run differs from them by up to ``float32_differs_by``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from gradcheck import TARGETS
from safetensors.numpy import load_file

from ortc import Trainer
from ortc.artifacts import compile
from ortc.compiler import Compilation, new_graph, of, role, set_role
from ortc.errors import RecipeError
from ortc.passes import optimizer
from ortc.passes.optimizer import BuildOptimizer, state_slots
from ortc.plan import ParameterInfo
from ortc.recipe import parse_recipe
from ortc.rules import OPTIMIZERS

FOLDER = Path(__file__).parent / "data"
SETTINGS = json.loads((FOLDER / "optimizers.json").read_text())


def optimizer_graph(shapes: dict[str, tuple[int, ...]], name: str, options: dict, **recipe) -> ir.Model:
    """The optimizer's graph for parameters of these shapes."""
    c = compilation(shapes, {"optimizer": {"name": name, "options": options, "decay_all": True, **recipe}})
    BuildOptimizer().run(c)
    return c.stages[0]["optimizer"]


def zeros(value: ir.Value) -> np.ndarray:
    assert value.shape is not None
    return np.zeros(value.shape.numpy(), np.float32)


def compilation(shapes: dict[str, tuple[int, ...]], recipe: dict) -> Compilation:
    """A compilation that trains parameters of these shapes, up to the optimizer."""
    target = TARGETS[-1]
    model = new_graph("model", target.opset, target.ir_version)
    infos = []
    for key, shape in shapes.items():
        value = ir.Value(name=key, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        model.graph.inputs.append(set_role(value, "parameter", of=key))
        infos.append(ParameterInfo(name=key, role="parameter", dtype="float32", shape=list(shape), trainable=True, reason=""))
    return Compilation(model, parse_recipe(recipe), target, parameters=infos, stages=[{"train": model}])


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
                "state": lambda key=key, v=value: states.get((key, v.metadata_props["ortc.slot"]), zeros(v)),
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
            assert np.abs(now[p] - want).max() <= 1e-6 * np.abs(want).max(), f"{p} at step {step + 1}"


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


def test_max_norm_comes_before_max_value():
    model = optimizer_graph({"w": (3,)}, "sgd", {}, max_norm=1.0, max_value=0.5)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = {v.name: zeros(v) for v in model.graph.inputs if role(v) == "parameter"}
    feeds |= {v.name: np.array([4.0, -0.4, -6.0], np.float32) for v in model.graph.inputs if role(v) == "gradient"}
    scalars = {"step": np.array(1), "lr": np.array(1, np.float32), "gradient_scale": np.array(0.25, np.float32)}
    (new,) = session.run(None, feeds | scalars)
    np.testing.assert_allclose(new, [-0.5, 0.1, 0.5], rtol=1e-6)


def test_centred_rmsprop_stays_finite_where_the_variance_rounds_to_less_than_nothing():
    """Equal gradients have none: v and a² are the same number, rounded in two ways."""
    model = optimizer_graph({"w": (64,)}, "rmsprop", {"centered": True, "alpha": 0.5})
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = {v.name: zeros(v) for v in model.graph.inputs if role(v) in ("parameter", "state")}
    feeds |= {"w.grad": np.linspace(0.1, 1, 64, dtype=np.float32), "lr": np.array(1e-9, np.float32)}
    below = 0
    for step in range(60):
        w, v, a = session.run(None, feeds | {"step": np.array(step + 1)})
        below += int((v - a * a < 0).sum())
        assert np.isfinite(w).all()
        feeds |= {"w": w, "w.square_avg": v, "w.grad_avg": a}
    assert below


def test_factored_states_are_counted_allocated_saved_and_restored(tmp_path):
    """Adafactor keeps a row and a column of a matrix; a run that continues from a checkpoint is the same to the bit."""
    assert state_slots(compilation({"w": (40, 60), "b": (100,)}, {"optimizer": {"name": "adafactor"}})) == 200 / 2500
    assert state_slots(compilation({"w": (40, 60), "b": (100,)}, {"optimizer": {"name": "adamw"}})) == 2
    plan = compile(FOLDER / "models" / "mlp.legacy.onnx", tmp_path / "out", parse_recipe({"optimizer": {"name": "adafactor"}}))
    ports = {p.name: p for p in plan.stages[0].phases["train"].inputs}
    random = np.random.default_rng(0)
    data, label = (next(p for p in ports.values() if p.role == r) for r in ("data", "label"))
    x = random.standard_normal([4, *data.shape[1:]]).astype(np.float32)
    batches = [{data.of or data.name: x, label.of or label.name: random.integers(0, 2, 4)} for _ in range(4)]
    with Trainer(tmp_path / "out", threads=1) as trainer:
        for batch in batches[:2]:
            trainer.step(batch)
        trainer.save()
        whole = [trainer.step(batch).loss for batch in batches[2:]]
        values = {name: array.copy() for name, array in trainer.parameters.items()}
        states = {k: a.copy() for k, a in trainer._team.workers[0].stages[0].states.items()}
    shapes = {p.name: tuple(p.shape) for p in plan.trainable()}
    for (name, slot), array in states.items():
        shape = shapes[name]
        assert array.any()
        assert array.shape == {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1]), "variance": shape}[slot]
    assert {slot for _, slot in states} == {"row_var", "col_var", "variance"}
    with Trainer(tmp_path / "out", threads=1) as trainer:
        assert [trainer.step(batch).loss for batch in batches[2:]] == whole
        for name, array in trainer.parameters.items():
            assert array.tobytes() == values[name].tobytes()
        for key, array in trainer._team.workers[0].stages[0].states.items():
            assert array.tobytes() == states[key].tobytes()


def test_a_group_has_its_own_rate_and_decay():
    shapes = {"w": (2, 2), "special": (2, 2)}
    groups = [{"match": ["spec*"], "lr_scale": 0.5, "weight_decay": 0.0}]
    c = compilation(shapes, {"optimizer": {"name": "sgd", "options": {"weight_decay": 0.1}}, "groups": groups})
    c.parameters = [info.model_copy(update={"group": 0 if info.name == "special" else None}) for info in c.parameters]
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


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if OPTIMIZERS[name].elementwise])
def test_a_large_parameter_is_updated_in_chunks_as_in_one_piece(name, tmp_path, monkeypatch):
    """A Scan over rows that fit the cache: the same numbers but for the last bit, in the parameter's own shape."""
    monkeypatch.setattr(optimizer, "_LARGE", 1 << 10)
    monkeypatch.setattr(optimizer, "_SMALLEST_CHUNK", 64)
    text = "m (float[N,96] x) => (float[N,40] y) { h = MatMul(x, w) y = Add(h, b) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    random = np.random.default_rng(1)
    values = {"w": random.standard_normal((96, 40), np.float32), "b": random.standard_normal(40, np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, key) for key, array in values.items())
    onnx.save(model, tmp_path / "m.onnx")
    batch = {"x": random.standard_normal((8, 96)).astype(np.float32), "labels": np.ones((8, 40), np.float32)}
    options = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    chosen = {"loss": [{"name": "mse"}], "target": TARGETS[-1].name}
    chosen |= {"optimizer": {"name": name, "options": options, "max_norm": 5.0}}
    found = []
    for chunk in (None, 480):
        monkeypatch.setattr(optimizer, "_chunk", lambda elements, size=chunk: size if elements == 96 * 40 else None)
        folder = tmp_path / str(chunk)
        plan = compile(tmp_path / "m.onnx", folder, parse_recipe(chosen))
        shapes = {p.of: p.shape for p in plan.stages[0].phases["optimizer"].inputs if p.role == "parameter"}
        assert shapes["w"] == ([96, 40] if chunk is None else [8, 480])
        with Trainer(folder) as trainer:
            for _ in range(3):
                trainer.step(batch)
            trainer.save()
            found.append({k: v.copy() for k, v in trainer.parameters.items()})
        states = load_file(folder / "checkpoint" / "step-3" / "optimizer.safetensors")
        assert all(states[f"w/{key.split('/')[1]}"].shape == (96, 40) for key in states if key.startswith("w/"))
    for key in ("w", "b"):
        np.testing.assert_allclose(found[0][key], found[1][key], rtol=1e-6, atol=1e-7)
    assert np.abs(found[1]["w"] - values["w"]).max() > 1e-4


def test_chunks_divide_a_parameter():
    assert optimizer._chunk(1000) is None
    for elements in (50257 * 768, 768 * 3072, 512 * 512 * 9):
        size = optimizer._chunk(elements)
        assert size is not None
        assert elements % size == 0
        assert 1 << 12 <= size <= 1 << 15
    assert optimizer._chunk(1_000_003) is None  # a prime
