"""Counter-based random numbers, written in integer operators.

A random tensor is a pure function of (seed, step, micro-batch, node, element): recomputed it is the same, a restored run
continues it, and stages need no shared generator. The mixing function is the 32-bit finaliser ``lowbias32`` (C. Wellons,
hash-prospector, 2018: two multiplications, bias 0.17); int32 products wrap around, as in two's complement.

    key     = mix(mix(mix(mix(seed) + step) + micro_batch) + node)      node: a hash of its name
    bits[i] = mix(key + i · (2·mix(key + 1) + 1))        an odd stride per key, so that streams do not overlap
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortc.compiler import set_role
from ortc.errors import ModelError
from ortc.graph.builder import Builder
from ortc.graph.names import take_place
from ortc.graph.shapes import constant

_INT32, _UINT32 = int(ir.DataType.INT32), int(ir.DataType.UINT32)
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)


def _int32(bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).astype(np.int32)


def _number(node: ir.Node) -> int:
    """A node's own number, the same however the graph around it is cut or changed (CRC-32, of ITU-T V.42)."""
    return zlib.crc32((node.name or "").encode())


class Randomness:
    """Writes random tensors into one training graph; its counters are inputs of role ``scalar``."""

    def __init__(self, op: Builder) -> None:
        self.op = op
        self._base: ir.Value | None = None

    def replace(self, node: ir.Node) -> None:
        """Replace a random operator by its counter-based form."""
        base = self._counters(node)
        with self.op.scope(
            node.name or node.op_type,
            before=node,
            origin=node.name or "",
            rule=node.op_type,
            pass_="training-form",
        ):
            key = self._mix(self.op.Add(base, _int32(_number(node))))
            values = RANDOM[node.op_type](self, node, key)
        for old, new in zip(node.outputs, values, strict=False):
            take_place(old, new)
        self.op.graph.remove(node, safe=True)

    def _counters(self, first: ir.Node) -> ir.Value:
        """The key of this seed, step and micro-batch, made once."""
        if self._base is None:
            op = self.op
            with op.scope("random", before=first, rule="counter", pass_="training-form"):
                key: ir.Value | None = None
                for counter in ("seed", "step", "micro_batch"):
                    scalar = ir.Value(name=op.names.fresh(counter), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
                    op.graph.inputs.append(set_role(scalar, "scalar", of=counter))
                    low = op.Cast(scalar, to=_INT32)
                    key = self._mix(low if key is None else op.Add(key, low))
            self._base = key
        assert self._base is not None
        return self._base

    def _mix(self, x: ir.Value) -> ir.Value:
        """lowbias32 of an int32 tensor, as int32."""
        op = self.op
        for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
            unsigned = op.Cast(x, to=_UINT32)
            mixed = op.BitwiseXor(unsigned, op.BitShift(unsigned, np.array(shift, np.uint32), direction="RIGHT"))
            x = op.Cast(mixed, to=_INT32)
            if multiplier is not None:
                x = op.Mul(x, _int32(multiplier))
        return x

    def bits(self, key: ir.Value, shape: ir.Value, stream: int = 0) -> ir.Value:
        """Uniform int32 numbers in a shape given as an int64 vector."""
        op = self.op
        if stream:
            key = self._mix(op.Add(key, _int32(0x9E3779B9 * stream & 0xFFFFFFFF)))
        stride = op.Add(op.Mul(self._mix(op.Add(key, _int32(1))), _int32(2)), _int32(1))
        count = op.Cast(op.ReduceProd(shape, keepdims=0), to=_INT32)
        index = op.Range(_int32(0), count, _int32(1))
        flat = self._mix(op.Add(op.Mul(index, stride), key))
        return op.Reshape(flat, shape)

    def uniform(self, key: ir.Value, shape: ir.Value, dtype: ir.DataType, stream: int = 0) -> ir.Value:
        """Uniform floats in (0, 1): 23 bits and a half, so that neither end occurs."""
        op = self.op
        unsigned = op.BitShift(op.Cast(self.bits(key, shape, stream), to=_UINT32), np.array(9, np.uint32), direction="RIGHT")
        return (op.Cast(unsigned, to=int(dtype)) + 0.5) * 2.0**-23


def _dropout(random: Randomness, node: ir.Node, key: ir.Value) -> tuple[ir.Value, ...]:
    """y = x · mask / (1 - ratio); an element is kept where its bits lie in the upper 1 - ratio of their range."""
    op = random.op
    x = node.inputs[0]
    assert x is not None
    ratio = constant_ratio(node)
    threshold = np.array(round(ratio * 2**32) - 2**31 if ratio < 1 else 2**31 - 1).clip(-(2**31), 2**31 - 1)
    kept = op.GreaterOrEqual(random.bits(key, op.shape(x)), threshold.astype(np.int32))
    kept.shape = x.shape
    scale = op.where(kept, 1 / (1 - ratio) if ratio < 1 else 0, 0, like=x)
    return x * scale, kept


def _shape_of(op: Builder, node: ir.Node) -> ir.Value:
    if node.inputs and node.inputs[0] is not None:
        return op.shape(node.inputs[0])
    return op.const(np.asarray(node.attributes["shape"].as_ints(), np.int64))


def _dtype_of(node: ir.Node) -> ir.DataType:
    if "dtype" in node.attributes:
        return ir.DataType(node.attributes["dtype"].as_int())
    like = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    return like or ir.DataType.FLOAT


def _random_uniform(random: Randomness, node: ir.Node, key: ir.Value) -> tuple[ir.Value, ...]:
    """low + (high - low)·u"""
    low, high = node.attributes.get_float("low", 0.0), node.attributes.get_float("high", 1.0)
    return (low + (high - low) * random.uniform(key, _shape_of(random.op, node), _dtype_of(node)),)


def _random_normal(random: Randomness, node: ir.Node, key: ir.Value) -> tuple[ir.Value, ...]:
    """mean + scale·√(-2 ln u)·cos 2πv (Box & Muller 1958)"""
    op, shape, dtype = random.op, _shape_of(random.op, node), _dtype_of(node)
    radius = op.Sqrt(-2.0 * op.Log(random.uniform(key, shape, dtype)))
    angle = op.Cos(2 * math.pi * random.uniform(key, shape, dtype, stream=1))
    return (node.attributes.get_float("mean", 0.0) + node.attributes.get_float("scale", 1.0) * (radius * angle),)


def _bernoulli(random: Randomness, node: ir.Node, key: ir.Value) -> tuple[ir.Value, ...]:
    """1 where u < p"""
    op = random.op
    p = node.inputs[0]
    assert p is not None and p.dtype is not None
    drawn = op.Less(random.uniform(key, op.shape(p), p.dtype), p)
    return (op.Cast(drawn, to=int(_dtype_of(node))),)


RANDOM: dict[str, Callable[[Randomness, ir.Node, ir.Value], tuple[ir.Value, ...]]] = {
    "Dropout": _dropout,
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "Bernoulli": _bernoulli,
}


def constant_ratio(node: ir.Node) -> float:
    """Dropout's ratio; it must be known when compiling."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    if ratio is None:
        return 0.5
    array = constant(ratio)
    if array is None:
        raise ModelError(f"node {node.name!r} (Dropout): its ratio must be a constant")
    return float(array.reshape(()))
