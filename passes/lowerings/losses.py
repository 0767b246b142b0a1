"""Losses in plain operators.

Measured on [512, 50257] float32 with one thread (ONNX Runtime 1.19.2): the kernel of SoftmaxCrossEntropyLoss takes 109-150 ms,
LogSoftmax and GatherElements 8.6 ms.
"""

from __future__ import annotations

from ortc.rules import Unsupported, lowering


@lowering("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op, scores, labels, weights=None, *, ignore_index=None, reduction="mean"):
    """l = log softmax X;  loss = -Σ w[t]·l[t] / Σ w[t] for the mean, w = 0 where ignored, 1 without weights"""
    if op.rank(scores) != 2:
        raise Unsupported("its classes are not the last axis")
    log_prob = op.LogSoftmax(scores, axis=1)
    weight = None
    if ignore_index is not None:
        valid = op.Not(op.Equal(labels, ignore_index))
        labels = op.Where(valid, labels, op.const(0, like=labels))
        weight = op.cast(valid, scores)
    if weights is not None:
        per_target = op.Gather(weights, labels, axis=0)
        weight = per_target if weight is None else weight * per_target
    picked = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(labels, [1]), axis=1), [1])
    loss = -picked if weight is None else -(weight * picked)
    if reduction == "none":
        return loss, log_prob
    total = op.ReduceSum(loss, keepdims=0)
    if reduction == "mean":
        total = total / (op.size(loss, like=scores) if weight is None else op.ReduceSum(weight, keepdims=0))
    return total, log_prob
