"""Forms of operators that ONNX Runtime has no kernel for, or that rules would have to know beside the usual one.

A spelling is ``f(op, node) -> value or None``: what stands for the node's output, None where the node stays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortc.graph.builder import Builder
from ortc.graph.names import all_graphs, take_place
from ortc.graph.shapes import dims, is_float

Spelling = Callable[[Builder, ir.Node], ir.Value | None]
_SPELLINGS: dict[str, Spelling] = {}

# The exponents that ONNX Runtime's Pow takes.
_EXPONENTS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.INT32, ir.DataType.INT64)


def respell(model: ir.Model) -> ir.Model:
    """Write the nodes of such forms in the usual ones, in place. The model has types and shapes."""
    outermost = Builder(model.graph)
    for graph in all_graphs(model.graph):
        op = outermost if graph is model.graph else Builder(graph, outermost)
        for node in [n for n in graph if not n.domain and n.op_type in _SPELLINGS]:
            with op.scope(node.name or node.op_type, before=node, origin=node.name or "", pass_="respell"):
                made = _SPELLINGS[node.op_type](op, node)
            if made is not None:
                take_place(node.outputs[0], made)
                graph.remove(node, safe=True)
    return model


def _spelling(*op_types: str) -> Callable[[Spelling], Spelling]:
    def register(function: Spelling) -> Spelling:
        _SPELLINGS.update(dict.fromkeys(op_types, function))
        return function

    return register


@_spelling(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
)
def _no_axes(op: Builder, node: ir.Node) -> ir.Value | None:
    """An empty list of axes stands for all of them, as no list does; or, if the node says so, for none at all."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x is None or (axes is not None and dims(axes) != (0,)):
        return None
    if node.attributes.get_int("noop_with_empty_axes", 0):
        return _OF_ONE[node.op_type](op, x) if node.op_type in _OF_ONE else op.Identity(x)
    if axes is not None:
        node.replace_input_with(1, None)
    return None


# What a reduction makes of one element, where it is not that element. (ONNX Runtime gives the element all the same.)
_OF_ONE: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "ReduceL1": lambda op, x: op.Abs(x),
    "ReduceL2": lambda op, x: op.Abs(x),
    "ReduceLogSum": lambda op, x: op.Log(x),
    "ReduceSumSquare": lambda op, x: x * x,
}


@_spelling("Mod")
def _floor_mod(op: Builder, node: ir.Node) -> ir.Value | None:
    """The remainder with the divisor's sign, which ONNX Runtime has for integers only: A - ⌊A/B⌋·B"""
    a, b = node.inputs
    if node.attributes.get_int("fmod", 0) or a is None or b is None or not is_float(a):
        return None
    return a - op.Floor(a / b) * b


@_spelling("Pow")
def _power(op: Builder, node: ir.Node) -> ir.Value | None:
    base, exponent = node.inputs
    if base is None or exponent is None or exponent.dtype is None or exponent.dtype in _EXPONENTS or not is_float(base):
        return None
    return op.Pow(base, op.cast(exponent, base))


@_spelling("OptionalGetElement")
def _element(op: Builder, node: ir.Node) -> ir.Value | None:
    """Of a tensor, which an optional may be: itself"""
    x = node.inputs[0]
    return op.Identity(x) if x is not None and isinstance(x.type, ir.TensorType) else None


@_spelling("OptionalHasElement")
def _has_element(op: Builder, node: ir.Node) -> ir.Value | None:
    x = node.inputs[0] if node.inputs else None
    if x is None:
        return op.Identity(op.const(np.array(False)))
    return op.Identity(op.const(np.array(True))) if isinstance(x.type, ir.TensorType) else None
