"""Makes losses.npz and losses.json, values by PyTorch: ``pip install torch numpy && python make_losses.py``.

Keys of the ``.npz`` for each case: ``<case>/output`` float32 (what the loss reads), ``<case>/labels`` (int64 classes or
float32), ``<case>/loss`` and ``<case>/grad`` (of the loss with respect to the output), both float64 from the float32
inputs. The JSON gives each case's loss and options; ``axis`` is the class axis.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

FOLDER = Path(__file__).parent
IGNORE = -100
WEIGHTS = [0.5, 1.0, 2.0, 0.25, 1.5]
CLASSES = len(WEIGHTS)

FLAT, IMAGE, SEQUENCE = ((7, CLASSES), 1), ((2, CLASSES, 3, 4), 1), ((2, 4, CLASSES), -1)


def cross_entropy(layout: tuple[tuple[int, ...], int], **options: Any) -> dict[str, Any]:
    shape, axis = layout
    return {"loss": "cross_entropy", "shape": shape, "options": {"axis": axis, **options}}


def continuous(loss: str, **options: Any) -> dict[str, Any]:
    return {"loss": loss, "shape": (4, 3), "options": options}


EVERYTHING = {"class_weights": WEIGHTS, "ignore_index": IGNORE, "label_smoothing": 0.1}
CASES = {
    "cross_entropy": cross_entropy(FLAT),
    "cross_entropy_sum": cross_entropy(FLAT, reduction="sum"),
    "cross_entropy_nchw": cross_entropy(IMAGE),
    "cross_entropy_sequence": cross_entropy(SEQUENCE),
    "cross_entropy_ignore": cross_entropy(SEQUENCE, ignore_index=IGNORE),
    "cross_entropy_ignore_class": cross_entropy(FLAT, ignore_index=2),
    "cross_entropy_weights": cross_entropy(FLAT, class_weights=WEIGHTS),
    "cross_entropy_weights_nchw_sum": cross_entropy(IMAGE, class_weights=WEIGHTS, reduction="sum"),
    "cross_entropy_smoothing": cross_entropy(FLAT, label_smoothing=0.1),
    "cross_entropy_smoothing_nchw": cross_entropy(IMAGE, label_smoothing=0.1),
    "cross_entropy_everything": cross_entropy(FLAT, **EVERYTHING),
    "cross_entropy_everything_sum": cross_entropy(FLAT, **EVERYTHING, reduction="sum"),
    "cross_entropy_everything_nchw": cross_entropy(IMAGE, **EVERYTHING),
    "cross_entropy_everything_sequence": cross_entropy(SEQUENCE, **EVERYTHING),
    **{
        f"{loss}{suffix}_{reduction}": continuous(loss, **options, reduction=reduction)
        for loss, suffix, options in (
            ("mse", "", {}),
            ("l1", "", {}),
            ("huber", "", {"delta": 1.0}),
            ("huber", "_half", {"delta": 0.5}),
            ("bce_with_logits", "", {}),
            ("bce_with_logits", "_soft", {}),
            ("bce_with_logits", "_pos_weight", {"pos_weight": [2.0, 0.5, 3.0]}),
        )
        for reduction in ("mean", "sum")
    },
}


def labels_of(name: str, case: dict[str, Any], output: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Targets; those of l1 and huber keep away from the kinks, so that the gradient is defined."""
    if case["loss"] == "cross_entropy":
        axis = case["options"]["axis"] % output.ndim
        labels = rng.integers(0, CLASSES, output.shape[:axis] + output.shape[axis + 1 :])
        if case["options"].get("ignore_index") == IGNORE:
            labels[rng.random(labels.shape) < 0.3] = IGNORE
            labels.flat[0] = IGNORE  # at least one
        return labels.astype(np.int64)
    if case["loss"] == "bce_with_logits":
        uniform = rng.random(output.shape)
        return (uniform if "soft" in name else uniform < 0.5).astype(np.float32)
    distances = rng.permutation(np.linspace(0.05, 2.1, output.size)).reshape(output.shape)
    return (output + distances * rng.choice([-1, 1], output.shape)).astype(np.float32)


def by_torch(case: dict[str, Any], output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = dict(case["options"])
    if case["loss"] == "cross_entropy":
        output = output.movedim(options.pop("axis"), 1)
        if "class_weights" in options:
            options["weight"] = torch.tensor(options.pop("class_weights"), dtype=output.dtype)
        return functional.cross_entropy(output, labels, **options)
    if "pos_weight" in options:
        options["pos_weight"] = torch.tensor(options["pos_weight"], dtype=output.dtype)
    functions = {
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "huber": functional.huber_loss,
        "bce_with_logits": functional.binary_cross_entropy_with_logits,
    }
    return functions[case["loss"]](output, labels.to(output.dtype), **options)


def make() -> None:
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, Any] = {}
    for seed, (name, case) in enumerate(CASES.items()):
        rng = np.random.default_rng(seed)
        output = (2 * rng.standard_normal(case["shape"])).astype(np.float32)
        labels = labels_of(name, case, output, rng)
        x = torch.tensor(output, dtype=torch.float64, requires_grad=True)
        loss = by_torch(case, x, torch.tensor(labels))
        loss.backward()
        arrays |= {f"{name}/output": output, f"{name}/labels": labels}
        arrays |= {f"{name}/loss": loss.detach().numpy(), f"{name}/grad": x.grad.numpy()}
        described[name] = {"loss": case["loss"], "options": case["options"]}
    np.savez_compressed(FOLDER / "losses.npz", **arrays)  # type: ignore[arg-type]
    (FOLDER / "losses.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
