"""Normalisations. x̂ = (X - μ)·σ⁻¹ over the normalised axes; of g = dY·scale the gradient is σ⁻¹·(g - mean g - x̂·mean(g·x̂))
(Ioffe & Szegedy, arXiv 1502.03167; Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

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


_BATCH_NORM = {"input_mean": _MEAN, "input_var": _VARIANCE}


@gradient(
    "BatchNormalization",
    wrt="X scale B",
    samples=(
        {"X": (2, 3, 4), "scale": (3,), "B": (3,), **_BATCH_NORM},
        {"X": (4, 3), "scale": (3,), "B": (3,), **_BATCH_NORM, "epsilon": 1e-3},
        {
            **{"X": (4, 3, 2, 2), "scale": (3,), "B": (3,), **_BATCH_NORM},
            **{"training_mode": 1, "_outputs": ["out0", "unused_mean", "unused_var"]},
        },
    ),
)
def batch_normalization(op, X, scale, input_mean, input_var, dY, *, epsilon=1e-5, training_mode=0, momentum=0.9):
    """With stored statistics dX = dY·scale·σ⁻¹, dscale = σ⁻¹·Σ dY·(X - μ), dB = Σ dY; on the batch as
    com.microsoft::BatchNormInternal, with the batch's statistics made again"""
    if training_mode:
        axes = [0, *range(2, op.rank(X))]
        mean = op.ReduceMean(X, axes, keepdims=1)
        inverse = op.Reciprocal(op.Sqrt(op.ReduceMean((X - mean) * (X - mean), axes, keepdims=1) + float(epsilon)))
        return _batch_norm_grad(op, dY, X, scale, *(op.Reshape(v, [-1]) for v in (mean, inverse)), epsilon)
    inverse = op.cast(op.Reciprocal(op.Sqrt(input_var + float(epsilon))), X)
    centred = X - _per_channel(op, op.cast(input_mean, X), X)
    dscale = _channel_sum(op, dY * centred) * inverse
    gain = _per_channel(op, op.cast(scale, X) * inverse, X)
    return dY * gain, op.cast(dscale, scale), op.cast(_channel_sum(op, dY), scale)


@gradient(
    "com.microsoft::BatchNormInternal",
    wrt="X scale B",
    inputs="X scale B input_mean input_var",
    outputs="Y running_mean running_var saved_mean saved_inv_std",
    samples=(
        {"X": (4, 3, 2, 2), "scale": (3,), "B": (3,), **_BATCH_NORM, "_outputs": ["out0", *(f"unused_{i}" for i in range(4))]},
        {
            "X": (5, 3),
            "scale": (3,),
            "B": (3,),
            **_BATCH_NORM,
            "epsilon": 1e-3,
            "_outputs": ["out0", *(f"unused_{i}" for i in range(4))],
        },
    ),
)
def batch_norm_internal(op, X, scale, saved_mean, saved_inv_std, dY, *, epsilon=1e-5):
    """The training kernel, of the statistics that the forward has: dX as above, dscale = σ⁻¹·Σ dY·(X - μ), dB = Σ dY"""
    return _batch_norm_grad(op, dY, X, scale, saved_mean, saved_inv_std, epsilon)


def _batch_norm_grad(op, dY, X, scale, mean, inverse, epsilon):
    """The training kernel, which wants ε and does not use it; passes/lowerings/normalization.py has it for targets without."""
    outputs = [ir.Value(type=v.type, shape=v.shape) for v in (X, scale, scale)]
    statistics = {"epsilon": float(epsilon), "_domain": "com.microsoft", "_outputs": outputs}
    return op.BatchNormalizationGrad(dY, X, scale, mean, inverse, **statistics)


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
