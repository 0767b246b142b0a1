"""A model that is divided over stages, micro-batches and replicas trains as it does in one piece.

Every rank is a thread here; tests/runtime/test_mpi.py holds processes against threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import CheckpointError, DataError, NotFiniteError
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime import checkpoint
from ortc.runtime.run import run
from ortc.runtime.stage import Stage, view

pytestmark = pytest.mark.ranks

DATA = Path(__file__).parent / "data"
Batch = dict[str, np.ndarray]


# ---- models and their data -------------------------------------------------------------------------------------------


def build(
    path: Path,
    inputs: str,
    outputs: str,
    lines: Sequence[str],
    weights: Mapping[str, Sequence[int]],
    seed: int = 0,
) -> Path:
    """A model from ONNX text; weights are random, nodes are named as their first output."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> net ({inputs}) => ({outputs}) {{ {" ".join(lines)} }}'
    )
    random = np.random.default_rng(seed)
    for node in model.graph.node:
        node.name = node.output[0]
    for name, shape in weights.items():
        scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 0.1
        array = (random.standard_normal(shape) * scale).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def dense(x: str, y: str, layer: int, active: bool = True) -> str:
    """A line of ``build``: y = relu(x·w + b), or without relu."""
    if not active:
        return f"{y} = Gemm({x}, w{layer}, b{layer})"
    return f"p{layer} = Gemm({x}, w{layer}, b{layer}) {y} = Relu(p{layer})"


def layers(*widths: int) -> dict[str, Sequence[int]]:
    pairs = list(pairwise(widths))
    return {f"w{i}": pair for i, pair in enumerate(pairs)} | {f"b{i}": (pair[1],) for i, pair in enumerate(pairs)}


def perceptron(path: Path, batch: int | str = "n") -> Path:
    """Four layers, 6 numbers to 5 classes."""
    lines = [dense("x", "h0", 0), dense("h0", "h1", 1), dense("h1", "h2", 2), dense("h2", "logits", 3, active=False)]
    return build(path, f"float[{batch}, 6] x", f"float[{batch}, 5] logits", lines, layers(6, 16, 12, 10, 5))


def points(samples: int, seed: int = 0) -> Batch:
    """For the perceptron."""
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((samples, 6)).astype(np.float32), "labels": random.integers(0, 5, samples)}


def attention(name: str, query: str, memory: str, masked: str = "") -> str:
    """Lines of ``build``: one head of attention added to the query."""
    scores = f"{name}_m = Add({name}_s, {masked})" if masked else f"{name}_m = Identity({name}_s)"
    return f"""
        {name}_q = MatMul({query}, {name}_wq)  {name}_k = MatMul({memory}, {name}_wk)  {name}_v = MatMul({memory}, {name}_wv)
        {name}_t = Transpose<perm=[0, 2, 1]>({name}_k)  {name}_s = MatMul({name}_q, {name}_t)  {scores}
        {name}_p = Softmax<axis=-1>({name}_m)  {name}_a = MatMul({name}_p, {name}_v)  {name} = Add({query}, {name}_a)
    """


def feed_forward(name: str, x: str) -> str:
    return f"""
        {name}_n = LayerNormalization<axis=-1>({x}, {name}_g)  {name}_h = MatMul({name}_n, {name}_w1)
        {name}_r = Relu({name}_h)  {name}_o = MatMul({name}_r, {name}_w2)  {name} = Add({x}, {name}_o)
    """


def encoder_decoder(path: Path) -> Path:
    """Two inputs of different lengths; encoder, decoder and head share one embedding; each layer of the decoder reads
    what the encoder made, over as many stages as lie between."""
    width, hidden, words = 12, 24, 20
    names = ["e0", "e1", "d0", "d1", "c0", "c1"]
    weights: dict[str, Sequence[int]] = {"words": (words, width)}
    for name in names:
        weights |= {f"{name}_w{x}": (width, width) for x in "qkv"}
    for name in ("ef0", "ef1", "df0", "df1"):
        weights |= {f"{name}_g": (width,), f"{name}_w1": (width, hidden), f"{name}_w2": (hidden, width)}
    encoder = [attention("e0", "es", "es"), feed_forward("ef0", "e0"), attention("e1", "ef0", "ef0"), feed_forward("ef1", "e1")]
    decoder = [
        *(attention("d0", "ds", "ds", "future"), attention("c0", "d0", "ef1"), feed_forward("df0", "c0")),
        *(attention("d1", "df0", "df0", "future"), attention("c1", "d1", "ef1"), feed_forward("df1", "c1")),
    ]
    causal = """
        length = Shape<start=1, end=2>(target)  zero = Constant<value_ints=[0]>()  row = Constant<value_int=1>()
        square = Concat<axis=0>(length, length)  low = Constant<value_float=-1e9>()  full = Expand(low, square)
        future = Trilu<upper=1>(full, row)
    """
    lines = ["es = Gather(words, source)", *encoder, causal, "ds = Gather(words, target)", *decoder]
    lines += ["head = Transpose<perm=[1, 0]>(words)", "logits = MatMul(df1, head)"]
    shapes = "int64[n, s] source, int64[n, t] target"
    return build(path, shapes, f"float[n, t, {words}] logits", lines, weights)


@dataclass(frozen=True)
class Task:
    """A model with its loss and batches of 8 samples."""

    model: Callable[[Path], Path]
    loss: dict[str, Any]
    batch: Callable[[np.random.Generator], Batch]


def stored(name: str) -> Callable[[Path], Path]:
    return lambda folder: DATA / name


def images(size: int, pixels: bool) -> Callable[[np.random.Generator], Batch]:
    def make(random: np.random.Generator) -> Batch:
        labels = random.integers(0, 4, (8, size, size) if pixels else (8,))
        return {"x": random.standard_normal((8, 3, size, size)).astype(np.float32), "labels": labels}

    return make


def text(random: np.random.Generator) -> Batch:
    ids = random.integers(0, 64, (2, 8, 7))
    return {"input_ids": ids[0], "attention_mask": np.ones((8, 7), np.int64), "labels": ids[1]}


def translation(random: np.random.Generator) -> Batch:
    return {key: random.integers(0, 20, (8, n)) for key, n in (("source", 9), ("target", 6), ("labels", 6))}


CROSS_ENTROPY = {"name": "cross_entropy"}
TASKS = {
    "gpt": Task(stored("models/gpt2_eager.legacy.onnx"), {**CROSS_ENTROPY, "output": "logits"}, text),
    "resnet": Task(stored("models/resnet.legacy_train.onnx"), CROSS_ENTROPY, images(16, pixels=False)),
    "unet": Task(stored("pipeline/unet.onnx"), {"name": "cross_entropy", "options": {"axis": 1}}, images(32, pixels=True)),
    "encoder-decoder": Task(lambda folder: encoder_decoder(folder / "translate.onnx"), CROSS_ENTROPY, translation),
}


# ---- training --------------------------------------------------------------------------------------------------------


def compiled(model: Path, folder: Path, pipeline: Mapping[str, Any] = {}, **recipe: Any) -> Plan:
    table = {"optimizer": {"name": "sgd", "options": {"momentum": 0.9}}, "learning_rate": {"base": 0.02}, **recipe}
    return compile(model, folder, parse_recipe({**table, "pipeline": dict(pipeline)}), force=True)


def losses(trainer: Trainer, batches: Sequence[Batch], steps: int) -> np.ndarray:
    return np.array([trainer.step(batches[trainer.step_number % len(batches)]).loss for _ in range(steps)])


def values(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in trainer.parameters.items()}


def apart(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """The largest difference of two gradients, relative to the largest element of any."""
    assert a.keys() == b.keys()
    largest = max(float(np.abs(x).max()) for x in a.values())
    return max(float(np.abs(x - b[name]).max()) for name, x in a.items()) / largest


STEPS = 50
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages, gpipe": {"stages": 2, "micro_batches": 4, "schedule": "gpipe"},
    "2 stages, 1f1b": {"stages": 2, "micro_batches": 4},
    "2 stages, zb-h1": {"stages": 2, "micro_batches": 4, "schedule": "zb-h1"},
    "4 stages, gpipe": {"stages": 4, "micro_batches": 4, "schedule": "gpipe"},
    "4 stages, 1f1b": {"stages": 4, "micro_batches": 4},
    "4 stages, zb-h1": {"stages": 4, "micro_batches": 4, "schedule": "zb-h1"},
    "4 stages on 2 ranks": {"stages": 4, "micro_batches": 4, "schedule": "interleaved", "ranks": 2},
    "2 stages, 2 replicas": {"stages": 2, "micro_batches": 2, "replicas": 2},
    "2 stages, 2 replicas, ZeRO-1": {"stages": 2, "micro_batches": 2, "replicas": 2, "zero": 1},
    "4 replicas": {"micro_batches": 1, "replicas": 4},
}


@pytest.fixture(scope="module", params=list(TASKS))
def task(request, tmp_path_factory) -> dict[str, Any]:
    """A task, its losses in one piece (4 micro-batches on one rank), and how far rounding drives those apart."""
    folder, chosen = tmp_path_factory.mktemp(request.param), TASKS[request.param]
    model = chosen.model(folder)
    batches = [chosen.batch(np.random.default_rng(i)) for i in range(8)]
    compiled(model, folder / "whole", {"micro_batches": 4}, loss=[chosen.loss])
    with Trainer(folder / "whole", threads=1) as trainer:
        whole = losses(trainer, batches, STEPS)
    spread = 0.0
    for direction in (-np.inf, np.inf):  # every tenth weight moved by one unit in the last place
        with Trainer(folder / "whole", threads=1) as trainer:
            for array in trainer._values().values():
                if array.dtype.kind == "f":
                    array.flat[::10] = np.nextafter(array.flat[::10], array.dtype.type(direction))
            spread = max(spread, float(np.abs(losses(trainer, batches, STEPS) / whole - 1).max()))
    assert whole[-8:].mean() < whole[:8].mean()
    return {"model": model, "loss": chosen.loss, "batches": batches, "whole": whole, "spread": spread}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_losses_over_fifty_steps_are_those_of_one_piece(task, layout: str, tmp_path: Path):
    """Tolerance: a step rounds by some 1e-7, a float32's last place, and training magnifies what the first step had. How much
    is measured: by a run in one piece whose weights began one unit in the last place off. Ten times that is allowed where
    sums have another order (replicas, a weight in several stages); else stages change nothing but where fusions end."""
    compiled(task["model"], tmp_path / "o", LAYOUTS[layout], loss=[task["loss"]])
    with Trainer(tmp_path / "o", threads=1) as trainer:
        found = losses(trainer, task["batches"], STEPS)
    off = np.abs(found / task["whole"] - 1)
    assert off[:3].max() < 1e-6
    assert off.max() < 1e-6 + 10 * task["spread"], f"{off.max():.1e}, rounding alone gives {task['spread']:.1e}"


# ---- what a micro-batch counts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlp(tmp_path_factory) -> Path:
    return perceptron(tmp_path_factory.mktemp("mlp") / "mlp.onnx")


def gradients(model: Path, folder: Path, pipeline: Mapping[str, Any], batch: Batch, **recipe: Any):
    compiled(model, folder, pipeline, **recipe)
    with Trainer(folder, threads=1) as trainer:
        return trainer.gradients(batch)


SOME = {
    "in 4": {"micro_batches": 4},
    "2 stages": {"stages": 2, "micro_batches": 4},
    "3 stages, zb-h1": {"stages": 3, "micro_batches": 4, "schedule": "zb-h1"},
    "4 stages on 2 ranks": {"stages": 4, "micro_batches": 4, "schedule": "interleaved", "ranks": 2},
    "2 stages, 2 replicas": {"stages": 2, "micro_batches": 2, "replicas": 2},
    "2 stages, 2 replicas, ZeRO-1": {"stages": 2, "micro_batches": 2, "replicas": 2, "zero": 1},
    "3 replicas": {"micro_batches": 1, "replicas": 3},
}
WEIGHTS = [0.5, 2.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize("layout", list(SOME))
@pytest.mark.parametrize("loss", [{}, {"ignore_index": 0}, {"class_weights": WEIGHTS}, {"reduction": "sum"}], ids=str)
def test_uneven_micro_batches_count_what_they_hold(mlp: Path, layout: str, loss: dict, tmp_path: Path):
    """Also where a batch has fewer samples than there are micro-batches, or replicas."""
    terms = [{"name": "cross_entropy", "options": loss}]
    compiled(mlp, tmp_path / "whole", {}, loss=terms)
    compiled(mlp, tmp_path / "parts", SOME[layout], loss=terms)
    for samples in (1, 2, 7):  # a replica's first step may be one without a sample
        batch = points(samples, seed=3)
        batch["labels"][:2] = [1, 2][:samples] if samples < 7 else [0, 1]
        with Trainer(tmp_path / "whole", threads=1) as whole, Trainer(tmp_path / "parts", threads=1) as parts:
            (a, ga), (b, gb) = whole.gradients(batch), parts.gradients(batch)
            assert b == pytest.approx(a, rel=1e-6)
            assert apart(ga, gb) < 1e-6
            for _ in range(2):
                assert parts.step(batch).loss == pytest.approx(whole.step(batch).loss, rel=1e-6)


@pytest.mark.parametrize("layout", list(SOME))
def test_micro_batches_without_targets_count_nothing(mlp: Path, layout: str, tmp_path: Path):
    batch = points(8)
    batch["labels"][:5] = -100  # of four micro-batches two have no target at all
    expected = gradients(mlp, tmp_path / "whole", {}, batch, loss=[CROSS_ENTROPY])
    found = gradients(mlp, tmp_path / "parts", SOME[layout], batch, loss=[CROSS_ENTROPY])
    assert np.isfinite(expected[0])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert apart(expected[1], found[1]) < 1e-6


@pytest.mark.parametrize("layout", list(SOME))
def test_two_terms_each_have_their_mean(layout: str, tmp_path: Path):
    """One term reads an output of the first stage, one has targets that are ignored."""
    lines = [dense("x", "h0", 0), dense("h0", "h1", 1), dense("h1", "h2", 2), dense("h2", "logits", 3, active=False)]
    outputs = "float[n, 5] logits, float[n, 16] h0"
    model = build(tmp_path / "two.onnx", "float[n, 6] x", outputs, lines, layers(6, 16, 12, 10, 5))
    batch = points(7)
    batch["labels"][::2] = -100
    batch["near"] = np.random.default_rng(1).standard_normal((7, 16)).astype(np.float32)
    terms = [
        {"name": "cross_entropy", "output": "logits", "weight": 0.7},
        {"name": "mse", "output": "h0", "labels": "near", "weight": 3.0},
    ]
    expected = gradients(model, tmp_path / "whole", {}, batch, loss=terms)
    found = gradients(model, tmp_path / "parts", SOME[layout], batch, loss=terms)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert apart(expected[1], found[1]) < 1e-6
    with Trainer(tmp_path / "whole", threads=1) as whole, Trainer(tmp_path / "parts", threads=1) as parts:
        a, b = whole.evaluate(batch), parts.evaluate(batch)
        assert b.loss == pytest.approx(a.loss, rel=1e-6)
        assert apart(a.outputs, b.outputs) < 1e-6


@pytest.mark.parametrize("layout", list(SOME))
def test_clipping_takes_the_norm_over_all_stages(layout: str, tmp_path: Path):
    """Also of a weight that two stages share: it counts once."""
    task = TASKS["gpt"]
    batch = task.batch(np.random.default_rng(0))
    found = []
    for name, pipeline in (("whole", {}), ("parts", SOME[layout])):
        optimizer = {"name": "sgd", "max_norm": 0.05}
        compiled(task.model(tmp_path), tmp_path / name, pipeline, loss=[task.loss], optimizer=optimizer)
        with Trainer(tmp_path / name, threads=1) as trainer:
            before, result = values(trainer), trainer.step(batch)
            found.append((result.gradient_norm, {k: v - before[k] for k, v in values(trainer).items()}))
    (norm, moved), (parts_norm, parts_moved) = found
    assert norm > 0.5  # it is clipped
    assert parts_norm == pytest.approx(norm, rel=1e-5)
    assert np.sqrt(sum(np.sum(np.square(m, dtype=np.float64)) for m in moved.values())) == pytest.approx(0.02 * 0.05, rel=1e-4)
    assert apart(moved, parts_moved) < 1e-4  # of differences of weights, which have 1e-7 of the weights themselves


@pytest.mark.parametrize("layout", ["2 stages, 1f1b", "4 stages, zb-h1", "4 stages on 2 ranks", "2 stages, 2 replicas"])
def test_dropout_does_not_see_the_stages(layout: str, tmp_path: Path):
    """A mask is a function of seed, step, micro-batch and node."""
    lines = ["rate = Constant<value_float=0.4>()  on = Constant<value = bool {1}>()"]
    for i in range(3):
        lines += [dense(f"d{i - 1}" if i else "x", f"h{i}", i), f"d{i} = Dropout(h{i}, rate, on)"]
    lines.append(dense("d2", "logits", 3, active=False))
    model = build(tmp_path / "d.onnx", "float[n, 6] x", "float[n, 5] logits", lines, layers(6, 16, 12, 10, 5))
    batch = {k: np.repeat(v[:1], 8, axis=0) for k, v in points(8).items()}
    compiled(model, tmp_path / "whole", {"micro_batches": 4})
    compiled(model, tmp_path / "parts", LAYOUTS[layout])
    with Trainer(tmp_path / "whole", threads=1, seed=5) as whole, Trainer(tmp_path / "parts", threads=1, seed=5) as parts:
        seen = []
        for _ in range(3):
            (a, ga), (b, gb) = whole.gradients(batch), parts.gradients(batch)
            assert b == pytest.approx(a, rel=1e-6)
            assert apart(ga, gb) < 1e-6
            seen.append(whole.step(batch).loss)
            assert parts.step(batch).loss == pytest.approx(seen[-1], rel=1e-6)
        evaluated = whole.evaluate(batch).loss
    assert len({*seen, evaluated}) == 4  # other masks in each step, none in the evaluation


# ---- what is cut how -------------------------------------------------------------------------------------------------


def same_as_whole(model: Path, tmp_path: Path, batch: Batch, pipeline: dict[str, Any], **recipe: Any) -> Plan:
    """Losses and gradients of two steps and the evaluation are those of one piece; returns the plan."""
    compiled(model, tmp_path / "whole", {}, **recipe)
    plan = compiled(model, tmp_path / "parts", pipeline, **recipe)
    with Trainer(tmp_path / "whole", threads=1) as whole, Trainer(tmp_path / "parts", threads=1) as parts:
        for _ in range(2):
            (a, ga), (b, gb) = whole.gradients(batch), parts.gradients(batch)
            assert b == pytest.approx(a, rel=1e-6)
            assert apart(ga, gb) < 2e-6
            assert parts.step(batch).loss == pytest.approx(whole.step(batch).loss, rel=1e-6)
        assert parts.evaluate(batch).loss == pytest.approx(whole.evaluate(batch).loss, rel=1e-5)
    return plan


SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_stage_has_nothing_to_update(mlp: Path, schedule: str, tmp_path: Path):
    pipeline = {"stages": 3, "micro_batches": 3, "schedule": schedule, "cuts": ["h0", "h2"]}
    plan = same_as_whole(mlp, tmp_path, points(8), pipeline, parameters={"freeze": ["w0", "b0"]})
    assert set(plan.stages[0].phases) == {"forward", "eval"}
    assert plan.stages[0].parameters == ["w0", "b0"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_without_weights_passes_gradients_on(mlp: Path, schedule: str, tmp_path: Path):
    pipeline = {"stages": 3, "micro_batches": 3, "schedule": schedule, "cuts": ["p1", "h1"]}
    plan = same_as_whole(mlp, tmp_path, points(8), pipeline)
    assert plan.stages[1].parameters == []
    assert "optimizer" not in plan.stages[1].phases


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_the_last_stage_trains(mlp: Path, schedule: str, tmp_path: Path):
    pipeline = {"stages": 2, "micro_batches": 3, "schedule": schedule, "cuts": ["h1"]}
    plan = same_as_whole(mlp, tmp_path, points(8), pipeline, parameters={"train": ["w3", "b3"]})
    assert "backward" not in "".join(plan.stages[0].phases)
    outputs = [port.role for phase in plan.stages[1].phases.values() for port in phase.outputs]
    assert outputs.count("gradient") == 2
    assert "boundary_gradient" not in outputs


def test_globs_say_what_no_cut_can(tmp_path: Path):
    """Two branches over one input, each in a stage of its own."""
    lines = [dense("x", "h0", 0), "left = MatMul(h0, a)", "right = MatMul(h0, b)", "l = Tanh(left)", "r = Sigmoid(right)"]
    lines += ["both = Add(l, r)", "logits = MatMul(both, c)"]
    weights = {**layers(6, 16), "a": (16, 12), "b": (16, 12), "c": (12, 5)}
    model = build(tmp_path / "b.onnx", "float[n, 6] x", "float[n, 5] logits", lines, weights)
    assign = {"left": 1, "l": 1, "right": 2, "r": 2, "both": 3, "logits": 3, "*": 0}
    # The loss comes after what the globs name: the last stage has it.
    pipeline = {"stages": 4, "micro_batches": 3, "assign": {k: v for k, v in assign.items() if k != "*"} | {"p0": 0, "h0": 0}}
    plan = same_as_whole(model, tmp_path, points(8), pipeline)
    assert [stage.parameters for stage in plan.stages] == [["w0", "b0"], ["a"], ["b"], ["c"]]
    sends = {port.of: port.stages for port in plan.stages[0].phases["forward"].outputs if port.role == "boundary"}
    assert sends == {"h0": [1, 2]}


def test_integers_and_booleans_cross(tmp_path: Path):
    lines = [
        dense("x", "h0", 0),
        "best = ArgMax<axis=1, keepdims=0>(h0)  zero = Constant<value_float=0.3>()  high = Greater(h0, zero)",
        dense("h0", "h1", 1),
        "row = Gather(table, best)  none = Constant<value_float=0.0>()  kept = Where(high, h1, none)  sum = Add(kept, row)",
        dense("sum", "h2", 2),
        dense("h2", "logits", 3, active=False),
    ]
    weights = {**layers(6, 16, 16, 10, 5), "table": (16, 16)}
    model = build(tmp_path / "m.onnx", "float[n, 6] x", "float[n, 5] logits", lines, weights)
    for schedule in SCHEDULES:
        pipeline = {"stages": 3, "micro_batches": 3, "schedule": schedule, "cuts": ["h0,best,high", "sum"]}
        plan = same_as_whole(model, tmp_path, points(8), pipeline)
        crossing = [port.dtype for port in plan.stages[0].phases["forward"].outputs if port.role == "boundary"]
        assert sorted(crossing) == ["bool", "float32", "int64"]


@pytest.mark.parametrize("layout", list(SOME))
def test_the_gradient_of_an_input_is_the_sum_over_the_stages_that_read_it(layout: str, tmp_path: Path):
    lines = [dense("x", "h0", 0), dense("h0", "h1", 1), dense("h1", "h2", 2), "again = MatMul(x, v)  late = Add(h2, again)"]
    lines.append(dense("late", "logits", 3, active=False))
    model = build(tmp_path / "m.onnx", "float[n, 6] x", "float[n, 5] logits", lines, {**layers(6, 16, 12, 10, 5), "v": (6, 10)})
    batch = points(7)
    expected = gradients(model, tmp_path / "whole", {}, batch, wrt=["x"])
    found = gradients(model, tmp_path / "parts", SOME[layout], batch, wrt=["x"])
    assert found[1]["x"].shape == (7, 6)
    assert apart(expected[1], found[1]) < 1e-6


def test_a_skip_over_many_stages_of_few_ranks(tmp_path: Path):
    """Six stages on two ranks, and values that go from the first to several later ones: on the way from rank to rank they
    overtake others."""
    weights = layers(6, 16, 16, 16, 16, 16, 16)
    lines = [dense("x", "h0", 0)]
    for i in range(1, 5):
        lines += [dense(f"h{i - 1}" if i == 1 else f"s{i - 1}", f"h{i}", i), f"s{i} = Add(h{i}, h0)"]
    lines += [dense("s4", "h5", 5), "s5 = Mul(h5, h0)  logits = MatMul(s5, last)"]
    model = build(tmp_path / "m.onnx", "float[n, 6] x", "float[n, 5] logits", lines, {**weights, "last": (16, 5)})
    assign = {f"{x}{i}": i for i in range(6) for x in ("ph" if i == 0 else "phs")} | {"logits": 5}
    pipeline = {"stages": 6, "micro_batches": 4, "schedule": "interleaved", "ranks": 2, "assign": assign}
    same_as_whole(model, tmp_path, points(8), pipeline)


@pytest.mark.parametrize("layout", list(SOME))
def test_an_input_that_has_no_samples_goes_to_every_micro_batch(layout: str, tmp_path: Path):
    """A table of as many rows as the batch has samples, by chance."""
    lines = ["mixed = MatMul(table, w)  rows = Gather(mixed, at)", dense("rows", "h0", 0)]
    lines.append(dense("h0", "logits", 1, active=False))
    shapes = "int64[n] at, float[k, k] table"
    model = build(tmp_path / "m.onnx", shapes, "float[n, 5] logits", lines, {**layers(6, 16, 5), "w": (8, 6)})
    random = np.random.default_rng(0)
    table = random.standard_normal((8, 8)).astype(np.float32)
    batch = {"at": random.integers(0, 8, 8), "table": table, "labels": random.integers(0, 5, 8)}
    expected = gradients(model, tmp_path / "whole", {}, batch, wrt=["table"])
    found = gradients(model, tmp_path / "parts", SOME[layout], batch, wrt=["table"])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert apart(expected[1], found[1]) < 1e-6


# ---- memory ----------------------------------------------------------------------------------------------------------


def held_at_most(trainer: Trainer, batch: Batch) -> dict[int, int]:
    """The most bytes that each stage holds in a step: weights, gradients, states, what it keeps for the backward, and what
    has just arrived or is about to leave. Memory that several of them share counts once."""
    peaks: dict[int, int] = {}

    def watched(stage: Stage, name: str) -> None:
        run = getattr(stage, name)
        static = [*stage.values.values(), *stage.gradients.values(), *stage.states.values()]

        def counting(*arguments: Any, **options: Any) -> Any:
            arrived = next(a for a in arguments if isinstance(a, dict))
            before = [v for kept in stage._kept.values() for v in kept.values()]
            made = run(*arguments, **options)
            after = [v for kept in stage._kept.values() for v in kept.values()]
            arrays = [v if isinstance(v, np.ndarray) else view(v) for v in [*before, *after, *arrived.values(), *made.values()]]
            held = {a.ctypes.data: a.nbytes for a in [*static, *arrays]}
            peaks[stage.stage.index] = max(peaks.get(stage.stage.index, 0), sum(held.values()))
            return made

        setattr(stage, name, counting)

    for worker in trainer._team.workers:
        for stage in worker.stages.values():
            watched(stage, "forward")
            watched(stage, "backward")
    trainer.step(batch)
    return peaks


def sizes_of(model: Path, batch: Batch, micro_batches: int) -> dict[str, int]:
    """The symbolic dimensions of a model's inputs, as a micro-batch has them."""
    sizes = {}
    for value in onnx.load(model).graph.input:
        for axis, (d, size) in enumerate(zip(value.type.tensor_type.shape.dim, batch[value.name].shape, strict=True)):
            if d.dim_param:
                sizes[d.dim_param] = size if axis else size // micro_batches
    return sizes


@pytest.mark.parametrize(
    "layout",
    ["2 stages, gpipe", "2 stages, 1f1b", "4 stages, gpipe", "4 stages, 1f1b", "4 stages, zb-h1", "4 stages on 2 ranks"],
)
@pytest.mark.parametrize("name", list(TASKS))
def test_stages_hold_what_the_plan_predicts(name: str, layout: str, tmp_path: Path):
    task = TASKS[name]
    batch, model = task.batch(np.random.default_rng(0)), task.model(tmp_path)
    pipeline = {**LAYOUTS[layout], "sizes": sizes_of(model, batch, LAYOUTS[layout]["micro_batches"])}
    plan = compiled(model, tmp_path / "o", pipeline, loss=[task.loss], optimizer={"name": "adamw"})
    with Trainer(tmp_path / "o", threads=1) as trainer:
        found = held_at_most(trainer, batch)
    for stage in plan.stages:
        assert stage.costs is not None
        assert found[stage.index] == pytest.approx(stage.costs.memory_bytes, rel=0.15), (found, [s.costs for s in plan.stages])


# ---- a model of fixed batch size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(SOME))
def test_a_fixed_batch_is_that_of_a_micro_batch(layout: str, tmp_path: Path):
    model, free = perceptron(tmp_path / "fixed.onnx", batch=2), perceptron(tmp_path / "free.onnx")
    pipeline = SOME[layout]
    parts = pipeline["micro_batches"] * pipeline.get("replicas", 1)
    batch = points(2 * parts)
    expected = gradients(free, tmp_path / "whole", {}, batch)
    found = gradients(model, tmp_path / "parts", pipeline, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert apart(expected[1], found[1]) < 1e-6
    with Trainer(tmp_path / "parts", threads=1) as trainer:
        for samples in (2 * parts - 1, 2, 2 * parts + 2):
            with pytest.raises(DataError, match=rf"{samples} samples.*batches of 2.*{parts} micro-batches.*{2 * parts}"):
                trainer.step(points(samples))
        assert trainer.evaluate(points(2)).samples == 2
        before = trainer.step_number
        trainer.step(batch)
        assert trainer.step_number == before + 1


def test_a_run_says_what_batch_size_a_fixed_model_takes(tmp_path: Path, capsys):
    compiled(perceptron(tmp_path / "m.onnx", batch=2), tmp_path / "o", {"stages": 2, "micro_batches": 3})
    np.savez(tmp_path / "data.npz", **points(20))
    with pytest.raises(DataError, match=r"micro-batches of 2 samples.*--batch-size 6"):
        run(tmp_path / "o", data=tmp_path / "data.npz", batch_size=2)
    with pytest.raises(DataError, match=r"--drop-last"):
        run(tmp_path / "o", data=tmp_path / "data.npz", batch_size=6)
    assert run(tmp_path / "o", data=tmp_path / "data.npz", eval_data=tmp_path / "data.npz", batch_size=6, drop_last=True) == 0
    lines = [json.loads(line) for line in (tmp_path / "o" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    with Trainer(tmp_path / "o", threads=1) as trainer:
        trainer.export(tmp_path / "e.onnx", tmp_path / "data.npz")


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def everything(trainer: Trainer) -> dict[str, np.ndarray]:
    """All that a step may change, of every stage."""
    held = [stage for worker in trainer._team.workers for stage in worker.stages.values()]
    return {
        f"{stage.stage.index} {kind} {key}": array.copy()
        for stage in held
        for kind, arrays in (("value", stage.values), ("state", stage.states))
        for key, array in arrays.items()
    }


BAD = {
    "2 stages": LAYOUTS["2 stages, 1f1b"],
    "4 stages on 2 ranks": LAYOUTS["4 stages on 2 ranks"],
    "2 stages, 2 replicas": LAYOUTS["2 stages, 2 replicas"],
}


@pytest.mark.parametrize("layout", list(BAD))
def test_a_batch_that_is_not_finite_changes_nothing_on_any_stage(layout: str, tmp_path: Path):
    task = TASKS["resnet"]
    good, bad = (task.batch(np.random.default_rng(i)) for i in range(2))
    bad["x"][-1, 0, 0, 0] = np.nan
    compiled(task.model(tmp_path), tmp_path / "o", BAD[layout], loss=[task.loss], optimizer={"name": "adamw"})
    with Trainer(tmp_path / "o", threads=1) as trainer:
        trainer.step(good)
        before = everything(trainer)
        with pytest.raises(NotFiniteError, match=r"step 2.*'x'"):
            trainer.step(bad)
        after = everything(trainer)
        assert all(np.array_equal(after[key], array) for key, array in before.items())
        found = [trainer.step(good).loss for _ in range(2)]
    with Trainer(tmp_path / "o", threads=1) as trainer:
        assert [trainer.step(good).loss for _ in range(3)][1:] == found


@pytest.mark.parametrize("layout", list(BAD))
def test_an_error_within_a_step_leaves_the_trainer_usable(layout: str, tmp_path: Path):
    """Beyond the table is an id only for ONNX Runtime, in one stage of one replica."""
    weights = {**layers(16, 12, 10, 5), "table": (9, 16)}
    lines = ["e = Gather(table, ids)", dense("e", "h0", 0), dense("h0", "h1", 1), dense("h1", "logits", 2, active=False)]
    model = build(tmp_path / "m.onnx", "int64[n] ids", "float[n, 5] logits", lines, weights)
    random = np.random.default_rng(0)
    good = {"ids": random.integers(0, 9, 8), "labels": random.integers(0, 5, 8)}
    beyond = {"ids": np.array([*good["ids"][:-1], 99]), "labels": good["labels"]}
    wrong = {"ids": good["ids"], "labels": good["labels"] + 3}
    compiled(model, tmp_path / "o", BAD[layout])
    found = []
    for bads in ((), (beyond, wrong, beyond)):
        with Trainer(tmp_path / "o", threads=1) as trainer:
            run = [trainer.step(good).loss]
            for bad in bads:
                with pytest.raises(DataError):
                    trainer.step(bad)
                with pytest.raises(DataError):
                    trainer.evaluate(bad)
                run.append(trainer.step(good).loss)
            run += [trainer.step(good).loss for _ in range(3 - len(bads))]
            found.append((run, everything(trainer)))
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(found[1][1][key], array) for key, array in found[0][1].items())


# ---- checkpoints -----------------------------------------------------------------------------------------------------


CHANGES = [
    {"stages": 4, "micro_batches": 4},
    {"stages": 2, "micro_batches": 4, "schedule": "zb-h1"},
    {"micro_batches": 4},
    {"stages": 2, "micro_batches": 2, "replicas": 2},
    {"stages": 4, "micro_batches": 4, "schedule": "interleaved", "ranks": 2},
]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_run_goes_on_with_other_stages(name: str, tmp_path: Path):
    """Losses, weights and states after each change are those of a run in one piece, but for rounding."""
    task = TASKS[name]
    model, batches = task.model(tmp_path), [task.batch(np.random.default_rng(i)) for i in range(4)]
    recipe = {"loss": [task.loss], "optimizer": {"name": "sgd", "options": {"momentum": 0.9}}}
    compiled(model, tmp_path / "whole", {"micro_batches": 4}, **recipe)
    with Trainer(tmp_path / "whole", threads=1) as trainer:
        expected = losses(trainer, batches, 5 * len(CHANGES))
    latest: Path | str = "none"
    found = []
    for i, pipeline in enumerate(CHANGES):
        folder = tmp_path / str(i)
        compiled(model, folder, pipeline, **recipe)
        with Trainer(folder, threads=1, restore=latest) as trainer:
            assert trainer.step_number == 5 * i
            found += [*losses(trainer, batches, 5)]
            latest = trainer.save()
            saved = everything(trainer)
        with Trainer(folder, threads=1) as trainer:
            restored = everything(trainer)
            assert all(np.array_equal(restored[key], array) for key, array in saved.items())
    assert np.abs(np.array(found) / expected - 1).max() < 2e-6


@pytest.mark.parametrize("pipeline", [CHANGES[0], CHANGES[3]], ids=str)
def test_a_model_exported_from_stages_is_that_from_one_piece(pipeline: dict[str, Any], tmp_path: Path):
    task = TASKS["gpt"]
    batch = task.batch(np.random.default_rng(0))
    compiled(task.model(tmp_path), tmp_path / "parts", pipeline, loss=[task.loss])
    compiled(task.model(tmp_path), tmp_path / "whole", {}, loss=[task.loss])
    with Trainer(tmp_path / "parts", threads=1) as trainer:
        losses(trainer, [batch], 2)
        path = trainer.save()
        trainer.export(tmp_path / "parts.onnx")
    with Trainer(tmp_path / "whole", threads=1, restore=path) as trainer:
        trainer.export(tmp_path / "whole.onnx")
    assert (tmp_path / "parts.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_save_that_fails_on_one_rank_leaves_nothing(rank: int, tmp_path: Path, monkeypatch):
    task = TASKS["gpt"]
    batch = task.batch(np.random.default_rng(0))
    compiled(task.model(tmp_path), tmp_path / "o", CHANGES[0], loss=[task.loss])
    write = checkpoint._write_tensors

    def fail(path: Path, tensors: dict[str, np.ndarray]) -> None:
        if path.name == f"parameters-{rank}.safetensors":
            raise PermissionError(13, "Permission denied")
        write(path, tensors)

    with Trainer(tmp_path / "o", threads=1) as trainer:
        trainer.step(batch)
        trainer.save()
        expected = [trainer.step(batch).loss for _ in range(2)]
    with Trainer(tmp_path / "o", threads=1) as trainer:
        found = [trainer.step(batch).loss]
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_write_tensors", fail)
            with pytest.raises(CheckpointError, match=r"step-2: .*Permission denied.*earlier checkpoints are intact"):
                trainer.save()
        assert sorted(p.name for p in (tmp_path / "o" / "checkpoint").iterdir()) == ["step-0", "step-1"]
        found.append(trainer.step(batch).loss)
        trainer.save()
    assert found == expected
    assert sorted(p.name for p in (tmp_path / "o" / "checkpoint").iterdir()) == ["step-0", "step-1", "step-3"]
