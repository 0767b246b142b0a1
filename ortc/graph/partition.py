"""Cuts a directed acyclic graph into pipeline stages.

Plain data in and out. A stage's time is its computation, forward and backward, plus what it receives and sends over the
link; a value that a later stage needs goes there directly, once for each stage that reads it, and its gradient comes back
the same way. The way of :func:`partition`:

1. Nodes that follow from data inputs and constants alone, and are cheap (masks, positions, shape arithmetic), are set aside:
   each stage that needs one computes it. A stage reads data inputs itself, so nothing has to travel for that.
2. The others are put in a line: in the graph's own order, and in the order of a search from its end (:func:`search_order`).
3. On each line contiguous cuts are found by dynamic programming over *all* positions: first the smallest possible largest
   time T, then, among all cuts that take at most 1.01·T, the least traffic. Both are exact for the line. The better line wins.
4. Light nodes (a slice, a shape) then move over the cuts where that saves traffic, which no contiguous cut could express.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ortc.errors import RecipeError

# All replicated nodes together may take this share of a stage's ideal time: that some run twice stays unnoticed.
_REPLICATED_SHARE = 0.01

# A node that takes at most this share of a stage's ideal time may leave its place on the line where that saves traffic.
_LIGHT_SHARE = 0.001

# Sums of floats in different orders differ.
_ROUNDING = 1e-9

# Cuts whose largest time is this much above the smallest are as good, and their traffic decides: the cost model is no better.
_INDIFFERENT = 0.01

# A node that makes less than 1/64 of what it reads (a shape, a token of a sequence) is computed where that is.
_SUMMARY = 64


@dataclass(frozen=True)
class Node:
    """A node; values and parameters are given by their positions in the :class:`Problem`.

    ``keeps`` are the values that its backward reads, ``extra`` the bytes that it keeps beside them. A ``replicable`` node
    depends on nothing but data inputs, constants and other such nodes. A ``last`` node belongs to the last stage, and so does
    everything that reads it. Times are in seconds, for one micro-batch; ``backward_weight`` is a part of ``backward``.
    """

    name: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    extra: int = 0
    forward: float = 0.0
    backward: float = 0.0
    backward_weight: float = 0.0
    flops: float = 0.0
    replicable: bool = False
    last: bool = False

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Value:
    """A value that a node makes: bytes in one micro-batch, and whether a gradient of the same size comes back for it."""

    name: str
    bytes: int
    gradient: bool = False

    @property
    def crossing(self) -> int:
        """Bytes that travel, both ways, where another stage reads it."""
        return self.bytes * (1 + self.gradient)


@dataclass(frozen=True)
class Parameter:
    """A weight or buffer, in bytes; ``elements`` is only told."""

    bytes: int
    gradient: int = 0
    state: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Problem:
    """A graph in topological order. Data inputs and constants are no values here: every stage has them."""

    nodes: Sequence[Node]
    values: Sequence[Value]
    parameters: Sequence[Parameter] = ()

    def producers(self) -> list[int]:
        """The node that makes each value, -1 if none does."""
        made = [-1] * len(self.values)
        for i, node in enumerate(self.nodes):
            for value in node.outputs:
                made[value] = i
        return made

    def predecessors(self) -> list[list[int]]:
        """The nodes that each node reads from, in the order of its inputs."""
        made = self.producers()
        return [list(dict.fromkeys(made[v] for v in node.inputs)) for node in self.nodes]


@dataclass(frozen=True)
class Machine:
    """What the stages run on.

    Attributes:
        in_flight: the micro-batches whose stash each stage holds at a time; as many entries as stages.
        link: bytes a second between two stages.
        memory: bytes that a stage may take, or None.
    """

    in_flight: Sequence[int]
    link: float = math.inf
    memory: float | None = None

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.in_flight)


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of a stage's own tensors.

    ``stash`` is kept for the backward by all micro-batches in flight; ``boundary`` are buffers, of one micro-batch, for the
    values received and sent and their gradients.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    stash: int = 0
    boundary: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.gradients + self.state + self.stash + self.boundary

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {amount(getattr(self, f.name))}" for f in dataclasses.fields(self))


@dataclass(frozen=True)
class StageRow:
    """One line of the stage table; times, operations and bytes sent are of one micro-batch.

    ``sends`` are the bytes of values by the stage that reads them, ``returns`` those of the gradients that come back.
    """

    stage: int
    nodes: int
    parameters: int
    parameter_elements: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    backward_weight_seconds: float
    link_seconds: float
    sends: Mapping[int, int]
    returns: Mapping[int, int]
    memory: Memory

    @property
    def seconds(self) -> float:
        """What is balanced: computation and link."""
        return self.forward_seconds + self.backward_seconds + self.link_seconds


Placement = list[tuple[int, ...]]  # the stages of each node; more than one where it is replicated


@dataclass(frozen=True)
class Partition:
    """The stages of every node, and the stage table."""

    placement: Placement
    table: list[StageRow]


# ---- the table -------------------------------------------------------------------------------------------------------


def stage_table(problem: Problem, placement: Placement, machine: Machine) -> list[StageRow]:
    """What each stage holds, computes and sends."""
    own: list[list[Node]] = [[] for _ in range(machine.stages)]
    for node, stages in zip(problem.nodes, placement, strict=True):
        for stage in stages:
            own[stage].append(node)
    homes, readers = _routes(problem, placement)
    sends: list[dict[int, int]] = [{} for _ in own]
    returns: list[dict[int, int]] = [{} for _ in own]
    boundary = [0] * len(own)
    for v, targets in readers.items():
        value, home = problem.values[v], homes[v]
        boundary[home] += value.crossing
        for target in targets:
            boundary[target] += value.crossing
            sends[home][target] = sends[home].get(target, 0) + value.bytes
            returns[home][target] = returns[home].get(target, 0) + value.bytes * value.gradient
    return [_stage_row(problem, s, nodes, sends[s], returns[s], boundary[s], machine) for s, nodes in enumerate(own)]


def _stage_row(
    problem: Problem,
    stage: int,
    nodes: Sequence[Node],
    sends: Mapping[int, int],
    returns: Mapping[int, int],
    boundary: int,
    machine: Machine,
) -> StageRow:
    weights = [problem.parameters[p] for p in dict.fromkeys(p for node in nodes for p in node.parameters)]
    kept = dict.fromkeys(v for node in nodes for v in node.keeps)
    stash = sum(problem.values[v].bytes for v in kept) + sum(node.extra for node in nodes)
    return StageRow(
        stage=stage,
        nodes=len(nodes),
        parameters=len(weights),
        parameter_elements=sum(w.elements for w in weights),
        flops=sum(node.flops for node in nodes),
        forward_seconds=sum(node.forward for node in nodes),
        backward_seconds=sum(node.backward for node in nodes),
        backward_weight_seconds=sum(node.backward_weight for node in nodes),
        link_seconds=boundary / machine.link,
        sends=dict(sorted(sends.items())),
        returns=dict(sorted(returns.items())),
        memory=Memory(
            parameters=sum(w.bytes for w in weights),
            gradients=sum(w.gradient for w in weights),
            state=sum(w.state for w in weights),
            stash=stash * machine.in_flight[stage],
            boundary=boundary,
        ),
    )


def _routes(problem: Problem, placement: Placement) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The stage of each value that a single node makes, and the other stages that read it, where there are any."""
    homes: dict[int, int] = {}
    readers: dict[int, dict[int, None]] = {}
    for node, stages in zip(problem.nodes, placement, strict=True):
        for value in node.inputs:
            for stage in stages:
                if homes.get(value, stage) != stage:
                    readers.setdefault(value, {})[stage] = None
        if len(stages) == 1 and not node.replicable:
            homes.update(dict.fromkeys(node.outputs, stages[0]))
    return homes, {v: sorted(stages) for v, stages in readers.items()}


def traffic(table: Sequence[StageRow]) -> int:
    """Bytes that travel for one micro-batch, both ways."""
    return sum(sum(row.sends.values()) + sum(row.returns.values()) for row in table)


def imbalance(table: Sequence[StageRow]) -> float:
    """The slowest stage's time over the mean: 1 is perfect."""
    seconds = [row.seconds for row in table]
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean if mean else 1.0


# ---- replicated nodes ------------------------------------------------------------------------------------------------


def choose_replicated(problem: Problem, stages: int) -> Problem:
    """The problem with only those nodes ``replicable`` that each stage shall compute itself.

    Of the replicable ones, in the graph's order, as many as are negligible together. One that reads what a single node makes
    is single too: what it reads would have to travel.
    """
    left = _REPLICATED_SHARE * sum(node.seconds for node in problem.nodes) / stages
    nodes: list[Node] = []
    for node, predecessors in zip(problem.nodes, problem.predecessors(), strict=True):
        chosen = node.replicable and not node.last and node.seconds <= left
        chosen = chosen and all(nodes[p].replicable for p in predecessors)
        left -= node.seconds if chosen else 0.0
        nodes.append(node if chosen == node.replicable else dataclasses.replace(node, replicable=chosen))
    return dataclasses.replace(problem, nodes=nodes)


def single(problem: Problem) -> tuple[Problem, list[int]]:
    """The problem without the replicable nodes, and the positions that the others had.

    What the backward keeps of a removed node's values is still counted where it is read.
    """
    free = {v for node in problem.nodes if node.replicable for v in node.outputs}
    stay = [i for i, node in enumerate(problem.nodes) if not node.replicable]
    nodes = [
        dataclasses.replace(problem.nodes[i], inputs=tuple(v for v in problem.nodes[i].inputs if v not in free)) for i in stay
    ]
    return dataclasses.replace(problem, nodes=nodes), stay


def place_replicated(problem: Problem, stage_of: Mapping[int, int]) -> Placement:
    """The stages of every node, from those of the single ones: a replicated node is wherever somebody reads it.

    One that nobody reads is in the first stage.
    """
    found: list[set[int]] = [set() for _ in problem.nodes]
    for i, predecessors in reversed(list(enumerate(problem.predecessors()))):
        found[i] = {stage_of[i]} if i in stage_of else found[i] or {0}
        for p in predecessors:
            found[p] |= found[i]
    return [tuple(sorted(stages)) for stages in found]


# ---- the line --------------------------------------------------------------------------------------------------------


def search_order(problem: Problem) -> list[int]:
    """A topological order whose cuts have little traffic.

    A depth-first search from the last nodes emits a node when all that it reads is emitted, and enters the input with the
    longest way behind it (in seconds) first: so a branch is finished before the next begins, an encoder stands before the
    decoder that needs it, and a short side branch right before what reads it. After each node follow those that are ready and
    shrink what a cut there carries: they free as many bytes as they make, or make a summary of what they read (its shape).
    """
    nodes, values = problem.nodes, problem.values
    predecessors = problem.predecessors()
    successors = transposed(predecessors)
    way: list[float] = []
    for node, before in zip(nodes, predecessors, strict=True):
        way.append(node.seconds + max((way[p] for p in before), default=0.0))
    missing = [len(before) for before in predecessors]
    unread = [0] * len(values)
    for node in nodes:
        for value in dict.fromkeys(node.inputs):
            unread[value] += 1
    order: dict[int, None] = {}

    def shrinks(i: int) -> bool:
        made = sum(values[v].crossing for v in nodes[i].outputs)
        sizes = {v: values[v].crossing for v in nodes[i].inputs}
        freed = sum(size for v, size in sizes.items() if unread[v] == 1)
        return not nodes[i].last and (made <= freed or made * _SUMMARY <= max(sizes.values(), default=0))

    def emit(first: int) -> None:
        stack = [first]
        while stack:
            i = stack.pop()
            if i in order:
                continue
            order[i] = None
            for value in dict.fromkeys(nodes[i].inputs):
                unread[value] -= 1
            for j in successors[i]:
                missing[j] -= 1
            stack += [j for j in reversed(successors[i]) if missing[j] == 0 and shrinks(j)]

    ends = [i for i, following in enumerate(successors) if not following]
    stack = sorted(ends, key=lambda i: (nodes[i].last, i), reverse=True)
    while stack:
        ahead = [p for p in predecessors[stack[-1]] if p not in order]
        if ahead:
            stack.append(max(ahead, key=lambda p: (way[p], -p)))
        else:
            emit(stack.pop())
    return _last_at_the_end(problem, order)


def _last_at_the_end(problem: Problem, order: Iterable[int]) -> list[int]:
    return sorted(order, key=lambda i: problem.nodes[i].last)


def transposed(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """The reverse of an adjacency list."""
    result: list[list[int]] = [[] for _ in edges]
    for i, others in enumerate(edges):
        for other in others:
            result[other].append(i)
    return result


# ---- segments of a line ----------------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """All segments of a line that begin at one position; entry j is the one of j + 1 nodes."""

    begin: int
    ends: np.ndarray  # one past each segment's last node
    seconds: np.ndarray
    received: np.ndarray  # bytes, both ways
    fixed: np.ndarray  # bytes of memory that do not depend on the number of micro-batches
    stash: np.ndarray  # bytes for each micro-batch in flight
    computes: np.ndarray  # whether any of the nodes takes time


class _Uses:
    """Things that a segment needs once, however often its nodes use them: values from before it, parameters, kept values.

    A thing is counted at its first user from the segment's beginning on, so that the needs of all segments that begin there
    are one cumulative sum.
    """

    def __init__(self, used: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self.first: dict[int, int] = {}
        self.final: dict[int, int] = {}
        self._following: list[list[tuple[int, int]]] = []  # for each node its things with their next users
        for position in reversed(range(len(used))):
            things = dict.fromkeys(used[position])
            self._following.append([(t, self.first[t]) for t in things if t in self.first])
            for thing in things:
                self.first[thing] = position
                self.final.setdefault(thing, position)
        self._following.reverse()
        self.counted = np.zeros(len(used))

    def count(self, things: Iterable[int]) -> _Uses:
        """Count things at their first user."""
        for thing in things:
            if thing in self.first:
                self.counted[self.first[thing]] += self._sizes[thing]
        return self

    def advance(self, position: int) -> None:
        """The beginning moves over a user: what it uses is counted at the next one."""
        for thing, following in self._following[position]:
            self.counted[following] += self._sizes[thing]


class Line:
    """The nodes of a problem in one topological order, ready to be cut."""

    def __init__(self, problem: Problem, order: Sequence[int], machine: Machine) -> None:
        self.problem, self.order, self.machine = problem, list(order), machine
        self._nodes = [problem.nodes[i] for i in order]
        self.last = next((i for i, node in enumerate(self._nodes) if node.last), len(order))
        self.elapsed = _prefix(node.seconds for node in self._nodes)

    def segments(self, most: float, wanted: Callable[[int], bool]) -> Iterator[Segments]:
        """The segments by their beginning, where it is wanted, up to ``most`` seconds of computation each."""
        nodes, values = self._nodes, self.problem.values
        crossing = [v.crossing for v in values]
        reads = _Uses([node.inputs for node in nodes], crossing)
        holds = _Uses([node.parameters for node in nodes], [p.bytes + p.gradient + p.state for p in self.problem.parameters])
        keeps = _Uses([node.keeps for node in nodes], [v.bytes for v in values])
        holds.count(holds.first)
        keeps.count(keeps.first)
        made = [[v for v in node.outputs if v in reads.final] for node in nodes]
        sent = _prefix(sum(crossing[v] for v in outputs) for outputs in made)
        extra = _prefix(node.extra for node in nodes)
        busy = _prefix(node.seconds > 0 for node in nodes)
        inside = np.zeros(len(nodes))  # bytes of the values made from the beginning on, at their last readers
        for v in itertools.chain.from_iterable(made):
            inside[reads.final[v]] += crossing[v]
        stops = np.searchsorted(self.elapsed, self.elapsed + most * (1 + _ROUNDING), "right")
        for begin in range(len(nodes)):
            if wanted(begin):
                span, ends = slice(begin, stops[begin] - 1), slice(begin + 1, stops[begin])
                received = np.cumsum(reads.counted[span])
                boundary = received + (sent[ends] - sent[begin]) - np.cumsum(inside[span])
                yield Segments(
                    begin=begin,
                    ends=np.arange(begin + 1, stops[begin]),
                    seconds=self.elapsed[ends] - self.elapsed[begin] + boundary / self.machine.link,
                    received=received,
                    fixed=boundary + np.cumsum(holds.counted[span]),
                    stash=np.cumsum(keeps.counted[span]) + (extra[ends] - extra[begin]),
                    computes=busy[ends] > busy[begin],
                )
            for uses in (reads, holds, keeps):
                uses.advance(begin)
            reads.count(made[begin])
            for v in made[begin]:
                inside[reads.final[v]] -= crossing[v]

    def memory(self, segments: Segments) -> np.ndarray:
        """Bytes of each segment as each stage: [stages, segments]."""
        return segments.fixed + np.multiply.outer(np.asarray(self.machine.in_flight), segments.stash)

    def allowed(self, segments: Segments) -> np.ndarray:
        """Which segments each stage may be: [stages, segments]. Only the last stage reaches the end, and the last nodes."""
        at_end = segments.ends == len(self.order)
        allowed = np.repeat((segments.computes & ~at_end & (segments.ends <= self.last))[None], self.machine.stages, axis=0)
        allowed[-1] = segments.computes & at_end
        if self.machine.memory is not None:
            allowed &= self.memory(segments) <= self.machine.memory
        return allowed


def _prefix(numbers: Iterable[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(numbers, np.float64))])


# ---- cuts ------------------------------------------------------------------------------------------------------------


def shortest_time(line: Line) -> float:
    """The smallest possible largest stage time of contiguous cuts; infinite if no cuts are allowed.

    Exact: a search among all cuts whose stages take at most ``most``, which is raised until there are some.
    """
    total, stages = float(line.elapsed[-1]), line.machine.stages
    lowest = max(total / stages, float(np.diff(line.elapsed).max(initial=0.0)))
    if lowest == 0:
        return math.inf
    sending = 2 * sum(v.crossing for v in line.problem.values) / line.machine.link
    for step in itertools.count():
        most = lowest * (1 + 0.02 * 2**step) + (sending if step else 0) * 2.0**step / 1024
        best, _ = _cheapest(line, most, lambda s: s.seconds, np.maximum)
        if math.isfinite(best) or most > total + sending:
            return best
    raise AssertionError("unreachable")


def least_traffic(line: Line, most: float) -> tuple[float, list[int]]:
    """The least traffic of all cuts whose stages take at most ``most`` seconds, and where those stages end.

    Of equal ones the smallest sum of squared times decides: it adds up to less than a byte.
    """
    most *= 1 + _ROUNDING
    return _cheapest(line, most, lambda s: s.received + (s.seconds / most) ** 2 / (line.machine.stages + 1), np.add)


def least_memory(line: Line) -> tuple[float, list[int]]:
    """The smallest possible largest memory of a stage, and where those stages end."""
    free = Line(line.problem, line.order, dataclasses.replace(line.machine, memory=None))
    return _cheapest(free, math.inf, free.memory, np.maximum)


def _cheapest(
    line: Line, most: float, cost: Callable[[Segments], np.ndarray], combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, list[int]]:
    """Dynamic programming over all cut positions.

    Args:
        line: the line.
        most: the seconds that a stage may take.
        cost: of segments: [segments], or [stages, segments] where it depends on the stage.
        combine: how the costs of stages add up.

    Returns:
        The smallest total, infinite if there is none, and the ends of the stages; of equal ones the earliest.
    """
    n, stages = len(line.order), line.machine.stages
    best = np.full((stages + 1, n + 1), np.inf)  # best[k, p]: of k stages that end at p
    came = np.zeros((stages + 1, n + 1), np.int64)
    best[0, 0] = 0.0
    # At a position only those k count from which the remaining stages can still hold the rest.
    needed = np.ceil((line.elapsed[-1] - line.elapsed) / most * (1 - 2 * _ROUNDING)) if math.isfinite(most) else np.zeros(n + 1)

    def viable(begin: int) -> np.ndarray:
        ks = np.flatnonzero(np.isfinite(best[:stages, begin]))
        return ks[stages - ks >= needed[begin]]

    for segments in line.segments(most, lambda begin: viable(begin).size > 0):
        ks = viable(segments.begin)
        allowed = (line.allowed(segments) & (segments.seconds <= most))[ks]
        costs = np.broadcast_to(cost(segments), (stages, segments.ends.size))[ks]
        found = np.where(allowed, combine(best[ks, segments.begin, None], costs), np.inf)
        part = slice(segments.begin + 1, segments.begin + 1 + segments.ends.size)
        better = found < best[ks + 1, part]
        best[ks + 1, part] = np.where(better, found, best[ks + 1, part])
        came[ks + 1, part] = np.where(better, segments.begin, came[ks + 1, part])
    if not math.isfinite(best[stages, n]):
        return math.inf, []
    cuts = [n]
    for k in range(stages, 1, -1):
        cuts.append(int(came[k, cuts[-1]]))
    return float(best[stages, n]), cuts[::-1]


# ---- the partition ---------------------------------------------------------------------------------------------------


def partition(problem: Problem, machine: Machine) -> Partition:
    """Balance the stages; see the module's text.

    Raises:
        RecipeError: if there are fewer nodes than stages, or no cut fits the memory.
    """
    problem = choose_replicated(problem, machine.stages)
    rest, positions = single(problem)
    _check_enough(rest, machine.stages)
    orders = [_last_at_the_end(rest, range(len(rest.nodes))), search_order(rest)]
    lines = [Line(rest, order, machine) for order in orders]
    shortest = min(shortest_time(line) for line in lines)
    if not math.isfinite(shortest):
        raise RecipeError(_too_large(lines))
    cuts = [(*least_traffic(line, shortest * (1 + _INDIFFERENT)), line) for line in lines]
    _, ends, line = min(cuts, key=lambda found: found[0])
    cut = _placed(problem, positions, _stages(line, ends), machine)
    stage_of = settle(rest, _stages(line, ends), light(rest, machine.stages))
    settled = _placed(problem, positions, stage_of, machine)
    limit, room = shortest * (1 + _INDIFFERENT), machine.memory or math.inf
    better = traffic(settled.table) < traffic(cut.table)
    fits = all(row.seconds <= limit and row.memory.total <= room for row in settled.table)
    return settled if better and fits else cut


def _placed(problem: Problem, positions: Sequence[int], stage_of: Mapping[int, int], machine: Machine) -> Partition:
    placement = place_replicated(problem, {positions[i]: stage for i, stage in stage_of.items()})
    return Partition(placement, stage_table(problem, placement, machine))


def light(problem: Problem, stages: int) -> list[int]:
    """The nodes that may be moved for their traffic alone: each takes next to nothing of a stage's ideal time.

    A node that reads parameters would take them along. It may where it only rewrites them (a transposed weight): what it makes
    is as large, and would travel for each micro-batch.
    """
    most = _LIGHT_SHARE * sum(node.seconds for node in problem.nodes) / stages

    def takes_little(node: Node) -> bool:
        made = sum(problem.values[v].bytes for v in node.outputs)
        rewrites = not node.inputs and sum(problem.parameters[p].bytes for p in node.parameters) <= made
        return rewrites or not node.parameters

    return [i for i, node in enumerate(problem.nodes) if node.seconds <= most and not node.last and takes_little(node)]


def _stages(line: Line, ends: Sequence[int]) -> dict[int, int]:
    begins = [0, *ends]
    return {i: k for k, end in enumerate(ends) for i in line.order[begins[k] : end]}


def _check_enough(problem: Problem, stages: int) -> None:
    busy = [node for node in problem.nodes if node.seconds > 0]
    before = sum(not node.last for node in busy)
    if len(busy) < stages or before < stages - 1:
        raise RecipeError(
            f"stages: the model has {before} nodes that compute something, and the loss is on the last stage: that is not "
            f"enough for {stages} stages; ask for at most {max(min(before + 1, len(busy)), 1)}"
        )


def _too_large(lines: Sequence[Line]) -> str:
    tried = [(*least_memory(line), line) for line in lines]
    smallest, ends, line = min(tried, key=lambda t: t[0])
    machine = line.machine
    if not ends:
        return f"stages: the model cannot be cut into {machine.stages} stages that each compute something"
    stage_of = _stages(line, ends)
    table = stage_table(line.problem, [(stage_of[i],) for i in range(len(line.order))], machine)
    row = max(table, key=lambda r: r.memory.total)
    inside = [line.problem.nodes[i].name for i in line.order if stage_of[i] == row.stage]
    return (
        f"no cut into {machine.stages} stages fits {amount(machine.memory or 0)} a stage; the smallest limit that would do is "
        f"{amount(smallest)} ({math.ceil(smallest)} bytes). Then the largest is stage {row.stage}, from node {inside[0]!r} "
        f"to {inside[-1]!r}: {row.memory}. Raise the limit, take more stages, or hold fewer micro-batches in flight"
    )


def amount(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


# ---- by hand ---------------------------------------------------------------------------------------------------------


def ancestors(problem: Problem, ends: Iterable[int]) -> set[int]:
    """The nodes that some nodes depend on, with those nodes."""
    predecessors, found = problem.predecessors(), set(ends)
    for i in range(len(problem.nodes) - 1, -1, -1):
        if i in found:
            found.update(predecessors[i])
    return found


def path(problem: Problem, start: int, end: int) -> list[int]:
    """The nodes of a shortest way from one node to a later one that depends on it; empty if it does not."""
    successors = transposed(problem.predecessors())
    came, queue = {start: start}, [start]
    for i in queue:
        if i == end:
            break
        for j in successors[i]:
            if j not in came:
                came[j] = i
                queue.append(j)
    if end not in came:
        return []
    way = [end]
    while way[-1] != start:
        way.append(came[way[-1]])
    return way[::-1]


def fill(problem: Problem, given: Mapping[int, int], stages: int) -> tuple[dict[int, int], list[int]]:
    """Give a stage to the nodes that have none: the latest of what they read, or, without that, the earliest of their readers.

    Returns:
        The stages; and if an edge then runs backwards, the nodes of a way from a later stage to an earlier one, else ``[]``.
    """
    predecessors = problem.predecessors()
    source: dict[int, int] = {}  # of each node the given node, itself or one before it, with the latest stage
    for i, before in enumerate(predecessors):
        sources = [source[p] for p in before if p in source]
        latest = max(sources, key=lambda s: (given[s], -s)) if sources else None
        if i in given:
            if latest is not None and given[latest] > given[i]:
                return {}, path(problem, latest, i)
            source[i] = i
        elif latest is not None:
            source[i] = latest
    stage_of = {i: given[s] for i, s in source.items()}
    successors = transposed(predecessors)
    for i in range(len(problem.nodes) - 1, -1, -1):
        if i not in stage_of:
            stage_of[i] = min((stage_of[j] for j in successors[i]), default=stages - 1)
    return stage_of, []


def settle(problem: Problem, stage_of: Mapping[int, int], movable: Collection[int]) -> dict[int, int]:
    """Move nodes, one at a time, between the stages of what they read and of who reads them, while that saves traffic."""
    stage_of = dict(stage_of)
    producers, predecessors = problem.producers(), problem.predecessors()
    successors = transposed(predecessors)
    readers = readers_of(problem)

    def cost(i: int, stage: int) -> int:
        old, stage_of[i] = stage_of[i], stage
        node, total = problem.nodes[i], 0
        for v in dict.fromkeys([*node.inputs, *node.outputs]):
            away = {stage_of[j] for j in readers[v]} - {stage_of[producers[v]]}
            total += problem.values[v].crossing * len(away)
        stage_of[i] = old
        return total

    order = [i for i in range(len(problem.nodes)) if i in movable]
    for sweep in [order, order[::-1]] * 2:
        for i in sweep:
            low = max((stage_of[p] for p in predecessors[i]), default=stage_of[i])
            high = min((stage_of[j] for j in successors[i]), default=stage_of[i])
            choices = dict.fromkeys([stage_of[i], low, high])
            stage_of[i] = min(choices, key=lambda stage, i=i: cost(i, stage))  # type: ignore[misc]
    return stage_of


def readers_of(problem: Problem) -> list[list[int]]:
    """The nodes that read each value."""
    readers: list[list[int]] = [[] for _ in problem.values]
    for i, node in enumerate(problem.nodes):
        for v in dict.fromkeys(node.inputs):
            readers[v].append(i)
    return readers
