"""Batch norm on the statistics of the batch, and its gradient (Ioffe & Szegedy, arXiv 1502.03167), in standard operators."""

from __future__ import annotations

from ortc.rules import lowering


@lowering("com.microsoft::BatchNormInternal")
def batch_norm_internal(op, X, scale, B, input_mean, input_var, *, epsilon=1e-5, momentum=0.9, training_mode=1):
    """With a momentum of 0 the running statistics of the standard's operator are the batch's, which the gradient reads"""
    # ONNX Runtime writes them over the statistics that it is given, even where those are read again or are the caller's.
    overwritten = (op.cast(op.Less(v, v), v) for v in (input_mean, input_var))
    Y, mean, variance = op.BatchNormalization(
        X, scale, B, *overwritten, epsilon=epsilon, momentum=0.0, training_mode=training_mode, _outputs=3
    )
    running = (old * momentum + new * (1 - momentum) for old, new in ((input_mean, mean), (input_var, variance)))
    return Y, *running, mean, op.Reciprocal(op.Sqrt(variance + float(epsilon)))


@lowering("com.microsoft::BatchNormalizationGrad")
def batch_normalization_grad(op, dY, X, scale, mean, inverse, *, epsilon=1e-5):
    """With c = X - μ: dX = scale·σ⁻¹·(dY - mean dY - c·σ⁻²·mean(dY·c)), dscale = σ⁻¹·Σ dY·c, dB = Σ dY"""
    axes, one_channel = [0, *range(2, op.rank(X))], [-1, *[1] * (op.rank(X) - 2)]
    mean, inverse, gain = (op.Reshape(op.cast(v, X), one_channel) for v in (mean, inverse, scale))
    centred, gain, count = X - mean, gain * inverse, op.size(X, axes, like=X)
    product, total = op.ReduceSum(dY * centred, axes, keepdims=1), op.ReduceSum(dY, axes, keepdims=1)
    dX = dY * gain - centred * (gain * inverse * inverse * (product / count)) - gain * (total / count)
    return dX, *(op.cast(op.reshape_like(v, scale), scale) for v in (product * inverse, total))
