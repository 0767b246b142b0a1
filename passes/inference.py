"""Types and shapes of every value.

ONNX's own inference is asked node by node, with a memory (:class:`ortc.graph.shapes.NodeInference`): no weight is
serialised, a mistake is told with the node's name, and the repeated layers of a model cost nothing. Two things are
added, since later passes need every rank, and equal sizes under equal names:

- integer tensors that hold sizes are followed through the graph with symbolic entries (``Shape → Gather → Concat →
  Reshape``), where ONNX loses track of them;
- a dimension that stays unknown gets a name of its own, so that what is computed from it elementwise is known to have
  the same size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortc.errors import ModelError
from ortc.graph.builder import Builder, UnknownRank
from ortc.graph.names import Names, all_graphs
from ortc.graph.shapes import Dim, Dims, constant, dims, is_float, node_inference
from ortc.rules import LOWERINGS, Unsupported, lowered, node_key

# Lowerings are written in this opset of the standard.
_LOWERED_OPSET = 21

# Integer tensors of at most this many entries are followed through the graph.
_FOLLOWED = 64

# Results of arithmetic beyond this are no sizes, and could overflow.
_LARGEST_SIZE = np.iinfo(np.int32).max


def infer_shapes(model: ir.Model) -> ir.Model:
    """Give every value of the model its type and shape, in place; dimensions are numbers or names.

    Equal names are equal sizes. One assumption goes beyond ONNX: a slice ``[:n]`` of a constant dimension has the
    length ``n`` (a model that slices beyond the end of its mask fails anyway). Values behind operators that nothing is
    known about stay as the model declares them.

    Raises:
        ModelError: naming the node, if its inputs do not fit its operator.
    """
    inference = ShapeInference(model.graph)
    inference.visit_all(model.graph)
    return model


def infer_missing(model: ir.Model) -> ir.Model:
    """As :func:`infer_shapes`, where that has been done before and nodes were added since: what is known stays."""
    if any(_unknown(v) for node in model.graph for v in node.outputs):
        inference = ShapeInference(model.graph)
        for node in model.graph:
            if any(_unknown(v) or v.dtype in _SIZES for v in node.outputs):
                inference.visit(node)
    return model


_SIZES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})  # of tensors that may hold sizes


def _unknown(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and None in dims(value)  # type: ignore[operator]


class ShapeInference:
    """Infers one node after the other, in topological order, with what is known of the integers in the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._opset = graph.opset_imports[""]
        self._known: dict[ir.Value, np.ndarray] = {}
        self._names = Names(_dimension_names(graph))
        self._derived: dict[Any, str] = {}
        for g in all_graphs(graph):
            for value in g.initializers.values():
                if value.const_value is not None:
                    value.dtype, value.shape = value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
        for value in graph.inputs:
            self.name_dimensions(value)

    def visit_all(self, graph: ir.Graph) -> None:
        """Infer every node of a graph or body."""
        for node in graph:
            self.visit(node)

    def visit(self, node: ir.Node) -> None:
        """Infer one node's outputs; those of its inputs must be known by now.

        Raises:
            ModelError: naming the node.
        """
        body_rule = _BODIES.get(node.op_type) if not node.domain else None
        rule = _RULES.get((node.domain, node.op_type))
        if body_rule is not None:
            self._infer_bodies(node, body_rule)
        elif all(v is None or isinstance(v.type, ir.TensorType) for v in node.inputs):
            self._stamp(node)
        if rule is not None:
            rule(self, node)
        elif node_key(node) in LOWERINGS and not onnx.defs.has(node.op_type, node.domain):
            self._infer_lowering(node)
        for value in node.outputs:
            self.name_dimensions(value)

    def integers(self, value: ir.Value | None) -> np.ndarray | None:
        """What is known of an integer tensor: an object array of numbers, names and None; or None if nothing is."""
        if value is None:
            return None
        if value not in self._known and value.dtype in _SIZES:
            array = constant(value)
            if array is not None:
                return array.astype(object)
        return self._known.get(value)

    def learn(self, value: ir.Value, array: np.ndarray) -> None:
        """Remember the entries of an integer tensor."""
        if array.size <= _FOLLOWED:
            self._known[value] = array

    def refine(self, value: ir.Value, shape: Sequence[Dim]) -> None:
        """Say what is known of a value's dimensions; an earlier number stays."""
        value.shape = merged(tuple(shape), dims(value))

    def derived(self, *expression: Any) -> str:
        """The name of a size that is no sum or product of others: the same for the same expression."""
        if expression not in self._derived:
            self._derived[expression] = self._names.fresh("dim")
        return self._derived[expression]

    def _infer_bodies(self, node: ir.Node, rule: Callable[[ShapeInference, ir.Node], None]) -> None:
        if node.op_type == "Scan" and self._opset < 9:
            return  # it had another form then, which no later opset has
        try:
            rule(self, node)
        except (ValueError, KeyError):
            raise ModelError(f"node {node.name!r} ({node.op_type}): its bodies do not fit its inputs and outputs") from None

    def _infer_lowering(self, node: ir.Node) -> None:
        """An operator that ONNX does not know: its outputs are as those that it would be lowered to."""
        aside = ir.Graph([], [], nodes=[], opset_imports={"": _LOWERED_OPSET})
        op = Builder(aside)
        try:
            with op.scope(node.op_type):
                results = lowered(op, node)
            for inner in aside:
                inner.version = _LOWERED_OPSET
                self.visit(inner)
            for y, result in zip(node.outputs, results, strict=False):
                if result is not None:
                    y.type, y.shape = result.type or y.type, merged(dims(result), dims(y))
        except (Unsupported, UnknownRank):  # a type at least, so that a gradient arrives there, and the reason is told
            floats = (v.type for v in node.inputs if v is not None and is_float(v))
            node.outputs[0].type = node.outputs[0].type or next(floats, None)
        except onnx.shape_inference.InferenceError as error:
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) cannot be right: {_reason(error)} (its inputs: {_describe(node)})"
            ) from None
        finally:
            for inner in reversed(list(aside)):
                aside.remove(inner, safe=True)

    def _stamp(self, node: ir.Node) -> None:
        declared = [(value.type, dims(value)) for value in node.outputs]
        for value in node.outputs:
            value.type = value.shape = None
        try:
            node_inference(node.version or self._opset).stamp(node)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            if (node.domain, node.op_type) in _TOLERATED:
                return
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) cannot be right: {_reason(error)} (its inputs: {_describe(node)})"
            ) from None
        except onnx.defs.SchemaError:
            pass  # an operator of another opset: the passes that need to know it will say so
        finally:
            for value, (type_, shape) in zip(node.outputs, declared, strict=True):
                value.type = value.type or type_
                value.shape = _confirmed(_believed(node, dims(value)), shape)

    def name_dimensions(self, value: ir.Value) -> None:
        known = dims(value)
        if known is not None and None in known:
            value.shape = ir.Shape([self._names.fresh("dim") if d is None else d for d in known])


def _dimension_names(graph: ir.Graph) -> set[str]:
    values = [v for g in all_graphs(graph) for v in [*g.inputs, *g.outputs, *(o for n in g for o in n.outputs)]]
    return {d for value in values for d in dims(value) or () if isinstance(d, str)}


def merged(first: Dims | None, second: Dims | None) -> ir.Shape | None:
    """The better known of each dimension: a number, else the first's name, else the second's."""
    if first is None or second is None or len(first) != len(second):
        best = first if first is not None else second
        return None if best is None else ir.Shape(best)
    merged = []
    for a, b in zip(first, second, strict=True):
        merged.append(b if a is None or (isinstance(a, str) and isinstance(b, int)) else a)
    return ir.Shape(merged)


def _confirmed(inferred: Dims | None, declared: Dims | None) -> ir.Shape | None:
    """What was inferred; what the model declares counts where nothing was. (An exporter may have written down the sizes of
    its example: a name that comes from the inputs is right for every size.)"""
    if inferred is None or declared is None or len(inferred) != len(declared):
        best = inferred if inferred is not None else declared
        return None if best is None else ir.Shape(best)
    return ir.Shape([b if a is None else a for a, b in zip(inferred, declared, strict=True)])


def _believed(node: ir.Node, shape: Dims | None) -> Dims | None:
    """What ONNX inferred; it gives 0 for a named dimension in some operators."""
    if shape is None or (node.domain, node.op_type) not in _ZERO_FOR_NAMES:
        return shape
    return tuple(None if d == 0 else d for d in shape)


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _describe(node: ir.Node) -> str:
    parts = []
    for value in node.inputs:
        if value is not None:
            kind = value.dtype.name.lower() if value.dtype is not None else "unknown type"
            known = dims(value)
            parts.append(f"{value.name} {kind}{'' if known is None else list(known)}")
    return ", ".join(parts) or "none"


# ---- arithmetic with sizes -------------------------------------------------------------------------------------------


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@cache
def _symbolic(operation: str, a: int | str, b: int | str) -> Dim:
    """``a`` and ``b`` added, subtracted, multiplied or divided, in one canonical spelling; None if that is no size."""
    left, right = (ir.SymbolicDim(x) if isinstance(x, str) else x for x in (a, b))
    try:
        result = _OPERATIONS[operation](left, right)
    except (ValueError, ZeroDivisionError):  # a name that is no expression
        return None
    if isinstance(result, ir.SymbolicDim) and result.value is not None:
        text = result.value.replace(" ", "")
        number = text.lstrip("-").isdigit()
        return int(text) if number else None if "/" in text else result.value
    return None


def _arithmetic(operation: str, a: Dim, b: Dim) -> Dim:
    if a is None or b is None:
        return None
    if isinstance(a, int) and isinstance(b, int):
        if operation == "/":
            return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # ONNX truncates
        result = int(_OPERATIONS[operation](a, b))
        return result if abs(result) <= _LARGEST_SIZE else None
    if operation == "*" and 0 in (a, b):
        return 0
    if operation in "+*" and isinstance(a, int):
        a, b = b, a
    if b == (1 if operation in "*/" else 0):
        return a
    return _symbolic(operation, a, b)


def product(sizes: Sequence[Dim]) -> Dim:
    """The product of sizes, by number or name; None if one is unknown."""
    total: Dim = 1
    for size in sizes:
        total = _arithmetic("*", total, size)
    return total


def _broadcast(a: Dims, b: Dims) -> list[Dim]:
    """Multidirectional broadcasting; two different names leave the size open."""
    count = max(len(a), len(b))
    a, b = (1,) * (count - len(a)) + a, (1,) * (count - len(b)) + b
    result: list[Dim] = []
    for x, y in zip(a, b, strict=True):
        if x == y or y == 1:
            result.append(x)
        elif x == 1 or isinstance(y, int):
            result.append(y)
        else:
            result.append(x if isinstance(x, int) else None)
    return result


# ---- what ONNX does not follow ---------------------------------------------------------------------------------------
# Rules run after ONNX's own inference. Each says what more is known of a node's outputs: of the dimensions, or, for
# integers that hold sizes, of the entries.

_RULES: dict[tuple[str, str], Callable[[ShapeInference, ir.Node], None]] = {}


def _rule(*op_types: str, domain: str = "") -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES.update({(domain, op_type): function for op_type in op_types})
        return function

    return register


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _input_dims(node: ir.Node, index: int) -> Dims | None:
    value = _input(node, index)
    return None if value is None else dims(value)


def _entries(op_type: str) -> Callable[[Any], Any]:
    """Register a function from the known entries of all inputs (and the node) to those of the first output."""

    def register(function: Callable[..., Any]) -> Any:
        def rule(inference: ShapeInference, node: ir.Node) -> None:
            known = [inference.integers(v) for v in node.inputs]
            if all(k is not None or v is None for k, v in zip(known, node.inputs, strict=True)):
                try:
                    result = function(node, *known)
                except (ValueError, IndexError, TypeError):  # entries that are names where numbers are needed
                    return
                if result is not None:
                    inference.learn(node.outputs[0], np.asarray(result, dtype=object))

        _RULES["", op_type] = rule
        return function

    return register


def _numbers(array: np.ndarray) -> list[int]:
    """A list of plain numbers.

    Raises:
        TypeError: if an entry is a name or unknown.
    """
    if not all(isinstance(x, int | bool) for x in array.flat):
        raise TypeError
    return [int(x) for x in array.flat]


def _elementwise(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    combine = np.frompyfunc(operation, 2, 1)
    return lambda node, a, b: combine(a, b)


_entries("Add")(_elementwise(lambda a, b: _arithmetic("+", a, b)))
_entries("Sub")(_elementwise(lambda a, b: _arithmetic("-", a, b)))
_entries("Mul")(_elementwise(lambda a, b: _arithmetic("*", a, b)))
_entries("Div")(_elementwise(lambda a, b: _arithmetic("/", a, b)))


@_entries("Mod")
def _mod(node: ir.Node, a: np.ndarray, b: np.ndarray) -> Any:
    remainder = math.fmod if _attribute(node, "fmod", 0) else operator.mod
    whole = np.frompyfunc(lambda x, y: int(remainder(x, y)) if isinstance(x, int) and isinstance(y, int) and y else None, 2, 1)
    return whole(a, b)


@_entries("Equal")
def _equal(node: ir.Node, a: np.ndarray, b: np.ndarray) -> Any:
    def equal(x: Dim, y: Dim) -> bool | None:
        if x is None or y is None:
            return None
        if isinstance(x, str) != isinstance(y, str):
            number = y if isinstance(x, str) else x
            return False if isinstance(number, int) and number < 0 else None  # a size is not negative
        return True if x == y else False if isinstance(x, int) else None

    return np.frompyfunc(equal, 2, 1)(a, b)


@_entries("Where")
def _where(node: ir.Node, condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> Any:
    return np.frompyfunc(lambda c, a, b: None if c is None else a if c else b, 3, 1)(condition, x, y)


@_entries("Gather")
def _gather(node: ir.Node, data: np.ndarray, indices: np.ndarray) -> Any:
    return np.take(data, np.asarray(_numbers(indices), dtype=int).reshape(indices.shape), _attribute(node, "axis", 0))


@_entries("Concat")
def _concat(node: ir.Node, *parts: np.ndarray) -> Any:
    return np.concatenate(parts, axis=_attribute(node, "axis", 0))


@_entries("Slice")
def _slice(node: ir.Node, data: np.ndarray, *where: np.ndarray) -> Any:
    if not where or data.ndim != 1:
        return None
    start, end, *rest = (_numbers(w)[0] for w in where)
    return data[start : end : rest[1] if len(rest) > 1 else 1]


@_entries("Squeeze")
@_entries("Unsqueeze")
def _same_entries(node: ir.Node, data: np.ndarray, axes: np.ndarray | None = None) -> Any:
    if data.size != 1:
        return None
    before = data.ndim
    count = len(_attribute(node, "axes", ())) if axes is None else axes.size
    after = before + count if node.op_type == "Unsqueeze" else (before - count if count else 0)
    return data.reshape((1,) * after)


@_entries("Reshape")
def _reshape_entries(node: ir.Node, data: np.ndarray, shape: np.ndarray) -> Any:
    return data.reshape(_numbers(shape))


@_entries("Identity")
def _identity(node: ir.Node, data: np.ndarray) -> Any:
    return data


@_entries("Cast")
def _cast(node: ir.Node, data: np.ndarray) -> Any:
    sizes = all(not isinstance(d, int) or abs(d) <= _LARGEST_SIZE for d in data.flat)
    return data if sizes and ir.DataType(_attribute(node, "to", 0)) in (ir.DataType.INT64, ir.DataType.INT32) else None


@_entries("Max")
@_entries("Min")
def _extreme(node: ir.Node, *operands: np.ndarray) -> Any:
    pick = max if node.op_type == "Max" else min

    def extreme(a: Dim, b: Dim) -> Dim:
        if a == b:
            return a
        if isinstance(a, int) and isinstance(b, int):
            return pick(a, b)
        return None

    result: Any = operands[0]
    for operand in operands[1:]:
        result = np.frompyfunc(extreme, 2, 1)(result, operand)
    return result


@_entries("ReduceProd")
def _reduce_prod(node: ir.Node, data: np.ndarray, axes: np.ndarray | None = None) -> Any:
    total = product(list(data.flat))
    return [total] if _attribute(node, "keepdims", 1) else total


@_rule("Shape")
def _shape(inference: ShapeInference, node: ir.Node) -> None:
    known = _input_dims(node, 0)
    if known is not None:
        end = _attribute(node, "end", None)
        inference.learn(node.outputs[0], np.array(known[_attribute(node, "start", 0) : end], dtype=object))


@_rule("Size")
def _size(inference: ShapeInference, node: ir.Node) -> None:
    known = _input_dims(node, 0)
    if known is not None:
        inference.learn(node.outputs[0], np.array(product(known), dtype=object))


@_rule("Split")
def _split(inference: ShapeInference, node: ir.Node) -> None:
    data = inference.integers(_input(node, 0))
    lengths = [dims(v) for v in node.outputs]
    if data is None or data.ndim != 1 or not all(n is not None and isinstance(n[0], int) for n in lengths):
        return
    at = 0
    for value, length in zip(node.outputs, lengths, strict=True):
        assert length is not None
        assert isinstance(length[0], int)
        inference.learn(value, data[at : at + length[0]])
        at += length[0]


@_rule("MeanVarianceNormalization")
def _as_input(inference: ShapeInference, node: ir.Node) -> None:
    """The shape of the input; ONNX infers none where the axes are left out."""
    shape = _input_dims(node, 0)
    if shape is not None:
        inference.refine(node.outputs[0], shape)


@_rule("MaxUnpool")
def _max_unpool(inference: ShapeInference, node: ir.Node) -> None:
    """ONNX infers nothing where the shape is an input."""
    have, want = _input_dims(node, 0), inference.integers(_input(node, 2))
    if want is not None:
        inference.refine(node.outputs[0], list(want))
    elif have is not None and _input(node, 2) is not None:
        inference.refine(node.outputs[0], [None] * len(have))


_entries_of_reshape = _RULES["", "Reshape"]


@_rule("Reshape")
def _reshape(inference: ShapeInference, node: ir.Node) -> None:
    _entries_of_reshape(inference, node)
    have, want = _input_dims(node, 0), inference.integers(_input(node, 1))
    if want is None:
        return
    shape: list[Dim] = list(want)
    if not _attribute(node, "allowzero", 0):
        copied = [have[i] if have is not None and i < len(have) else None for i in range(len(shape))]
        shape = [copied[i] if d == 0 else d for i, d in enumerate(shape)]
    if -1 in shape:
        at = shape.index(-1)
        shape[at] = None
        if have is not None:
            shape[at] = _quotient(list(have), shape[:at] + shape[at + 1 :])
    inference.refine(node.outputs[0], shape)


def _quotient(have: list[Dim], others: list[Dim]) -> Dim:
    """The size that completes ``others`` to as many elements as ``have``; equal unknowns need not be known."""
    for d in list(others):
        if d in have and d is not None:
            have.remove(d)
            others.remove(d)
    if not others:
        return product(have)
    divisor = product(others)
    return None if divisor == 0 else _exact(product(have), divisor)


def _exact(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int) and a % b:
        return None
    return _arithmetic("/", a, b)


@_rule("Expand")
def _expand(inference: ShapeInference, node: ir.Node) -> None:
    have, want = _input_dims(node, 0), inference.integers(_input(node, 1))
    if have is not None and want is not None:
        inference.refine(node.outputs[0], _broadcast(have, tuple(want)))
    known = inference.integers(_input(node, 0))
    shape = dims(node.outputs[0])
    if known is not None and shape is not None and all(isinstance(d, int) and d <= _FOLLOWED for d in shape):
        inference.learn(node.outputs[0], np.broadcast_to(known, shape))  # type: ignore[arg-type]


@_rule("ConstantOfShape")
def _constant_of_shape(inference: ShapeInference, node: ir.Node) -> None:
    want = inference.integers(_input(node, 0))
    if want is None:
        return
    inference.refine(node.outputs[0], list(want))
    if want.size <= 1 and all(isinstance(d, int) and d <= _FOLLOWED for d in want):
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        if fill.dtype.kind in "ib":
            inference.learn(node.outputs[0], np.full(tuple(want), fill.item(), dtype=object))


@_rule("Range")
def _range(inference: ShapeInference, node: ir.Node) -> None:
    known = [inference.integers(v) for v in node.inputs]
    y, start_value = node.outputs[0], node.inputs[0]
    if y.type is None and start_value is not None:
        y.type = start_value.type
    if y.shape is None:
        y.shape = ir.Shape([None])
    if any(k is None for k in known):
        return
    start, limit, step = (k.reshape(()).item() for k in known if k is not None)
    span = _arithmetic("-", limit, start)
    if isinstance(span, int) and isinstance(step, int) and step:
        inference.refine(node.outputs[0], [max(-(-span // step), 0)])
    else:
        inference.refine(node.outputs[0], [_exact(span, step)])


@_rule("Tile")
def _tile(inference: ShapeInference, node: ir.Node) -> None:
    have, repeats = _input_dims(node, 0), inference.integers(_input(node, 1))
    if have is not None and repeats is not None:
        inference.refine(node.outputs[0], [_arithmetic("*", d, r) for d, r in zip(have, repeats, strict=True)])


_entries_of_slice = _RULES["", "Slice"]


@_rule("Slice")
def _slice_dims(inference: ShapeInference, node: ir.Node) -> None:
    _entries_of_slice(inference, node)
    have = _input_dims(node, 0)
    if have is None:
        return
    starts, ends, axes, steps = (inference.integers(_input(node, i)) for i in range(1, 5))
    if starts is None or ends is None or (axes is None and _input(node, 3)) or (steps is None and _input(node, 4)):
        return
    shape: list[Dim] = list(have)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = i if axes is None else axes[i]
        step = 1 if steps is None else steps[i]
        if not isinstance(axis, int):
            return
        shape[axis] = _slice_length(have[axis], start, end) if step == 1 else None
    inference.refine(node.outputs[0], shape)


def _bound(bound: Dim, size: Dim) -> Dim:
    """Bounds beyond what any size can be stand for the beginning and the end."""
    if isinstance(bound, int) and abs(bound) >= _LARGEST_SIZE:
        return size if bound > 0 else 0
    return bound


def _slice_length(size: Dim, start: Dim, end: Dim) -> Dim:
    """The length of ``[start:end]`` with step 1; None where it depends on which is larger."""
    start, end = (_bound(b, size) for b in (start, end))
    if isinstance(start, int) and start < 0:
        start = _arithmetic("+", size, start)
        if isinstance(start, int):
            start = max(start, 0)
    if isinstance(end, int) and end < 0:
        end = _arithmetic("+", size, end)
    if start is None or end is None or size is None:
        return None
    if isinstance(size, int) and isinstance(end, int):
        end = max(min(end, size), 0)
    elif isinstance(size, str) and end != size:  # which is larger must follow from the names
        spare = _arithmetic("-", size, end)
        if not isinstance(spare, int) or spare < 0:
            return None
    if isinstance(start, int) and isinstance(end, int):
        return max(end - start, 0)
    return _arithmetic("-", end, start)


_entries_of_reduce_prod = _RULES["", "ReduceProd"]
_entries_of_concat = _RULES["", "Concat"]


@_rule("Concat")
def _concat_dims(inference: ShapeInference, node: ir.Node) -> None:
    _entries_of_concat(inference, node)
    parts = [dims(v) for v in node.inputs if v is not None]
    if any(p is None or len(p) != len(parts[0] or ()) for p in parts) or not parts:
        return
    columns = list(zip(*parts, strict=True))  # type: ignore[arg-type]
    shape = [max(c, key=lambda d: (isinstance(d, int), d is not None)) for c in columns]
    if shape:
        axis = _attribute(node, "axis", 0)
        if not -len(columns) <= axis < len(columns):
            raise ModelError(
                f"node {node.name!r} (Concat) cannot be right: axis {axis} of inputs with {len(columns)} dimensions"
            )
        total: Dim = 0
        for d in columns[axis]:
            total = _arithmetic("+", total, d)
        shape[axis] = total
        inference.refine(node.outputs[0], shape)


@_rule("Compress")
def _compress(inference: ShapeInference, node: ir.Node) -> None:
    have, condition = _input_dims(node, 0), constant(_input(node, 1))
    if condition is None:
        return
    count = int(np.count_nonzero(condition))
    if "axis" not in node.attributes:
        inference.refine(node.outputs[0], [count])
    elif have is not None:
        axis = _attribute(node, "axis", 0) % len(have)
        inference.refine(node.outputs[0], [*have[:axis], count, *have[axis + 1 :]])


@_rule("Flatten")
def _flatten(inference: ShapeInference, node: ir.Node) -> None:
    have = _input_dims(node, 0)
    if have is not None:
        axis = _attribute(node, "axis", 1)
        axis += len(have) if axis < 0 else 0
        inference.refine(node.outputs[0], [product(have[:axis]), product(have[axis:])])


@_rule("Pad")
def _pad(inference: ShapeInference, node: ir.Node) -> None:
    have, pads = _input_dims(node, 0), inference.integers(_input(node, 1))
    axes = inference.integers(_input(node, 3))
    if have is None or pads is None or (axes is None and len(pads) != 2 * len(have)):
        return
    shape = list(have)
    for i, axis in enumerate(range(len(have)) if axes is None else axes):
        shape[axis] = _arithmetic("+", _arithmetic("+", have[axis], pads[i]), pads[len(pads) // 2 + i])
    inference.refine(node.outputs[0], shape)


@_rule("Resize")
def _resize(inference: ShapeInference, node: ir.Node) -> None:
    y = node.outputs[0]
    have = _input_dims(node, 0)
    scales = constant(_input(node, 2))
    sizes = inference.integers(_input(node, 3))
    if have is None or "axes" in node.attributes or "keep_aspect_ratio_policy" in node.attributes:
        return
    if sizes is not None and len(sizes) == len(have):
        inference.refine(y, list(sizes))
    elif scales is not None and len(scales) == len(have):
        whole = [int(s) if float(s).is_integer() else None for s in scales]
        inference.refine(y, [_arithmetic("*", d, s) for d, s in zip(have, whole, strict=True)])


@_rule("ConvTranspose")
def _conv_transpose(inference: ShapeInference, node: ir.Node) -> None:
    have, weight = _input_dims(node, 0), _input_dims(node, 1)
    if have is not None and weight is not None and len(have) > 2:
        channels = _arithmetic("*", weight[1], _attribute(node, "group", 1))
        inference.refine(node.outputs[0], [have[0], channels, *[None] * (len(have) - 2)])


@_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2")
@_rule("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")
def _reduce(inference: ShapeInference, node: ir.Node) -> None:
    """Axes that are computed leave the rank as it is, where the reduced axes are kept."""
    if node.op_type == "ReduceProd":
        _entries_of_reduce_prod(inference, node)
    have = _input_dims(node, 0)
    if have is not None and node.outputs[0].shape is None and _attribute(node, "keepdims", 1):
        inference.refine(node.outputs[0], [None] * len(have))


@_rule("CastLike")
def _cast_like(inference: ShapeInference, node: ir.Node) -> None:
    have, like = _input_dims(node, 0), _input(node, 1)
    if have is not None:
        inference.refine(node.outputs[0], have)
    if like is not None and like.type is not None:
        node.outputs[0].type = like.type


@_rule("Conv", "MaxPool", "AveragePool", "LpPool")
def _windows(inference: ShapeInference, node: ir.Node) -> None:
    """Named spatial sizes: ⌊(size + pads − dilation · (kernel − 1) − 1) / stride⌋ + 1, rounded up with ceil_mode."""
    have = _input_dims(node, 0)
    weight = _input_dims(node, 1) if node.op_type == "Conv" else None
    kernel = _attribute(node, "kernel_shape", weight[2:] if weight else None)
    if have is None or len(have) < 3:
        return
    channels = have[1] if node.op_type != "Conv" else None if weight is None else weight[0]
    if kernel is None or not all(isinstance(k, int) for k in kernel):
        inference.refine(node.outputs[0], [have[0], channels, *[None] * (len(have) - 2)])
        return
    count = len(kernel)
    pads, mode = _attribute(node, "pads", [0] * (2 * count)), _attribute(node, "auto_pad", "NOTSET")
    dilations, strides = _attribute(node, "dilations", [1] * count), _attribute(node, "strides", [1] * count)
    shape: list[Dim] = [have[0], channels]
    for i, size in enumerate(have[2:]):
        if mode.startswith("SAME"):
            shape.append(size if strides[i] == 1 or size is None else inference.derived("⌈/⌉", size, strides[i]))
            continue
        around = 0 if mode == "VALID" else pads[i] + pads[count + i]
        last = _arithmetic("+", size, around - dilations[i] * (kernel[i] - 1) - 1)
        if strides[i] == 1 or last is None or isinstance(last, int):
            shape.append(_arithmetic("+", last, 1) if strides[i] == 1 else None)
        else:
            shape.append(inference.derived("⌊/⌋", last, strides[i], _attribute(node, "ceil_mode", 0)))
    first = node.outputs[0]
    inference.refine(first, shape)
    for value in node.outputs[1:]:
        value.shape = merged(dims(first), dims(value))
    if not _attribute(node, "ceil_mode", 0) or mode != "NOTSET":
        return
    for i, size in enumerate(have[2:]):
        if isinstance(size, int):
            last = -(-(size + pads[i] + pads[count + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i])
            if last * strides[i] >= size + pads[i]:
                # A window in the padding alone, which ONNX Runtime 1.19 makes and newer ones do not.
                for value in node.outputs:
                    value.shape = ir.Shape([None if a == 2 + i else d for a, d in enumerate(dims(value) or ())])


# ONNX reads a named dimension as 0 there (1.23.2).
_ZERO_FOR_NAMES = {("", "Attention")}

# What ONNX's inference refuses and ONNX Runtime takes: an operator marked as deprecated in an opset that models are written
# in, though defined again later; vectors of one number for scalars.
_TOLERATED = {("", "GroupNormalization"), ("", "Range")}


# ---- operators that ONNX does not know -------------------------------------------------------------------------------

# Their first output is like their first input. (Those that have a lowering need no rule here.)
_LIKE_FIRST = {"com.microsoft": ("BiasSoftmax", "BiasDropout", "Inverse"), "": ("GroupNormalization",)}


def _like_first(inference: ShapeInference, node: ir.Node) -> None:
    x, y = node.inputs[0], node.outputs[0]
    if x is not None and x.type is not None:
        y.type = x.type
        y.shape = merged(dims(x), dims(y))


for _domain, _op_types in _LIKE_FIRST.items():
    _rule(*_op_types, domain=_domain)(_like_first)


# ---- sequences -------------------------------------------------------------------------------------------------------


@_rule("SequenceConstruct", "SplitToSequence", "SequenceInsert", "SequenceErase")
def _make_sequence(inference: ShapeInference, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is not None and x.dtype is not None:
        node.outputs[0].type = ir.SequenceType(ir.TensorType(x.dtype))
        node.outputs[0].shape = None


@_rule("SequenceEmpty")
def _empty_sequence(inference: ShapeInference, node: ir.Node) -> None:
    node.outputs[0].type = ir.SequenceType(ir.TensorType(ir.DataType(_attribute(node, "dtype", 1))))


@_rule("SequenceAt", "ConcatFromSequence")
def _take_from_sequence(inference: ShapeInference, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is not None and x.dtype is not None:
        node.outputs[0].dtype = x.dtype


@_rule("SequenceLength")
def _sequence_length(inference: ShapeInference, node: ir.Node) -> None:
    node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, ir.Shape(())


# ---- control flow ----------------------------------------------------------------------------------------------------


def _if(inference: ShapeInference, node: ir.Node) -> None:
    """A branch that is never taken may be wrong: exporters write one for each rank that a value might have had."""
    condition = inference.integers(node.inputs[0])
    taken = None if condition is None else condition.item()
    names = ("then_branch", "else_branch") if taken is None else ("then_branch" if taken else "else_branch",)
    branches = [node.attributes[name].as_graph() for name in names]
    for branch in branches:
        inference.visit_all(branch)
    for y, *results in zip(node.outputs, *(b.outputs for b in branches), strict=True):
        y.type = results[0].type or results[-1].type or y.type
        y.shape = _common(results[0], results[-1])


def _common(a: ir.Value, b: ir.Value) -> ir.Shape | None:
    """What two values that may take each other's place have in common."""
    left, right = dims(a), dims(b)
    if left is None or right is None or len(left) != len(right):
        return None
    return ir.Shape([x if x == y else None for x, y in zip(left, right, strict=True)])


def _loop(inference: ShapeInference, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    carried = node.inputs[2:]
    count = len(carried)
    for value, dtype in zip(body.inputs[:2], (ir.DataType.INT64, ir.DataType.BOOL), strict=True):
        value.dtype, value.shape = dtype, value.shape or ir.Shape(())
    _settle_states(inference, body, list(carried), body.inputs[2:], body.outputs[1 : 1 + count])
    for y, inner in zip(node.outputs[:count], body.inputs[2:], strict=True):
        y.type, y.shape = inner.type, inner.shape
    for y, result in zip(node.outputs[count:], body.outputs[1 + count :], strict=True):
        y.type, inner_dims = result.type, dims(result)
        y.shape = None if inner_dims is None else ir.Shape([None, *inner_dims])


def _scan(inference: ShapeInference, node: ir.Node) -> None:
    body = node.attributes["body"].as_graph()
    scanned = _attribute(node, "num_scan_inputs", 0)
    states = len(node.inputs) - scanned
    length: Dim = None
    axes = _attribute(node, "scan_input_axes", [0] * scanned)
    for value, inner, axis in zip(node.inputs[states:], body.inputs[states:], axes, strict=True):
        assert value is not None
        inner.type, known = value.type, dims(value)
        if known is not None:
            axis %= len(known)
            length = known[axis]
            inner.shape = ir.Shape([d for i, d in enumerate(known) if i != axis])
    _settle_states(inference, body, list(node.inputs[:states]), body.inputs[:states], body.outputs[:states])
    for y, inner in zip(node.outputs[:states], body.inputs[:states], strict=True):
        y.type, y.shape = inner.type, inner.shape
    results = body.outputs[states:]
    for y, result, axis in zip(
        node.outputs[states:], results, _attribute(node, "scan_output_axes", [0] * len(results)), strict=True
    ):
        y.type, inner_dims = result.type, dims(result)
        if inner_dims is None:
            y.shape = None
            continue
        outer: list[Dim] = list(inner_dims)
        outer.insert(axis % (len(outer) + 1), length)
        y.shape = ir.Shape(outer)


def _settle_states(
    inference: ShapeInference,
    body: ir.Graph,
    initial: list[ir.Value | None],
    inside: Sequence[ir.Value],
    results: Sequence[ir.Value],
) -> None:
    """Infer a loop's body, with states whose shape changes from one iteration to the next as unknown."""
    declared = {v: (v.type, v.shape) for g in all_graphs(body) for n in g for v in n.outputs}
    for value, state in zip(initial, inside, strict=True):
        if value is not None:
            state.type, state.shape = value.type, value.shape
    inference.visit_all(body)
    changed = False
    for state, result in zip(inside, results, strict=True):
        if dims(state) != dims(result):
            state.shape = _common(state, result)
            inference.name_dimensions(state)
            changed = True
    if changed:
        for value, (type_, shape) in declared.items():
            value.type, value.shape = type_, shape
        inference.visit_all(body)


_BODIES: dict[str, Callable[[ShapeInference, ir.Node], None]] = {"If": _if, "Loop": _loop, "Scan": _scan}
