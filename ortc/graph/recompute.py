"""What a backward computes again instead of keeping: plain data, and the algorithms that choose.

A training graph is a forward and a backward, both in order. The choice is a set of forward nodes; what follows from it is
:func:`follow`'s: which of them a backward needs again (the clones), and which values it keeps (the stash). A clone runs just
before the first node that reads it, and each runs at most once.

* :func:`minimum_cut`: the least of bytes kept and seconds spent, at a rate of exchange between the two; exact.
* :func:`best`, :func:`fit`, :func:`least`: the least of peak and seconds at a rate; the least seconds whose peak fits a budget;
  the least peak. All look at the peak itself, for choices that a dynamic program makes for many budgets: a knapsack over the
  windows of a line, whose options are such cuts and whole windows. A local search ends it.
* :func:`repeated_layers`: the layers of a model, as people recompute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

# What the budget is counted in, in parts of itself; and how many windows of a line may be computed again as one.
_BUCKETS, _JOINED, _WINDOWS = 400, 16, 192
# Rates of exchange (bytes a second) whose cuts are a window's options.
_RATES = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
# Values of fewer bytes do not count where it is asked how many values cross.
_SMALL = 1024
# Budgets that are tried; moves of the local search, and nodes that it may look at in all.
_STEPS, _TRIES, _WORK = 12, 160, 300_000
# Of so few nodes every set is tried; a graph of so few nodes is searched more thoroughly, from so many choices.
_TINY, _FEW, _STARTS = 9, 32, 12


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
    def wanted_set(self) -> frozenset[int]:
        """The same as a set."""
        return frozenset(self.wanted)

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
    """The clones and the stash of a choice; views go with what they view."""
    maker = t.maker
    drawn = _drawn(t, {i for i, node in enumerate(t.forward) if node.again and (node.view or i in chosen)})
    for i in sorted(drawn):  # a view of what is kept is at hand
        if t.forward[i].view and not any(maker.get(v) in drawn for v in t.forward[i].reads[:1]):
            drawn.discard(i)
    clones = _drawn(t, drawn)
    again = tuple(sorted(clones))
    read = [*t.wanted, *(v for i in again for v in t.forward[i].reads)]
    stash = tuple(dict.fromkeys(v for v in read if v in maker and maker[v] not in clones))
    return Choice(again, stash, t.seconds(again), peak(t, clones))


def _drawn(t: Training, able: Collection[int]) -> set[int]:
    """Those of some nodes that the backward reads, or that these read."""
    found: set[int] = set()
    waiting = list(t.wanted)
    while waiting:
        i = t.maker.get(waiting.pop())
        if i is not None and i in able and i not in found:
            found.add(i)
            waiting.extend(t.forward[i].reads)
    return found


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


@dataclass(frozen=True)
class Line:
    """The forward as a line: where it is narrow.

    Attributes:
        necks: positions (``p`` lies before node ``p``) where fewer bytes cross than just before and after; both ends are in.
        marks: positions where so few values cross that they lie between layers: as few as can be, if no third of the line is to
            be without.
    """

    necks: list[int]
    marks: list[int]


def line_of(t: Training) -> Line:
    """The necks of a forward, at most ``_WINDOWS`` windows of them, and its marks."""
    length = len(t.forward)
    crossing, count = [0] * (length + 2), [0] * (length + 2)
    for i, node in enumerate(t.forward):
        for v in node.makes:
            end = t.last_read.get(v, i)
            if not node.view and end > i:
                crossing[i + 1] += t.sizes[v]
                crossing[end + 1] -= t.sizes[v]
                if t.sizes[v] >= _SMALL:
                    count[i + 1] += 1
                    count[end + 1] -= 1
    bytes_at, values_at = np.cumsum(crossing), np.cumsum(count)
    inside = [p for p in range(1, length) if bytes_at[p] <= bytes_at[p - 1] and bytes_at[p] < bytes_at[p + 1]]
    marks: list[int] = []
    for few in sorted({values_at[p] for p in inside}):
        marks = [p for p in inside if values_at[p] <= few]
        if max(b - a for a, b in zip([0, *marks], [*marks, length], strict=True)) <= length / 3:
            break
    narrow = set(marks)
    groups = [list(g) for g in np.array_split(inside, _WINDOWS)] if len(inside) > _WINDOWS else [[p] for p in inside]
    chosen = [int(min(g, key=lambda p: (p not in narrow, bytes_at[p], p))) for g in groups if g]
    return Line([0, *chosen, length], [0, *marks, length])


def _leaving(t: Training, start: int, end: int) -> set[int]:
    """The makers in a window of what later nodes of the forward read."""
    return {i for i in range(start, end) for v in t.forward[i].makes if t.last_read.get(v, i) >= end and t.sizes[v] > 0}


def _whole(t: Training, ends: Sequence[int]) -> set[int]:
    """All nodes of the windows between positions, but for those that make what later windows read."""
    chosen: set[int] = set()
    for start, end in pairwise(ends):
        chosen.update(set(range(start, end)) - _leaving(t, start, end))
    return chosen


def repeated_layers(t: Training) -> set[int]:
    """The nodes of the layers that repeat: the longest run of windows between marks whose kinds repeat.

    Where nothing repeats, about as many parts, of equal kept bytes, as the square root of the windows (Chen et al. 2016,
    arXiv 1604.06174); not the last, whose backward comes first.
    """
    line = line_of(t)
    kinds = [tuple(node.kind for node in t.forward[a:b]) for a, b in pairwise(line.marks)]
    start, period, times = _longest_run(kinds)
    if 2 * times * period >= len(kinds):
        return _whole(t, [line.marks[start + k * period] for k in range(times + 1)])
    wanted = {t.maker[v] for v in t.wanted}
    until = np.cumsum([0, *(sum(t.sizes[v] for v in n.makes) if i in wanted else 0 for i, n in enumerate(t.forward))])
    parts, marks = max(2, math.isqrt(len(line.necks) - 1)), [0]
    for k in range(1, parts):
        near = min(line.necks[1:-1], key=lambda p: (abs(until[p] * parts - until[-1] * k), p), default=0)
        if near > marks[-1]:
            marks.append(near)
    return _whole(t, marks)


def _longest_run(kinds: Sequence[object]) -> tuple[int, int, int]:
    """Where a repetition starts, its period and how often it comes, so that it covers most; of equal ones the shortest."""
    best = (0, 1, 0)
    for period in range(1, min(len(kinds) // 2, 64) + 1):
        run = 0
        for i in range(len(kinds) - period):
            run = run + 1 if kinds[i] == kinds[i + period] else 0
            times = 1 + run // period
            if run >= period and times * period > best[1] * best[2]:
                best = (i + 1 - run, period, times)
    return best


@dataclass(frozen=True)
class _Option:
    """What a window may do: bytes that it keeps, bytes that it has again while its backward runs, seconds, its nodes."""

    kept: int
    inside: int
    seconds: float
    nodes: frozenset[int]


class _Windows:
    """The windows of a line with their options.

    A window of the necks runs again as a whole, alone or with its next ones, or not at all; a window of the marks has the
    nodes of minimum cuts at several rates.
    """

    def __init__(self, t: Training) -> None:
        self.t = t
        line = line_of(t)
        self.ends = sorted({*line.necks, *line.marks})
        self._wanted = set(t.wanted)
        self.cuts: list[set[int]] = [set() for _ in _RATES]
        options: dict[tuple[int, int], list[_Option]] = {}
        joined = max(2, min(_JOINED, 20_000 // max(len(t.forward), 1)))  # so that the time stays linear
        for a, start in enumerate(self.ends[:-1]):
            options.setdefault((a, a + 1), []).append(self._option(start, self.ends[a + 1], set()))
            for b in range(a + 1, min(a + joined, len(self.ends) - 1) + 1):
                chosen = set(range(start, self.ends[b])) - _leaving(t, start, self.ends[b])
                options.setdefault((a, b), []).append(self._option(start, self.ends[b], chosen))
        place = {end: a for a, end in enumerate(self.ends)}
        known: dict[object, list[frozenset[int]]] = {}
        for start, end in pairwise(line.marks):
            piece = _window(t, start, end)
            same = _outline(piece)
            if same not in known:
                known[same] = [frozenset(minimum_cut(piece, rate)) for rate in _RATES]
            for cut, found in zip(self.cuts, known[same], strict=True):
                chosen = {start + i for i in found}
                cut |= chosen
                options.setdefault((place[start], place[end]), []).append(self._option(start, end, chosen))
        self.options = {key: list({o.nodes: o for o in found}.values()) for key, found in sorted(options.items())}

    def _option(self, start: int, end: int, chosen: set[int]) -> _Option:
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
        if chosen:  # what comes after may read it
            seen |= {v for i in _leaving(t, start, end) for v in t.forward[i].makes if t.last_read.get(v, i) >= end}
        plain = [v for i in range(start, end) if not t.forward[i].view for v in t.forward[i].makes if v in seen]
        kept = sum(t.sizes[v] for v in plain if t.maker[v] not in nodes)
        inside = sum(t.sizes[v] for v in plain if t.maker[v] in nodes)
        return _Option(kept, inside, t.seconds(nodes), frozenset(nodes))

    def cheapest(self, budget: int) -> set[int] | None:
        """The nodes of the cheapest options that fit: before the backward of a window, what it and all before it keep, and
        what it has again, are at most the budget. None if there are none."""
        unit = max(budget / _BUCKETS, 1.0)
        last = len(self.ends) - 1
        best = np.full((last + 1, _BUCKETS + 1), np.inf)
        best[0, 0] = 0.0
        came = np.full((last + 1, _BUCKETS + 1, 2), -1)
        every: list[tuple[int, _Option]] = []
        for (a, b), options in self.options.items():
            for option in options:
                kept = math.ceil(option.kept / unit)
                room = math.floor((budget - option.kept - option.inside) / unit)
                reach = min(room, _BUCKETS - kept) + 1
                if room < 0 or reach <= 0:
                    continue
                every.append((a, option))
                candidate = best[a, :reach] + option.seconds
                target = best[b, kept : kept + reach]
                better = np.flatnonzero(candidate < target)
                target[better] = candidate[better]
                came[b, kept + better, 0] = better
                came[b, kept + better, 1] = len(every) - 1
        bucket = int(np.argmin(best[last]))
        if not np.isfinite(best[last, bucket]):
            return None
        place, chosen = last, set[int]()
        while place:
            bucket, index = came[place, bucket]
            place, option = every[index]
            chosen |= option.nodes
        return chosen


def _window(t: Training, start: int, end: int) -> Training:
    """A part of the forward alone; what leaves it is kept anyway, what it reads is given."""
    inside = range(start, end)
    kept = {v for i in _leaving(t, start, end) for v in t.forward[i].makes if t.last_read.get(v, i) >= end}
    number = {v: k for k, v in enumerate(v for i in inside for v in t.forward[i].makes)}
    forward = [
        replace(t.forward[i], reads=tuple(number[v] for v in t.forward[i].reads if v in number),
                makes=tuple(number[v] for v in t.forward[i].makes))
        for i in inside
    ]  # fmt: skip
    wanted = [v for v in number if v in t.wanted_set]
    backward = [Node(reads=tuple(number[v] for v in wanted), makes=())]
    return Training(forward, backward, [0 if v in kept else t.sizes[v] for v in number])


def _outline(t: Training) -> object:
    """Equal for windows whose cuts are equal."""
    return tuple(t.forward), tuple(t.sizes), t.backward[0].reads


# ---- choices ---------------------------------------------------------------------------------------------------------

Cost = Callable[[Choice], tuple[float, float]]


def best(t: Training, rate: float) -> Choice:
    """The choice with the least of peak bytes plus ``rate`` times seconds, of those that are looked at."""
    return _searched(t, _candidates(t, _Windows(t)), lambda c: (c.peak + rate * c.seconds, c.seconds))


def least(t: Training) -> Choice:
    """The choice of the lowest peak that is found, of equal ones the quickest."""
    return _searched(t, _candidates(t, _Windows(t)), lambda c: (c.peak, c.seconds))


def fit(t: Training, budget: int) -> Choice:
    """The cheapest choice whose peak is at most ``budget`` bytes; if none is found, the choice of the least peak."""
    found = follow(t, ())
    if found.peak <= budget:
        return found
    windows = _Windows(t)
    tried = _candidates(t, windows)
    low, high = 0, 2 * budget
    for _ in range(7):  # what windows take is not all that is there: search the number for which the real peak fits
        middle = (low + high) // 2
        chosen = windows.cheapest(middle)
        if chosen is None:
            low = middle
            continue
        tried.append(follow(t, chosen))
        low, high = (middle, high) if tried[-1].peak <= budget else (low, middle)
    if min(c.peak for c in tried) > budget:
        tried = [_searched(t, tried, lambda c: (c.peak, c.seconds))]
    if tried[0].peak > budget and len(tried) == 1:
        return tried[0]
    return _searched(t, tried, lambda c: (c.seconds if c.peak <= budget else math.inf, c.peak))


def _candidates(t: Training, windows: _Windows) -> list[Choice]:
    """Nothing, layers, cuts, and the cheapest options for budgets down to where there are none; of a tiny graph everything."""
    nothing = follow(t, ())
    able = [i for i, node in enumerate(t.forward) if node.again and not node.view]
    if len(able) <= _TINY:
        return [follow(t, set(c)) for size in range(len(able) + 1) for c in combinations(able, size)]
    chosen: list[set[int]] = [repeated_layers(t), *windows.cuts]
    low, high = 0, nothing.peak
    for part in range(1, _STEPS + 1):
        budget = nothing.peak * part // _STEPS
        found = windows.cheapest(budget)
        if found is None:
            low = budget
        else:
            chosen.append(found)
            high = min(high, budget)
    for _ in range(4):
        middle = (low + high) // 2
        found = windows.cheapest(middle)
        if found is None:
            low = middle
        else:
            chosen.append(found)
            high = middle
    distinct = {frozenset(c): c for c in chosen}
    return [nothing, *(follow(t, c) for c in distinct.values())]


def _searched(t: Training, choices: Sequence[Choice], cost: Cost) -> Choice:
    """The cheapest of some choices after a local search; of small graphs the search starts from each of them."""
    if len(t.forward) > _FEW:
        return _descended(t, min(choices, key=cost), cost, min(_TRIES, _WORK // (len(t.forward) + len(t.backward))))
    return min((_descended(t, c, cost, _TRIES * _FEW) for c in sorted(choices, key=cost)[:_STARTS]), key=cost)


def _descended(t: Training, now: Choice, cost: Cost, tries: int) -> Choice:
    """Keep what a clone makes instead, the dearest first; in small graphs also the other way round, and two such at once."""
    improved = True
    while improved and tries > 0:
        improved = False
        clones = sorted(now.clones, key=lambda i: (-t.forward[i].seconds, i))
        moves: list[tuple[int, ...]] = [(i,) for i in clones if t.forward[i].seconds > 0]
        if len(t.forward) <= _FEW:
            others = [i for i, node in enumerate(t.forward) if i not in now.clones and node.again]
            moves += [(i,) for i in others]
            moves += [(i, k) for i in clones for k in others]
            moves += [*combinations(others, 2), *combinations(clones, 2)]
        for move in moves[:tries]:
            tries -= 1
            made = follow(t, set(now.clones).symmetric_difference(move))
            if cost(made) < cost(now):
                now, improved = made, True
                break
    return now
