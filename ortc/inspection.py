"""``ortc inspect``: what would train and why, before anything is compiled; and what an output folder holds."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ortc.errors import OrtcError, PlanError
from ortc.plan import ParameterInfo, Plan, RewriteInfo, load_plan
from ortc.recipe import Recipe

if TYPE_CHECKING:
    from ortc.runtime.schedule import Edges, Schedule
    from ortc.runtime.simulate import Costs

FEW_RANKS, _WIDEST = 16, 160  # what is shown rank by rank, and the most columns of a picture


def inspect_model(path: Path, recipe: Recipe, rules: Sequence[Path] = ()) -> None:
    """Print every initialiser of a model with its fate and the reason."""
    from ortc import passes
    from ortc.artifacts import load_rules
    from ortc.compiler import Compilation, run_passes
    from ortc.passes.parameters import DecideTraining
    from ortc.source import blamed, load_model
    from ortc.target import load_target

    load_rules(rules)
    c = Compilation(load_model(path), recipe, load_target(recipe.target))
    steps = passes.standard()
    until = next(i for i, step in enumerate(steps) if isinstance(step, DecideTraining))
    problem: OrtcError | None = None
    try:
        with blamed(path):
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


def inspect_folder(folder: Path, timeline: Path | None = None, schedule_file: Path | None = None) -> None:
    """Print what an output folder holds: parameters, graphs, stages, and the schedule as it is predicted.

    Args:
        folder: the folder.
        timeline: where to write the predicted step, for Perfetto or chrome://tracing.
        schedule_file: where to write the schedule as text; what is there is not replaced, it may be a person's own.
    """
    plan = load_plan(folder)
    if len(plan.stages) == 1 and (timeline or schedule_file):
        raise PlanError(f"{folder} has one stage, and so no schedule: compile with --stages N")
    if schedule_file is not None and schedule_file.exists():
        raise OrtcError(f"{schedule_file} exists already; choose another name")
    console = _console()
    console.print(_fates(f"{folder}: weights of {plan.model}", plan.parameters, []))
    console.print(_graphs(plan))
    for loss in plan.losses:
        console.print(f"loss: {loss.name} of output {loss.output!r}: {loss.chosen}", markup=False)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False)
    for line in (*recompute_lines(plan), *stash_lines(plan)):
        console.print(line.strip(), markup=False)
    for stage in plan.stages:
        if stage.recomputed is not None and stage.recomputed.nodes:
            console.print(f"stage {stage.index} runs again: {', '.join(stage.recomputed.nodes)}", markup=False)
    print(*memory_lines(plan), sep="\n")
    if len(plan.stages) > 1:
        _print_pipeline(plan, timeline, schedule_file)


_BARS = " ▁▂▃▄▅▆▇█"


def memory_lines(plan: Plan) -> list[str]:
    """What each training session is predicted to have in memory, node by node, and which values are the largest at the peak."""
    lines = []
    for stage in plan.stages:
        for name, graph in stage.phases.items():
            if graph.memory is None or name == "eval" or name.startswith("optimizer"):
                continue
            where = f"stage {stage.index} {name}" if len(plan.stages) > 1 else name
            peak = graph.memory.peak_bytes
            bars = "".join(_BARS[-(-(len(_BARS) - 1) * size // max(peak, 1))] for size in graph.memory.live)
            values = ", ".join(f"{value} {format_bytes(size)}" for value, size in graph.memory.largest.items())
            lines += [f"  {where}: {format_bytes(peak)} at {graph.memory.node}", f"    |{bars}|", f"    {values or '-'}"]
    sizes = "of one micro-batch, predicted: what a session has alive over its nodes beside weights, gradients and inputs"
    return [f"memory {sizes}; the largest at the peak:", *lines] if lines else []


def _print_pipeline(plan: Plan, timeline: Path | None, schedule_file: Path | None) -> None:
    from ortc.runtime.files import write_text
    from ortc.runtime.schedule import format_schedule
    from ortc.runtime.simulate import chrome_trace, plan_costs, simulate
    from ortc.runtime.worker import Routes, schedule_of

    edges = Routes(plan).edges
    schedule = schedule_of(plan, plan.recipe.pipeline.parts)
    if timeline is not None or all(stage.costs for stage in plan.stages):
        costs = plan_costs(plan)
        step = simulate(schedule, costs, edges)
        how = f"{format_seconds(step.end)}, bubble {step.bubble:.1%} (`ortc simulate` compares others)"
        print("stages", *stage_lines(plan), f"schedule {schedule.name}: {how}", *picture(schedule, costs, edges), sep="\n")
    if timeline is not None:
        write_text(timeline, json.dumps(chrome_trace(step.timed, edges)) + "\n")
        print(f"{timeline}: open it in ui.perfetto.dev or chrome://tracing")
    if schedule_file is not None:
        write_text(schedule_file, format_schedule(schedule))
        print(f"{schedule_file}: edit it, and give it to `ortc compile --pipeline {shlex.quote(str(schedule_file))}`")


def picture(schedule: Schedule, costs: Costs, edges: Edges | None) -> list[str]:
    """A small world's step, a line a rank; nothing of a world that a terminal cannot show."""
    from ortc.runtime.simulate import grid

    if schedule.ranks > FEW_RANKS:
        return []
    lines = grid(schedule, costs, edges).splitlines()
    return lines if max(map(len, lines), default=0) <= _WIDEST else []


def schedule_name(plan: Plan) -> str:
    """The name of the plan's schedule."""
    from ortc.runtime.schedule import OWN, is_text

    return OWN if is_text(plan.recipe.pipeline.schedule) else plan.recipe.pipeline.schedule


def stage_lines(plan: Plan) -> list[str]:
    """The stages as predicted: what each holds, computes, sends and takes."""
    table = [(s, s.costs) for s in plan.stages if s.costs is not None]
    if not table:
        return []
    rows = [("stage", "nodes", "parameters", "GFLOP", "ms", "sends", "memory")]
    for stage, c in table:
        held = [p for p in plan.parameters if p.name in stage.parameters]
        sends = ", ".join(f"{format_bytes(n)} to {to}" for to, n in c.sends.items()) or "-"
        count = f"{sum(math.prod(p.shape) for p in held):,}"
        cells = (f"{c.flops / 1e9:.3g}", f"{c.seconds * 1e3:.3g}", sends, format_bytes(c.memory_bytes))
        rows.append((str(stage.index), str(c.nodes), count, *cells))
    seconds = [c.seconds for _, c in table]
    slowest = max(seconds) * len(seconds) / sum(seconds)
    note = f"predicted, of one micro-batch, the memory of all in flight; the slowest stage takes {slowest:.3f} of the mean"
    return [*columns(rows), f"  {note}"]


def recompute_lines(plan: Plan) -> list[str]:
    """What each stage computes again, and what that is predicted to save and to cost."""
    lines = []
    for stage in plan.stages:
        again = stage.recomputed
        if again is None:
            continue
        where = f"stage {stage.index}: " if len(plan.stages) > 1 else ""
        peak = f"peak {format_bytes(again.memory_before)} -> {format_bytes(again.memory_after)}"
        more = again.seconds / again.step_seconds if again.step_seconds else 0.0
        lines.append(
            f"  recompute   {where}{again.policy}: {len(again.nodes)} nodes run again, {peak}, {more:+.1%} time, as predicted "
            "(--recompute, --memory-budget)"
        )
    return lines


def stash_lines(plan: Plan) -> list[str]:
    """What each stage keeps for its backward in a smaller form."""
    chosen = plan.recipe.stash
    how = [text for text, on in (("packed", chosen.packed), (chosen.dtype, chosen.dtype != "fp32")) if on]
    if not how:
        return []
    lines = []
    for stage in plan.stages:
        where = f"stage {stage.index}: " if len(plan.stages) > 1 else ""
        found = stage.stashed
        if found is None:
            lines.append(f"  stash       {where}{', '.join(how)}: there is nothing that gets smaller")
            continue
        size = f"{format_bytes(found.bytes_before)} -> {format_bytes(found.bytes_after)}"
        text = f"{where}{', '.join(how)}: the backward keeps {size} of a micro-batch, {found.values} values in another form"
        lines.append(f"  stash       {text}")
    return lines


def gelu_lines(plan: Plan) -> list[str]:
    """What the choice of a form of GELU has changed."""
    form = plan.recipe.gelu
    if form == "keep":
        return []
    found = {r.rule: r.count for r in plan.rewrites if r.by == f"gelu to {form}"}
    changed = [f"{count} {rule}" for rule, count in found.items() if rule != form]
    what = f"{' and '.join(changed)} became {form}" if changed else f"there was none to change to {form}"
    return [f"  gelu        {what}, in training, evaluation and export (--gelu keep leaves them)"]


def summarise_rewrites(rewrites: Sequence[RewriteInfo]) -> list[str]:
    """What the fusions found, in a line, or none."""
    found: dict[str, int] = {}
    for r in rewrites:
        found[r.by] = found.get(r.by, 0) + r.count
    return [f"  fusions     {', '.join(f'{count} {by}' for by, count in found.items())}"] if found else []


def list_passes(recipe: Recipe) -> str:
    """Every pass in order: whether it runs, whether that may be changed, whether it runs alone, and what it does."""
    from ortc import passes
    from ortc.compiler import is_on
    from ortc.target import load_target

    target = load_target(recipe.target)
    rows = [("pass", "runs", "alone", "what it does")]
    for step in passes.standard():
        runs = "always" if not step.optional else "on" if is_on(step, recipe, target) else "off"
        rows.append((step.name, runs, "yes" if step.alone else "", step.summary()))
    told = "on and off are of the target {}, and `ortc compile` changes them: --with PASS, --without PASS"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, told.format(target.name)])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as it must be, the cells on its right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def format_bytes(count: float) -> str:
    """``3.2 MiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """``1.5 s`` or ``20 ms``"""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def list_operators(model: Path | None, rules: Sequence[Path] = ()) -> None:
    """Print what is known of every operator, or of those of a model with the number of their nodes."""
    from ortc.artifacts import load_rules
    from ortc.ops import UNKNOWN, of_model, operators, summary

    load_rules(rules)
    rows = [(None, o) for o in operators()] if model is None else of_model(model)
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
