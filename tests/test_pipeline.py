"""A model that is divided over stages, micro-batches and replicas trains as it does in one piece.

Every rank is a thread here; tests/runtime/test_mpi.py holds processes against threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from ortc.runtime.worker import Worker

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
    pairs = list(zip(widths, widths[1:], strict=False))
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
