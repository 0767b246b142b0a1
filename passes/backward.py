"""Where a training graph's forward ends, and how nodes of the backward wait for it to get there.

ONNX Runtime runs what is ready, and of that what comes first in the file, but the nodes of its own fusions last. A node that
makes again what was given up needs nothing but the forward, so it waits for a gradient: what it reads goes through
``Reshape(x, [0, 0, …])``, where 0 means "as it is", which is no copy; and the zeros are the size of an empty selection of
that gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortc.compiler import role
from ortc.graph.builder import Builder
from ortc.graph.cut import needed
from ortc.graph.shapes import rank

FORWARD_ROLES = frozenset({"loss", "boundary", "buffer"})

# Nodes that only look at a value otherwise: a backward that has what they read runs them again, instead of keeping more.
SIZES = frozenset({"Shape", "Size"})

# In a node's metadata: it belongs to the forward, though only the backward reads what it makes; it belongs to each phase of the
# backward that reads what it makes, which is larger than what it reads.
AHEAD, ANEW = "ortc.ahead", "ortc.anew"

# How many nodes are looked at for a gradient that a node can wait for, and how near to its place it has to be.
_FAR, _NEAR = 200, 3


def forward_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that loss, buffers and other stages need, and those that compress for the backward."""
    ahead = [v for v in graph.outputs if role(v) in FORWARD_ROLES]
    ahead += [v for node in graph if AHEAD in node.metadata_props for v in node.outputs]
    return needed(ahead, set())[0]


def halves(graph: ir.Graph) -> tuple[list[ir.Node], list[ir.Node]]:
    """The forward and the backward, in order.

    What the backward alone wants to know of sizes, the forward comes to tell: else it would keep whole values for that.
    """
    forward = forward_nodes(graph)
    last: dict[ir.Node, ir.Node] = {}
    for node in list(graph):
        if node in forward or node.op_type not in SIZES or node.domain:
            continue
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if producer in forward and producer is not None:
            after = last.get(producer, producer)
            graph.remove(node)
            graph.insert_after(after, node)
            last[producer] = node
            forward.add(node)
    return [node for node in graph if node in forward], [node for node in graph if node not in forward]


class Waiting:
    """Finds what tells that the backward has come to a node.

    Args:
        op: of the training graph.
        backward: its second half, in order.
        pass_: who asks.
    """

    def __init__(self, op: Builder, backward: Sequence[ir.Node], pass_: str) -> None:
        self._op, self._pass = op, pass_
        self._place = {v: i for i, node in enumerate(backward) for v in node.outputs}

    def until(self, reader: ir.Node) -> Guard:
        """A guard for nodes in front of the one that reads what they make."""
        return Guard(self._op, reader, self._signal(reader), self._pass)

    def _signal(self, reader: ir.Node) -> ir.Value | None:
        """What tells that the backward has come to a node: the newest of its values that this node, or what follows from it,
        needs anyway; so that nothing is drawn into a phase that does not need it."""
        here = self._place[reader.outputs[0]]
        seen, waiting = {reader: None}, deque([reader])
        newest, at = None, -1
        while waiting and len(seen) < _FAR:
            node = waiting.popleft()
            near: list[ir.Node | None] = [u.node for v in node.outputs for u in v.uses()]
            for value in node.inputs:
                place = -1 if value is None else self._place.get(value, -1)
                if at < place < here:
                    newest, at = value, place
                elif place > here and value is not None:
                    near.append(value.producer())
            for other in near:
                if other is not None and other not in seen:
                    seen[other] = None
                    waiting.append(other)
            if at >= here - _NEAR:
                break
        return newest


class Guard:
    """Lets nodes wait for a value, without which they could run as soon as the forward has."""

    def __init__(self, op: Builder, before: ir.Node, signal: ir.Value | None, pass_: str) -> None:
        self._op, self._before, self._signal, self._pass = op, before, signal, pass_
        self._nothing: ir.Value | None = None
        self._zeros: dict[int, ir.Value] = {}
        self._held: dict[ir.Value, ir.Value] = {}

    def hold(self, node: ir.Node) -> None:
        """Let a node that no other holds back read one of its inputs late."""
        reads = [v for v in node.inputs if v is not None and rank(v) is not None and v.type is not None and v.name]
        reads = [v for v in reads if not v.is_initializer()]
        value = next((v for v in reads if v.producer() is not None), reads[0] if reads else None)
        if value is not None:
            node.replace_input_with(node.inputs.index(value), self.late(value))

    def late(self, value: ir.Value, **metadata: str) -> ir.Value:
        """The same value, when the backward has come here; with no gradient to wait for, the value itself."""
        if self._signal is None:
            return value
        if value not in self._held:
            op = self._op
            with op.scope(f"{value.name}.late", before=self._before, origin=value.name or "", pass_=self._pass):
                zeros = self._zeros_of(rank(value) or 0)
            with op.scope(f"{value.name}.late", before=self._before, origin=value.name or "", pass_=self._pass, **metadata):
                self._held[value] = op.Reshape(value, zeros, _like=value)
        return self._held[value]

    def _zeros_of(self, count: int) -> ir.Value:
        op = self._op
        if self._nothing is None:
            signal = self._signal
            assert signal is not None
            if rank(signal) == 0:
                signal = op.Reshape(signal, [1])
            if signal.dtype == ir.DataType.BFLOAT16:  # Compress does not know the type
                none = op.Slice(signal, [0], [0], [0])
            else:
                none = op.Compress(signal, np.array([False]))
            # Size has no kernel for half types.
            self._nothing = op.Size(none if signal.dtype == ir.DataType.FLOAT else op.Cast(none, to=int(ir.DataType.FLOAT)))
        if count not in self._zeros:
            self._zeros[count] = op.Expand(self._nothing, [count])
        return self._zeros[count]
