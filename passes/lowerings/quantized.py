"""Products with quantised weights, so that a gradient reaches their float input: adapters train over frozen weights."""

from __future__ import annotations

import numpy as np

from ortc.rules import Unsupported, lowering


@lowering("com.microsoft::MatMulNBits")
def matmul_n_bits(op, A, B, scales, zero_points=None, g_idx=None, bias=None, *, K, N, bits=4, block_size, accuracy_level=0):
    """Y = A · Wᵀ, W [N, K] of blocks of ``block_size`` along K: (packed - zero point) · scale, the lowest bits first"""
    if g_idx is not None:
        raise Unsupported("g_idx")
    if bits not in (2, 4, 8):
        raise Unsupported(f"bits={bits}")
    blocks = -(-K // block_size)
    levels = op.Reshape(_unpack(op, B, bits), [N, blocks, block_size])
    scale = op.Reshape(scales, [N, blocks, 1])
    if zero_points is None:
        zero = op.const(float(2 ** (bits - 1)), like=A)
    elif op.is_float(zero_points):
        zero = op.Reshape(op.cast(zero_points, A), [N, blocks, 1])
    else:
        packed = op.Reshape(zero_points, [N, -1])
        rows = op.Slice(op.Reshape(_unpack(op, packed, bits), [N, -1]), [0], [blocks], [1])
        zero = op.cast(op.Reshape(rows, [N, blocks, 1]), A)
    weight = op.Reshape((op.cast(levels, A) - zero) * op.cast(scale, A), [N, -1])
    if blocks * block_size != K:
        weight = op.Slice(weight, [0], [K], [1])
    product = op.MatMul(A, op.Transpose(weight, perm=[1, 0]))
    return (product if bias is None else product + bias,)


def _unpack(op, packed, bits):
    """The unsigned numbers in each byte along a new last axis, the lowest bits first."""
    if bits == 8:
        return packed
    mask = op.const(np.array(2**bits - 1, np.uint8))
    parts = []
    for shift in range(0, 8, bits):
        moved = op.BitShift(packed, np.array(shift, np.uint8), direction="RIGHT") if shift else packed
        parts.append(op.Unsqueeze(op.BitwiseAnd(moved, mask), [-1]))
    return op.Concat(*parts, axis=-1)
