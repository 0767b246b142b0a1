"""The losses of the standard.

As in PyTorch, class weights get no gradient; and where every target is ignored the mean is 0/0, its gradient 0.
"""

from __future__ import annotations

import numpy as np

from ortc.rules import gradient

_LABELS = np.array([2, 0, 3, 0])
_PIXELS = np.array([[[1, 0], [2, 2], [1, 0]], [[0, 0], [1, 2], [2, 1]]])
_WEIGHTS = np.array([0.5, 1.5, 2.0, 0.7])


def _factors(op, labels, weights, dloss, ignore_index, reduction):
    """Labels with class 0 in place of the ignored, and what each label's loss is multiplied with in Σ dloss · loss.

    The factor is a scalar where all are equal, else of the labels' shape.
    """
    valid = None if ignore_index is None else op.Not(op.Equal(labels, ignore_index))
    if valid is not None:
        labels = op.where(valid, labels, 0, like=labels)
    weight = None if weights is None else op.Gather(weights, labels)
    if reduction == "mean":
        counted = weight
        if valid is not None:
            counted = op.cast(valid, dloss) if weight is None else op.where(valid, weight, 0, like=dloss)
        dloss = dloss / (op.size(labels, like=dloss) if counted is None else op.ReduceSum(counted, keepdims=0))
    factor = dloss if weight is None else dloss * weight
    return labels, factor if valid is None else op.where(valid, factor, 0, like=dloss)


def _each(op, factor):
    """The factors along the classes of [N, C, …]"""
    return op.Unsqueeze(factor, [1]) if op.rank(factor) else factor


def _subtract_at(op, x, labels, each):
    """``x`` [N, C, …] minus each label's factor at its class."""
    places = op.Unsqueeze(labels, [1])
    return op.ScatterElements(x, places, op.expand_like(-each, places), axis=1, reduction="add", _like=x)


@gradient(
    "SoftmaxCrossEntropyLoss",
    wrt="scores",
    samples=(
        {"scores": (4, 5), "labels": _LABELS},
        {"scores": (4, 5), "labels": _LABELS, "_outputs": 2},
        {"scores": (4, 5), "labels": _LABELS, "reduction": "none"},
        {"scores": (4, 4), "labels": _LABELS.astype(np.int32), "weights": _WEIGHTS, "_constants": "weights"},
        {"scores": (4, 5), "labels": _LABELS, "ignore_index": 0, "_outputs": 2},
        {"scores": (4, 5), "labels": np.array([2, -100, 3, -100]), "ignore_index": -100, "reduction": "sum"},
        {"scores": (2, 3, 3, 2), "labels": _PIXELS, "reduction": "sum"},
        {"scores": (2, 4, 3, 2), "labels": _PIXELS, "weights": _WEIGHTS, "ignore_index": 1, "_constants": "weights"},
        {"scores": (2, 4, 3, 2), "labels": _PIXELS, "weights": _WEIGHTS, "ignore_index": 1, "reduction": "none"},
    ),
)
def softmax_cross_entropy_loss(op, labels, weights, log_prob, doutput, dlog_prob, *, ignore_index=None, reduction="mean"):
    """dscores = f · (softmax - one-hot), f a label's factor; and of log_prob: dL - softmax · Σ dL over the classes

    One exponential, one product and one subtraction at the labels in its place: no one-hot matrix. (Measured on
    [512, 50257]: half the time of LogSoftmax's rule after that of a gather.)
    """
    probability, total = op.Exp(log_prob), None
    if doutput is not None:
        labels, factor = _factors(op, labels, weights, doutput, ignore_index, reduction)
        each = _each(op, factor)
        total = _subtract_at(op, op.Mul(probability, each, _like=log_prob), labels, each)
    if dlog_prob is not None:
        direct = dlog_prob - probability * op.ReduceSum(dlog_prob, [1], keepdims=1)
        total = direct if total is None else total + direct
    return total


@gradient(
    "NegativeLogLikelihoodLoss",
    wrt="input",
    samples=(
        {"input": (4, 5), "target": _LABELS},
        {"input": (4, 5), "target": _LABELS, "ignore_index": 0, "reduction": "none"},
        {"input": (4, 4), "target": _LABELS, "weight": _WEIGHTS, "reduction": "sum", "_constants": "weight"},
        {"input": (2, 4, 3, 2), "target": _PIXELS, "weight": _WEIGHTS, "ignore_index": 1, "_constants": "weight"},
    ),
)
def negative_log_likelihood_loss(op, input, target, weight, dloss, *, ignore_index=None, reduction="mean"):
    """dX = -f at the labels, f a label's factor"""
    labels, factor = _factors(op, target, weight, dloss, ignore_index, reduction)
    return _subtract_at(op, op.zeros_like(input), labels, _each(op, factor))
