"""Loss and every gradient of real exported models against PyTorch's (made by tests/data/make_models.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer

FOLDER = Path(__file__).parent / "data" / "models"
INDEX = json.loads((FOLDER / "index.json").read_text())
LOSSES = {
    "ce": {"name": "cross_entropy"},
    "ce_nchw": {"name": "cross_entropy", "options": {"axis": 1}},
    "mse": {"name": "mse"},
    "bce": {"name": "bce_with_logits"},
}


@pytest.fixture(scope="module", params=[f"{name} {target.name}" for name in sorted(INDEX) for target in TARGETS])
def trained(request, tmp_path_factory):
    """Name, stored values, plan and trainer of one model; its statistics are used as PyTorch used them."""
    name, target = request.param.split()
    info = INDEX[name]
    with np.load(FOLDER / f"{name}.ref.npz") as archive:
        stored = {key: archive[key] for key in archive.files}
    loss = {**LOSSES[info["loss"]], "output": info["output"]}
    statistics = "batch" if name.endswith("_train") else "frozen"
    recipe = parse_recipe({"loss": [loss], "batch_norm": statistics, "target": target})
    folder = tmp_path_factory.mktemp("stages") / name
    plan = compile(FOLDER / f"{name}.onnx", folder, recipe)
    with Trainer(folder) as trainer:
        yield name, stored, plan, trainer


def batch_of(stored):
    batch = {key.removeprefix("in/"): value for key, value in stored.items() if key.startswith("in/")}
    return {**batch, "labels": stored["target"]}


def tied_gradients(stored, plan):
    """The file holds a tied weight twice, and the stored values are each copy's part of its gradient."""
    whole = {}
    for p in plan.parameters:
        for copy in p.copies:
            whole[f"grad/{p.name}"] = stored[f"grad/{p.name}"] + stored[f"grad/{copy}"].T
            whole[f"grad/{copy}"] = whole[f"grad/{p.name}"].T
    return whole


def test_loss_and_gradients_are_pytorchs(trained):
    name, stored, plan, trainer = trained
    stored = {**stored, **tied_gradients(stored, plan)}
    loss, gradients = trainer.gradients(batch_of(stored))
    assert loss == pytest.approx(float(stored["loss"]), rel=1e-5)
    largest = max(float(np.abs(v).max()) for k, v in stored.items() if k.startswith("grad/"))
    for key in (k for k in stored if k.startswith("grad/")):
        parameter, want = key.removeprefix("grad/"), stored[key]
        told = ~np.isnan(want)
        # A gradient that is zero but for rounding has no largest entry to be relative to.
        scale = largest if parameter in INDEX[name]["vanishing"] else float(np.abs(want[told]).max())
        error = float(np.abs(gradients[parameter] - want)[told].max())
        assert error <= 1e-4 * scale, f"{parameter}: {error} of {scale}"


def test_constants_of_the_exporter_do_not_train(trained):
    name, _, plan, _ = trained
    assert not {p.name for p in plan.trainable()} & set(INDEX[name]["constants"])
