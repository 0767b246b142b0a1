"""Fake quantisation: a QuantizeLinear followed by its DequantizeLinear, as exports for quantisation-aware training hold them.

Between the two the values are integers, which no gradient passes. A pair becomes one ``ortc::FakeQuantize`` while gradients are
built; its rule is the straight-through estimator (Bengio et al., arXiv 1308.3432; Jacob et al., arXiv 1712.05877): the gradient
passes where the value was not clipped. Afterwards its lowering writes the pair again, so the numbers stay the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass
from ortc.graph.builder import Builder
from ortc.graph.names import take_place
from ortc.graph.shapes import is_float, static
from ortc.rules import Unsupported, gradient, lowering


@dataclass(frozen=True)
class PairQuantizers(Pass):
    """Makes one node of each QuantizeLinear and the DequantizeLinear that undoes it."""

    name = "pair-quantizers"
    alone = True
    after = ("upgrade",)

    def run(self, c: Compilation) -> None:
        op = Builder(c.graph)
        for node in list(c.graph):
            if _is(node, "DequantizeLinear"):
                self._pair(op, node)

    def _pair(self, op: Builder, node: ir.Node) -> None:
        quantizer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if quantizer is None or not _is(quantizer, "QuantizeLinear") or not _undoes(node, quantizer):
            _state_zero_point(op, node)
            return
        x, *parameters = quantizer.inputs
        integer = quantizer.outputs[0].dtype
        if x is None or not is_float(x) or integer not in _INTEGERS:
            return
        attributes = {k: a.value for k, a in quantizer.attributes.items() if k in ("axis", "block_size")}
        with op.scope(node.name or node.op_type, before=node, origin=node.name or "", rule="FakeQuantize", pass_=self.name):
            like = node.outputs[0]
            y = op.FakeQuantize(x, *parameters, _domain="ortc", _like=like, integer=int(integer), **attributes)
        take_place(node.outputs[0], y)
        op.graph.remove(node, safe=True)


def _state_zero_point(op: Builder, node: ir.Node) -> None:
    """Without a zero point ONNX Runtime 1.19.2, where it moves a Transpose over the node, takes the integers for unsigned."""
    x, scale, *zero_point = node.inputs
    shape = None if scale is None else static(scale)
    if x is not None and x.dtype in _INTEGERS and shape is not None and not any(zero_point):
        node.resize_inputs(3)
        node.replace_input_with(2, op.const(np.zeros(shape, x.dtype.numpy())))


_INTEGERS = (
    *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16),
    *(ir.DataType.INT4, ir.DataType.UINT4),
)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and not node.domain


def _undoes(node: ir.Node, quantizer: ir.Node) -> bool:
    """Whether both have the same scale, zero point and axis."""
    same = {k: a.value for k, a in node.attributes.items()} | {"output_dtype": 0, "saturate": 1}
    other = {k: a.value for k, a in quantizer.attributes.items()} | {"output_dtype": 0, "saturate": 1}
    return list(node.inputs[1:]) == list(quantizer.inputs[1:]) and same == other


def _range(integer: int) -> tuple[int, int]:
    dtype = ir.DataType(integer)
    if dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        return (-8, 7) if dtype == ir.DataType.INT4 else (0, 15)
    limits = np.iinfo(dtype.numpy())
    return int(limits.min), int(limits.max)


@gradient("ortc::FakeQuantize", wrt="x", inputs="x y_scale y_zero_point", outputs="y")
def fake_quantize(op, x, y_scale, y_zero_point, dy, *, integer, axis=1, block_size=0):
    """dx = dy where round(x / scale) + zero point lies within the integer's range, else 0; no gradient for the scale"""
    scale, zero = _along(op, y_scale, x, axis), None
    level = op.Round(x / op.cast(scale, x))
    if y_zero_point is not None:
        zero = _along(op, op.Cast(y_zero_point, to=int(x.dtype)), x, axis)
        level = level + zero
    low, high = _range(integer)
    inside = op.And(
        op.GreaterOrEqual(level, op.const(float(low), like=x)), op.LessOrEqual(level, op.const(float(high), like=x))
    )
    return dy * op.cast(inside, dy)


def _along(op, parameter, x, axis):
    """A scale or zero point of one number, or one per slice along the axis, to broadcast against ``x``."""
    if op.rank(parameter) == 0:
        return parameter
    if op.rank(parameter) > 1:
        raise Unsupported("scales per block")
    after = op.rank(x) - 1 - axis % op.rank(x)
    return op.Reshape(parameter, [-1, *[1] * after])


@lowering("ortc::FakeQuantize")
def quantize_dequantize(op, x, y_scale, y_zero_point=None, *, integer, axis=1, block_size=0):
    """The pair again"""
    place = {"axis": axis, "block_size": block_size or None}
    chosen = integer if y_zero_point is None else None
    quantized = op.QuantizeLinear(x, y_scale, y_zero_point, output_dtype=chosen, **place)
    return (op.DequantizeLinear(quantized, y_scale, y_zero_point, **place),)
