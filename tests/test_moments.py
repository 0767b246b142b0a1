"""First moments in bfloat16: against the published formulas with that one rounding, in checkpoints, shards and chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from gradcheck import TARGETS
from ml_dtypes import bfloat16
from safetensors import safe_open
from test_pipeline import TASKS

from ortc import Trainer
from ortc.artifacts import compile
from ortc.plan import Plan, load_plan
from ortc.recipe import parse_recipe

LR, STEPS = 0.01, 6

Arrays = dict[str, np.ndarray]
Update = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def build(folder: Path, name: str, options: dict[str, float], columns: int = 5, **fields: Any) -> Plan:
    text = """<ir_version: 10, opset_import: ["": 21]>
    product (float[batch,3] x) => (float[batch,2] y) { h = MatMul (x, up)  t = Tanh (h)  y = MatMul (t, down) }"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(1)
    for key, shape in (("up", (3, columns)), ("down", (columns, 2))):
        array = random.standard_normal(shape).astype(np.float32) / np.float32(columns**0.5)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    optimizer = {"name": name, "options": options, "moments": "bf16", "decay_all": True}
    recipe = {"optimizer": optimizer, "learning_rate": {"base": LR}, "target": TARGETS[-1].name, **fields}
    return compile(folder / "model.onnx", folder / "o", parse_recipe({"loss": [{"name": "mse"}], **recipe}))


def batches(count: int = STEPS, samples: int = 8) -> list[Arrays]:
    random = np.random.default_rng(2)
    sizes = {"x": (samples, 3), "y.target": (samples, 2)}
    return [{n: random.standard_normal(s).astype(np.float32) for n, s in sizes.items()} for _ in range(count)]


def fed(trainer: Trainer, batch: Arrays) -> Arrays:
    """The batch under the names that the trainer reads."""
    return {name: batch["x" if name == "x" else "y.target"] for name in trainer.inputs.ports}


def adamw(p, g, m, v, t):
    """Loshchilov & Hutter 2019, algorithm 2, with λ=0.1."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p * (1 - LR * 0.1) - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v


def lion(p, g, m, v, t):
    """Chen et al. 2023, algorithm 2."""
    return p - LR * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g, v


def momentum(p, g, m, v, t):
    """PyTorch's form: b = μ·b + g."""
    m = 0.9 * m + g
    return p - LR * m, m, v


@pytest.mark.parametrize("columns", [5, 1 << 17], ids=["small", "in chunks"])
@pytest.mark.parametrize(
    ("name", "options", "update"),
    [
        ("adamw", {"weight_decay": 0.1}, adamw),
        ("lion", {"weight_decay": 0.0}, lion),
        ("sgd", {"momentum": 0.9, "weight_decay": 0.0}, momentum),
    ],
)
def test_formulas_with_one_rounding(name: str, options: dict[str, float], update: Update, columns: int, tmp_path: Path) -> None:
    build(tmp_path, name, options, columns)
    with Trainer(tmp_path / "o", threads=1) as trainer:
        p = {k: v.astype(np.float64) for k, v in trainer.parameters.items()}
        m, v = ({k: np.zeros_like(a) for k, a in p.items()} for _ in range(2))
        for step, batch in enumerate(batches(), 1):
            _, gradients = trainer.gradients(fed(trainer, batch))
            gradients = {k: g.astype(np.float64) for k, g in gradients.items()}
            trainer.step(fed(trainer, batch))
            for k, g in gradients.items():
                p[k], m[k], v[k] = update(p[k], g, m[k], v[k], step)
                m[k] = m[k].astype(np.float32).astype(bfloat16).astype(np.float64)
                moved = np.abs(trainer.parameters[k] - p[k]) / LR
                # A sum in float32 may round to the other neighbour in bfloat16: rarely, and then by 2^-8 of the moment.
                assert np.median(moved) < 1e-5, (k, step)
                assert np.mean(moved > 1e-3) < 1e-3, (k, step)
                p[k] = trainer.parameters[k].astype(np.float64)


def states(saved: Path) -> dict[str, str]:
    """The element type of each stored state, by its name."""
    found = {}
    for file in saved.rglob("*.safetensors"):
        with safe_open(file, "np") as archive:
            found.update({k: archive.get_slice(k).get_dtype() for k in archive.keys()})  # noqa: SIM118
    return found


def test_a_checkpoint_has_them_as_they_are(tmp_path: Path) -> None:
    """And training goes on from it to the same bits."""
    build(tmp_path, "adamw", {})
    given = batches()
    with Trainer(tmp_path / "o", threads=1) as trainer:
        for batch in given[:3]:
            trainer.step(fed(trainer, batch))
        saved = trainer.save()
        for batch in given[3:]:
            trainer.step(fed(trainer, batch))
        straight = {k: v.copy() for k, v in trainer.parameters.items()}
    types = states(saved)
    assert sorted(t for k, t in types.items() if "exp_avg" in k and "sq" not in k) == ["BF16", "BF16"]
    assert sorted(t for k, t in types.items() if "exp_avg_sq" in k) == ["F32", "F32"]
    with Trainer(tmp_path / "o", threads=1, restore=saved) as trainer:
        for batch in given[3:]:
            trainer.step(fed(trainer, batch))
        assert all(np.array_equal(v, straight[k]) for k, v in trainer.parameters.items())


@pytest.mark.parametrize(
    ("fields", "exact"),
    [
        ({"optimizer": {"name": "adamw", "moments": "bf16", "fuse": True}}, True),
        ({"pipeline": {"replicas": 2, "zero": 1}}, False),
        ({"pipeline": {"stages": 2, "micro_batches": 2}}, False),
    ],
    ids=["fused", "zero", "stages"],
)
def test_wherever_they_are(fields: dict[str, Any], exact: bool, tmp_path: Path) -> None:
    """In the fused step to the last bit; where gradients are summed over ranks, as close as their rounding lets them."""
    task = TASKS["mlp"] if "mlp" in TASKS else next(iter(TASKS.values()))
    model, found = task.model(tmp_path), []
    for name, more in (("plain", {}), ("other", fields)):
        recipe = {"optimizer": {"name": "adamw", "moments": "bf16"}, "loss": [task.loss], "target": TARGETS[-1].name, **more}
        compile(model, tmp_path / name, parse_recipe(recipe))
        assert load_plan(tmp_path / name).recipe.optimizer.moments == "bf16"
        with Trainer(tmp_path / name, threads=1) as trainer:
            for seed in range(4):
                trainer.step(task.batch(np.random.default_rng(seed)))
            found.append({k: v.copy() for k, v in trainer.parameters.items()})
    for k, v in found[0].items():
        if exact:
            assert np.array_equal(v, found[1][k])
        else:
            assert np.median(np.abs(v - found[1][k])) < 1e-6
