"""``ortc simulate``: what schedules would cost, for an output folder or for worlds that no machine here could hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ortc.errors import RecipeError
from ortc.inspection import FEW_RANKS, columns, format_bytes, format_seconds, picture, schedule_name
from ortc.plan import load_plan
from ortc.runtime.schedule import OWN, SCHEDULES, Edges, Schedule, make_schedule
from ortc.runtime.simulate import Costs, Simulation, plan_costs, simulate
from ortc.runtime.worker import Routes, schedule_of

LARGEST = 2**20  # stages times micro-batches; each is two or three actions of some hundred bytes


@dataclass(frozen=True)
class Case:
    """A schedule to simulate; ``edges`` as in `simulate`."""

    schedule: Schedule
    costs: Costs
    edges: Edges | None = None


@dataclass(frozen=True)
class Pipeline:
    """A schedule that was asked for: what it is called, its name or text, and the sizes that a text has."""

    name: str
    schedule: str
    sizes: Mapping[str, int] = field(default_factory=dict)


def folder_cases(
    folder: Path, pipelines: Sequence[Pipeline] = (), micro_batches: int | None = None, ranks: int | None = None
) -> list[Case]:
    """The plan's schedule, or others, with what the compiler predicted of the stages.

    Raises:
        OrtcError: no such folder or schedule, or it does not fit the stages; the folder has one stage.
    """
    plan = load_plan(folder)
    costs, edges = plan_costs(plan), Routes(plan).edges
    parts = plan.recipe.pipeline.parts if micro_batches is None else micro_batches
    if not pipelines and ranks is None:
        _check_size(len(plan.stages), parts)
        return [Case(schedule_of(plan, parts), costs, edges)]
    cases = []
    for pipeline in pipelines or [Pipeline(schedule_name(plan), plan.recipe.pipeline.schedule)]:
        own = plan.recipe.pipeline.ranks if pipeline.schedule == "interleaved" else pipeline.sizes.get("ranks")
        count = pipeline.sizes.get("micro_batches", parts) if micro_batches is None else micro_batches
        _check_size(len(plan.stages), count)
        cases.append(Case(_make(pipeline, len(plan.stages), count, ranks or own), costs, edges))
    return cases


def equal_cases(
    stages: int | None,
    micro_batches: int | None,
    pipelines: Sequence[Pipeline] = (),
    ranks: int | None = None,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    transfer: float = 0.0,
    stash: int = 0,
    static: int = 0,
) -> list[Case]:
    """Schedules of equal stages. Where the ranks are fewer, a schedule of one stage a rank has stages so much larger.

    Args:
        stages: how many; a person's own schedule says it itself.
        micro_batches: likewise.
        pipelines: the schedules; by default all that are known.
        ranks: by default one a stage.
        forward, backward: seconds, in any unit, of a stage and a micro-batch.
        weight: the part of the backward that is for the weights' gradients; by default half.
        transfer: seconds that a value travels from rank to rank.
        stash: bytes that a stage keeps of a micro-batch until its backward; and until its weights' part.
        static: bytes of a stage's parameters, gradients and optimizer states.

    Raises:
        RecipeError: numbers that make no sense, or do not fit each other.
    """
    weight = backward / 2 if weight is None else weight
    if not all(math.isfinite(t) and t >= 0 for t in (forward, backward, weight, transfer)) or forward + backward == 0:
        raise RecipeError("the times of a stage are finite, not negative, and not all 0 (--forward, --backward, --weight)")
    if weight > backward:
        raise RecipeError(f"--weight {weight:g} is a part of --backward {backward:g}, and cannot be more")
    shorter = stages is not None and ranks is not None and ranks < stages
    names = [name for name in SCHEDULES if name != "interleaved" or shorter]
    cases = []
    for pipeline in pipelines or [Pipeline(name, name) for name in names]:
        count = pipeline.sizes.get("micro_batches") if micro_batches is None else micro_batches
        parts = pipeline.sizes.get("stages") if stages is None else stages
        if parts is None or count is None:
            raise RecipeError("say how large the world is: --stages N --micro-batches M, or an output folder")
        held = pipeline.sizes.get("ranks", parts) if ranks is None else ranks
        larger = 1
        if pipeline.schedule in SCHEDULES and pipeline.schedule != "interleaved":
            if parts % held:
                raise RecipeError(f"{parts} stages on {held} ranks do not divide: take a multiple (--stages, --ranks)")
            larger, parts = parts // held, held
        _check_size(parts, count)
        costs = Costs(
            forward=[larger * forward] * parts,
            backward_input=[larger * (backward - weight)] * parts,
            backward_weight=[larger * weight] * parts,
            transfer=lambda a, b: transfer,
            stash_bytes=[larger * stash] * parts,
            weight_stash_bytes=[larger * stash] * parts,
            static_bytes=[larger * static] * parts,
        )
        cases.append(Case(_make(pipeline, parts, count, held), costs))
    return cases


def report(cases: Sequence[Case], *, in_seconds: bool) -> str:
    """A table of all cases; of a small world its ranks and its picture too."""
    steps = [simulate(case.schedule, case.costs, case.edges) for case in cases]
    with_bytes = any(max(step.peak_bytes) for step in steps)
    head = ["schedule", "stages", "ranks", "micro-batches", "time", "ideal", "bubble", "in flight"]
    rows = [[*head, *(["memory"] if with_bytes else [])]]
    for case, step in zip(cases, steps, strict=True):
        made = case.schedule
        sizes = [made.name, *map(str, (made.stages, made.ranks, made.micro_batches))]
        ideal = sum(step.busy) / made.ranks
        cells = [_time(step.end, in_seconds), _time(ideal, in_seconds), f"{step.bubble:.1%}", _span(step.peak_in_flight, str)]
        rows.append([*sizes, *cells, *([_span(step.peak_bytes, format_bytes)] if with_bytes else [])])
    lines = columns(rows)
    lines.append(
        "  one step, without reductions and optimizer; ideal: all ranks are always busy; in flight: micro-batches of a rank"
    )
    for case, step in zip(cases, steps, strict=True):
        shown = picture(case.schedule, case.costs, case.edges)
        if len(cases) == 1 and case.schedule.ranks <= FEW_RANKS:
            lines += _ranks(case, step, in_seconds)
        elif shown:
            lines.append(f"{case.schedule.name}:")
        lines += shown
    return "\n".join(lines)


def _make(pipeline: Pipeline, stages: int, micro_batches: int, ranks: int | None) -> Schedule:
    try:
        return replace(make_schedule(pipeline.schedule, stages, micro_batches, ranks), name=pipeline.name)
    except RecipeError as error:
        raise RecipeError(str(error).replace(f"schedule {OWN}", pipeline.name)) from None


def _check_size(stages: int, micro_batches: int) -> None:
    if stages * micro_batches > LARGEST:
        raise RecipeError(
            f"{stages} stages × {micro_batches} micro-batches are too many to simulate: at most {LARGEST:,} in all"
        )


def _ranks(case: Case, step: Simulation, in_seconds: bool) -> list[str]:
    with_bytes = any(step.peak_bytes)
    rows = [["rank", "stages", "busy", "idle", "in flight", *(["memory"] if with_bytes else [])]]
    for rank, busy in enumerate(step.busy):
        held = ",".join(str(s) for s, r in enumerate(case.schedule.stage_rank) if r == rank)
        cells = [str(rank), held, _time(busy, in_seconds), f"{step.idle[rank] / step.end:.1%}", str(step.peak_in_flight[rank])]
        rows.append([*cells, *([format_bytes(step.peak_bytes[rank])] if with_bytes else [])])
    return columns(rows)


def _time(seconds: float, in_seconds: bool) -> str:
    return format_seconds(seconds) if in_seconds else f"{seconds:.6g}"


def _span(values: Sequence[int], show) -> str:  # type: ignore[no-untyped-def]
    low, high = min(values), max(values)
    return show(high) if low == high else f"{show(low)} to {show(high)}"
