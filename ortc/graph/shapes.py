"""Shapes as plain Python data, and the inference of one node at a time.

A dimension is an ``int``, a ``str`` (symbolic: equal names are equal sizes) or ``None`` (unknown).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference

Dim = int | str | None
Dims = tuple[Dim, ...]

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

# Inputs of at most this many elements are shown to shape inference (axes, target shapes, …).
SMALL = 64

# Answers of shape inference that are kept, per opset: some ten thousand nodes' worth, in tens of MB.
_REMEMBERED = 1 << 16


def dims(value: ir.Value) -> Dims | None:
    """The value's dimensions, or None if not even the rank is known."""
    shape = value.shape
    if shape is None:
        return None
    return tuple([d if d.__class__ is int else d.value for d in shape.dims])  # type: ignore[union-attr]


def stamp_like(value: ir.Value, like: ir.Value) -> None:
    """Give a value the type and shape of another."""
    value.type, value.shape = like.type, like.shape


def rank(value: ir.Value) -> int | None:
    """The number of dimensions, or None."""
    return None if value.shape is None else len(value.shape)


def static(value: ir.Value) -> tuple[int, ...] | None:
    """The dimensions if all of them are numbers, else None."""
    known = dims(value)
    if known is None or not all(isinstance(d, int) for d in known):
        return None
    return known  # type: ignore[return-value]


def is_float(value: ir.Value) -> bool:
    """Whether gradients can flow through the value at all."""
    return value.dtype in FLOAT_TYPES


@cache
def type_name(dtype: ir.DataType) -> str:
    """NumPy's name of an element type, e.g. float32; bfloat16, of which NumPy has none, as such."""
    names = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
    return names.get(dtype, dtype.name.lower())


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value's array if it is a small constant (never a weight's), else None."""
    if value is None or value.const_value is None or value.const_value.size > SMALL or value.is_graph_input():
        return None
    if value.const_value.dtype == ir.DataType.STRING:
        return None
    return value.const_value.numpy()


class NodeInference:
    """Stamps type and shape on a new node's outputs; :func:`node_inference` gives the one of an opset.

    It asks ONNX's own inference for one node and remembers the answer, since the layers of a model repeat, and passes look
    at the same nodes again: a whole-graph inference per pass would cost far more. Outputs that ONNX knows nothing about (an
    operator of another domain) are left as they are.
    """

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._imports = [onnx.helper.make_opsetid("", opset)]
        self._seen: dict[Any, list[tuple[ir.DataType | None, ir.Shape | None]]] = {}

    def stamp(self, node: ir.Node) -> None:
        """Set dtype and shape of the outputs that have none.

        Raises:
            onnx.shape_inference.InferenceError: if the inputs do not fit the operator.
        """
        if not _known_to_onnx(node.op_type, node.domain):
            return
        key = (
            node.domain,
            node.op_type,
            tuple(bool(v.name) for v in node.outputs),
            tuple((name, repr(attribute.value)) for name, attribute in node.attributes.items()),
            tuple(self._signature(v) for v in node.inputs),
        )
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            # Values share the shape: a graph has few.
            inferred = [(d, None if s is None else ir.Shape(s, frozen=True)) for d, s in self._infer(node)]
            found = self._seen[key] = inferred
        for output, (dtype, shape) in zip(node.outputs, found, strict=True):
            if output.dtype is None and dtype is not None:
                output.dtype = dtype
            if output.shape is None and shape is not None:
                output.shape = shape

    @staticmethod
    def _signature(value: ir.Value | None) -> Any:
        if value is None:
            return None
        array = constant(value)
        return value.dtype, dims(value), None if array is None else array.tobytes()

    def _infer(self, node: ir.Node) -> list[tuple[ir.DataType | None, Dims | None]]:
        if any(v is not None and v.type is None for v in node.inputs):
            return [(None, None)] * len(node.outputs)
        schema = onnx.defs.get_schema(node.op_type, self._opset, node.domain)
        types, data = {}, {}
        for value in node.inputs:
            if value is None or value.type is None:
                continue
            types[value.name or ""] = _type_proto(value)
            array = constant(value)
            if array is not None:
                data[value.name or ""] = onnx.numpy_helper.from_array(array)
        inferred = shape_inference.infer_node_outputs(
            schema, ir.serde.serialize_node(node), types, data, opset_imports=self._imports, ir_version=10
        )
        return [_from_proto(inferred.get(v.name or "")) for v in node.outputs]


@cache
def _known_to_onnx(op_type: str, domain: str) -> bool:
    return bool(onnx.defs.has(op_type, domain))


@cache
def node_inference(opset: int) -> NodeInference:
    """The inference of an opset, with its memory: an answer depends on nothing but the node."""
    return NodeInference(opset)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    assert value.dtype is not None
    return onnx.helper.make_tensor_type_proto(int(value.dtype), dims(value))


def _from_proto(proto: onnx.TypeProto | None) -> tuple[ir.DataType | None, Dims | None]:
    if proto is None or not proto.HasField("tensor_type"):
        return None, None
    tensor = proto.tensor_type
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return dtype, None
    shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)
    return dtype, shape
