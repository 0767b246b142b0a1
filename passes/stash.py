"""Activation compression: what the backward reads of the forward is kept small (Gist: Jain et al., ISCA 2018).

Works on each stage's training graph, after recompute (what is computed again is not kept) and before the order is decided. A
value is compressed right behind the last node of the forward that reads it, and made again in front of the first node of the
backward that does, where it waits for a gradient (``passes/backward.py``). Views are looked at again, and what follows from a
mask and constants alone is made again from the mask.

Without loss:

* a mask as bits, eight in a byte; a comparison that only the backward makes moves into the forward, where that frees the
  numbers compared (a ReLU's output in front of a max-pool);
* where a max-pool found its maximum as the distance from the window's first element, in a byte or two.

With loss, by choice: float32 values in fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, role
from ortc.graph.builder import Builder
from ortc.graph.cut import read_by
from ortc.graph.names import captured
from ortc.graph.shapes import Dims, dims, rank
from ortc.passes.backward import AHEAD, Waiting, halves
from ortc.passes.costs import Shapes, concrete_sizes
from ortc.passes.gradients.convolution import window
from ortc.passes.inference import product
from ortc.passes.memory import VIEWS, phase_memory
from ortc.passes.recompute import of_weights
from ortc.passes.stages import assumed_sizes, schedule_of
from ortc.passes.waiting import Guard
from ortc.plan import Stashed
from ortc.rules import Unsupported, node_key
from ortc.runtime.schedule import in_flight

_UINT8, _BOOL = int(ir.DataType.UINT8), int(ir.DataType.BOOL)

# Values of fewer bytes stay as they are: a handful of nodes costs more than they do.
_LEAST = 1 << 12

# What makes a mask of values, and what may be made again of a mask and constants.
_MASKS = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"])
_OF_MASKS = frozenset(["Cast", "Mul", "Not", "Where"])

# A row of at least so many numbers has a scale of its own in 8 bits; where rows are shorter, each sample has.
_ROW = 64


@dataclass(frozen=True)
class Code:
    """How a value is kept.

    Attributes:
        encode: gives what is kept, the largest first. The decoder asks for no size of the value that it has not asked for.
        decode: gives the value back, its type and shape not yet stamped.
    """

    encode: Callable[[Builder, ir.Value], list[ir.Value]]
    decode: Callable[[Builder, ir.Value, Sequence[ir.Value]], ir.Value]


# ---- without loss ----------------------------------------------------------------------------------------------------

_DIGITS = (1 << np.arange(8)).astype(np.uint8)


def _bits(op: Builder, mask: ir.Value) -> list[ir.Value]:
    """Eight elements in a byte; what lacks at the end is 0."""
    op.shape(mask)
    flat = op.Reshape(op.Cast(mask, to=_UINT8), [-1])
    if _ragged(mask):
        missing = op.Mod(op.Sub(8, op.Mod(op.Size(mask), 8)), 8)
        flat = op.Pad(flat, op.Concat([0], op.Reshape(missing, [1]), axis=0))
    packed = op.Cast(op.MatMulInteger(op.Reshape(flat, [-1, 8]), _DIGITS[:, None]), to=_UINT8)
    packed.shape = ir.Shape([_eighth(dims(mask) or ()), 1])
    return [packed]


def _eighth(sizes: Dims) -> int | str | None:
    """The number of elements over 8, rounded up."""
    numbers = math.prod(d for d in sizes if isinstance(d, int))
    if numbers % 8 == 0:
        return product([numbers // 8, *(d for d in sizes if not isinstance(d, int))])
    count = product(sizes)
    return ((ir.SymbolicDim(count) + 7) // 8).value if isinstance(count, str) else None if count is None else -(-count // 8)


def _from_bits(op: Builder, mask: ir.Value, kept: Sequence[ir.Value]) -> ir.Value:
    found = op.Cast(op.BitwiseAnd(kept[0], _DIGITS), to=_BOOL)
    if _ragged(mask):
        count = op.ReduceProd(op.shape(mask), keepdims=1)
        found = op.Slice(op.Reshape(found, [-1]), [0], count, [0])
    return op.reshape_like(found, mask)


def _ragged(mask: ir.Value) -> bool:
    """Whether the number of elements may be no multiple of 8."""
    return math.prod(d for d in dims(mask) or () if isinstance(d, int)) % 8 != 0


def _distances(pool: ir.Node) -> Code | None:
    """Of a max-pool's indices: how far from the window's first element, as unsigned numbers of the least width that fits."""
    attributes, x, y = pool.attributes, pool.inputs[0], pool.outputs[0]
    sizes, found = (dims(v) or () for v in (x, y) if v is not None)
    if (
        attributes.get_int("storage_order", 0)
        or len(sizes) < 3
        or not all(isinstance(d, int) for d in (*sizes[2:], *found[2:]))
    ):
        return None
    kernel = attributes["kernel_shape"].as_ints()
    given = [attributes[name].as_ints() if name in attributes else None for name in ("pads", "strides", "dilations")]
    auto_pad = attributes["auto_pad"].as_string() if "auto_pad" in attributes else "NOTSET"
    axes = range(len(kernel))
    steps = [math.prod(sizes[2 + a + 1 :]) for a in axes]  # type: ignore[arg-type]

    try:
        pads, strides, dilations = window(Builder(pool.graph), x, kernel, auto_pad, *given)  # type: ignore[arg-type]
    except Unsupported:
        return None
    first = np.zeros([1] * len(sizes), np.int64)  # where each window begins in its plane, were there no edge
    for axis, step in zip(axes, steps, strict=True):
        at = (np.arange(found[2 + axis]) * strides[axis] - pads[axis]) * step  # type: ignore[arg-type]
        first = first + at.reshape([-1 if a == axis + 2 else 1 for a in range(len(sizes))])
    furthest = sum((k - 1) * d * step for k, d, step in zip(kernel, dilations, steps, strict=True))
    narrow = next((t for t in (ir.DataType.UINT8, ir.DataType.UINT16) if furthest < 1 << t.bitwidth), None)
    if narrow is None:
        return None

    def encode(op: Builder, indices: ir.Value) -> list[ir.Value]:
        shape = op.shape(x)  # type: ignore[arg-type]
        if (known := op.constant(shape)) is not None:
            planes = op.const(np.arange(known[0] * known[1]).reshape(*known[:2], *(1 for _ in axes)) * math.prod(known[2:]))
        else:
            outer = op.Gather(shape, [0, 1])
            counted = op.Range(0, op.ReduceProd(outer, keepdims=0), 1)
            planes = op.Mul(counted, math.prod(sizes[2:]))  # type: ignore[arg-type]
            planes = op.Reshape(planes, op.Concat(outer, [1 for _ in axes], axis=0))
        planes.shape = ir.Shape([*sizes[:2], *(1 for _ in axes)])
        distance = op.Clip(op.Sub(op.Sub(indices, planes), first), 0, furthest)  # of nothing but NaN there is no maximum
        distance = op.Cast(distance, to=int(narrow))
        distance.shape = indices.shape
        return [distance, planes]

    def decode(op: Builder, indices: ir.Value, kept: Sequence[ir.Value]) -> ir.Value:
        distance = op.Cast(kept[0], to=int(ir.DataType.INT64))
        return op.Add(op.Add(distance, first), kept[1])

    return Code(encode, decode)


# ---- with loss -------------------------------------------------------------------------------------------------------


def _half(dtype: ir.DataType) -> Code:
    """To the nearest number of the type, ties to even."""
    return Code(
        lambda op, value: [op.Cast(value, to=int(dtype))],
        lambda op, value, kept: op.Cast(kept[0], to=int(ir.DataType.FLOAT)),
    )


def _bytes(rows: bool) -> Code:
    """To the nearest of 255 numbers: multiples of max|x| / 127, the maximum over a row (the last axis) or a sample (all but the
    first)."""

    def encode(op: Builder, value: ir.Value) -> list[ir.Value]:
        op.shape(value)
        sizes = (1, *op.dims(value)) if rank(value) == 1 else op.dims(value)
        to = op.vector(-1, op.dim(value, -1)) if rows else op.vector(0 if rank(value) != 1 else 1, -1)
        flat = op.Reshape(value, to)
        largest = op.Max(op.ReduceMax(flat, [1], keepdims=0), op.Neg(op.ReduceMin(flat, [1], keepdims=0)))
        scale = op.Max(op.Mul(largest, 1 / 127), _TINY)
        narrow = op.QuantizeLinear(flat, scale, axis=0, output_dtype=int(ir.DataType.INT8))
        outer, inner = (sizes[:-1], sizes[-1:]) if rows else (sizes[:1], sizes[1:])
        narrow.shape = ir.Shape([product(outer), product(inner)])
        scale.shape = ir.Shape([product(outer)])
        return [narrow, scale]

    def decode(op: Builder, value: ir.Value, kept: Sequence[ir.Value]) -> ir.Value:
        return op.reshape_like(op.DequantizeLinear(*kept, axis=0), value)

    return Code(encode, decode)


_TINY = 1e-30  # a scale of zeros

# The types of the recipe's field; those of 16 bits by their name.
NARROW: dict[str, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16, "int8": ir.DataType.INT8}


# ---- a stage's graph -------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """A value of the forward, and what the backward reads that follows from it: each with the nodes between, in order."""

    read: dict[ir.Value, tuple[ir.Node, ...]] = field(default_factory=dict)
    first: ir.Node | None = None  # that reads one of them


class _Kept:
    """What the backward of a graph reads of the forward.

    Args:
        graph: a training graph.
        shapes: the sizes of its values.
        masks: whether what follows from a mask and constants alone is made again.
        divided: whether forward and backward are to be two sessions: what other stages are sent or send is then kept apart.
    """

    def __init__(self, graph: ir.Graph, shapes: Shapes, *, masks: bool, divided: bool) -> None:
        self.graph, self.shapes, self._masks = graph, shapes, masks
        self.forward, self.backward = halves(graph)
        self.made = {v for node in self.forward for v in node.outputs}
        self.made |= {v for v in graph.inputs if divided and role(v) == "boundary"}
        fixed = [v for v in graph.outputs if not (divided and role(v) == "boundary")]
        self._fixed = {*fixed, *(v for node in self.backward for v in captured(node))}
        self._of_masks: dict[ir.Value, bool] = {}

    def groups(self) -> dict[ir.Value, _Group]:
        """By the value that they follow from; those that cannot be had again, since they are outputs, are left out."""
        found: dict[ir.Value, _Group] = {}
        fixed: set[ir.Value] = set()
        for node in self.backward:
            for value in read_by(node):
                if value in self.made:
                    source, path = self.source(value)
                    group = found.setdefault(source, _Group(first=node))
                    group.read[value] = path
        fixed = {self.source(v)[0] for v in self._fixed if v in self.made}
        return {source: group for source, group in found.items() if source not in fixed}

    def source(self, value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
        """What a value can be had again from, and by which nodes."""
        path: list[ir.Node] = []
        while (node := value.producer()) is not None and value in self.made:
            before = self._before(node)
            if before is None:
                break
            path.append(node)
            value = before
        return value, tuple(reversed(path))

    def _before(self, node: ir.Node) -> ir.Value | None:
        """The value from which a node's output is had again at next to no cost, if there is one."""
        read = [v for v in node.inputs if v is not None and not v.is_initializer()]
        if node_key(node) in VIEWS:
            return node.inputs[0] if node.inputs[0] in self.made else None
        if self._masks and not node.domain and node.op_type in _OF_MASKS and len(read) == 1 and read[0] in self.made:
            return read[0] if self.source(read[0])[0].dtype == ir.DataType.BOOL else None
        return None

    def bytes(self) -> int:
        """What the backward reads of the forward, views once."""
        read = dict.fromkeys(_viewed(v) for node in self.backward for v in read_by(node) if v in self.made)
        return sum(self.shapes.bytes(v) for v in read if v in self.made)


def _move_comparisons(kept: _Kept) -> None:
    """Move comparisons of the backward into the forward, where numbers are kept for nothing else."""
    able: dict[ir.Node, None] = {}
    found: dict[ir.Value, set[ir.Node]] = {}
    for node in kept.backward:
        read = read_by(node)
        given = all(v in kept.made or v.producer() in able or _at_hand(v) for v in read)
        if given and not node.domain and node.op_type in _MASKS:
            able[node] = None
        for value in read:
            if value in kept.made:
                found.setdefault(kept.source(value)[0], set()).add(node)
    freed = {
        source for source, readers in found.items()
        if source.dtype != ir.DataType.BOOL and kept.shapes.bytes(source) >= _LEAST and readers <= able.keys()
    }  # fmt: skip
    moved: set[ir.Node] = set()
    waiting = [
        node for node in able if any(v in kept.made and kept.source(v)[0] in freed for v in node.inputs if v is not None)
    ]
    while waiting:
        node = waiting.pop()
        if node not in moved:
            moved.add(node)
            waiting += [p for v in node.inputs if v is not None and (p := v.producer()) in able and p is not None]
    place = {node: i for i, node in enumerate(kept.forward)}
    last = {i: node for node, i in place.items()}
    for node in (n for n in able if n in moved):
        at = max((place[p] for v in node.inputs if v is not None and (p := v.producer()) is not None), default=0)
        kept.graph.remove(node)
        kept.graph.insert_after(last[at], node)
        place[node], last[at] = at, node
        node.metadata_props[AHEAD] = "1"


def _at_hand(value: ir.Value) -> bool:
    """Whether a value is given to forward and backward alike."""
    return value.producer() is None and role(value) not in ("boundary", "boundary_gradient")


def _viewed(value: ir.Value) -> ir.Value:
    """The value in whose memory a view lies."""
    while (node := value.producer()) is not None and node_key(node) in VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _compress(c: Compilation, name: str, masks: bool, code_of: Callable[[ir.Value, Shapes], Code | None]) -> None:
    """Keep values of every stage's forward by their codes."""
    binding, waiting = assumed_sizes(c), in_flight(schedule_of(c))
    divided = c.recipe.pipeline.stages > 1
    for stage, phases in enumerate(c.stages):
        if "train" not in phases:
            continue
        graph = phases["train"].graph
        shapes = concrete_sizes(graph, binding)
        peak, before = phase_memory(graph, shapes).peak, _Kept(graph, shapes, masks=masks, divided=divided)
        bytes_before = before.bytes()
        if masks:
            _move_comparisons(before)
        count = _write(_Kept(graph, shapes, masks=masks, divided=divided), name, code_of)
        if count == 0:
            continue
        shapes = concrete_sizes(graph, binding)
        bytes_after = _Kept(graph, shapes, masks=masks, divided=divided).bytes()
        so_far = c.stashed.get(stage, Stashed(values=0, bytes_before=bytes_before, bytes_after=bytes_after))
        c.stashed[stage] = so_far.model_copy(update={"values": so_far.values + count, "bytes_after": bytes_after})
        again = c.recomputed.get(stage)
        if again is not None:
            parked = waiting[stage] - 1 if divided else 0
            less = peak - phase_memory(graph, shapes).peak + parked * (bytes_before - bytes_after)
            c.recomputed[stage] = again.model_copy(update={"memory_after": again.memory_after - less})


def _write(kept: _Kept, name: str, code_of: Callable[[ir.Value, Shapes], Code | None]) -> int:
    """Write encoders and decoders of all values that have a code; how many those are."""
    op, nodes = Builder(kept.graph), list(kept.graph)
    last: dict[ir.Value, int] = {}
    forward = set(kept.forward)
    for i, node in enumerate(nodes):
        if node in forward:
            last.update(dict.fromkeys(map(_viewed, (*read_by(node), *node.outputs)), i))
    chosen = [(source, group, code) for source, group in kept.groups().items() if (code := code_of(source, kept.shapes))]
    chosen.sort(key=lambda item: last.get(item[0], -1))
    coded: list[tuple[ir.Value, _Group, Code, list[ir.Value]]] = []
    for source, group, code in chosen:
        behind = nodes[last.get(source, -1) + 1]
        with op.scope(f"{source.name}.kept", before=behind, origin=source.name or "", pass_=name, ahead="1"):
            coded.append((source, group, code, code.encode(op, source)))
    place = {node: i for i, node in enumerate(kept.backward)}
    waiting = Waiting(op, kept.backward, name)
    guards: dict[ir.Node, Guard] = {}
    for source, group, code, values in sorted(coded, key=lambda item: place[item[1].first]):  # type: ignore[index]
        first = group.first
        assert first is not None
        if first not in guards:
            guards[first] = waiting.until(first)
        late = guards[first].late(values[0], anew="1")
        with op.scope(f"{source.name}.back", before=first, origin=source.name or "", pass_=name, anew="1"):
            again = code.decode(op, source, [late, *values[1:]])
            again.type, again.shape = source.type, source.shape
            made = {source: again}
            for value, path in group.read.items():
                for node in path:
                    attributes: dict[str, Any] = dict(node.attributes)
                    if (old := node.outputs[0]) not in made:
                        made[old] = op.node(
                            node.op_type,
                            *(v if v is None else made.get(v, v) for v in node.inputs),
                            _domain=node.domain,
                            _outputs=[ir.Value(type=old.type, shape=old.shape)],
                            **attributes,
                        )
                for use in tuple(value.uses()):
                    if use.node in place:
                        use.node.replace_input_with(use.idx, made[value])
    for node in reversed(kept.graph):  # a shape that was known after all
        if AHEAD in node.metadata_props and not any(v.uses() for v in node.outputs):
            kept.graph.remove(node, safe=True)
    return len(coded)


# ---- the passes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackStash(Pass):
    """Keeps masks as bits and max-pools' indices as bytes for the backward, where the recipe asks; gradients stay the same."""

    name = "pack-stash"
    after = ("recompute",)

    def run(self, c: Compilation) -> bool:
        if not c.recipe.stash.packed:
            return False
        _compress(c, self.name, True, _exact)
        return True


def _exact(value: ir.Value, shapes: Shapes) -> Code | None:
    if shapes.bytes(value) < _LEAST or rank(value) is None:
        return None
    if value.dtype == ir.DataType.BOOL:
        return Code(_bits, _from_bits)
    node = value.producer()
    pool = node is not None and node_key(node) == ("", "MaxPool") and value is not node.outputs[0]
    return _distances(node) if pool and node is not None else None


@dataclass(frozen=True)
class NarrowStash(Pass):
    """Keeps float32 values for the backward in fewer bits, where the recipe asks: gradients are rounded."""

    name = "narrow-stash"
    after = ("pack-stash",)
    preserves = False

    def run(self, c: Compilation) -> bool:
        if c.recipe.stash.dtype == "fp32":
            return False
        exact = {v for phases in c.stages if "train" in phases for v in of_weights(list(phases["train"].graph))}
        _compress(c, self.name, False, partial(_narrow, NARROW[c.recipe.stash.dtype], exact))
        return True


def _narrow(dtype: ir.DataType, exact: set[ir.Value | None], value: ir.Value, shapes: Shapes) -> Code | None:
    """Of float32 activations; a loss, a norm's statistics, weights and what is small stay exact."""
    node, sizes = value.producer(), shapes.of(value)
    if value.dtype != ir.DataType.FLOAT or shapes.bytes(value) < _LEAST or value in exact or not sizes or sizes[-1] == 1:
        return None
    if node is not None and (
        node_key(node) in VIEWS or value is not node.outputs[0] or node.metadata_props.get("ortc.pass") == "loss"
    ):
        return None
    return _bytes(sizes[-1] >= _ROW) if dtype == ir.DataType.INT8 else _half(dtype)
