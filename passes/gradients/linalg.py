"""Matrix products, Einsum, determinants."""

from __future__ import annotations

import string

import numpy as np

from ortc.rules import Unsupported, gradient

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


@gradient(
    "Einsum",
    samples=(
        {"Inputs": [(2, 3), (3, 4)], "equation": "ij,jk->ik"},
        {"Inputs": [(2, 3), (3, 4)], "equation": "ij, jk"},
        {"Inputs": [(5, 2, 3), (3, 4)], "equation": "...ij,jk->...ik"},
        {"Inputs": [(5, 2, 3), (1, 3, 4)], "equation": "...ij,...jk->...ki"},
        {"Inputs": [(5, 2, 3), (5, 2, 3)], "equation": "...i,...i"},
        {"Inputs": [(2, 3, 4), (2, 3, 4), (4,)], "equation": "bij,bkj,j->bik"},
        {"Inputs": [(3,), (4,)], "equation": "i,j->ij"},
        {"Inputs": [(2, 3)], "equation": "ij->i"},
        {"Inputs": [(2, 3), (2, 4)], "equation": "ij,ik->j"},
        {"Inputs": [(2, 3, 4)], "equation": "bij->jbi"},
        {"Inputs": [(3, 3)], "equation": "ii->i"},
        {"Inputs": [(3, 3)], "equation": "ii"},
        {"Inputs": [(2, 3, 3), (3, 2)], "equation": "bii,ij->bj"},
    ),
)
def einsum(op, Inputs, dOutput, *, equation):
    """An operand's gradient is the Einsum of dY and the other operands onto its labels.

    A label that only this operand has was summed: a vector of ones repeats the gradient along it. A label that it has
    twice was read on the diagonal: an identity matrix puts the gradient there.
    """
    terms, result = _labels(equation if isinstance(equation, str) else equation.decode(), [op.rank(x) for x in Inputs])
    sizes = {}  # more than one per label where an operand is (or may be) broadcast along it
    for x, term in zip(Inputs, terms, strict=True):
        for label, size in zip(term, op.dims(x), strict=True):
            sizes.setdefault(label, set()).add(object() if size is None else size)
    gradients = []
    for position, (x, term) in enumerate(zip(Inputs, terms, strict=True)):
        operands = [dOutput, *Inputs[:position], *Inputs[position + 1 :]]
        labels = [result, *terms[:position], *terms[position + 1 :]]
        target = ""
        for axis, label in enumerate(term):
            if label in target:
                size, twin = op.dim(x, axis), _fresh_label("".join([target, *terms, *labels]))
                numbers = op.Range(op.const(0), op.Squeeze(op.vector(size)), op.const(1))
                operands.append(op.cast(op.Equal(op.Unsqueeze(numbers, [1]), numbers), x))
                labels.append(label + twin)
                label = twin
            elif not any(label in other for other in labels):
                operands.append(op.Expand(op.const(1, like=x), op.vector(op.dim(x, axis))))
                labels.append(label)
            target += label
        like = x if all(len(sizes[label]) == 1 for label in term) else None
        gradients.append(op.Einsum(*operands, equation=f"{','.join(labels)}->{target}", _like=like))
    return gradients


def _labels(equation, ranks):
    """The labels of every operand and of the result, the ellipsis spelled out and the implicit result made explicit."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        result = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    hidden = [rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    spelled = ""
    for _ in range(max(hidden)):
        spelled += _fresh_label(equation + spelled)
    terms = [t.replace("...", spelled[len(spelled) - n :]) for t, n in zip(terms, hidden, strict=True)]
    return terms, result.replace("...", spelled)


def _fresh_label(taken):
    return next(c for c in string.ascii_letters if c not in taken)


@gradient("Det", samples=({"X": (3, 3)}, {"X": (2, 4, 4)}, {"X": (1, 1)}, {"X": np.array([[1.0, 2.0], [2.0, 4.0]])}))
def det(op, X, dY):
    """dX = dY · the matrix of cofactors (also right where X is singular), each a determinant: for small matrices"""
    n, r = op.dim(X, op.rank(X) - 1), op.rank(X)
    if isinstance(n, int) and n > 8:
        raise Unsupported(f"a matrix of {n} rows; up to 8 are covered")
    size = op.Squeeze(op.vector(n))
    row = op.Unsqueeze(op.Range(op.const(0), size, op.const(1)), [1])
    column = op.Range(op.const(0), op.Sub(size, 1), op.const(1))
    others = op.Where(op.Less(column, row), column, op.Add(column, 1))  # row i: every number but i
    minors = op.Gather(op.Gather(X, others, axis=r - 2), others, axis=r)  # […, i, rows, j, columns]
    minors = op.Transpose(minors, perm=[*range(r - 2), r - 2, r, r - 1, r + 1])
    odd = op.Mod(row + op.Squeeze(row, [1]), 2)
    cofactors = op.Det(minors) * op.cast(1 - 2 * odd, X)
    return op.Mul(op.Unsqueeze(dY, [-2, -1]), cofactors, _like=X)


@gradient(
    "com.microsoft::Inverse",
    inputs="X",
    outputs="Y",
    samples=({"X": np.array([[2.0, 1.0], [-0.5, 1.5]])}, {"X": np.eye(3) + np.arange(18.0).reshape(2, 3, 3) % 5 / 8}),
)
def inverse(op, Y, dY):
    """dX = -Yᵀ·dY·Yᵀ"""
    turned = op.transpose_last(Y)
    return -op.MatMul(op.MatMul(turned, dY), turned)
