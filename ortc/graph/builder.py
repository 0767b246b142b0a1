"""The ``op`` object: how rules, losses and optimizers write nodes.

``op.Tanh(x)`` appends a node and returns its output (a tuple with ``_outputs=2``). Inputs are values, or plain Python
data: a number takes the element type of the operand that the operator's schema pairs it with (a float without one, such
as Pow's, the first operand's), a list of integers becomes an int64 vector, an array stays what it is, None leaves an
optional input out. Attributes are keywords.
``a + b``, ``2 * a``, ``-a``, ``a / b`` work while the builder is entered as a context.

Every node gets a readable unique name, its origin as metadata, and every output its type and shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortc.graph.names import Names, taken_names
from ortc.graph.shapes import Dims, constant, dims, is_float, node_inference, rank, stamp_like, static

Operand = ir.Value | float | int | bool | Sequence[int] | np.ndarray | None


class Builder:
    """Appends nodes to one graph. The public methods in lower case are the vocabulary that rules share."""

    def __init__(self, graph: ir.Graph, outer: Builder | None = None) -> None:
        """``outer`` is the builder of the graph around a nested one: names and opsets are the outermost graph's."""
        self.graph = graph
        self._outer = outer
        self.root: ir.Graph = graph if outer is None else outer.root
        self.opset = self.root.opset_imports[""]
        self._inference = node_inference(self.opset)
        self._constants: dict[Any, ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}
        self._prefix = ""
        self._before: ir.Node | None = None
        self._metadata: dict[str, str] = {}

    # ---- where nodes go and what they are called -------------------------------------------------------------

    @cached_property
    def names(self) -> Names:
        """The names of the outermost graph; looked up with the first new node, for many builders come to write none."""
        return Names(taken_names(self.graph)) if self._outer is None else self._outer.names

    @contextlib.contextmanager
    def scope(self, prefix: str, before: ir.Node | None = None, **metadata: str) -> Iterator[None]:
        """New nodes are called ``prefix/OpType`` and carry the metadata as ``ortc.<key>``; arithmetic works.

        They go to the end of the graph, or in front of the node ``before``.
        """
        saved = self._prefix, self._metadata, self._before
        self._prefix, self._before = prefix, before
        self._metadata = {f"ortc.{key.rstrip('_')}": text for key, text in metadata.items()}
        handler = ir.set_value_magic_handler(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            ir.set_value_magic_handler(handler)
            self._prefix, self._metadata, self._before = saved

    def __getattr__(self, op_type: str) -> Any:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return partial(self.node, op_type)

    def node(
        self,
        op_type: str,
        *inputs: Operand,
        _domain: str = "",
        _outputs: int | Sequence[ir.Value | None] = 1,
        _like: ir.Value | None = None,
        **attributes: Any,
    ) -> Any:
        """Append one node.

        Args:
            op_type: the operator.
            inputs: operands, see the module's text.
            _domain: the operator's domain; "" is the ONNX standard.
            _outputs: how many outputs to make; a single one is returned bare, several as a tuple. Or the outputs themselves,
                without names, with types and shapes that need no inference; None leaves an optional one out.
            _like: the first output has this value's type and shape (where inference cannot know).
            attributes: the operator's attributes; None leaves one out.
        """
        values = self._operands(op_type, _domain, inputs)
        name = self.names.fresh(f"{self._prefix}/{op_type}" if self._prefix else op_type)
        made = [ir.Value() for _ in range(_outputs)] if isinstance(_outputs, int) else _outputs
        outputs = [ir.Value(name="") if v is None else v for v in made]
        for i, output in enumerate(v for v in made if v is not None):
            output.name = name if i == 0 else self.names.fresh(f"{name}.{i}")
        node = ir.Node(
            _domain,
            op_type,
            values,
            [_attribute(key, value) for key, value in attributes.items() if value is not None],
            outputs=outputs,
            name=name,
            metadata_props=dict(self._metadata),
        )
        if self._before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._before, node)
        if _domain:
            self.root.opset_imports.setdefault(_domain, 1)
        if _like is not None:
            stamp_like(outputs[0], _like)
        if isinstance(_outputs, int):
            self._inference.stamp(node)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _operands(self, op_type: str, domain: str, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        data = any(not (v is None or isinstance(v, ir.Value)) for v in inputs)
        values = self._with_constants(op_type, domain, inputs) if data else list(inputs)
        while values and values[-1] is None:
            values.pop()
        return values  # type: ignore[return-value]

    def _with_constants(self, op_type: str, domain: str, inputs: Sequence[Operand]) -> list[Operand]:
        kinds = _type_variables(op_type, domain, self.opset)
        variadic = kinds[-1:] if kinds else [""]
        kinds_of = [kinds[i] if i < len(kinds) else variadic[0] for i in range(len(inputs))]
        values: list[Operand] = []
        for operand, kind in zip(inputs, kinds_of, strict=True):
            if operand is None or isinstance(operand, ir.Value):
                values.append(operand)
            elif isinstance(operand, bool | int | float | np.generic):
                first = next((v for v in inputs if isinstance(v, ir.Value)), None) if isinstance(operand, float) else None
                paired = (v for v, k in zip(inputs, kinds_of, strict=True) if isinstance(v, ir.Value) and k == kind)
                like = next(paired, first)
                values.append(self.const(operand, like=like))
            elif isinstance(operand, np.ndarray):
                values.append(self.const(operand))
            else:
                values.append(self.const(np.asarray(operand, dtype=np.int64)))
        return values

    # ---- vocabulary ------------------------------------------------------------------------------------------

    def infer(self, node: ir.Node) -> None:
        """Stamp type and shape on outputs of ``node`` that have none."""
        self._inference.stamp(node)

    def const(self, data: Any, like: ir.Value | None = None) -> ir.Value:
        """A constant, made once per distinct content.

        Args:
            data: a number or an array.
            like: take this value's element type; else an array's own, int64 for an int, bool for a bool.
        """
        array = np.asarray(data)
        if like is not None and like.dtype is not None:
            array = array.astype(like.dtype.numpy())
        elif array.dtype == np.float64 and not isinstance(data, np.ndarray | np.generic):
            raise TypeError(f"the float constant {data} needs an operand that gives its type")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            text = _digits(array) if array.size <= 8 else f"{array.dtype}{list(array.shape)}"
            name = self.names.fresh(f"const/{text}")
            value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
            value.shape, value.dtype = ir.Shape(array.shape), value.const_value.dtype  # type: ignore[union-attr]
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def dims(self, x: ir.Value) -> Dims:
        """The dimensions of ``x`` (numbers, names, None for unknown). The rank must be known."""
        known = dims(x)
        if known is None:
            raise UnknownRank(x.name or "?")
        return known

    def rank(self, x: ir.Value) -> int:
        """The number of dimensions of ``x``; it must be known."""
        return len(self.dims(x))

    def axes(self, x: ir.Value, axes: Any = None) -> list[int]:
        """Axes of ``x`` as non-negative numbers, in order; None means all of them."""
        r = self.rank(x)
        wanted = range(r) if axes is None else np.atleast_1d(axes)
        return [int(a) % r for a in wanted]

    def constant(self, x: ir.Value | None) -> np.ndarray | None:
        """The array of a small constant, or None if ``x`` is known only when the graph runs."""
        return constant(x)

    def shape(self, x: ir.Value) -> ir.Value:
        """The shape of ``x`` as an int64 vector: a constant where it is known, else one shared Shape node."""
        known = static(x)
        if known is not None:
            return self.const(np.asarray(known, dtype=np.int64))
        if x not in self._shapes:
            self._shapes[x] = self.Shape(x)
        return self._shapes[x]

    def size(self, x: ir.Value, axes: Sequence[int] | None = None, like: ir.Value | None = None) -> ir.Value | float:
        """The number of elements of ``x`` along ``axes``: a Python float if known, else a scalar of ``like``'s type."""
        along = self.axes(x, axes)
        known = [self.dims(x)[a] for a in along]
        if all(isinstance(d, int) for d in known):
            return float(np.prod(known))  # type: ignore[arg-type]
        whole = len(along) == len(self.dims(x))
        count = self.Size(x) if whole else self.ReduceProd(self.Gather(self.shape(x), along), keepdims=0)
        return self.cast(count, x if like is None else like)

    def dim(self, x: ir.Value, *axes: int) -> int | ir.Value:
        """The product of dimensions of ``x``: an int if known, else an int64 vector of one number."""
        known = [self.dims(x)[a] for a in axes]
        if all(isinstance(d, int) for d in known):
            return int(np.prod(known, dtype=np.int64))  # type: ignore[arg-type]
        sizes = self.Gather(self.shape(x), list(axes))
        return sizes if len(axes) == 1 else self.ReduceProd(sizes, keepdims=1)

    def vector(self, *parts: int | ir.Value) -> ir.Value:
        """Numbers and int64 vectors as one int64 vector: a constant if all are known."""
        known = [np.array([p], np.int64) if isinstance(p, int) else self.constant(p) for p in parts]
        if parts and all(array is not None for array in known):
            return self.const(np.concatenate([array for array in known if array is not None]))
        vectors = [self.const(np.asarray([p], np.int64)) if isinstance(p, int) else p for p in parts]
        return vectors[0] if len(vectors) == 1 else self.Concat(*vectors, axis=0)

    def cast(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """``x`` with the element type of ``like``."""
        return x if x.dtype == like.dtype else self.Cast(x, to=int(like.dtype or 1))

    def reshape_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """``x`` in the shape of ``like`` (the same number of elements)."""
        if dims(x) is not None and dims(x) == dims(like) and None not in self.dims(x):
            return x
        known = static(like)
        out = self.Reshape(x, self.shape(like), allowzero=None if known is not None and 0 not in known else 1)
        out.shape = like.shape
        return out

    def expand_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """``x`` broadcast to the shape of ``like``."""
        if dims(x) is not None and dims(x) == dims(like) and None not in self.dims(x):
            return x
        out = self.Expand(x, self.shape(like))
        out.shape = like.shape
        return out

    def zeros(self, shape: ir.Value, like: ir.Value) -> ir.Value:
        """Zeros of a shape (an int64 vector), of the type of ``like``."""
        assert like.dtype is not None
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, like.dtype.numpy())))

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Zeros of the type and shape of ``x``."""
        out = self.zeros(self.shape(x), like=x)
        out.shape = x.shape
        return out

    def ones_like(self, x: ir.Value) -> ir.Value:
        """Ones of the type and shape of ``x``."""
        return self.expand_like(self.const(1, like=x), x)

    def copy(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """A value of its own that equals ``x``, with the type and shape of ``like``."""
        return self.Identity(x, _like=like)

    def where(self, condition: ir.Value, x: Operand, y: Operand, like: ir.Value) -> ir.Value:
        """``x`` where the condition holds, else ``y``; numbers take the type of ``like``."""
        x, y = (v if isinstance(v, ir.Value) else self.const(v, like=like) for v in (x, y))
        return self.Where(condition, x, y)

    def pad(
        self,
        x: ir.Value,
        pads: Sequence[int] | ir.Value,
        axes: Sequence[int],
        value: ir.Value | None = None,
        like: ir.Value | None = None,
    ) -> ir.Value:
        """``x`` with zeros, or ``value``, before and after it along ``axes``; a negative number cuts.

        The node has pads for all axes: where transposes are near, ONNX Runtime (1.19 to 1.32) reads those of some as if
        they were all.

        Args:
            pads: for each of ``axes`` the number before, then for each the number after; also as an int64 vector.
            like: the result has this value's type and shape.
        """
        rank, n = self.rank(x), len(axes)
        places = [2 * n] * (2 * rank)  # of a zero, behind the others
        for i, axis in enumerate(self.axes(x, axes)):
            places[axis], places[rank + axis] = i, n + i
        known = self.constant(pads) if isinstance(pads, ir.Value) else np.asarray(pads, np.int64)
        if known is not None:
            return self.Pad(x, np.append(known, 0)[places], value, _like=like)
        assert isinstance(pads, ir.Value)
        return self.Pad(x, self.Gather(self.vector(pads, 0), places), value, _like=like)

    def transpose_last(self, x: ir.Value) -> ir.Value:
        """``x`` with its last two axes exchanged."""
        r = self.rank(x)
        return self.Transpose(x, perm=[*range(r - 2), r - 1, r - 2])

    def sum_to(self, g: ir.Value, x: ir.Value) -> ir.Value:
        """Undo a broadcast: sum ``g`` over the axes along which ``x`` was repeated, giving the shape of ``x``.

        The axes are constants where the shapes are known. A dimension that may or may not be 1 when the graph runs
        (symbolic here, another name there) is decided in the graph.
        """
        have, want = dims(g), dims(x)
        if have is None or want is None:
            return self._sum_to_at_run_time(g, x)
        lead = len(have) - len(want)
        if lead < 0:
            raise ValueError(f"a gradient of rank {len(have)} for {x.name} of rank {len(want)}")
        repeated = []
        for axis, (d, target) in enumerate(zip(have[lead:], want, strict=True), start=lead):
            if target == 1:
                repeated += [axis] if d != 1 else []
            elif not isinstance(target, int) and (d is None or d != target) and d != 1:
                return self._sum_to_at_run_time(g, x)
        if repeated:
            g = self.ReduceSum(g, [*range(lead), *repeated], keepdims=1)
            g = self.Squeeze(g, list(range(lead))) if lead else g
        elif lead:
            g = self.ReduceSum(g, list(range(lead)), keepdims=0)
        if g.producer() is not None:
            g.shape = x.shape
        return g

    def _sum_to_at_run_time(self, g: ir.Value, x: ir.Value) -> ir.Value:
        have, want = self.shape(g), self.shape(x)
        if rank(g) is None or rank(x) is None:
            lead = self.Reshape(self.Size(have) - self.Size(want), [1])
            ones = self.ConstantOfShape(lead, value=ir.tensor(np.ones(1, np.int64)))
        else:
            ones = self.const(np.ones(self.rank(g) - self.rank(x), np.int64))
        padded = self.Concat(ones, want, axis=0)
        repeated = self.And(self.Equal(padded, 1), self.Not(self.Equal(have, 1)))
        # One more axis in front that is always summed: ONNX Runtime sums an empty tensor over all axes if given none.
        axes = self.Reshape(self.NonZero(self.Concat(np.ones(1, np.bool_), repeated, axis=0)), [-1])
        summed = self.ReduceSum(self.Unsqueeze(g, [0]), axes, keepdims=1)
        out = self.Reshape(summed, want, allowzero=1)
        out.shape = x.shape
        return out

    @contextlib.contextmanager
    def nested(self, inputs: Sequence[ir.Value]) -> Iterator[Builder]:
        """A builder on a new nested graph, for a node of this one; its nodes may read values of this graph."""
        name = self.names.fresh(f"{self._prefix}/body")
        inner = Builder(ir.Graph(inputs, [], nodes=[], name=name), self)
        with inner.scope(self._prefix):
            inner._metadata = self._metadata
            yield inner

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """New nodes go to the graph around this nested one, if it is nested."""
        outer = self._outer or self
        own = self.graph, self._constants, self._shapes
        self.graph, self._constants, self._shapes = outer.graph, outer._constants, outer._shapes
        try:
            yield
        finally:
            self.graph, self._constants, self._shapes = own

    def give(self, values: Sequence[ir.Value]) -> None:
        """Make the values outputs of a nested graph; what it does not make itself, or gives already, as a copy."""
        for value in values:
            own = value.producer() is not None and value.graph is self.graph and value not in self.graph.outputs
            self.graph.outputs.append(value if own else self.copy(value, like=value))

    def scan(
        self,
        body: Callable[..., tuple[Sequence[ir.Value], Sequence[ir.Value]]],
        states: Sequence[ir.Value],
        sequences: Sequence[ir.Value],
        reverse: bool = False,
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Walk along the first axis of ``sequences`` with a Scan.

        Args:
            body: called once as ``body(op, *states, *steps)`` with a builder on the nested graph and one step of every
                sequence; it returns the new states and the step's results. It may read values of this graph.
            states: their values before the first step; they keep their shapes.
            sequences: all of the same length.
            reverse: walk from the last step to the first; the results still lie in the sequences' order.

        Returns:
            The states after the last step, and the results of all steps.
        """
        inner = [ir.Value(name=self.names.fresh(f"{v.name}.state"), type=v.type, shape=v.shape) for v in states]
        for v in sequences:
            step = ir.Shape(self.dims(v)[1:])
            inner.append(ir.Value(name=self.names.fresh(f"{v.name}.step"), type=v.type, shape=step))
        with self.nested(inner) as nested:
            new_states, results = body(nested, *inner)
            nested.give([*new_states, *results])
        outputs = [ir.Value(type=v.type, shape=v.shape) for v in states]
        for v in results:
            outputs.append(ir.Value(type=v.type, shape=ir.Shape([self.dims(sequences[0])[0], *self.dims(v)])))
        self.Scan(
            *states,
            *sequences,
            _outputs=outputs,
            body=nested.graph,
            num_scan_inputs=len(sequences),
            scan_input_directions=[1] * len(sequences) if reverse else None,
            scan_output_directions=[1] * len(results) if reverse and results else None,
        )
        return outputs[: len(states)], outputs[len(states) :]

    @staticmethod
    def is_float(x: ir.Value | None) -> bool:
        """Whether a gradient can flow into ``x``."""
        return x is not None and is_float(x)


class UnknownRank(Exception):
    """A rule needs the rank of a value that shape inference could not find."""


def _digits(array: np.ndarray) -> str:
    """The elements in as few digits as their own type needs: the float32 nearest to 0.9 is 0.9."""
    elements = ",".join(map(str, array.flat))
    return f"[{elements}]" if array.ndim else elements


@cache
def _type_variables(op_type: str, domain: str, opset: int) -> list[str]:
    """The schema's type of every input ("T", "tensor(int64)", …); operands with the same one share a type."""
    if not onnx.defs.has(op_type, domain):
        return []
    return [i.type_str for i in onnx.defs.get_schema(op_type, opset, domain).inputs]


def _attribute(name: str, value: Any) -> ir.Attr:
    # The plain types first: to ask whether something is a tensor, which is a protocol, takes as long as to make the node.
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if isinstance(value, bool | int | np.integer):
        return ir.AttrInt64(name, int(value))
    if isinstance(value, ir.Attr):
        return value
    if isinstance(value, ir.Graph):
        return ir.AttrGraph(name, value)
    if not isinstance(value, list | tuple) and isinstance(value, ir.TensorProtocol):
        return ir.AttrTensor(name, value)
    if all(isinstance(v, str) for v in value) and len(value):
        return ir.AttrStrings(name, list(value))
    if any(isinstance(v, float) for v in value):
        return ir.AttrFloat32s(name, [float(v) for v in value])
    return ir.AttrInt64s(name, [int(v) for v in value])
