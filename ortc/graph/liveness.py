"""Which values are in memory at each node of a graph, and orders of its nodes that need little of it.

It follows what ONNX Runtime does with a graph that it runs in the graph's own order: a value has memory from the node that
makes it to its last reader; a view lies in the memory of what it views; an operator that may work in place writes over an
input of the same shape that nobody reads later. Which operators do so, the caller knows (:class:`NodeMemory`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.graph.cut import read_by
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
Waits = Mapping[ir.Node, Sequence[ir.Node]]


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
    live = [sum_ + memory(node).scratch + _inside(node, sizes, memory) for node, sum_, _ in _walk(graph, nodes, sizes, memory)]
    at = max(range(len(live)), key=live.__getitem__, default=0)
    alive: list[tuple[ir.Value, int]] = []
    for _, _, held in itertools.islice(_walk(graph, nodes, sizes, memory), at, at + 1):
        alive = sorted(((v, n) for v, n in held.items() if n), key=lambda pair: -pair[1])
    return Liveness(live, at, alive)


def _inside(node: ir.Node, sizes: Sizes, memory: Memory) -> int:
    """What the bodies nested in a node take while it runs, one at a time."""
    bodies = [a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    return max((liveness(body, sizes, memory).peak for body in bodies), default=0)


def _walk(
    graph: ir.Graph, nodes: Sequence[ir.Node], sizes: Sizes, memory: Memory
) -> Iterator[tuple[ir.Node, int, dict[ir.Value, int]]]:
    """Every node with the bytes of the buffers in use while it runs, and those buffers by the value that they were made for."""
    reads = {node: read_by(node) for node in nodes}  # twice what it reads in two places
    unread: dict[ir.Value, int] = {}  # readers of a value; of a buffer, as those of its values come to be made
    for value in itertools.chain(graph.outputs, *reads.values()):
        unread[value] = unread.get(value, 0) + 1
    buffer: dict[ir.Value, ir.Value] = {}
    held: dict[ir.Value, int] = {}
    total = 0
    kept = set(graph.outputs)
    for node in nodes:
        for position, value in enumerate(node.outputs):
            shared = None if value in kept else _shared(node, position, memory(node), buffer, unread, held)
            if shared is None:
                buffer[value] = value
                held[value] = sizes.get(value, 0)
                total += held[value]
                unread.setdefault(value, 0)
            else:
                buffer[value] = shared
                unread[shared] += unread.get(value, 0)
        yield node, total, held
        for value in reads[node]:
            unread[buffer.get(value, value)] -= 1
        for made in {buffer.get(v, v): None for v in (*reads[node], *node.outputs)}:
            if unread[made] == 0:
                total -= held.pop(made, 0)


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


def low_peak_order(graph: ir.Graph, sizes: Sizes, memory: Memory, waits: Waits | None = None) -> list[ir.Node]:
    """The nodes in an order that needs little memory: the graph's own, if no other that is tried has a lower peak.

    Tried are list schedules, which take one ready node after the other: (1) that which adds the fewest bytes to what is in
    use; (2) one that adds none, as soon as there is one, else the next of the graph's own order; (3) as (1), but from the end:
    there a node is ready when all its readers are placed, and takes away what it makes and adds what it reads, so that
    everything is made as late as can be. The best order is NP-hard to find (Sethi 1975). O(n log n); the same in any process.

    Args:
        graph, sizes, memory: as for :func:`liveness`.
        waits: nodes that must come after others, not only after those whose values they read.
    """
    nodes = list(graph)
    task = _Task(nodes, set(graph.outputs), sizes, memory, waits or {})
    orders = [
        nodes,
        task.forwards(lambda added, i: (added, i)),
        task.forwards(lambda added, i: (added, i) if added <= 0 else (1, i)),
        task.backwards(),
    ]
    return min(orders, key=lambda order: liveness(graph, sizes, memory, order).peak)


class _Task:
    """What there is to schedule, by position: of nodes, and of buffers, which are values together with their views."""

    def __init__(
        self, nodes: Sequence[ir.Node], kept: Collection[ir.Value], sizes: Sizes, memory: Memory, waits: Waits
    ) -> None:
        at = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.size: list[int] = []
        self.kept: list[bool] = []
        self.readers: list[list[int]] = []
        self.makes: list[list[int]] = []
        self.reads: list[list[int]] = []
        self.before: list[list[int]] = []
        self.after: list[list[int]] = [[] for _ in nodes]
        buffer: dict[ir.Value, int] = {}
        for i, node in enumerate(nodes):
            values = dict.fromkeys(read_by(node))
            ahead = [*(v.producer() for v in values), *waits.get(node, ())]
            self.before.append(list(dict.fromkeys(at[p] for p in ahead if p in at)))
            for p in self.before[i]:
                self.after[p].append(i)
            self.reads.append(list(dict.fromkeys(buffer[v] for v in values if v in buffer)))
            for b in self.reads[i]:
                self.readers[b].append(i)
            self.makes.append([])
            viewed = {o: v for j, o in memory(node).views if (v := _input(node, j)) is not None}
            for position, value in enumerate(node.outputs):
                source = None if value in kept else viewed.get(position)
                if source is None:
                    buffer[value] = len(self.size)
                    self.makes[i].append(len(self.size))
                    self.size.append(sizes.get(value, 0))
                    self.kept.append(value in kept)
                    self.readers.append([])
                elif source in buffer:
                    buffer[value] = buffer[source]

    def forwards(self, rank: Callable[[int, int], tuple[int, int]]) -> list[ir.Node]:
        """One ready node after the other, the one of the lowest rank: of the bytes that it adds, and its position."""
        left = [len(readers) for readers in self.readers]
        rest = [sum(readers) for readers in self.readers]  # with one reader left, the position of that

        def added(i: int) -> int:
            made = sum(self.size[b] for b in self.makes[i] if self.readers[b] or self.kept[b])
            return made - sum(self.size[b] for b in self.reads[i] if left[b] == 1 and not self.kept[b])

        def place(i: int) -> Iterator[int]:
            for b in self.reads[i]:
                left[b] -= 1
                rest[b] -= i
                if left[b] == 1:
                    yield rest[b]

        return self._one_by_one(self.before, self.after, lambda i: rank(added(i), i), place)

    def backwards(self) -> list[ir.Node]:
        """From the end: one node after the other whose readers are placed, the one that adds the fewest bytes before it."""
        used = list(self.kept)

        def added(i: int) -> int:
            read = sum(self.size[b] for b in self.reads[i] if not used[b])
            return read - sum(self.size[b] for b in self.makes[i] if used[b])

        def place(i: int) -> Iterator[int]:
            for b in self.reads[i]:
                if not used[b]:
                    used[b] = True
                    yield from self.readers[b]

        return self._one_by_one(self.after, self.before, lambda i: (added(i), -i), place)[::-1]

    def _one_by_one(
        self,
        ahead: Sequence[Sequence[int]],
        behind: Sequence[Sequence[int]],
        rank: Callable[[int], tuple[int, int]],
        place: Callable[[int], Iterator[int]],
    ) -> list[ir.Node]:
        """A list schedule.

        Args:
            ahead, behind: the nodes that must be placed before each, and after it.
            rank: of a node, as things are; the lowest comes first.
            place: takes note that a node is placed; yields the nodes whose rank this lowers.
        """
        missing = [len(others) for others in ahead]
        ready = [(rank(i), i) for i, count in enumerate(missing) if count == 0]
        heapq.heapify(ready)
        order: dict[int, None] = {}
        while ready:
            was, i = heapq.heappop(ready)
            if i in order:
                continue
            if (now := rank(i)) != was:
                heapq.heappush(ready, (now, i))
                continue
            order[i] = None
            lowered = [j for j in place(i) if missing[j] == 0 and j not in order]
            for j in behind[i]:
                missing[j] -= 1
            for j in dict.fromkeys([*lowered, *(j for j in behind[i] if missing[j] == 0)]):
                heapq.heappush(ready, (rank(j), j))
        return [self.nodes[i] for i in order]
