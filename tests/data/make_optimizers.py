"""Makes optimizers.npz and optimizers.json, trajectories by PyTorch.

    pip install torch numpy && python make_optimizers.py

Keys of the ``.npz``, for each setting and parameter: ``<setting>/init/<p>`` float32, ``<setting>/grad/<p>`` float32
[20, ...], ``<setting>/after/<p>`` float64 [20, ...], and ``<setting>/lr`` float64 [20]. The trajectories are PyTorch's
in float64, from the float32 inputs; the JSON says how far PyTorch's own float32 run is from them. Every hyperparameter
holds for every parameter, weight decay included. What PyTorch lacks is transcribed from its paper in NumPy, in float64:
LAMB and Lion. Decoupled weight decay of an optimizer that PyTorch gives none is p *= 1 - lr·λ before its step, as AdamW has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
SHAPES = {"w": (4, 3), "b": (5,), "k": (2, 3, 2)}
STEPS = 20

CONSTANT = [1e-2] * STEPS
WARMUP_AND_DECAY = [1e-2 * min((i + 1) / 5, (STEPS - i) / 15) for i in range(STEPS)]


def setting(
    name: str, lr: list[float] = CONSTANT, zero: tuple[str, ...] = (), max_value: float | None = None, **options: Any
) -> dict[str, Any]:
    return {"optimizer": name, "lr": lr, "zero": zero, "max_value": max_value, "options": options}


SETTINGS = {
    "adamw": setting("adamw", weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8),
    "adamw_schedule": setting("adamw", WARMUP_AND_DECAY, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6),
    "adam": setting("adam", weight_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8),
    "adam_l2": setting("adam", weight_decay=0.05, beta1=0.9, beta2=0.999, epsilon=1e-8),
    "sgd": setting("sgd"),
    "sgd_momentum": setting("sgd", momentum=0.9),
    "sgd_nesterov": setting("sgd", momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampening": setting("sgd", momentum=0.9, dampening=0.1),
    "lamb": setting("lamb", zero=("b",), weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-6),
    "lamb_bounds": setting(
        "lamb", zero=("b",), weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-6, min_ratio=1.0, max_ratio=1.5
    ),
    "adam_amsgrad": setting("adam", weight_decay=0.05, beta1=0.9, beta2=0.9, epsilon=1e-8, amsgrad=True),
    "adamw_amsgrad": setting("adamw", WARMUP_AND_DECAY, weight_decay=0.1, beta1=0.8, beta2=0.8, epsilon=1e-6, amsgrad=True),
    "adafactor": setting("adafactor", epsilon1=2.0**-23),
    "adafactor_schedule": setting("adafactor", WARMUP_AND_DECAY, ("b",), weight_decay=0.1, epsilon1=2.0**-23),
    "adafactor_relative_step": setting("adafactor", [0.5] * STEPS, weight_decay=0.01, clip_threshold=1.05, epsilon1=1e-3),
    "adafactor_floors": setting("adafactor", beta2_decay=-0.5, epsilon1=1.0, epsilon2=2.0),
    "lion": setting("lion", beta1=0.9, beta2=0.99),
    "lion_decay": setting("lion", WARMUP_AND_DECAY, weight_decay=0.5, beta1=0.95, beta2=0.98),
    "rmsprop": setting("rmsprop", alpha=0.99, epsilon=1e-8),
    "rmsprop_momentum": setting("rmsprop", WARMUP_AND_DECAY, alpha=0.9, epsilon=1e-6, momentum=0.9, weight_decay=0.05),
    "rmsprop_centered": setting("rmsprop", alpha=0.95, epsilon=1e-8, momentum=0.5, centered=True),
    "rmsprop_decoupled": setting("rmsprop", weight_decay=0.1, decoupled=True, alpha=0.99, epsilon=1e-8),
    "adagrad": setting("adagrad", epsilon=1e-10),
    "adagrad_decay": setting("adagrad", lr_decay=0.1, weight_decay=0.05, initial_accumulator=0.3, epsilon=1e-10),
    "adagrad_decoupled": setting("adagrad", [0.1] * STEPS, weight_decay=0.05, decoupled=True, epsilon=1e-6),
    "sgd_decoupled": setting("sgd", momentum=0.9, weight_decay=0.1, decoupled=True),
    "sgd_max_value": setting("sgd", momentum=0.9, max_value=0.5),
    "adamw_max_value": setting("adamw", max_value=0.7, weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8),
}

KINDS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
NAMES = {"epsilon": "eps", "clip_threshold": "d", "initial_accumulator": "initial_accumulator_value"}  # in PyTorch

Arrays = dict[str, np.ndarray]


def by_torch(case: dict[str, Any], init: Arrays, grads: Arrays, dtype: torch.dtype) -> Arrays:
    """The parameters after each step of PyTorch's optimizer."""
    options = {NAMES.get(k, k): v for k, v in case["options"].items()}
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if "epsilon1" in options:
        options["eps"] = options.pop("epsilon1"), options.pop("epsilon2", 1e-3)
    decoupled = options.pop("weight_decay") if options.pop("decoupled", False) else 0.0
    parameters = {p: torch.nn.Parameter(torch.tensor(a, dtype=dtype)) for p, a in init.items()}
    optimizer = KINDS[case["optimizer"]](parameters.values(), lr=case["lr"][0], **options)  # type: ignore[operator]
    after: dict[str, list[np.ndarray]] = {p: [] for p in init}
    for i, lr in enumerate(case["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        for p, parameter in parameters.items():
            parameter.grad = torch.tensor(grads[p][i], dtype=dtype)
            parameter.data.mul_(1 - lr * decoupled)
        if case["max_value"] is not None:
            torch.nn.utils.clip_grad_value_(parameters.values(), case["max_value"])
        optimizer.step()
        for p, parameter in parameters.items():
            after[p].append(parameter.detach().numpy().copy())
    return {p: np.stack(steps) for p, steps in after.items()}


def by_the_lamb_paper(case: dict[str, Any], init: Arrays, grads: Arrays) -> Arrays:
    """LAMB is not in PyTorch: an independent transcription of You et al. 2019, arXiv:1904.00962, algorithm 2.

    phi is the identity; the ratio of norms is within its bounds, and 1 where either norm is zero. float64.
    """
    low, high = case["options"].get("min_ratio", 0.0), case["options"].get("max_ratio", np.inf)
    b1, b2, eps, decay = (case["options"][k] for k in ("beta1", "beta2", "epsilon", "weight_decay"))
    after: Arrays = {}
    for p, start in init.items():
        x = start.astype(np.float64)
        m, v = np.zeros_like(x), np.zeros_like(x)
        steps = []
        for t, (lr, g) in enumerate(zip(case["lr"], grads[p].astype(np.float64), strict=True), start=1):
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g**2
            r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            update = r + decay * x
            norms = np.linalg.norm(x), np.linalg.norm(update)
            x = x - lr * (np.clip(norms[0] / norms[1], low, high) if all(norms) else 1.0) * update
            steps.append(x)
        after[p] = np.stack(steps)
    return after


def by_the_lion_paper(case: dict[str, Any], init: Arrays, grads: Arrays) -> Arrays:
    """Lion is not in PyTorch: an independent transcription of Chen et al. 2023, arXiv:2302.06675, algorithm 2. float64."""
    b1, b2, decay = case["options"]["beta1"], case["options"]["beta2"], case["options"].get("weight_decay", 0.0)
    after: Arrays = {}
    for p, start in init.items():
        x, m, steps = start.astype(np.float64), np.zeros(start.shape), []
        for lr, g in zip(case["lr"], grads[p].astype(np.float64), strict=True):
            x = x - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * x)
            m = b2 * m + (1 - b2) * g
            steps.append(x)
        after[p] = np.stack(steps)
    return after


BY_PAPER: dict[str, tuple[Callable[..., Arrays], str]] = {
    "lamb": (by_the_lamb_paper, "arXiv:1904.00962"),
    "lion": (by_the_lion_paper, "arXiv:2302.06675"),
}


def make() -> None:
    arrays: Arrays = {}
    described: dict[str, Any] = {}
    for seed, (name, case) in enumerate(SETTINGS.items()):
        rng = np.random.default_rng(seed)
        init = {p: rng.standard_normal(shape).astype(np.float32) for p, shape in SHAPES.items()}
        init |= {p: np.zeros(SHAPES[p], np.float32) for p in case["zero"]}
        grads = {p: rng.standard_normal((STEPS, *shape)).astype(np.float32) for p, shape in SHAPES.items()}
        source: dict[str, Any]
        if case["optimizer"] in BY_PAPER:
            trajectory, paper = BY_PAPER[case["optimizer"]]
            after = trajectory(case, init, grads)
            source = {"source": f"{paper}, algorithm 2, transcribed in NumPy, float64"}
        else:
            after = by_torch(case, init, grads, torch.float64)
            single = by_torch(case, init, grads, torch.float32)
            source = {
                "source": f"PyTorch {torch.__version__}, float64",
                "float32_differs_by": max(float(np.abs(single[p] - after[p]).max()) for p in init),
            }
        arrays[f"{name}/lr"] = np.array(case["lr"], np.float64)
        for p in init:
            arrays |= {f"{name}/init/{p}": init[p], f"{name}/grad/{p}": grads[p], f"{name}/after/{p}": after[p]}
        described[name] = {
            "optimizer": case["optimizer"],
            "options": case["options"],
            **({} if case["max_value"] is None else {"max_value": case["max_value"]}),
            "parameters": list(init),
            **source,
        }
    np.savez_compressed(FOLDER / "optimizers.npz", **arrays)  # type: ignore[arg-type]
    (FOLDER / "optimizers.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
