"""Where a training graph's forward ends, and what tells that the backward has come to a node.

A node that makes again what was given up needs nothing but the forward: it waits for a gradient (``waiting.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import onnx_ir as ir

from ortc.compiler import role
from ortc.graph.builder import Builder
from ortc.graph.cut import needed
from ortc.passes.waiting import Guard

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
        signal = self._signal(reader)
        return Guard(self._op, reader, [] if signal is None else [signal], self._pass)

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
