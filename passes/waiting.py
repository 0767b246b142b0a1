"""Nodes that wait for values which they do not read.

ONNX Runtime runs a node when what it reads is there. What a waiting node reads goes through ``Reshape(x, [0, 0, …])``, where 0
means "as it is", which is no copy; and the zeros are the sizes of empty selections of the values that it waits for. It should
stand behind no other reshape: two in a row are one for ONNX Runtime (1.32), which waits for nothing if the shape is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortc.graph.builder import Builder
from ortc.graph.shapes import rank
from ortc.passes.memory import VIEWS
from ortc.rules import node_key


def _is_view(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node_key(node) in VIEWS


class Guard:
    """Lets nodes wait for values.

    Args:
        op: the builder of the graph.
        before: the first of the nodes; what is added goes in front of it.
        signals: the values, tensors. Without any nothing waits.
        pass_: whose nodes these are.
    """

    def __init__(self, op: Builder, before: ir.Node, signals: Sequence[ir.Value], pass_: str) -> None:
        self._op, self._before, self._signals, self._pass = op, before, signals, pass_
        self._nothing: ir.Value | None = None
        self._zeros: dict[int, ir.Value] = {}
        self._held: dict[ir.Value, ir.Value] = {}

    def hold(self, node: ir.Node) -> bool:
        """Let a node read one of its inputs late; whether there was a signal, and an input of known rank that is no view."""
        if not self._signals:
            return False
        reads = [v for v in node.inputs if v is not None and rank(v) is not None and v.type is not None and v.name]
        reads = [v for v in reads if not v.is_initializer()]
        if not reads:
            return False
        value = min(reads, key=lambda v: (_is_view(v), v.producer() is None))
        held = not _is_view(value)
        node.replace_input_with(node.inputs.index(value), self.late(value))
        return held

    def late(self, value: ir.Value, **metadata: str) -> ir.Value:
        """The same value, once the signals are there; without any, the value itself."""
        if not self._signals:
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
            sizes = [self._size_of_none(signal) for signal in self._signals]
            self._nothing = sizes[0] if len(sizes) == 1 else op.Max(*sizes)
        if count not in self._zeros:
            self._zeros[count] = op.Expand(self._nothing, [count])
        return self._zeros[count]

    def _size_of_none(self, signal: ir.Value) -> ir.Value:
        op = self._op
        if not rank(signal):
            signal = op.Reshape(signal, [-1])
        if signal.dtype == ir.DataType.BFLOAT16:  # Compress does not know the type
            none = op.Slice(signal, [0], [0], [0])
        else:
            none = op.Compress(signal, np.array([False]))
        # Size has no kernel for half types.
        size: ir.Value = op.Size(none if signal.dtype == ir.DataType.FLOAT else op.Cast(none, to=int(ir.DataType.FLOAT)))
        return size
