"""Passes on their own: a model in, the passes that were asked for, the model out (`ortc rewrite`)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ortc.artifacts import load_rules
from ortc.compiler import OF, ROLE, Compilation, Pass, of, paused_gc, role, run_passes
from ortc.errors import OrtcError, RecipeError
from ortc.recipe import Recipe
from ortc.runtime.export import LARGEST_FILE
from ortc.source import blamed, load_model
from ortc.target import load_target


def rewrite_model(
    model: str | Path,
    output: str | Path,
    names: Sequence[str],
    recipe: Recipe | None = None,
    *,
    rules: Sequence[str | Path] = (),
    force: bool = False,
) -> Compilation:
    """Run single passes on a model and write the result, a model that computes the same.

    The model is brought to the form that all passes know first: functions inlined, the target's opset, constants folded but
    no weights, types and shapes known. Passes run in the order of a compilation, whatever the target's table says of them.

    Args:
        model: path of the ONNX file.
        output: the file to write; above 2 GB the weights go into ``<name>.data`` beside it. It appears whole or not at all.
        names: the passes.
        recipe: the options of passes that have some, and the target.
        rules: Python files with the user's own declarations.
        force: replace a file that is there.

    Raises:
        OrtcError: for anything wrong with the model, the names or the file.
    """
    from ortc.passes import NORMAL_FORM, standard

    possible = [step.name for step in standard() if step.alone]
    unknown = [name for name in names if name not in possible]
    if unknown or not names:
        what = f"there is no pass {unknown[0]!r} that runs alone" if unknown else "say which passes"
        raise RecipeError(f"{what}; there are {', '.join(possible)} (`ortc rewrite --list` says what they do)")
    path = Path(output)
    if path.exists() and not force:
        raise OrtcError(f"{path} exists already; choose another name, or --force to replace it")
    load_rules(rules)
    recipe = recipe or Recipe()
    steps = [step for step in standard() if step.name in (*NORMAL_FORM, *names)]
    everything_on = recipe.model_copy(update={"passes": recipe.passes.model_copy(update={"on": _optional(steps), "off": []})})
    with paused_gc(), blamed(model):
        c = run_passes(steps, Compilation(load_model(model), everything_on, load_target(recipe.target)), alone=True)
        _restore_weights(c)
        _write(c.model, path)
    return c


def _optional(steps: Sequence[Pass]) -> list[str]:
    return [step.name for step in steps if step.optional]


def _restore_weights(c: Compilation) -> None:
    """Weights, which are inputs for the passes, are initialisers again, and the marks of a compilation go."""
    graph = c.graph
    for value in list(graph.inputs):
        if role(value) in ("parameter", "buffer"):
            graph.inputs.remove(value)
            value.const_value = c.weights[of(value)]
            graph.register_initializer(value)
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        for key in (ROLE, OF):
            value.metadata_props.pop(key, None)


def _write(model: ir.Model, path: Path) -> None:
    """Write the model aside, then put it in place."""
    weights = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    data = f"{path.name}.data" if weights > LARGEST_FILE else None
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise OrtcError(f"cannot write in {path.parent}: {error.strerror}") from None
    try:
        if data is None:
            ir.external_data.load_to_model(model)
        ir.save(model, aside / path.name, external_data=data)
        for name in (data, path.name):
            if name is not None:
                os.replace(aside / name, path.with_name(name))
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}; nothing was left behind") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
