"""Normalisations. x̂ = (X - μ)·σ⁻¹ over the normalised axes; of g = dY·scale the gradient is σ⁻¹·(g - mean g - x̂·mean(g·x̂))
(Ioffe & Szegedy, arXiv 1502.03167; Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

import numpy as np

from ortc.rules import gradient

_VARIANCE = np.array([0.5, 1.5, 0.8])
_MEAN = np.array([0.1, -0.4, 0.3])


def _through(op, g, normal, inverse, axes):
    """σ⁻¹·(g - mean g - x̂·mean(g·x̂))"""
    shift = op.ReduceMean(g, axes, keepdims=1)
    stretch = op.ReduceMean(g * normal, axes, keepdims=1)
    return inverse * (g - shift - normal * stretch)


def _statistics(op, x, axes, epsilon):
    """x̂ and σ⁻¹ of the population over the axes."""
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1) + epsilon))
    return centred * inverse, inverse


def _per_channel(op, vector, x):
    """A vector over the channels, to broadcast against ``x`` [N, C, …]."""
    return op.Reshape(vector, [-1, *[1] * (op.rank(x) - 2)])


def _channel_sum(op, x):
    """Sum over everything but the channels."""
    return op.ReduceSum(x, [0, *range(2, op.rank(x))], keepdims=0)


@gradient(
    "LayerNormalization",
    samples=(
        {"X": (2, 3, 4), "Scale": (4,), "B": (4,)},
        {"X": (2, 3, 4), "Scale": (3, 4), "axis": 1, "epsilon": 1e-3},
        {"X": (2, 3, 4), "Scale": (4,), "_outputs": 3},
        {"X": (2, 3, 4), "Scale": (4,), "_outputs": ["unused_y", "out1", "out2"]},
    ),
)
def layer_normalization(op, X, Scale, Mean, InvStdDev, dY, dMean, dInvStdDev, *, axis=-1, epsilon=1e-5, stash_type=1):
    """dX as above, dScale = Σ dY·x̂, dB = Σ dY; the mean and σ⁻¹ are the forward's own, dμ/dX = 1/n, dσ⁻¹/dX = -x̂·σ⁻²/n"""
    axes = list(range(axis % op.rank(X), op.rank(X)))
    inverse = op.cast(InvStdDev, X)
    normal = (X - op.cast(Mean, X)) * inverse
    parts = [] if dY is None else [_through(op, dY * Scale, normal, inverse, axes)]
    if dMean is not None:
        parts.append(op.expand_like(op.cast(dMean, X) / op.size(X, axes, like=X), X))
    if dInvStdDev is not None:
        parts.append(normal * (-op.cast(dInvStdDev, X) * inverse * inverse / op.size(X, axes, like=X)))
    dX = parts[0] if len(parts) == 1 else op.Sum(*parts)
    return (dX, None, None) if dY is None else (dX, dY * normal, dY)


@gradient(
    "BatchNormalization",
    wrt="X scale B",
    samples=(
        {"X": (2, 3, 4), "scale": (3,), "B": (3,), "input_mean": _MEAN, "input_var": _VARIANCE},
        {"X": (4, 3), "scale": (3,), "B": (3,), "input_mean": _MEAN, "input_var": _VARIANCE, "epsilon": 1e-3},
        {
            **{"X": (4, 3, 2, 2), "scale": (3,), "B": (3,), "input_mean": _MEAN, "input_var": _VARIANCE},
            **{"training_mode": 1, "_outputs": ["out0", "unused_mean", "unused_var"]},
        },
    ),
)
def batch_normalization(op, X, scale, input_mean, input_var, dY, *, epsilon=1e-5, training_mode=0, momentum=0.9):
    """With stored statistics dX = dY·scale·σ⁻¹; on the batch as above, with c = X - μ
    scale·σ⁻¹·(dY - mean dY - c·σ⁻²·mean(dY·c)). dscale = σ⁻¹·Σ dY·c, dB = Σ dY"""
    axes = [0, *range(2, op.rank(X))]
    mean = op.ReduceMean(X, axes, keepdims=1) if training_mode else _per_channel(op, op.cast(input_mean, X), X)
    centred = X - mean
    if training_mode:
        inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1) + float(epsilon)))
    else:
        inverse = _per_channel(op, op.cast(op.Reciprocal(op.Sqrt(input_var + float(epsilon))), X), X)
    gain = _per_channel(op, op.cast(scale, X), X) * inverse
    product, total = op.ReduceSum(dY * centred, axes, keepdims=1), op.ReduceSum(dY, axes, keepdims=1)
    dX = dY * gain
    if training_mode:
        count = op.size(X, axes, like=X)
        dX = dX - centred * (gain * inverse * inverse * (product / count)) - gain * (total / count)
    return dX, op.cast(op.reshape_like(product * inverse, scale), scale), op.cast(op.reshape_like(total, scale), scale)


@gradient("InstanceNormalization", samples=({"input": (2, 3, 4, 2), "scale": (3,), "B": (3,)},))
def instance_normalization(op, input, scale, doutput, *, epsilon=1e-5):
    """As above over the spatial axes; dscale, dB summed per channel"""
    axes = list(range(2, op.rank(input)))
    normal, inverse = _statistics(op, input, axes, float(epsilon))
    dX = _through(op, doutput * _per_channel(op, scale, input), normal, inverse, axes)
    return dX, _channel_sum(op, doutput * normal), _channel_sum(op, doutput)


@gradient("GroupNormalization", samples=({"X": (2, 4, 3, 2), "scale": (4,), "bias": (4,), "num_groups": 2, "stash_type": 11},))
def group_normalization(op, X, scale, dY, *, num_groups, epsilon=1e-5, stash_type=1):
    """As above over each group of channels and the spatial axes (Wu & He, arXiv 1803.08494)"""
    grouped = op.Reshape(X, [0, num_groups, -1])
    normal, inverse = _statistics(op, grouped, [2], float(epsilon))
    g = op.Reshape(dY * _per_channel(op, scale, X), [0, num_groups, -1])
    dX = op.reshape_like(_through(op, g, normal, inverse, [2]), X)
    return dX, _channel_sum(op, dY * op.reshape_like(normal, X)), _channel_sum(op, dY)
