"""Hypothesis strategies for small random models: chains and graphs of operators that a gradient flows through.

A model is sketched node by node. Each node is computed by ONNX's reference evaluator at once, so that the next one can be
chosen to fit; a node whose result is not finite, or is large, is not taken.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortc.passes.reference import evaluator, widened

OPSET = 21
LARGEST = 200  # elements of a value
DOUBLE = int(TensorProto.DOUBLE)


# What is tried on a size of 0: other kernels of ONNX Runtime refuse it, or crash.
OF_NOTHING = frozenset(
    {
        *(
            "Neg",
            "Identity",
            "Tanh",
            "Sigmoid",
            "Exp",
            "Abs",
            "Relu",
            "Softplus",
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Cast",
            "CastLike",
        ),
        *("Concat", "Slice", "Split", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Gather", "Pad"),
        *("Tile", "Where", "ReduceSum", "ReduceSumSquare"),
    }
)


class Skip(Exception):
    """The node that was tried does not fit here."""


@dataclass(frozen=True)
class Drawn:
    """A model in float32 with static shapes, and where to differentiate it."""

    model: onnx.ModelProto
    arrays: dict[str, np.ndarray]  # of its data inputs, float ones in float32
    data: list[str]  # its float data inputs
    parameters: dict[str, np.ndarray]  # its float initialisers that may train


class Sketch:
    """A model that grows. Values are names; ``arrays`` has what they are, in float64."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.arrays: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.floats: list[str] = []
        self.data: list[str] = []
        self.parameters: list[str] = []
        self.constants: list[str] = []
        self.fed: list[str] = []
        self._random = np.random.default_rng(draw(st.integers(0, 7)))

    # ---- choices -------------------------------------------------------------------------------------------------

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of some."""
        return self._draw(st.sampled_from(choices))

    def flag(self) -> bool:
        """Yes or no."""
        return self._draw(st.booleans())

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return self._draw(st.integers(low, high))

    def shape(self, x: str) -> tuple[int, ...]:
        """A value's shape."""
        return self.arrays[x].shape

    def rank(self, x: str, at_least: int = 0) -> int:
        """A value's rank; the node does not fit if it is lower than wanted."""
        if self.arrays[x].ndim < at_least:
            raise Skip
        return self.arrays[x].ndim

    def axis(self, x: str) -> int:
        """An axis, often counted from the end."""
        r = self.rank(x, 1)
        return self.number(-r, r - 1)

    def axes(self, x: str, at_least: int = 1) -> list[int]:
        """Some axes in any order, each counted from the front or from the end."""
        r = self.rank(x, at_least)
        chosen = self._draw(st.lists(st.integers(0, r - 1), unique=True, min_size=at_least, max_size=r)) if r else []
        return [a - r if self.flag() else a for a in chosen]

    # ---- values --------------------------------------------------------------------------------------------------

    def leaf(self, shape: Sequence[int]) -> str:
        """A parameter or a data input of random numbers.

        One without elements is a data input: constants without elements crash the optimisers of ONNX Runtime 1.19.2.
        """
        if math.prod(shape) > LARGEST:
            raise Skip
        held, letter = (self.data, "x") if not math.prod(shape) or not shape or self.flag() else (self.parameters, "w")
        name = f"{letter}{len(held)}"
        self.arrays[name] = self._random.standard_normal(shape).astype(np.float32).astype(np.float64)
        held.append(name)
        self.floats.append(name)
        return name

    def const(self, array: Any) -> str:
        """A constant; a whole number is int64. Some that are not float are fed as data instead."""
        array = np.asarray(array)
        integer = array.dtype.kind != "f"
        fed = integer and array.size > 0 and self.number(0, 7) == 7
        held = self.fed if fed else self.constants
        name = f"{'i' if fed else 'c'}{len(held)}"
        self.arrays[name] = array if integer else array.astype(np.float32).astype(np.float64)
        held.append(name)
        return name

    def known(self, array: Any) -> str:
        """A constant that is never fed."""
        self.constants.append(name := f"c{len(self.constants)}")
        self.arrays[name] = np.asarray(array)
        return name

    def node(self, op_type: str, *inputs: str, outputs: int = 1, hidden: bool = False, **attributes: Any) -> Any:
        """Add a node; its output's name, or a list of them. One that is hidden is no choice for later nodes."""
        made = [f"{op_type.lower()}_{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        node = helper.make_node(op_type, inputs, made, name=f"node{len(self.nodes)}", **attributes)
        found = self._compute(node)
        floats = [a for a in [*found, *(self.arrays[n] for n in inputs if n)] if a.dtype.kind == "f"]
        if op_type not in OF_NOTHING and any(a.size == 0 for a in floats):
            raise Skip
        if any(a.size == 0 for a in found) and all(self.arrays[n].size for n in inputs if n and n not in self.constants):
            raise Skip  # only a data input has a size of 0: see leaf
        for name, array in zip(made, found, strict=True):
            if array.size > LARGEST or not np.isfinite(array).all() or np.abs(array).max(initial=0) > 100:
                raise Skip
            self.arrays[name] = array
            if array.dtype.kind == "f" and not hidden:
                self.floats.append(name)
        self.nodes.append(node)
        return made if outputs > 1 else made[0]

    def _compute(self, node: onnx.NodeProto) -> list[np.ndarray]:
        used = {n: self.arrays[n] for n in node.input if n}
        inputs = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in used.items()]
        graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=o) for o in node.output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [np.asarray(y) for y in evaluator(widened(model)).run(None, used)]
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # as where a size is 0
            raise Skip from None

    def try_(self, move: Callable[[Sketch, str], Any]) -> None:
        """Make a move from a random value; a node that does not fit leaves no trace."""
        lists = self.nodes, self.floats, self.data, self.parameters, self.constants, self.fed
        before = [len(held) for held in lists]
        x = self.floats[-1 - min(self.number(0, 4), len(self.floats) - 1)]
        try:
            move(self, x)
        except Skip:
            for held, count in zip(lists, before, strict=True):
                del held[count:]

    def positive(self, x: str, offset: float = 0.3) -> str:
        """ln(1 + e^x) + offset"""
        return self.node("Add", self.node("Softplus", x), self.const(offset))

    def partner(self, x: str) -> str:
        """A value that broadcasts with ``x``, in any of the ways there are."""
        shape = self.shape(x)
        if self.flag():
            fitting = [y for y in self.floats if _broadcasts(shape, self.shape(y))]
            return self.pick(fitting[::-1])
        sizes = [(self.pick([1, 3, 1]) if d == 1 else self.pick([d, d, 1])) for d in shape]
        sizes = sizes[self.number(0, len(sizes)) if self.flag() else 0 :]
        return self.leaf([2] * self.pick([0, 0, 1]) + sizes if len(sizes) == len(shape) < 4 else sizes)

    # ---- the whole -----------------------------------------------------------------------------------------------

    def finish(self) -> Drawn:
        """The model: its first output is a scalar loss on some of the values, then come some of the values."""
        last, *others = dict.fromkeys([self.floats[-1], *(self.pick(self.floats[::-1]) for _ in range(self.number(0, 2)))])
        shown = [v for v in others if v not in self.data + self.parameters and self.flag()]
        self.nodes += [n for y in (last, *others) for n in _term(y)]
        terms = [f"{y}.term" for y in (last, *others)]
        for x in self.data:  # so that the loss depends on each
            self.nodes += [
                helper.make_node("Tanh", [x], [f"{x}.tanh"]),
                helper.make_node("ReduceSum", [f"{x}.tanh"], [f"{x}.sum"], keepdims=0),
            ]
        self.nodes.append(helper.make_node("Sum", [*terms, *(f"{x}.sum" for x in self.data)], ["loss"]))
        types = {DOUBLE: int(TensorProto.FLOAT)}

        def port(name: str) -> onnx.ValueInfoProto:
            kind = helper.np_dtype_to_tensor_dtype(self.arrays[name].dtype)
            return helper.make_tensor_value_info(name, types.get(kind, kind), self.shape(name))

        def single(name: str) -> np.ndarray:
            array = self.arrays[name]
            return array.astype(np.float32) if array.dtype.kind == "f" else array

        inputs = [*self.data, *self.fed]
        held = [*self.parameters, *self.constants]
        graph = helper.make_graph(
            self.nodes,
            "random",
            [port(n) for n in inputs],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, ()), *(port(v) for v in shown)],
            [numpy_helper.from_array(single(n), n) for n in held],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        arrays = {n: single(n) for n in inputs}
        return Drawn(model, arrays, list(self.data), {n: single(n) for n in self.parameters})


def _term(y: str) -> list[onnx.NodeProto]:
    """Σ atan y + y²/64 is smooth and bounded enough, and weighs every element otherwise."""
    half = [
        helper.make_node("Atan", [y], [f"{y}.atan"]),
        helper.make_node("ReduceSumSquare", [y], [f"{y}.square"], keepdims=0),
        helper.make_node("ReduceSum", [f"{y}.atan"], [f"{y}.sum_of_atan"], keepdims=0),
    ]
    small = helper.make_node("Constant", [], [f"{y}.small"], value_float=1 / 64)
    scaled = helper.make_node("Mul", [f"{y}.square", f"{y}.small"], [f"{y}.scaled"])
    return [*half, small, scaled, helper.make_node("Add", [f"{y}.sum_of_atan", f"{y}.scaled"], [f"{y}.term"])]


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        return math.prod(np.broadcast_shapes(a, b)) <= LARGEST
    except ValueError:
        return False


# ---- the moves --------------------------------------------------------------------------------------------------------

UNARY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("Neg", "Identity", "Tanh", "Sigmoid", "Sin", "Cos", "Atan", "Erf", "Softplus", "Softsign")),
    *((name, {}) for name in ("Exp", "Asinh", "Sinh", "Cosh", "Mish", "Gelu", "Relu", "Abs", "HardSwish", "Selu")),
    *((name, {}) for name in ("HardSigmoid", "Floor", "Ceil", "Round", "Sign")),
    ("LeakyRelu", {"alpha": 0.2}),
    ("Elu", {"alpha": 1.3}),
    ("Gelu", {"approximate": "tanh"}),
    ("ThresholdedRelu", {"alpha": 0.4}),
    ("Shrink", {"lambd": 0.3, "bias": 0.1}),
    ("HardSigmoid", {"alpha": 0.4, "beta": 0.45}),
]


def unary(s: Sketch, x: str) -> None:
    name, attributes = s.pick(UNARY)
    s.node(name, x, **attributes)


def of_positive(s: Sketch, x: str) -> None:
    s.node(s.pick(["Log", "Sqrt", "Reciprocal"]), s.positive(x))


def of_unit(s: Sketch, x: str) -> None:
    inside = s.node("Mul", s.node("Tanh", x), s.const(0.9))
    s.node(s.pick(["Asin", "Acos", "Atanh", "Tan"]), inside)


def acosh(s: Sketch, x: str) -> None:
    s.node("Acosh", s.positive(x, 1.2))


def binary(s: Sketch, x: str) -> None:
    pair = [x, s.partner(x)]
    s.node(s.pick(["Add", "Mul", "Sub"]), *(pair if s.flag() else pair[::-1]))


def division(s: Sketch, x: str) -> None:
    y = s.partner(x)
    s.node("Div", *((x, s.positive(y)) if s.flag() else (y, s.positive(x))))


def power(s: Sketch, x: str) -> None:
    if s.flag():
        exponent = s.pick([2.0, 3.0, 1.0, 0.0, 4.0])
        s.node("Pow", x, s.const(exponent) if s.flag() else s.known(np.int64(exponent)))
    else:
        s.node("Pow", s.positive(x), s.partner(x))


def remainder(s: Sketch, x: str) -> None:
    s.node("Mod", x, s.positive(s.partner(x)), fmod=1)


def variadic(s: Sketch, x: str) -> None:
    count = s.number(1, 3)
    chosen = [x]
    while len(chosen) < count:
        chosen.append(s.partner(chosen[-1]))
    try:
        s.node(s.pick(["Sum", "Mean", "Max", "Min"]), *chosen)
    except ValueError:  # the third fits the second, not the first
        raise Skip from None


def clip(s: Sketch, x: str) -> None:
    low, high = s.const(-0.5), s.const(0.7)
    s.node("Clip", *s.pick([(x, low, high), (x, low), (x, "", high), (x,)]))


def prelu(s: Sketch, x: str) -> None:
    sizes = [s.pick([d, 1]) for d in s.shape(x)]
    s.node("PRelu", x, s.leaf(sizes[s.number(0, len(sizes)) :]))


def select(s: Sketch, x: str) -> None:
    y = s.partner(x)
    if s.flag():
        condition = s.node(s.pick(["Less", "GreaterOrEqual", "Greater"]), x, s.partner(x))
    else:
        condition = s.const(np.arange(math.prod(s.shape(x)[-1:])) % 2 == 0)
        if s.arrays[condition].size == 1 or s.flag():
            condition = s.node("Not", condition)
    s.node("Where", condition, *((x, y) if s.flag() else (y, x)))


def double(s: Sketch, x: str) -> None:
    wide = s.node("Cast", x, to=DOUBLE, hidden=True)
    if s.flag():
        wide = s.node("Mul", wide, s.node("Neg", wide, hidden=True), hidden=True)
    s.node("CastLike", wide, x) if s.flag() else s.node("Cast", wide, to=int(TensorProto.FLOAT))


def integers(s: Sketch, x: str) -> None:
    """Values that no gradient passes, in a product with one that it passes."""
    if s.flag():
        chosen = s.node("ArgMax", x, axis=s.axis(x), keepdims=1)
    else:
        chosen = s.node("ReduceProd", s.node("Shape", x), keepdims=0)
    s.node("Mul", x, s.node("Cast", chosen, to=int(TensorProto.FLOAT)))


REDUCTIONS = [
    "ReduceSum",
    "ReduceMean",
    "ReduceSumSquare",
    "ReduceL2",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
]


def reduction(s: Sketch, x: str) -> None:
    name = s.pick([*REDUCTIONS, "ReduceL1", "ReduceLogSum"])
    if name in ("ReduceL2", "ReduceLogSum"):
        x = s.positive(x)
    keepdims = int(s.flag())
    how = s.number(0, 3)
    if how == 0:
        s.node(name, x, keepdims=keepdims)
    elif how == 1 and name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        # Of the others ONNX Runtime 1.19.2 then gives x itself, where the standard has x², |x| or ln x.
        s.node(name, x, s.const(np.zeros(0, np.int64)), keepdims=keepdims, noop_with_empty_axes=s.number(0, 1))
    else:
        axes = np.array(s.axes(x), np.int64)
        if not s.arrays[x].size:  # then ONNX Runtime counts none from the end
            axes %= max(s.rank(x), 1)
        s.node(name, x, s.const(axes), keepdims=keepdims)


def matmul(s: Sketch, x: str) -> None:
    r = s.rank(x, 1)
    *batch, _, inner = (1, *s.shape(x))[-max(r, 2) :]
    batch = [s.pick([d, 1]) for d in batch][s.number(0, len(batch)) :]
    if s.flag():
        s.node("MatMul", x, s.leaf([*batch, inner, s.number(1, 3)] if s.flag() else [inner]))
    else:
        inner = s.shape(x)[-2 if r > 1 else -1]
        s.node("MatMul", s.leaf([*batch, s.number(1, 3), inner] if s.flag() else [inner]), x)


def gemm(s: Sketch, x: str) -> None:
    if s.rank(x) != 2:
        raise Skip
    turned_a, turned_b, n = s.number(0, 1), s.number(0, 1), s.number(1, 3)
    m, k = s.shape(x)[:: -1 if turned_a else 1]
    b = s.leaf((n, k) if turned_b else (k, n))
    c = s.pick([None, (n,), (m, n), (m, 1), (1,), (1, n), ()])
    rest = [] if c is None else [s.leaf(c)]
    scales = s.pick([{}, {"alpha": 0.5}, {"beta": 2.0}, {"alpha": -1.0, "beta": 0.25}])
    s.node("Gemm", x, b, *rest, transA=turned_a, transB=turned_b, **scales)


def einsum(s: Sketch, x: str) -> None:
    r = s.rank(x, 1)
    last = s.shape(x)[-1]
    if r == 2 and s.flag():
        s.node("Einsum", x, s.leaf(s.shape(x)), equation=s.pick(["ij,ij->i", "ij,ij->", "ij,kj->ik", "ij,ik->jk"]))
    else:
        s.node("Einsum", x, s.leaf((last, 2)), equation=s.pick(["...i,ij->...j", "...i,ij->...", "...i,ij->j..."]))


def softmax(s: Sketch, x: str) -> None:
    s.node(s.pick(["Softmax", "LogSoftmax"]), x, axis=s.axis(x))


def layer_norm(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    shape = s.shape(x)[axis:]
    rest = [s.leaf(shape)] if s.flag() else []
    s.node("LayerNormalization", x, s.leaf(shape), *rest, axis=axis, epsilon=0.05)


def group_norm(s: Sketch, x: str) -> None:
    s.rank(x, 3)
    channels = s.shape(x)[1]
    if 0 in s.shape(x):  # ONNX Runtime crashes
        raise Skip
    if s.flag():
        s.node("InstanceNormalization", x, s.leaf((channels,)), s.leaf((channels,)), epsilon=0.05)
    else:
        groups = s.pick([g for g in (1, 2, channels) if g and channels % g == 0] or [1])
        s.node("GroupNormalization", x, s.leaf((channels,)), s.leaf((channels,)), num_groups=groups, epsilon=0.05)


def norm(s: Sketch, x: str) -> None:
    if s.flag():
        s.node("LpNormalization", s.positive(x), axis=s.axis(x), p=s.number(1, 2))
    else:
        axes = sorted(a % s.rank(x) for a in s.axes(x))
        if not s.arrays[x].size or s.arrays[x].std(axis=tuple(axes)).min() < 0.2:  # it has no ε: rounding is all that is seen
            raise Skip
        s.node("MeanVarianceNormalization", x, axes=axes)


def transpose(s: Sketch, x: str) -> None:
    perm = s._draw(st.permutations(range(s.rank(x))))
    s.node("Transpose", x, **({"perm": perm} if perm and s.flag() else {}))


def reshape(s: Sketch, x: str) -> None:
    size = s.arrays[x].size
    factors = [d for d in range(1, size + 1) if size % d == 0] or [0]
    first = s.pick(factors)
    if size == 0:
        s.node("Reshape", x, s.known([*s.shape(x), 1]), allowzero=1)
    else:
        target = s.pick([[first, size // first], [-1], [first, -1], [1, -1, first], [-1, first]])
        if s.rank(x) and s.flag():
            target = [0, -1]
        s.node("Reshape", x, s.const(target))


def flatten(s: Sketch, x: str) -> None:
    r = s.rank(x)
    s.node("Flatten", x, axis=s.number(-r, r))


def squeeze(s: Sketch, x: str) -> None:
    ones = [a for a, d in enumerate(s.shape(x)) if d == 1]
    if not ones:
        raise Skip
    if s.flag():
        s.node("Squeeze", x, s.const([s.pick(ones) - (s.rank(x) if s.flag() else 0)]))
    else:
        s.node("Squeeze", x)


def unsqueeze(s: Sketch, x: str) -> None:
    r = s.rank(x)
    if r > 3:
        raise Skip
    axes = s.pick([[0], [-1], [r], [0, -1], [-2, 0], [-1 - r]])
    if len({a % (r + len(axes)) for a in axes}) < len(axes):
        raise Skip
    s.node("Unsqueeze", x, s.const(axes))


def expand(s: Sketch, x: str) -> None:
    target = [3 if d == 1 and s.flag() else s.pick([d, 1]) for d in s.shape(x)]
    target = [2] * s.number(0, 1) + target if s.flag() else target[s.number(0, len(target)) :]
    s.node("Expand", x, s.const(np.array(target, np.int64)))


def concat(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    sizes = list(s.shape(x))
    sizes[axis] = s.number(0, 2)
    fitting = [y for y in s.floats if _but(s.shape(y), axis, s.rank(x)) == _but(s.shape(x), axis, s.rank(x))]
    parts = [s.pick(fitting) if s.flag() else s.leaf(sizes) for _ in range(s.number(0, 2))]
    parts.insert(s.number(0, len(parts)), x)
    s.node("Concat", *parts, axis=axis)


def _but(shape: tuple[int, ...], axis: int, rank: int) -> tuple[int, ...] | None:
    return shape[: axis % rank] + shape[axis % rank + 1 :] if len(shape) == rank else None


def split(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    size = s.shape(x)[axis]
    if s.flag():
        count = s.number(1, 3)
        if size < count:
            raise Skip
        s.node("Split", x, axis=axis, num_outputs=count, outputs=count)
    else:
        first, second = sorted((s.number(0, size), s.number(0, size)))
        s.node("Split", x, s.const([first, second - first, size - second]), axis=axis, outputs=3)


def slice_(s: Sketch, x: str) -> None:
    axes = s.axes(x)
    far = np.iinfo(np.int64).max
    steps = [s.pick([1, 2, -1, -2, 3]) for _ in axes]
    starts = [s.pick([0, 1, -1, -2, 2, far, -far]) for _ in axes]
    ends = [s.pick([far, -1, 2, 3, -far, 1]) for _ in axes]
    inputs = [s.const(np.array(v, np.int64)) for v in (starts, ends)]
    all_axes = axes == list(range(len(axes)))
    named = "" if all_axes and s.flag() else s.const(np.array(axes, np.int64))
    s.node("Slice", x, *inputs, named, s.const(np.array(steps, np.int64)))


def pad(s: Sketch, x: str) -> None:
    axes = s.axes(x)
    mode = s.pick(["constant", "edge", "reflect", "wrap"])
    sizes = [s.shape(x)[a] for a in axes]
    if mode == "constant":
        pads = [s.number(-min(n // 2, 1), 2) for n in sizes * 2]
    else:
        most = [n - 1 if mode == "reflect" else min(n, 2) for n in sizes]
        if min(most) < 0 or 0 in s.shape(x):
            raise Skip
        pads = [s.number(0, min(n, 2)) for n in most * 2]
    value = s.pick(["", s.const(0.5), s.leaf(())]) if mode == "constant" else ""
    s.node("Pad", x, s.const(np.array(pads, np.int64)), value, s.known(np.array(axes, np.int64)), mode=mode)


def gather(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    size = s.shape(x)[axis]
    if not size:
        raise Skip
    chosen = [s.number(-size, size - 1) for _ in range(s.number(0 if s.arrays[x].size else 1, 3))]
    indices = np.array(chosen, np.int64) if s.flag() or not chosen else np.array(chosen[0])
    if indices.ndim and len(chosen) == 2:
        indices = indices.reshape(s.pick([(2,), (1, 2), (2, 1)]))
    s.node("Gather", x, s.const(indices.astype(s.pick([np.int64, np.int32]))), axis=axis)


def gather_elements(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    sizes = list(s.shape(x))
    if 0 in sizes:
        raise Skip
    size, sizes[axis] = sizes[axis], s.number(1, 3)
    indices = s._random.integers(-size, size, sizes)
    if s.flag():
        s.node("GatherElements", x, s.const(indices), axis=axis)
    else:
        reduction = s.pick(["add", "mul", "max", "min", "none"])
        if reduction == "none":
            if sizes[axis] > size:
                raise Skip
            indices = np.argsort(s._random.random(s.shape(x)), axis=axis).take(range(sizes[axis]), axis=axis)
        s.node("ScatterElements", x, s.const(indices), s.leaf(sizes), axis=axis, reduction=reduction)


def gather_nd(s: Sketch, x: str) -> None:
    r = s.rank(x, 1)
    depth = s.number(1, min(r, 2))
    sizes = s.shape(x)[:depth]
    if 0 in s.shape(x):
        raise Skip
    places = np.stack([s._random.integers(-n, n, 3) for n in sizes], axis=-1)
    if s.flag():
        s.node("GatherND", x, s.const(places))
    else:
        s.node(
            "ScatterND", x, s.const(places), s.leaf((3, *s.shape(x)[depth:])), reduction=s.pick(["add", "mul", "max", "min"])
        )


def tile(s: Sketch, x: str) -> None:
    s.node("Tile", x, s.const(np.array([s.pick([1, 2, 3, 0]) for _ in s.shape(x)], np.int64)))


def top_k(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    k = s.number(0, s.shape(x)[axis])
    s.node("TopK", x, s.const([k]), axis=axis, largest=s.number(0, 1), outputs=2)


def cum_sum(s: Sketch, x: str) -> None:
    s.node("CumSum", x, s.const(np.array(s.axis(x))), exclusive=s.number(0, 1), reverse=s.number(0, 1))


def trilu(s: Sketch, x: str) -> None:
    s.rank(x, 2)
    s.node("Trilu", x, *([s.const(np.array(s.number(-2, 2)))] if s.flag() else []), upper=s.number(0, 1))


def compress(s: Sketch, x: str) -> None:
    axis = s.axis(x)
    keep = np.array([s.flag() for _ in range(s.shape(x)[axis])], np.bool_)
    s.node("Compress", x, s.const(keep), axis=axis)


def center(s: Sketch, x: str) -> None:
    axes = s.axes(x)
    if 0 in s.shape(x):
        raise Skip
    s.node("CenterCropPad", x, s.const([s.number(1, 4) for _ in axes]), axes=axes)


def reverse_sequence(s: Sketch, x: str) -> None:
    s.rank(x, 2)
    time, batch = s.shape(x)[:2]
    if not time:
        raise Skip
    s.node("ReverseSequence", x, s.const(np.array([s.number(1, time) for _ in range(batch)], np.int64)))


def window(s: Sketch, x: str, smallest: int = 1) -> tuple[list[int], dict[str, Any]]:
    """A kernel that fits the spatial axes, with strides, dilations and pads."""
    if s.rank(x) not in (3, 4) or 0 in s.shape(x):
        raise Skip
    spatial = s.shape(x)[2:]
    kernel = [s.number(smallest, min(3, max(n, smallest))) for n in spatial]
    dilations = [2 if k == 2 and n > 2 and s.flag() else 1 for k, n in zip(kernel, spatial, strict=True)]
    attributes: dict[str, Any] = {"strides": [s.number(1, 2) for _ in kernel], "kernel_shape": kernel}
    attributes["dilations"] = dilations
    how = s.pick(["plain", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"])
    if how == "pads":
        attributes["pads"] = [s.number(0, k - 1) for k in kernel * 2]
    elif how != "plain":
        attributes["auto_pad"] = how
        if how != "VALID":
            attributes["dilations"] = [1 for _ in kernel]
            attributes["strides"] = [min(k, t) for k, t in zip(kernel, attributes["strides"], strict=True)]
    if any(n < (k - 1) * d + 1 for n, k, d in zip(spatial, kernel, attributes["dilations"], strict=True)):
        raise Skip
    return kernel, attributes


def conv(s: Sketch, x: str) -> None:
    kernel, attributes = window(s, x)
    channels = s.shape(x)[1]
    group = s.pick([g for g in (1, 2, channels) if channels % g == 0])
    made = group * s.number(1, 2)
    bias = [s.leaf((made,))] if s.flag() else []
    s.node("Conv", x, s.leaf((made, channels // group, *kernel)), *bias, group=group, **attributes)


def conv_transpose(s: Sketch, x: str) -> None:
    kernel, attributes = window(s, x)
    if "auto_pad" in attributes:
        raise Skip
    channels = s.shape(x)[1]
    group = s.pick([g for g in (1, 2) if channels % g == 0])
    bias = [s.leaf((group * 2,))] if s.flag() else []
    s.node("ConvTranspose", x, s.leaf((channels, 2, *kernel)), *bias, group=group, **attributes)


def pool(s: Sketch, x: str) -> None:
    _, attributes = window(s, x)
    if s.flag():
        s.node("MaxPool", x, **attributes)
    else:
        s.node("AveragePool", x, count_include_pad=s.number(0, 1), **attributes)


def global_pool(s: Sketch, x: str) -> None:
    s.rank(x, 3)
    s.node(s.pick(["GlobalAveragePool", "GlobalMaxPool"]), x)


def depth(s: Sketch, x: str) -> None:
    if s.rank(x) != 4:
        raise Skip
    c, h, w = s.shape(x)[1:]
    if c % 4 == 0 and s.flag():
        s.node("DepthToSpace", x, blocksize=2, mode=s.pick(["DCR", "CRD"]))
    elif h % 2 == 0 and w % 2 == 0:
        s.node("SpaceToDepth", x, blocksize=2)
    else:
        raise Skip


MOVES: list[Callable[[Sketch, str], Any]] = [
    *(unary, binary, unary, binary, reduction, matmul, transpose, reshape, softmax, division),
    *(layer_norm, gemm, concat, slice_, gather, pad, expand, squeeze, unsqueeze, flatten, split, tile),
    *(clip, select, variadic, power, of_positive, of_unit, acosh, remainder, prelu, double, integers),
    *(einsum, norm, group_norm, gather_elements, gather_nd, top_k, cum_sum, trilu, compress, center, reverse_sequence),
    *(conv, conv, pool, pool, conv_transpose, global_pool, depth),
]


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    """A random model with a scalar loss as its first output."""
    s = Sketch(draw)
    image = (s.number(1, 2), s.pick([2, 4, 3, 1]), s.number(2, 5), s.number(2, 5))
    flat = draw(st.lists(st.sampled_from([2, 3, 1, 4, 0]), max_size=3))
    s.leaf(s.pick([flat, flat, image, image[:1] + image[1:3]]))
    wanted = s.number(3, 15)
    for _ in range(3 * wanted):
        if len(s.nodes) >= wanted:
            break
        s.try_(s.pick(MOVES))
    return s.finish()
