"""What a schedule costs: time, bubble and memory of every rank, predicted; and timelines to look at.

A rank does one action at a time and waits only for values that have not arrived; transfers run beside the work and do
not slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortc.errors import PlanError
from ortc.plan import Plan
from ortc.runtime.schedule import Action, Edges, Schedule, ends, execution_order


@dataclass(frozen=True)
class Costs:
    """What the actions of each stage cost, for one micro-batch.

    Attributes:
        forward: seconds of ``F``, per stage.
        backward_input: seconds of ``I``, per stage; a full backward ``B`` takes those of ``I`` and ``W`` together.
        backward_weight: seconds of ``W``, per stage.
        transfer: seconds that a value takes along an edge, from the end of the action that makes it, and a gradient back:
            a function of (from stage, to stage), or a mapping, where an edge that is not in it takes no time.
        stash_bytes: what ``F`` keeps until ``B`` or ``I``, per stage.
        weight_stash_bytes: what remains of it (and of the gradients) from ``I`` to ``W``, per stage.
        static_bytes: parameters, gradients and optimizer states, per stage.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: Mapping[tuple[int, int], float] | Callable[[int, int], float]
    stash_bytes: Sequence[int]
    weight_stash_bytes: Sequence[int]
    static_bytes: Sequence[int]

    def seconds(self, action: Action) -> float:
        """How long a compute action takes."""
        stage = action.stage
        if action.kind == "F":
            return self.forward[stage]
        if action.kind == "B":
            return self.backward_input[stage] + self.backward_weight[stage]
        return (self.backward_input if action.kind == "I" else self.backward_weight)[stage]

    def travel(self, a: int, b: int) -> float:
        """Seconds between two stages, either way."""
        edge = (a, b) if a < b else (b, a)
        return self.transfer.get(edge, 0.0) if isinstance(self.transfer, Mapping) else self.transfer(*edge)


def equal_costs(stages: int, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0) -> Costs:
    """All stages alike, nothing for transfers and memory: to look at a schedule itself."""
    zeros = (0,) * stages
    return Costs((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages, {}, zeros, zeros, zeros)


def plan_costs(plan: Plan) -> Costs:
    """What the compiler predicted of the stages.

    Raises:
        PlanError: nothing was predicted.
    """
    costs = [stage.costs for stage in plan.stages if stage.costs is not None]
    if len(costs) < len(plan.stages):
        raise PlanError("the plan predicts no costs: it has one stage, or was not cut by ortc; compile with --stages N")
    return Costs(
        forward=[c.forward_seconds for c in costs],
        backward_input=[c.backward_input_seconds for c in costs],
        backward_weight=[c.backward_weight_seconds for c in costs],
        transfer={(s.index, to): t for s, c in zip(plan.stages, costs, strict=True) for to, t in c.send_seconds.items()},
        stash_bytes=[c.kept_bytes for c in costs],
        weight_stash_bytes=[c.kept_for_weights_bytes for c in costs],
        static_bytes=[c.memory_bytes - c.stash_bytes for c in costs],
    )


class Timed(NamedTuple):
    """An action of a rank, from start to end in seconds, and the bytes that it sent."""

    rank: int
    action: Action
    start: float
    end: float
    sent: int = 0


@dataclass(frozen=True)
class Simulation:
    """What `simulate` predicts for one step, without the optimizer.

    Attributes:
        end: seconds until the last rank is done.
        busy: seconds of work, per rank.
        peak_bytes: the most bytes held at once, static ones included, per rank.
        peak_in_flight: the most micro-batches between ``F`` and ``B`` (or ``W``) at once, summed over the rank's stages.
        timed: every action with its time, by rank and then in order.
    """

    end: float
    busy: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    peak_in_flight: tuple[int, ...]
    timed: tuple[Timed, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds without work, per rank."""
        return tuple(self.end - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is idle, from 0 to 1."""
        return sum(self.idle) / (self.end * len(self.busy)) if self.end else 0.0


def simulate(schedule: Schedule, costs: Costs, edges: Edges | None = None) -> Simulation:
    """Runs a checked schedule on paper. Linear in actions and edges.

    Args:
        schedule: the schedule.
        costs: what each stage costs.
        edges: pairs (from stage, to stage) between which values go; by default each stage to the next.

    Raises:
        RecipeError: a deadlock.
    """
    rank_of = schedule.stage_rank
    finished: dict[Action, float] = {}
    timed: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    for rank, action, needs in execution_order(schedule, edges):
        start = timed[rank][-1].end if timed[rank] else 0.0
        for need in needs:
            travel = costs.travel(need.stage, action.stage) if rank_of[need.stage] != rank else 0.0
            start = max(start, finished[need] + travel)
        finished[action] = start + costs.seconds(action)
        timed[rank].append(Timed(rank, action, start, finished[action]))
    peaks = [_peaks(row, costs, [s for s, r in enumerate(rank_of) if r == rank]) for rank, row in enumerate(schedule.actions)]
    return Simulation(
        end=max(finished.values()),
        busy=tuple(sum(costs.seconds(action) for action in row) for row in schedule.actions),
        peak_bytes=tuple(peak for peak, _ in peaks),
        peak_in_flight=tuple(in_flight for _, in_flight in peaks),
        timed=tuple(t for row in timed for t in row),
    )


def grid(schedule: Schedule, costs: Costs, edges: Edges | None = None) -> str:
    """The simulated step as text: a line per rank, time from left to right, dots where the rank idles.

    Lengths are true to scale. Where a rank has one stage, its actions are written without it. An action too short for its
    name shows the beginning of it.
    """
    simulation = simulate(schedule, costs, edges)
    one_stage = schedule.ranks == schedule.stages
    labels = {t.action: str(t.action)[len(str(t.action.stage)) if one_stage else 0 :] for t in simulation.timed}
    longest = max(t.end - t.start for t in simulation.timed)
    if not longest:
        return ""
    shortest = min(t.end - t.start for t in simulation.timed if t.end - t.start >= longest / 4)
    scale = (1 + max(map(len, labels.values()))) / shortest
    rows = [["."] * _column(simulation.end, scale) for _ in range(schedule.ranks)]
    for rank, action, start, end, _ in simulation.timed:
        first, last = _column(start, scale), _column(end, scale)
        if first < last:
            rows[rank][first:last] = f"{labels[action][: last - first - 1]:-<{last - first - 1}} "
    width = len(str(schedule.ranks - 1))
    return "".join(f"rank {rank:{width}}  {''.join(row).rstrip()}\n" for rank, row in enumerate(rows))


_CATEGORY = {
    "F": ("forward", "rail_response"),
    "B": ("backward", "thread_state_iowait"),
    "I": ("backward_input", "rail_animation"),
    "W": ("backward_weight", "thread_state_running"),
    "SEND_F": ("send", "grey"),
    "SEND_B": ("send", "grey"),
    "RECV_F": ("receive", "grey"),
    "RECV_B": ("receive", "grey"),
}


def chrome_trace(
    timed: Iterable[Timed], edges: Edges | None = None, process: str = "predicted", pid: int = 0
) -> dict[str, Any]:
    """Actions, predicted or measured, in the trace-event format of chrome://tracing and Perfetto; times in microseconds.

    The ranks are the threads of one process; arrows lead from the action that makes a value, or a gradient, to the one on
    another rank that takes it. To lay two side by side, give them different ``process`` and ``pid`` and join their
    ``traceEvents``.

    Args:
        timed: the actions of one step with their rank, start and end in seconds; of all ranks or some.
        edges: as in `simulate`.
        process: the name shown above the ranks.
        pid: the number of that process.
    """
    timed = sorted(timed, key=lambda t: (t.start, t.rank))
    names = [("process_name", 0, process), *(("thread_name", r, f"rank {r}") for r in sorted({t.rank for t in timed}))]
    metadata = [
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0.0, "args": {"name": name}} for kind, tid, name in names
    ]
    events: list[dict[str, Any]] = []
    for rank, action, start, end, sent in timed:
        category, color = _CATEGORY[action.kind]
        shown = {"stage": action.stage, "micro_batch": action.micro_batch, **({"bytes": sent} if sent else {})}
        event = {"ph": "X", "name": str(action), "cat": category, "cname": color, "pid": pid, "tid": rank}
        events.append({**event, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": shown})
    for maker, taker in _handovers(timed, edges):
        name = f"{maker.action} to {taker.action}"
        flow = {"name": name, "cat": "transfer", "id": f"{pid}: {name}", "pid": pid}
        # inside the actions, not at their borders: an arrow belongs to the slice that lies around its end
        events.append({**flow, "ph": "s", "tid": maker.rank, "ts": (maker.start + maker.end) / 2 * 1e6})
        events.append({**flow, "ph": "f", "bp": "e", "tid": taker.rank, "ts": (taker.start + taker.end) / 2 * 1e6})
    return {"traceEvents": metadata + sorted(events, key=lambda event: event["ts"]), "displayTimeUnit": "ms"}


def _peaks(row: Sequence[Action], costs: Costs, held: Iterable[int]) -> tuple[int, int]:
    """The most bytes and the most micro-batches in flight after any action of a rank; its order alone decides both."""
    held_bytes = peak_bytes = sum(costs.static_bytes[stage] for stage in held)
    in_flight = peak_in_flight = 0
    for action in row:
        stash, rest = costs.stash_bytes[action.stage], costs.weight_stash_bytes[action.stage]
        held_bytes += {"F": stash, "B": -stash, "I": rest - stash, "W": -rest}[action.kind]
        in_flight += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak_bytes, peak_in_flight = max(peak_bytes, held_bytes), max(peak_in_flight, in_flight)
    return peak_bytes, peak_in_flight


def _column(seconds: float, scale: float) -> int:
    return math.floor(seconds * scale + 0.5)


def _handovers(timed: Sequence[Timed], edges: Edges | None) -> Iterable[tuple[Timed, Timed]]:
    """Pairs (who makes it, who takes it) of the values and gradients that go from rank to rank."""
    made = {
        ("F" if t.action.kind == "F" else "B", t.action.stage, t.action.micro_batch): t for t in timed if t.action.kind in "FBI"
    }
    earlier, later = ends(1 + max((t.action.stage for t in timed), default=0), edges)
    for (kind, stage, micro_batch), taker in made.items():
        for other in (earlier if kind == "F" else later)[stage]:
            maker = made.get((kind, other, micro_batch))
            if maker and maker.rank != taker.rank:
                yield maker, taker
