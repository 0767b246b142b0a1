"""What a step took on every rank, measured, beside what was predicted."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ortc.plan import Plan
from ortc.runtime.schedule import Action, parse_action
from ortc.runtime.simulate import Timed, chrome_trace, plan_costs, simulate
from ortc.runtime.stage import TRAINING, Part
from ortc.runtime.worker import Routes, Worker, ranks_of, schedule_of

_COMPUTE = "FBIW"
_TOLD = ("peak_stash_bytes", "tensor_bytes", "resident_bytes", "sent_bytes")


class Recorder:
    """Records the latest step of a rank, from the moment at which all ranks begin it."""

    def __init__(self) -> None:
        self._actions: list[tuple[Action, float, float, int]] = []
        self._peak = self._before = self._sent = self._most = 0
        self._zero = 0.0

    def begin(self, worker: Worker) -> Callable[[Action, Part, int, int], None]:
        """Wait for all ranks, start the clock, and give what does the worker's actions and records them."""
        counters = worker.world.counters
        held: dict[tuple[int, int], int] = {}
        self._actions, self._peak = [], 0
        for stage in worker.stages.values():
            stage.most_bytes = 0
        worker.world.barrier()
        self._before, self._zero = counters.sent, time.perf_counter()

        def act(action: Action, part: Part, seed: int, step: int) -> None:
            sent, start = counters.sent, time.perf_counter()
            worker.act(action, part, seed, step)
            end = time.perf_counter()
            self._actions.append((action, start - self._zero, end - self._zero, counters.sent - sent))
            if action.kind in _COMPUTE:
                held[action.stage, action.micro_batch] = worker.stages[action.stage].kept_bytes(part.index)
                self._peak = max(self._peak, sum(held.values()))

        return act

    def end(self, worker: Worker) -> None:
        """The step is over, its optimizer too."""
        self._sent = worker.world.counters.sent - self._before
        self._most = sum(stage.most_bytes or 0 for stage in worker.stages.values())

    def told(self) -> dict[str, Any]:
        """The record as JSON data."""
        return {
            "host": platform.node(),
            "began": self._zero,
            "actions": [(str(action), start, end, sent) for action, start, end, sent in self._actions],
            "peak_stash_bytes": self._peak,
            "tensor_bytes": self._most,
            "resident_bytes": _most_resident(),
            "sent_bytes": self._sent,
        }


def _most_resident() -> int:
    """The most memory that this process has had so far, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Profile:
    """One step.

    Attributes:
        measured: for each replica the actions of its ranks, transfers too; seconds since the ranks began.
        predicted: the same of one replica, compute actions only; nothing where the plan has no predictions.
        ranks: of each rank its number, ``bubble`` (the part of the time until the last rank of its replica is done in which
            it computes nothing), ``peak_stash_bytes`` (kept for backwards at once), ``tensor_bytes`` (with it the stages'
            weights, gradients, states, and what passes), ``resident_bytes`` (the most that the process has had, sessions and
            Python too), ``sent_bytes``; and of what is predicted, where it is, ``predicted_tensor_bytes`` and
            ``predicted_session_bytes``, what the largest session has alive beside them.
    """

    measured: list[list[Timed]]
    predicted: list[Timed]
    ranks: list[dict[str, Any]]

    def trace(self, plan: Plan) -> str:
        """Both as JSON text for Perfetto or chrome://tracing."""
        edges = Routes(plan).edges
        names = ["measured", *(f"measured, replica {r}" for r in range(1, len(self.measured)))]
        processes = [("predicted", self.predicted)] if self.predicted else []
        processes += zip(names, self.measured, strict=True)
        traces = [chrome_trace(timed, edges, name, pid) for pid, (name, timed) in enumerate(processes)]
        return json.dumps({**traces[0], "traceEvents": [event for trace in traces for event in trace["traceEvents"]]}) + "\n"


def _predicted(plan: Plan, rank: int) -> dict[str, int]:
    """What the compiler says of the memory of a pipeline rank."""
    held = [s for s, r in zip(plan.stages, schedule_of(plan, 1).stage_rank, strict=True) if r == rank]
    tensors = [s.costs.memory_bytes for s in held if s.costs is not None]
    peaks = [g.memory.peak_bytes for s in held for name, g in s.phases.items() if name in TRAINING and g.memory is not None]
    found = {"predicted_tensor_bytes": sum(tensors)} if tensors else {}
    return {**found, **({"predicted_session_bytes": max(peaks)} if peaks else {})}


def make_profile(plan: Plan, told: Sequence[dict[str, Any]]) -> Profile:
    """From what the recorders of all ranks told, in rank order.

    The ranks of one machine have one clock (CLOCK_MONOTONIC and its like), so their times count from the first that began;
    those of several machines are aligned as well as a barrier does it.
    """
    size = ranks_of(plan)
    began: dict[str, float] = {}
    for one in told:
        began[one["host"]] = min(one["began"], began.get(one["host"], one["began"]))
    measured, ranks = [], []
    for first in range(0, len(told), size):
        rows = [
            [Timed(rank, parse_action(text), late + start, late + end, sent) for text, start, end, sent in one["actions"]]
            for rank, one in enumerate(told[first : first + size])
            for late in [one["began"] - began[one["host"]]]
        ]
        measured.append([t for row in rows for t in row])
        last = max((t.end for t in measured[-1] if t.action.kind in _COMPUTE), default=0.0)
        for rank, row in enumerate(rows, first):
            busy = sum(t.end - t.start for t in row if t.action.kind in _COMPUTE)
            rest = {key: told[rank][key] for key in _TOLD}
            bubble = round(1 - busy / last, 4) if last else 0.0
            ranks.append({"rank": rank, "bubble": bubble, **rest, **_predicted(plan, rank % size)})
    predicted: list[Timed] = []
    if all(stage.costs for stage in plan.stages) and measured[0]:
        micro_batches = 1 + max(t.action.micro_batch for t in measured[0])
        predicted = list(simulate(schedule_of(plan, micro_batches), plan_costs(plan), Routes(plan).edges).timed)
    return Profile(measured, predicted, ranks)
