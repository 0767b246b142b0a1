"""A batch in micro-batches, and what each counts in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ortc.errors import DataError
from ortc.plan import LossInfo
from ortc.runtime.batch import Batch, BatchCheck
from ortc.runtime.stage import Part


def parts_of(
    batch: Mapping[str, np.ndarray], count: int, inputs: BatchCheck, losses: Sequence[LossInfo], weighted: bool
) -> list[Part]:
    """Cut a batch along its samples into at most ``count`` micro-batches, as equal as can be, and check each.

    An array is cut if its first dimension is that of the samples, or a multiple; others go whole to every micro-batch.

    Args:
        batch: arrays by name.
        count: how many micro-batches; of a batch of fewer samples, one each.
        inputs: the model's inputs.
        losses: the terms of the loss.
        weighted: whether the graphs sum over targets and want to know what that is to be multiplied with.

    Raises:
        DataError: the batch does not fit.
    """
    inputs.check_names(batch)
    arrays = {name: np.asarray(batch[name]) for name in inputs.ports}
    samples, fixed = inputs.samples(arrays), inputs.fixed_batch_size()
    if count > 1 and fixed is not None and samples != fixed * count:
        raise DataError(
            f"the batch has {samples} samples; the model takes batches of {fixed} only, and a step has {count} micro-batches: "
            f"give it {fixed * count} samples"
        )
    edges = edges_of(samples, min(count, max(samples, 1)))
    pieces = [inputs.fit(_slice(arrays, inputs, samples, a, b)) for a, b in pairwise(edges)]
    counts = np.array([[_count(loss, piece, inputs) for loss in losses] for piece in pieces], np.float64)
    return [Part(i, piece, _weights(losses, counts, i) if weighted else {}) for i, piece in enumerate(pieces)]


def share_of(samples: int, count: int, replica: int, replicas: int) -> slice:
    """The samples of a batch that are in a replica's micro-batches."""
    parts = min(count, max(samples, 1))
    edges, dealt = edges_of(samples, parts), edges_of(parts, replicas)
    return slice(edges[dealt[replica]], edges[dealt[replica + 1]])


def edges_of(count: int, parts: int) -> list[int]:
    """Where parts of equal size, or one less, begin and end."""
    return [i * count // parts for i in range(parts + 1)]


def read_whole(inputs: BatchCheck) -> frozenset[str]:
    """The arrays that a replica needs all of: targets, which are counted, and those that go to every micro-batch."""
    inner = {d for port in inputs.ports.values() for d in (port.shape or [])[1:]}
    return frozenset(
        name
        for name, port in inputs.ports.items()
        if port.role == "label" or not port.shape or (isinstance(port.shape[0], str) and port.shape[0] in inner)
    )


def _slice(arrays: Batch, inputs: BatchCheck, samples: int, start: int, end: int) -> Batch:
    whole = start == 0 and end == samples
    return {
        name: a if whole or not _is_cut(name, a, inputs, samples) else _rows(a, samples, start, end)
        for name, a in arrays.items()
    }


def _is_cut(name: str, array: np.ndarray, inputs: BatchCheck, samples: int) -> bool:
    shape = inputs.ports[name].shape
    inner = {d for port in inputs.ports.values() for d in (port.shape or [])[1:]}
    if shape and isinstance(shape[0], str) and shape[0] in inner:
        return False  # another size than the batch's, though the numbers may agree
    if array.ndim == 0 or array.shape[0] % samples or array.shape[0] < samples:
        return False
    fixed = shape is not None and isinstance(shape[0], int)
    return not fixed or shape[0] != array.shape[0]  # type: ignore[index]


def _rows(array: np.ndarray, samples: int, start: int, end: int) -> np.ndarray:
    each = array.shape[0] // samples
    return array[start * each : end * each]


def _count(loss: LossInfo, batch: Batch, inputs: BatchCheck) -> float:
    """What the mean of a term is taken over: its targets that are not ignored, by their classes' weights."""
    if loss.reduction == "samples" or loss.labels is None:
        return float(inputs.samples(batch))
    targets = batch[loss.labels]
    if loss.ignore_index is not None:
        targets = targets[targets != loss.ignore_index]
    if loss.class_weights is not None:
        return float(np.asarray(loss.class_weights, np.float64)[targets].sum())
    return float(targets.size)


def _weights(losses: Sequence[LossInfo], counts: np.ndarray, part: int) -> dict[str, float]:
    weights = {}
    for k, loss in enumerate(losses):
        total = counts[:, k].sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            share = counts[part, k] / total if loss.reduction == "samples" else np.float64(1) / total
        weights[f"loss_weight.{k}"] = 1.0 if loss.reduction == "sum" else float(share)
    return weights
