"""Matrix products."""

from __future__ import annotations

from ortc.rules import gradient

_MATMUL = (
    {"A": (2, 3), "B": (3, 4)},
    {"A": (5, 2, 3), "B": (3, 4)},
    {"A": (2, 3), "B": (5, 3, 4)},
    {"A": (5, 1, 2, 3), "B": (4, 3, 2)},
    {"A": (3,), "B": (3,)},
    {"A": (3,), "B": (5, 3, 4)},
    {"A": (5, 2, 3), "B": (3,)},
)


@gradient("MatMul", samples=_MATMUL)
def matmul(op, A, B, dY):
    """dA = dY · Bᵀ, dB = Aᵀ · dY

    A vector is a matrix of one row (A) or one column (B). A weight (a matrix under a batch of them) gets its gradient
    as one product over the flattened batch, not as a sum of many.
    """
    rank_a, rank_b = op.rank(A), op.rank(B)
    a = op.Unsqueeze(A, [0]) if rank_a == 1 else A
    b = op.Unsqueeze(B, [1]) if rank_b == 1 else B
    if rank_a == 1:
        dY = op.Unsqueeze(dY, [-2] if rank_b > 1 else [-1])
    if rank_b == 1:
        dY = op.Unsqueeze(dY, [-1])
    dA = op.MatMul(dY, op.transpose_last(b))
    if op.rank(b) == 2 and op.rank(a) > 2:
        dB = op.MatMul(op.Transpose(_rows(op, a), perm=[1, 0]), _rows(op, dY))
    else:
        dB = op.MatMul(op.transpose_last(a), dY)
    return (
        op.Squeeze(dA, [-2]) if rank_a == 1 else dA,
        op.Squeeze(dB, [-1]) if rank_b == 1 else dB,
    )


def _rows(op, x):
    """[…, n] as a matrix of n columns."""
    width = op.dims(x)[-1]
    if isinstance(width, int):
        return op.Reshape(x, [-1, width])
    return op.Flatten(x, axis=-1)


@gradient(
    "Gemm",
    samples=(
        {"A": (2, 3), "B": (3, 4), "C": (4,)},
        {"A": (3, 2), "B": (4, 3), "C": (2, 1), "transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
        {"A": (2, 3), "B": (4, 3), "transB": 1},
    ),
)
def gemm(op, A, B, C, dY, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """Y = α·A'·B' + β·C:  dA' = α·dY·B'ᵀ, dB' = α·A'ᵀ·dY, dC = β·dY"""
    product = {"alpha": float(alpha)} if alpha != 1 else {}
    dA = op.Gemm(B, dY, transA=transB, transB=1, **product) if transA else op.Gemm(dY, B, transB=1 - transB, **product)
    dB = op.Gemm(dY, A, transA=1, transB=transA, **product) if transB else op.Gemm(A, dY, transA=1 - transA, **product)
    dC = dY if beta == 1 else float(beta) * dY
    return dA, dB, dC
