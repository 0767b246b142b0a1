"""Which values are in memory at each node of a graph, and orders of its nodes that need little of it.

It follows what ONNX Runtime does with a graph that it runs in the graph's own order: a value has memory from the node that
makes it to its last reader, and one that nobody reads to the end; a view lies in the memory of what it views; an operator that
may work in place writes over an input of the same shape that nobody reads later. Which operators do so, the caller knows
(:class:`NodeMemory`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.graph.cut import read_by
from ortc.graph.names import bodies_of
from ortc.graph.shapes import dims


@dataclass(frozen=True)
class NodeMemory:
    """How a node deals with memory.

    Attributes:
        views: (input, output) positions: the output is the input's memory.
        in_place: likewise: the output may be written over the input, if that is read for the last time; the first that fits.
        scratch: bytes that the kernel takes for itself while it runs.
    """

    views: tuple[tuple[int, int], ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
    scratch: int = 0


Sizes = Mapping[ir.Value, int]
Memory = Callable[[ir.Node], NodeMemory]


@dataclass(frozen=True)
class Liveness:
    """Memory over a graph's order.

    Attributes:
        live: bytes in use while each node runs: what it reads, what it makes, its scratch, and what later nodes read.
        at: the position of the first node with the most, 0 without nodes.
        alive: the buffers in use there, by the value that they were made for, with their bytes, the largest first.
    """

    live: list[int]
    at: int
    alive: list[tuple[ir.Value, int]]

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return max(self.live, default=0)


def liveness(graph: ir.Graph, sizes: Sizes, memory: Memory, order: Sequence[ir.Node] | None = None) -> Liveness:
    """Live bytes at every node. Linear in the graph.

    Args:
        graph: the graph. Its inputs and initialisers are somebody else's memory, which is not counted.
        sizes: bytes of each value. One that is missing takes none: it is memory of the caller's, such as that of an output
            which is bound to an array. Outputs of the graph that have a size stay to the end.
        memory: how a node deals with memory.
        order: the nodes in another order than the graph's.
    """
    nodes = list(graph) if order is None else order
    return _liveness(graph, nodes, _facts(nodes, memory), sizes, memory)


# What a node reads (twice what it reads in two places), and how it deals with memory.
_Facts = Mapping[ir.Node, tuple[Sequence[ir.Value], NodeMemory]]


def _facts(nodes: Sequence[ir.Node], memory: Memory) -> _Facts:
    return {node: (read_by(node), memory(node)) for node in nodes}


def _liveness(graph: ir.Graph, nodes: Sequence[ir.Node], facts: _Facts, sizes: Sizes, memory: Memory) -> Liveness:
    unread: dict[ir.Value, int] = {}  # readers of a value; of a buffer, as those of its values come to be made
    for value in itertools.chain(graph.outputs, *(reads for reads, _ in facts.values())):
        unread[value] = unread.get(value, 0) + 1
    buffer: dict[ir.Value, ir.Value] = {}
    held: dict[ir.Value, int] = {}  # the buffers in use, by the value that they were made for
    spans: dict[
        ir.Value, tuple[int, int]
    ] = {}  # of a buffer that nobody needs any more: its bytes, and where it was needed last
    first: dict[ir.Value, int] = {}  # where each buffer was made
    live: list[int] = []
    total = 0
    kept = set(graph.outputs)
    for at, node in enumerate(nodes):
        reads, behaviour = facts[node]
        outputs = node.outputs
        idle = [v for v in outputs if v not in unread]
        for position, value in enumerate(outputs):
            shared = None if value in kept else _shared(node, position, behaviour, buffer, unread, held)
            if shared is None:
                buffer[value] = value
                first[value] = at
                held[value] = size = sizes.get(value, 0)
                total += size
                unread.setdefault(value, 0)
            else:
                buffer[value] = shared
                unread[shared] += unread.get(value, 0)
        live.append(total + behaviour.scratch + _inside(node, sizes, memory))
        for value in reads:
            unread[buffer.get(value, value)] -= 1
        for value in (*reads, *outputs):
            made = buffer.get(value, value)
            if unread[made] == 0 and made in held and made not in idle:
                size = held.pop(made)
                spans[made] = size, at
                total -= size
    return Liveness(live, *_alive(live, first, held, spans))


def _inside(node: ir.Node, sizes: Sizes, memory: Memory) -> int:
    """What the bodies nested in a node take while it runs, one at a time."""
    return max((liveness(body, sizes, memory).peak for body in bodies_of(node)), default=0)


def _alive(
    live: Sequence[int],
    first: Mapping[ir.Value, int],
    held: Mapping[ir.Value, int],
    spans: Mapping[ir.Value, tuple[int, int]],
) -> tuple[int, list[tuple[ir.Value, int]]]:
    """The position of the first node with the most in use, and the buffers in use there, the largest first."""
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    alive = []
    for value, since in first.items():
        size, until = spans[value] if value in spans else (held[value], len(live))
        if size and since <= peak <= until:
            alive.append((value, size))
    return peak, sorted(alive, key=lambda pair: -pair[1])


def _shared(
    node: ir.Node,
    position: int,
    memory: NodeMemory,
    buffer: Mapping[ir.Value, ir.Value],
    unread: Mapping[ir.Value, int],
    held: Mapping[ir.Value, int],
) -> ir.Value | None:
    """The buffer that an output is written to, if it is one that is there already."""
    output = node.outputs[position]
    for i, o in memory.views:
        if o == position and (value := _input(node, i)) is not None:
            return buffer.get(value, value)
    for i, o in memory.in_place:
        if o == position and (value := _input(node, i)) is not None:
            found = buffer.get(value, value)
            if found in held and unread[found] == 1 and _same_size(value, output):
                return found
    return None


def _input(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _same_size(a: ir.Value, b: ir.Value) -> bool:
    """Whether ONNX Runtime can tell that they are of one size: equal shapes by number and name, elements equally wide."""
    if a.dtype is None or b.dtype is None or a.dtype.itemsize != b.dtype.itemsize:
        return False
    shape = dims(a)
    return shape is not None and None not in shape and shape == dims(b)


# ---- orders ----------------------------------------------------------------------------------------------------------


def low_peak_order(graph: ir.Graph, sizes: Sizes, memory: Memory) -> list[ir.Node]:
    """The nodes in an order that needs little memory: a list schedule, or the graph's own order if its peak is no higher.

    Of the nodes that are ready, the schedule takes the one that gives back the most bytes, if any adds none to what is in use
    (so gradients of weights come as soon as they can); else the next in the graph's own order. The best order is NP-hard to
    find (Sethi 1975); other lists (always the least added; from the end, everything as late as can be) were no better on any
    real model. O(n log n); the same in any process.

    Args:
        graph, sizes, memory: as for :func:`liveness`.
    """
    nodes = list(graph)
    facts = _facts(nodes, memory)
    scheduled = _Schedule(nodes, set(graph.outputs), facts, sizes).run()
    return min((nodes, scheduled), key=lambda order: _liveness(graph, order, facts, sizes, memory).peak)


class _Schedule:
    """A list schedule, by position: of nodes, and of buffers, which are values together with their views."""

    def __init__(self, nodes: Sequence[ir.Node], kept: Collection[ir.Value], facts: _Facts, sizes: Sizes) -> None:
        at = {node: i for i, node in enumerate(nodes)}
        self._nodes = nodes
        self._size: list[int] = []
        self._left: list[int] = []  # readers of each buffer that are still to come
        self._rest: list[int] = []  # the sum of their positions: with one left, that one's
        self._makes: list[list[int]] = []
        self._reads: list[list[int]] = []
        self._missing: list[int] = []
        self._after: list[list[int]] = [[] for _ in nodes]
        buffer: dict[ir.Value, int] = {}
        for i, node in enumerate(nodes):
            reads, behaviour = facts[node]
            values = dict.fromkeys(reads)
            before = dict.fromkeys(at[p] for v in values if (p := v.producer()) in at)
            self._missing.append(len(before))
            for j in before:
                self._after[j].append(i)
            self._reads.append(list(dict.fromkeys(buffer[v] for v in values if v in buffer)))
            for b in self._reads[i]:
                self._left[b] += 1
                self._rest[b] += i
            self._makes.append([])
            viewed = {o: v for j, o in behaviour.views if (v := _input(node, j)) is not None}
            for position, value in enumerate(node.outputs):
                source = None if value in kept else viewed.get(position)
                if source is None:
                    buffer[value] = len(self._size)
                    self._makes[i].append(len(self._size))
                    self._size.append(sizes.get(value, 0))
                    self._left.append(int(value in kept or not value.uses()))  # one more reader, that never comes
                    self._rest.append(0)
                elif source in buffer:
                    buffer[value] = buffer[source]

    def run(self) -> list[ir.Node]:
        """The nodes in order."""
        ready = [(self._rank(i), i) for i, missing in enumerate(self._missing) if missing == 0]
        heapq.heapify(ready)
        order: dict[int, None] = {}
        while ready:
            was, i = heapq.heappop(ready)
            if i in order:
                continue
            if (now := self._rank(i)) != was:
                heapq.heappush(ready, (now, i))
                continue
            order[i] = None
            for j in self._place(i):
                if self._missing[j] == 0 and j not in order:
                    heapq.heappush(ready, (self._rank(j), j))
        return [self._nodes[i] for i in order]

    def _rank(self, i: int) -> tuple[int, int]:
        added = sum([self._size[b] for b in self._makes[i] if self._left[b]])
        added -= sum([self._size[b] for b in self._reads[i] if self._left[b] == 1])
        return (added, i) if added <= 0 else (1, i)

    def _place(self, i: int) -> Iterator[int]:
        """Note that a node is placed; the nodes that this makes ready, or to which it leaves the last reading of a buffer."""
        for b in self._reads[i]:
            self._left[b] -= 1
            self._rest[b] -= i
            if self._left[b] == 1:
                yield self._rest[b]
        for j in self._after[i]:
            self._missing[j] -= 1
            yield j
