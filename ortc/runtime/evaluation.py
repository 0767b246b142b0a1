"""What a model is judged by beside its loss: metrics that add up over batches, and which evaluation was the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ortc.errors import DataError, OrtcError, RecipeError
from ortc.plan import LossInfo, Plan
from ortc.runtime.batch import key
from ortc.runtime.stage import open_session

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A number over an evaluation: sums over batches, and what is made of them in the end.

    Attributes:
        name: what it is called in the metrics file (``eval_<name>``) and to ``--best``.
        better: which end is the better one.
        sums: of the targets and the model's outputs of a batch (float64, of the same length in every batch).
        value: of the sums over all batches.
    """

    name: str
    better: Literal["max", "min"]
    sums: Callable[[Arrays, int], np.ndarray]
    value: Callable[[np.ndarray], float]


def make_metrics(plan: Plan, names: Sequence[str], threads: int | None) -> list[Metric]:
    """The metrics of an evaluation.

    Args:
        plan: whose losses say what is a class, and which targets are ignored.
        names: ``accuracy``, ``perplexity``, ``f1``, or paths of ONNX files (see :func:`_of_file`).
        threads: of the files' sessions.

    Raises:
        RecipeError: there is no such metric, or it does not fit the model's losses.
        OrtcError: a file cannot be opened, or reads what the model has not.
    """
    made: list[Metric] = []
    for name in dict.fromkeys(names):
        if name in BUILT_IN:
            made.append(BUILT_IN[name](_classifying(plan, name)))
        elif name.endswith(".onnx"):
            made += _of_file(plan, Path(name), threads)
        else:
            raise RecipeError(f"there is no metric {name!r}: take one of {', '.join(BUILT_IN)}, or a file METRIC.onnx")
    return made


def _classifying(plan: Plan, name: str) -> LossInfo:
    fits = ("cross_entropy",) if name == "perplexity" else ("cross_entropy", "bce_with_logits")
    for loss in plan.losses:
        if loss.name in fits and loss.labels:
            return loss
    raise RecipeError(f"the metric {name} is for a model whose loss is {' or '.join(fits)}; this one has {plan.losses[0].name}")


def _scores(loss: LossInfo, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Of N targets that are not ignored the scores [N, classes] and the classes [N]; of binary targets the decisions."""
    output, labels = arrays[loss.output], arrays[loss.labels or ""]
    if loss.name == "bce_with_logits":
        return (output.reshape(-1) > 0).astype(np.int64), (labels.reshape(-1) > 0.5).astype(np.int64)
    axis = output.ndim - 1 if loss.axis is None else loss.axis
    rows = np.moveaxis(output, axis, -1).reshape(-1, output.shape[axis])
    targets = labels.reshape(-1)
    counted = targets != loss.ignore_index
    return rows[counted], targets[counted]


def _decided(loss: LossInfo, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    scores, targets = _scores(loss, arrays)
    return (scores.argmax(-1) if scores.ndim == 2 else scores), targets


def _accuracy(loss: LossInfo) -> Metric:
    """The part of the targets whose class has the highest score; of binary ones, those on the right side of 0."""

    def sums(arrays: Arrays, samples: int) -> np.ndarray:
        decided, targets = _decided(loss, arrays)
        return np.array([(decided == targets).sum(), targets.size], np.float64)

    return Metric("accuracy", "max", sums, lambda total: total[0] / total[1])


def _perplexity(loss: LossInfo) -> Metric:
    """exp of the mean negative log-probability of the targets, natural logarithm; class weights and smoothing do not count."""

    def sums(arrays: Arrays, samples: int) -> np.ndarray:
        scores, targets = _scores(loss, arrays)
        scores = scores.astype(np.float64)
        highest = scores.max(-1, keepdims=True)
        log_total = np.log(np.exp(scores - highest).sum(-1)) + highest[:, 0]
        return np.array([(log_total - scores[np.arange(targets.size), targets]).sum(), targets.size])

    return Metric("perplexity", "min", sums, lambda total: math.exp(min(total[0] / total[1], 700.0)))


def _f1(loss: LossInfo) -> Metric:
    """2·TP / (2·TP + FP + FN); of classes the mean over those that are a target or were decided on (macro), of two-sided
    targets that of the positive side."""
    binary = loss.name == "bce_with_logits"
    if not binary and loss.classes is None:
        raise RecipeError("the metric f1 wants to know the number of classes, which the model's output leaves open")
    classes = 2 if loss.classes is None else loss.classes

    def sums(arrays: Arrays, samples: int) -> np.ndarray:
        decided, targets = _decided(loss, arrays)
        right = np.bincount(targets[decided == targets], minlength=classes)
        wrong = decided != targets
        false = [np.bincount(side[wrong], minlength=classes) for side in (decided, targets)]
        return np.stack([right, *false]).astype(np.float64)

    def value(total: np.ndarray) -> float:
        right, false_positive, false_negative = total
        seen = 2 * right + false_positive + false_negative
        each = 2 * right / np.maximum(seen, 1)
        return float(each[1]) if binary else float(each[seen > 0].mean())

    return Metric("f1", "max", sums, value)


BUILT_IN: dict[str, Callable[[LossInfo], Metric]] = {"accuracy": _accuracy, "perplexity": _perplexity, "f1": _f1}


def _of_file(plan: Plan, path: Path, threads: int | None) -> list[Metric]:
    """The outputs of the user's graph, by their names. It reads outputs, inputs and targets of the model by theirs; what it
    makes of a batch, a scalar or a value per sample, is averaged over the samples."""
    if not path.is_file():
        raise OrtcError(f"there is no metric {path}")
    session = open_session(str(path), f"the metric {path}", plan.target, plan.sessions.others, threads)
    ports = [p for s in plan.stages for g in s.phases.values() for p in (*g.inputs, *g.outputs)]
    known = dict.fromkeys(key(p) for p in ports if p.role in ("data", "label", "output"))
    reads = [i.name for i in session.get_inputs()]
    for name in reads:
        if name not in known:
            raise OrtcError(f"the metric {path} reads {name!r}, which the model has not; it has {', '.join(known)}")

    def sums_of(output: str) -> Callable[[Arrays, int], np.ndarray]:
        def sums(arrays: Arrays, samples: int) -> np.ndarray:
            try:
                made = np.asarray(session.run([output], {name: arrays[name] for name in reads})[0], np.float64)
            except KeyError as error:
                raise OrtcError(f"the metric {path} reads {error}, which another rank makes: run it in one process") from None
            except Exception as error:
                raise DataError(f"the metric {path} fails: {str(error).splitlines()[0]}") from None
            return np.array([made.mean() * samples, samples])

        return sums

    return [Metric(o.name, "max", sums_of(o.name), lambda total: total[0] / total[1]) for o in session.get_outputs()]


# Which evaluation is the best


@dataclass(frozen=True)
class Goal:
    """What an evaluation is judged by: ``loss`` or a metric's name, and which end is better."""

    metric: str
    better: Literal["max", "min"]

    @staticmethod
    def parse(text: str, metrics: Sequence[Metric]) -> Goal:
        """``accuracy``, ``min:my_metric``.

        Raises:
            RecipeError: if no evaluation has it.
        """
        side, colon, name = text.rpartition(":")
        known: dict[str, Literal["max", "min"]] = {"loss": "min", **{m.name: m.better for m in metrics}}
        if name not in known or (colon and side not in ("min", "max")):
            raise RecipeError(f"--best {text}: there is {', '.join(known)}; min:NAME or max:NAME says which end is better")
        return Goal(name, side or known[name])  # type: ignore[arg-type]

    def judged(self, best: Mapping[str, Any] | None, found: Mapping[str, float], step: int) -> dict[str, Any]:
        """The best so far, with the number of evaluations since (``stale``)."""
        value = found[self.metric]
        if best is None or (best["metric"], best["better"]) != (self.metric, self.better):
            best = {"metric": self.metric, "better": self.better, "value": None, "step": step, "stale": 0}
        before = best["value"]
        improved = before is None or (value > before if self.better == "max" else value < before)
        if math.isfinite(value) and improved:
            return {**best, "value": value, "step": step, "stale": 0}
        return {**best, "stale": best["stale"] + 1}
