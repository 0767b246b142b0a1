"""What a backward computes again instead of keeping: plain data, and the algorithms that choose.

A training graph is a forward and a backward, both in order. The choice is a set of forward nodes; what follows from it is
:func:`follow`'s: which of them a backward needs again (the clones), and which values it keeps (the stash). A clone runs just
before the first node that reads it, and each runs at most once.

* :func:`minimum_cut`: the least of bytes kept and seconds spent, at a rate of exchange between the two; exact.
* :func:`fit`: the least time whose peak fits a budget: a knapsack by dynamic programming over the windows of a line, whose
  options are such cuts and whole windows; then a local search. :func:`least` is the lowest peak that it finds.
* :func:`repeated_layers`: the layers of a model, as people recompute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# What the budget is counted in, in parts of itself; and how many windows of a line may be computed again as one.
_BUCKETS, _JOINED, _WINDOWS = 400, 16, 192
# Rates of exchange (bytes a second) whose cuts are a window's options.
_RATES = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
_TRIES = 160


@dataclass(frozen=True)
class Node:
    """A node by the numbers of its values.

    Attributes:
        reads, makes: values.
        seconds: how long it takes.
        again: whether it may run twice.
        view: its output is its first input's memory.
        in_place: its output may take the memory of an input that nothing reads any more.
        kind: nodes of repeated layers have the same.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float = 0.0
    again: bool = True
    view: bool = False
    in_place: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Training:
    """A forward and a backward.

    Attributes:
        forward, backward: in order; a value that neither makes is given, and takes nothing here.
        sizes: bytes of each value.
        outputs: values that are there until the end.
    """

    forward: Sequence[Node]
    backward: Sequence[Node]
    sizes: Sequence[int]
    outputs: frozenset[int] = frozenset()

    @cached_property
    def maker(self) -> dict[int, int]:
        """The forward node that makes a value."""
        return {v: i for i, node in enumerate(self.forward) for v in node.makes}

    @cached_property
    def wanted(self) -> list[int]:
        """The values of the forward that the backward reads, by their first reader."""
        return list(dict.fromkeys(v for node in self.backward for v in node.reads if v in self.maker))

    @cached_property
    def last_read(self) -> dict[int, int]:
        """The last forward node that reads a value."""
        return {v: i for i, node in enumerate(self.forward) for v in node.reads}

    def seconds(self, nodes: Iterable[int]) -> float:
        """What forward nodes take together."""
        return math.fsum(self.forward[i].seconds for i in nodes)


@dataclass(frozen=True)
class Choice:
    """What follows from a set of nodes that may run again: those that do, in order; the values kept; seconds; peak bytes."""

    clones: tuple[int, ...]
    stash: tuple[int, ...]
    seconds: float
    peak: int


def follow(t: Training, chosen: Collection[int]) -> Choice:
    """The clones and the stash of a choice."""
    maker = t.maker
    clones: set[int] = set()
    waiting = list(t.wanted)
    while waiting:
        i = maker.get(waiting.pop())
        if i is not None and i in chosen and i not in clones and t.forward[i].again:
            clones.add(i)
            waiting.extend(t.forward[i].reads)
    for i in sorted(clones):  # a view of what is kept is at hand
        if t.forward[i].view and not any(maker.get(v) in clones for v in t.forward[i].reads[:1]):
            clones.discard(i)
    again = tuple(sorted(clones))
    read = [*t.wanted, *(v for i in again for v in t.forward[i].reads)]
    stash = tuple(dict.fromkeys(v for v in read if v in maker and maker[v] not in clones))
    return Choice(again, stash, t.seconds(again), peak(t, clones))


def order(t: Training, clones: Collection[int]) -> list[tuple[int, bool]]:
    """The backward with the clones in their places: (node, whether it is a clone of the forward's)."""
    maker, made = t.maker, set()
    steps: list[tuple[int, bool]] = []
    for j, node in enumerate(t.backward):
        found: set[int] = set()
        waiting = [v for v in node.reads if maker.get(v) in clones]
        while waiting:
            i = maker[waiting.pop()]
            if i not in made and i not in found:
                found.add(i)
                waiting.extend(v for v in t.forward[i].reads if maker.get(v) in clones)
        steps.extend((i, True) for i in sorted(found))
        made |= found
        steps.append((j, False))
    return steps


def peak(t: Training, clones: Collection[int]) -> int:
    """The most bytes alive at a time, of what the graph makes."""
    count, maker = len(t.sizes), t.maker
    steps = [(node, node.reads, node.makes) for node in t.forward]
    for i, cloned in order(t, clones):
        node = t.forward[i] if cloned else t.backward[i]
        reads = tuple(v + count if maker.get(v) in clones else v for v in node.reads)
        steps.append((node, reads, tuple(v + count for v in node.makes) if cloned else node.makes))
    root: dict[int, int] = {}  # a value -> the one whose memory it is
    last: dict[int, int] = {}
    for step, (node, reads, makes) in enumerate(steps):
        for v in makes:
            root[v] = root[reads[0]] if node.view and reads and reads[0] in root else v
            last[root[v]] = step
        for v in reads:
            if v in root:
                last[root[v]] = step
    for v in t.outputs:
        if v in root:
            last[root[v]] = len(steps)
    alive, most = 0, 0
    held: dict[int, int] = {}
    for step, (node, reads, makes) in enumerate(steps):
        ending = [r for r in dict.fromkeys(root[v] for v in reads if v in root) if last[r] == step]
        for v in makes:
            if root[v] == v:
                held[v] = t.sizes[v % count]
                heir = next((r for r in ending if held[r] == held[v]), None) if node.in_place else None
                if heir is not None:
                    ending.remove(heir)
                    held.pop(heir)
                else:
                    alive += held[v]
        most = max(most, alive)
        alive -= sum(held.pop(r) for r in ending)
        alive -= sum(held.pop(v) for v in makes if root[v] == v and last[v] == step)
    return most


# ---- the cut ---------------------------------------------------------------------------------------------------------


def minimum_cut(t: Training, rate: float, allowed: Collection[int] | None = None) -> set[int]:
    """The nodes to run again, so that bytes kept plus ``rate`` times seconds spent are least (Ford & Fulkerson 1956).

    What the backward lacks lies on the sink's side. A value there whose maker is not costs its bytes; a maker costs its time,
    and draws what it reads to its side.

    Args:
        t: the graph.
        rate: bytes that a second is worth.
        allowed: the nodes that may run again; default: all.
    """
    import networkx

    maker, count = t.maker, len(t.sizes)
    source, sink = -1, -2
    flow = networkx.DiGraph()
    flow.add_nodes_from((source, sink))
    for v in t.wanted:
        flow.add_edge(v, sink)
    waiting, seen = list(t.wanted), set(t.wanted)
    while waiting:
        v = waiting.pop()
        i = maker[v]
        node = t.forward[i]
        if not node.again or (allowed is not None and i not in allowed):
            flow.add_edge(source, v, capacity=t.sizes[v])
            continue
        again = count + i
        if again not in flow:
            # A tie is for keeping; a view costs nothing but to be there.
            flow.add_edge(source, again, capacity=round(rate * node.seconds) + (0 if node.view else 1))
            for u in dict.fromkeys(u for u in node.reads if u in maker):
                flow.add_edge(u, again)
                if u not in seen:
                    seen.add(u)
                    waiting.append(u)
        flow.add_edge(again, v, capacity=t.sizes[v])
    _, (_, lacking) = networkx.minimum_cut(flow, source, sink, flow_func=networkx.algorithms.flow.preflow_push)
    return {v - count for v in lacking if v >= count}


# ---- a line of windows -----------------------------------------------------------------------------------------------


def necks(t: Training) -> list[int]:
    """Where the forward is narrow: positions before which few bytes are made that later nodes read, ends included.

    Position ``p`` lies before node ``p``; kept are those where fewer bytes cross than at both neighbours.
    """
    crossing = _crossing(t)
    inside = [p for p in range(1, len(t.forward)) if crossing[p] <= crossing[p - 1] and crossing[p] < crossing[p + 1]]
    if len(inside) > _WINDOWS:  # the narrowest, spread over the line
        step = len(inside) / _WINDOWS
        groups = [inside[round(k * step) : round((k + 1) * step)] for k in range(_WINDOWS)]
        inside = [min(group, key=lambda p: (crossing[p], p)) for group in groups if group]
    return [0, *inside, len(t.forward)]


def _crossing(t: Training) -> list[int]:
    change = [0] * (len(t.forward) + 2)
    for i, node in enumerate(t.forward):
        for v in node.makes:
            end = t.last_read.get(v, i)
            if not node.view and end > i:
                change[i + 1] += t.sizes[v]
                change[end + 1] -= t.sizes[v]
    return list(np.cumsum(change))


def _leaving(t: Training, start: int, end: int) -> set[int]:
    """The makers in a window of what later nodes of the forward read."""
    return {i for i in range(start, end) for v in t.forward[i].makes if t.last_read.get(v, i) >= end and t.sizes[v] > 0}


def whole_windows(t: Training, ends: Sequence[int]) -> set[int]:
    """All nodes of the windows between positions, but for those that make what later windows read."""
    chosen: set[int] = set()
    for start, end in zip(ends, ends[1:], strict=False):
        chosen.update(set(range(start, end)) - _leaving(t, start, end))
    return chosen


def repeated_layers(t: Training, fewest: int = 2) -> set[int]:
    """The nodes of the layers that repeat: the longest run of windows between the narrowest positions whose kinds repeat.

    Where nothing repeats, about as many equal parts of the kept bytes as the square root of the windows (Chen et al. 2016,
    arXiv 1604.06174).
    """
    ends, crossing = necks(t), _crossing(t)
    if len(ends) < 3:
        return set()
    narrow = min(crossing[p] for p in ends[1:-1])
    for width in (narrow, None):
        marks = [0, *(p for p in ends[1:-1] if width is None or crossing[p] <= 1.5 * width), len(t.forward)]
        kinds = [tuple(node.kind for node in t.forward[a:b]) for a, b in zip(marks, marks[1:], strict=False)]
        start, period, times = _longest_run(kinds, fewest)
        if times * period * 2 >= len(kinds):
            return whole_windows(t, [marks[start + k * period] for k in range(times + 1)])
    parts = max(2, math.isqrt(len(ends) - 1))
    wanted = {t.maker[v] for v in t.wanted}
    bytes_until = np.cumsum([sum(t.sizes[v] for v in n.makes) if i in wanted else 0 for i, n in enumerate(t.forward)])
    marks = [0]
    for k in range(1, parts):
        target = bytes_until[-1] * k / parts
        near = min(ends[1:-1], key=lambda p: (abs(bytes_until[p - 1] - target), p))
        if near > marks[-1]:
            marks.append(near)
    return whole_windows(t, marks)  # the last part's backward comes first, and would run it again at once


def _longest_run(kinds: Sequence[object], fewest: int) -> tuple[int, int, int]:
    """Where a repetition starts, its period and how often it comes, so that it covers most; of equal ones the shortest."""
    best = (0, 1, 0)
    for period in range(1, min(len(kinds) // fewest, 64) + 1):
        run = 0
        for i in range(len(kinds) - period + 1):
            run = run + 1 if i + period < len(kinds) and kinds[i] == kinds[i + period] else 0
            times = 1 + run // period
            if run and times >= fewest and times * period > best[1] * best[2]:
                best = (i + 1 - run, period, times)
    return best


@dataclass(frozen=True)
class _Option:
    """What a window may do: bytes that it keeps, bytes that it has again while its backward runs, seconds, its nodes."""

    kept: int
    inside: int
    seconds: float
    nodes: frozenset[int]


class _Line:
    """The windows of a graph with their options; see :func:`fit`."""

    def __init__(self, t: Training) -> None:
        self.t, self.ends = t, necks(t)
        self._wanted = set(t.wanted)
        cuts = [minimum_cut(t, rate) for rate in _RATES]
        # By the window's first and last: several windows only as a whole.
        self.options: dict[tuple[int, int], list[_Option]] = {}
        for a in range(len(self.ends) - 1):
            for b in range(a + 1, min(a + _JOINED, len(self.ends) - 1) + 1):
                start, end = self.ends[a], self.ends[b]
                leaving = _leaving(t, start, end)
                choices = [set(range(start, end)) - leaving]
                if b == a + 1:
                    choices += [set(), *({i for i in cut if start <= i < end} for cut in cuts)]
                made = (self._option(start, end, leaving, chosen) for chosen in choices)
                self.options[a, b] = list({o.nodes: o for o in made}.values())

    def _option(self, start: int, end: int, leaving: set[int], chosen: set[int]) -> _Option:
        t = self.t
        nodes: set[int] = set()
        needed = [v for i in range(start, end) for v in t.forward[i].makes if v in self._wanted]
        seen = set(needed)
        while needed:
            i = t.maker[needed.pop()]
            if i in chosen and i not in nodes and t.forward[i].again:
                nodes.add(i)
                found = [v for v in t.forward[i].reads if v not in seen and start <= t.maker.get(v, -1) < end]
                seen.update(found)
                needed.extend(found)
        made = {v for i in range(start, end) if not t.forward[i].view for v in t.forward[i].makes}
        crossing = {v for i in leaving for v in t.forward[i].makes if t.last_read.get(v, i) >= end}
        kept = sum(t.sizes[v] for v in made & (seen | crossing) if t.maker[v] not in nodes)
        inside = sum(t.sizes[v] for v in made & seen if t.maker[v] in nodes)
        return _Option(kept, inside, t.seconds(nodes), frozenset(nodes))

    def cheapest(self, budget: int) -> set[int] | None:
        """The nodes of the cheapest options that fit: before the backward of a window, what it and all before it keep, and
        what it has again, are at most the budget. None if there are none."""
        unit = max(budget / _BUCKETS, 1.0)
        last = len(self.ends) - 1
        best = np.full((last + 1, _BUCKETS + 1), np.inf)
        best[0, 0] = 0.0
        came: dict[tuple[int, int], tuple[int, int, _Option]] = {}
        for (a, b), options in sorted(self.options.items()):
            for option in options:
                kept = math.ceil(option.kept / unit)
                room = math.floor((budget - option.kept - option.inside) / unit)
                if room < 0:
                    continue
                reach = min(room, _BUCKETS - kept) + 1
                if reach <= 0:
                    continue
                candidate = best[a, :reach] + option.seconds
                target = best[b, kept : kept + reach]
                for k in np.flatnonzero(candidate < target):
                    came[b, kept + int(k)] = (a, int(k), option)
                np.minimum(target, candidate, out=target)
        if not np.isfinite(best[last]).any():
            return None
        place, bucket, chosen = last, int(np.argmin(best[last])), set[int]()
        while place:
            place, bucket, option = came[place, bucket]
            chosen |= option.nodes
        return chosen


def least(t: Training, start: Iterable[Collection[int]] = ()) -> tuple[set[int], Choice]:
    """The choice of the lowest peak that is found, of equal ones the quickest."""
    return _least(t, _Line(t), start)


def _least(t: Training, line: _Line, start: Iterable[Collection[int]]) -> tuple[set[int], Choice]:
    tried = [set(), *map(set, start)]
    high = peak(t, ())
    low, feasible = 0, high
    while feasible - low > max(high // 200, 1):
        middle = (low + feasible) // 2
        if line.cheapest(middle) is None:
            low = middle
        else:
            feasible = middle
    tried += [c for part in (1.0, 1.03, 1.08, 1.15, 1.3) if (c := line.cheapest(math.ceil(feasible * part))) is not None]
    chosen = min(tried, key=lambda c: ((made := follow(t, c)).peak, made.seconds))
    chosen = _searched(t, chosen, lambda new, old: (new.peak, new.seconds) < (old.peak, old.seconds))
    return chosen, follow(t, chosen)


def fit(t: Training, budget: int, start: Iterable[Collection[int]] = ()) -> tuple[set[int], Choice]:
    """The cheapest choice whose peak is at most ``budget`` bytes; if none is found, the choice of the least peak.

    Args:
        t: the graph.
        budget: bytes of what the graph makes.
        start: choices to try first.
    """
    tried = [set(), *map(set, start)]
    if follow(t, ()).peak <= budget:
        return set(), follow(t, ())
    line = _Line(t)
    low, high = 0, 2 * budget
    for _ in range(9):  # what a window takes is not all that is there: find the budget of the line that keeps the real one
        middle = (low + high) // 2
        found = line.cheapest(middle)
        if found is None:
            low = middle
            continue
        tried.append(found)
        low, high = (middle, high) if follow(t, found).peak <= budget else (low, middle)
    fitting = [c for c in tried if follow(t, c).peak <= budget]
    if not fitting:
        chosen, lowest = _least(t, line, tried)
        if lowest.peak > budget:
            return chosen, lowest
        fitting = [chosen]
    chosen = min(fitting, key=lambda c: follow(t, c).seconds)
    chosen = _searched(t, chosen, lambda new, old: new.peak <= budget and new.seconds < old.seconds)
    return chosen, follow(t, chosen)


def _searched(t: Training, chosen: set[int], better: Callable[[Choice, Choice], bool]) -> set[int]:
    """Local search: keep what a clone makes instead, the dearest first; in small graphs also the other way round."""
    small = len(t.forward) <= 64
    now, tries = follow(t, chosen), _TRIES
    chosen = set(now.clones)
    improved = True
    while improved and tries > 0:
        improved = False
        moves = [{i} for i in sorted(now.clones, key=lambda i: (-t.forward[i].seconds, i)) if t.forward[i].seconds > 0]
        if small:
            others = [i for i in range(len(t.forward)) if i not in chosen and t.forward[i].again]
            moves += [{i} for i in others]
            moves += [{i, k} for i in now.clones for k in others]
            tries += len(moves)
        for move in moves:
            tries -= 1
            made = follow(t, chosen ^ move)
            if better(made, now):
                chosen, now, improved = set(made.clones), made, True
                break
            if tries <= 0:
                break
    return chosen
