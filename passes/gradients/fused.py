"""ortc's own operators, which fusions make and lowerings write out again: their gradients need less than their parts' do."""

from __future__ import annotations

from ortc.passes.gradients.activations import gelu
from ortc.rules import gradient

_ROWS = (2, 3, 4)

# What the rules read of the forward is always made with the operator.
_TWO = {"_outputs": ["out0", "unused_1"]}
_THREE = {"_outputs": ["out0", "unused_1", "unused_2"]}


@gradient("ortc::Swish", inputs="X", outputs="Y", samples=({"X": _ROWS}, {"X": _ROWS, "alpha": 1.702}))
def swish(op, X, dY, *, alpha=1.0):
    """Y = X·s, s = sigmoid(αX):  dX = dY·(s + αX·s·(1 - s)), from X alone (Ramachandran et al., arXiv 1710.05941)"""
    line = X if alpha == 1 else X * float(alpha)
    s = op.Sigmoid(line)
    return dY * (s * (1 + line * (1 - s)))


@gradient(
    "ortc::BiasGelu",
    inputs="A B",
    outputs="Y",
    samples=({"A": _ROWS, "B": (4,)}, {"A": _ROWS, "B": (4,), "approximate": "tanh"}),
)
def bias_gelu(op, A, B, dY, *, approximate="none"):
    """Y = gelu(A + B): dA and, summed, dB are gelu's gradient; the sum is made again"""
    g = gelu(op, A + B, dY, approximate=approximate)
    return g, g


@gradient(
    "ortc::RMSNormalization",
    inputs="X scale",
    outputs="Y InvRMS",
    samples=({"X": _ROWS, "scale": (4,), **_TWO}, {"X": _ROWS, "scale": (3, 4), "axis": 1, "epsilon": 1e-3, **_TWO}),
)
def rms_normalization(op, X, scale, InvRMS, dY, *, axis=-1, epsilon=1e-5):
    """n = X/√(mean X² + ε), g = dY·scale:  dX = (g - n·mean(g·n))/√…, dscale = Σ dY·n (Zhang & Sennrich, arXiv 1910.07467)"""
    axes = list(range(axis % op.rank(X), op.rank(X)))
    normal = X * InvRMS
    g = dY * scale
    return InvRMS * (g - normal * op.ReduceMean(g * normal, axes, keepdims=1)), dY * normal


@gradient(
    "ortc::SoftmaxDropout",
    wrt="X",
    inputs="X mask",
    outputs="Y weights",
    samples=({"X": _ROWS, "mask": _ROWS, **_TWO}, {"X": _ROWS, "mask": (3, 1), "axis": 1, **_TWO}),
)
def softmax_dropout(op, Y, weights, dY, *, axis=-1):
    """Y = P·mask, P = softmax X:  dX = dY·Y - P·Σ dY·Y along the axis: the mask is not read again"""
    weighted = dY * Y
    return weighted - weights * op.ReduceSum(weighted, [axis], keepdims=1)


@gradient(
    "ortc::Attend",
    wrt="scores V",
    inputs="scores V mask",
    outputs="Y weights dropped",
    samples=(
        {"scores": (2, 2, 3, 5), "V": (2, 2, 5, 4), **_THREE},
        {"scores": (2, 3, 5), "V": (2, 5, 4), "mask": (2, 3, 5), **_THREE},
        {"scores": (2, 3, 5), "V": (1, 5, 4), "guarded": 1, **_THREE},
    ),
)
def attend(op, V, mask, Y, weights, dropped, dY, *, guarded=0):
    """Y = D·V, D = P·mask, P = softmax(scores):

    dV = Dᵀ·dY;  dscores = D·(dY·Vᵀ) - P·Σ dY·Y, a sum over V's channels and not over all keys
    (Dao et al., arXiv 2205.14135, B.2).
    """
    rows = op.ReduceSum(dY * Y, [-1], keepdims=1)
    back = op.MatMul(dY, op.transpose_last(V))
    if mask is None:
        return weights * (back - rows), op.MatMul(op.transpose_last(weights), dY)
    return dropped * back - weights * rows, op.MatMul(op.transpose_last(dropped), dY)
