"""``ortc inspect``: what would train and why, before anything is compiled; and what an output folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ortc.errors import OrtcError
from ortc.plan import ParameterInfo, Plan, load_plan
from ortc.recipe import Recipe


def inspect_model(path: Path, recipe: Recipe, rules: Sequence[Path] = ()) -> None:
    """Print every initialiser of a model with its fate and the reason."""
    from ortc import passes
    from ortc.artifacts import load_rules
    from ortc.compiler import Compilation, run_passes
    from ortc.passes.parameters import DecideTraining
    from ortc.source import load_model
    from ortc.target import load_target

    load_rules(rules)
    c = Compilation(load_model(path), recipe, load_target(recipe.target))
    steps = passes.standard()
    until = next(i for i, step in enumerate(steps) if isinstance(step, DecideTraining))
    problem: OrtcError | None = None
    try:
        run_passes(steps[: until + 1], c)
    except OrtcError as error:
        if not c.parameters and not c.constants:
            raise
        problem = error
    console = _console()
    console.print(_fates(f"{path.name}: weights", c.parameters, c.constants))
    for loss in c.losses:
        console.print(f"loss: {loss.name} of output {loss.output!r}: {loss.chosen}", markup=False)
    for warning in c.warnings:
        console.print(f"warning: {warning}", markup=False)
    if problem is not None:
        raise problem


def inspect_folder(folder: Path) -> None:
    """Print the parameters and graphs of an output folder."""
    plan = load_plan(folder)
    console = _console()
    console.print(_fates(f"{folder}: weights of {plan.model}", plan.parameters, []))
    console.print(_graphs(plan))
    for loss in plan.losses:
        console.print(f"loss: {loss.name} of output {loss.output!r}: {loss.chosen}", markup=False)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False)


def list_operators(model: Path | None, rules: Sequence[Path] = ()) -> None:
    """Print what is known of every operator, or of those of a model with the number of their nodes."""
    from ortc.artifacts import load_rules
    from ortc.ops import UNKNOWN, of_model, operators, summary

    load_rules(rules)
    rows = [(None, o) for o in operators()] if model is None else of_model(model, rules)
    columns = ["operator", "opsets", "gradient", "of the inputs", "in others on", "tested by"]
    table = Table(*(["nodes"] if model is not None else []), *columns, title="operators" if model is None else model.name)
    for count, o in rows:
        status = f"{o.status}: {o.note}" if o.note else o.status
        cells = [o.name, " ".join(map(str, o.versions)), status, " ".join(o.inputs), " ".join(o.lowered), o.tested]
        table.add_row(*([str(count)] if count is not None else []), *map(escape, cells))
    console = _console()
    console.print(table)
    if model is None:
        console.print(summary([o for _, o in rows]), markup=False)
    elif unknown := [o.name for _, o in rows if o.status == UNKNOWN]:
        console.print(
            f"nothing is known of {', '.join(unknown)}: freeze what lies before, or declare a rule (--rules FILE.py)",
            markup=False,
        )


def _console() -> Console:
    """As wide as the terminal; where the output goes to a file or a pipe, so wide that no name is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _fates(title: str, parameters: list[ParameterInfo], constants: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in ("name", "type", "shape", "fate", "why"):
        table.add_column(column, overflow="fold")
    for p in parameters:
        fate = "trains" if p.trainable else "buffer" if p.role == "buffer" else "frozen"
        table.add_row(p.name, p.dtype, "×".join(map(str, p.shape)) or "scalar", fate, p.reason)
    for name, why in constants:
        table.add_row(name, "", "", "constant", why)
    return table


def _graphs(plan: Plan) -> Table:
    table = Table(title="graphs", title_justify="left", box=None)
    for column in ("file", "inputs", "outputs"):
        table.add_column(column, overflow="fold")
    for stage in plan.stages:
        for graph in stage.phases.values():
            table.add_row(graph.file, _roles([p.role for p in graph.inputs]), _roles([p.role for p in graph.outputs]))
    return table


def _roles(roles: list[str]) -> str:
    return ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
