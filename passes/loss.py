"""The losses, and the pass that appends them.

A loss is ``f(op, output, labels, *, options…) -> scalar``. Its keyword parameters are the options that a recipe or
``--loss name:key=value`` may set; ``labels`` tells what the target looks like. Formulas are PyTorch's of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, new_graph, of, role, set_role
from ortc.errors import ModelError, RecipeError
from ortc.graph.builder import Builder
from ortc.graph.shapes import Dims, dims, is_float, rank
from ortc.passes.inference import infer_shapes
from ortc.plan import LossInfo
from ortc.recipe import LossTerm
from ortc.rules import LOSSES, loss


def _reduce(op, x, reduction):
    reducers = {"mean": op.ReduceMean, "sum": op.ReduceSum}
    if reduction not in reducers:
        raise RecipeError(f"loss: reduction must be mean or sum, not {reduction!r}")
    return reducers[reduction](x, keepdims=0)


@loss("cross_entropy")
def cross_entropy(op, output, labels, *, axis=-1, ignore_index=-100, class_weights=None, label_smoothing=0.0, reduction="mean"):
    """Softmax cross-entropy: logits against integer classes.

    Of N targets t with weights w (1 without class weights, 0 where ignored) and log-probabilities l over C classes:
    Σ w[t]·((1-ε)·-l[t] + ε/C·Σ_c -w[c]/w[t]·l[c]), divided by Σ w[t] for the mean (Szegedy et al., arXiv 1512.00567, for ε).
    """
    axis = axis % op.rank(output)
    if axis != op.rank(output) - 1 and not (axis == 1 and label_smoothing == 0):
        output = op.Transpose(output, perm=[*(i for i in range(op.rank(output)) if i != axis), axis])
        axis = op.rank(output) - 1
    if axis != 1:
        output, labels = op.Flatten(output, axis=-1), op.Reshape(labels, [-1])
    weights = None if class_weights is None else op.const(np.asarray(class_weights), like=output)
    if label_smoothing == 0:
        return op.SoftmaxCrossEntropyLoss(output, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return _smoothed(op, output, labels, weights, ignore_index, float(label_smoothing), reduction)


def _smoothed(op, output, labels, weights, ignore_index, smoothing, reduction):
    """The general form, on [N, C] logits."""
    valid = op.Not(op.Equal(labels, ignore_index))
    target = op.Where(valid, labels, op.const(0))
    log_prob = op.LogSoftmax(output, axis=-1)
    picked = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(target, [-1]), axis=-1), [-1])
    ones = op.where(valid, 1, 0, like=output)
    weight = ones if weights is None else ones * op.Gather(weights, target, axis=0)
    spread = op.ReduceSum(log_prob if weights is None else log_prob * weights, [-1], keepdims=0)
    per_target = (1 - smoothing) * (weight * picked) + op.cast(
        smoothing / op.size(output, [-1], output) * (ones * spread), output
    )
    total = -op.ReduceSum(per_target, keepdims=0)
    return total / op.ReduceSum(weight, keepdims=0) if reduction == "mean" else total


@loss("mse")
def mse(op, output, labels, *, reduction="mean"):
    """Squared error: (x - y)²"""
    difference = output - labels
    return _reduce(op, difference * difference, reduction)


@loss("l1")
def l1(op, output, labels, *, reduction="mean"):
    """Absolute error: |x - y|"""
    return _reduce(op, op.Abs(output - labels), reduction)


@loss("huber")
def huber(op, output, labels, *, delta=1.0, reduction="mean"):
    """½·d² for |d| <= δ, else δ·(|d| - δ/2), d = x - y (Huber 1964)"""
    distance = op.Abs(output - labels)
    small = op.Min(distance, op.const(float(delta), like=output))
    return _reduce(op, small * (distance - 0.5 * small), reduction)


@loss("bce_with_logits")
def bce_with_logits(op, output, labels, *, pos_weight=None, reduction="mean"):
    """Binary cross-entropy of logits: softplus(x) - x·z; with a weight p of the positives (1-z)·x + (1+(p-1)·z)·softplus(-x)"""
    if pos_weight is None:
        return _reduce(op, op.Softplus(output) - output * labels, reduction)
    weight = op.const(np.asarray(pos_weight), like=output)
    positives = 1 + (weight - 1) * labels
    return _reduce(op, (1 - labels) * output + positives * op.Softplus(-output), reduction)


# ---- the targets ------------------------------------------------------------------------------------------------------

INTEGER_TARGETS = {"cross_entropy"}
WANTS_LOGITS = {"cross_entropy": ("Softmax", "LogSoftmax", "Sigmoid"), "bce_with_logits": ("Sigmoid", "Softmax")}


def _class_axis(term: LossTerm, output: ir.Value) -> int:
    r = rank(output)
    axis = int(term.options.get("axis", -1))
    if r is None or r < 2 or not -r <= axis < r:
        raise RecipeError(f"loss cross_entropy: output {output.name!r} of rank {r} has no class axis {axis}")
    return axis % r


def _target_shape(term: LossTerm, output: ir.Value) -> Dims | None:
    shape = dims(output)
    if shape is None or term.name not in INTEGER_TARGETS:
        return shape
    axis = _class_axis(term, output)
    return shape[:axis] + shape[axis + 1 :]


@dataclass(frozen=True)
class AttachLoss(Pass):
    """Appends the loss: the graph's first output becomes the total, the model's own outputs follow.

    Where only a part is at hand, that is of the last stage.
    """

    name = "loss"
    after = ("choose-parameters", "simplify")

    def run(self, c: Compilation) -> None:
        for value in c.graph.inputs:
            if role(value) is None:
                set_role(value, "data", of=value.name)
        if c.part is not None and not c.part.is_last:
            return
        terms = [(t, "as the recipe says") for t in c.recipe.loss] or [_recognise(c.graph)]
        outputs = {of(v): v for v in c.graph.outputs}
        data = [of(v) for v in c.graph.inputs if role(v) == "data"]
        resolved = [(_name_target(_resolve(t, outputs), data, list(outputs)), why) for t, why in terms]
        criterion = new_graph("criterion", c.target.opset, c.target.ir_version)
        criterion_inputs = {name: _copy_input(criterion.graph, v) for name, v in outputs.items()}
        total, c.losses = append_losses(c.graph, resolved, outputs, c)
        criterion_total, _ = append_losses(criterion.graph, resolved, criterion_inputs, None)
        criterion.graph.outputs.append(set_role(criterion_total, "loss"))
        for value in list(criterion.graph.inputs):
            if not value.uses() and not value.is_graph_output():
                criterion.graph.inputs.remove(value)
        c.graphs["criterion"] = criterion
        c.graph.outputs.insert(0, set_role(total, "loss"))
        infer_shapes(c.model)


def append_losses(
    graph: ir.Graph, terms: list[tuple[LossTerm, str]], outputs: dict[str, ir.Value], c: Compilation | None
) -> tuple[ir.Value, list[LossInfo]]:
    """Append the weighted sum of the terms; returns the scalar and what the plan says of each."""
    op = Builder(graph)
    divided = c is not None and c.recipe.pipeline.divided
    parts: list[ir.Value] = []
    infos: list[LossInfo] = []
    targets: dict[str, ir.Value] = {}
    for term, why in terms:
        assert term.output is not None
        output = outputs[term.output]
        with op.scope("loss", origin="loss", rule=term.name, pass_="loss"):
            if term.name == "none":
                shape, key = dims(output), None
                if shape is None or any(d != 1 for d in shape):
                    has = "an unknown shape" if shape is None else f"shape {list(shape)}"
                    raise RecipeError(f"loss none: output {term.output!r} must be a scalar, it has {has}")
                value = op.Reshape(output, np.array([], np.int64)) if rank(output) else output
            elif term.name in LOSSES:
                key = term.labels
                chosen = _summed(term) if divided else term
                value = _options_checked(chosen)(op, output, _label_input(graph, op, term, output, targets))
            else:
                from ortc.passes.user_loss import append_user_loss

                value, key = append_user_loss(graph, op, term, outputs, targets)
            if c is not None:
                _warn(c, term, output)
            value = value if term.weight == 1 else op.Mul(value, float(term.weight))
            if divided:
                value = op.Mul(value, _part_weight(graph, op, len(infos), value))
            parts.append(value)
        infos.append(_describe(term, why, output, key))
    with op.scope("loss", origin="loss", pass_="loss"):
        total = parts[0] if len(parts) == 1 else op.Sum(*parts)
        if total.producer() is None or role(total) is not None or total.is_graph_output():
            total = op.Identity(total)
    total.name = op.names.fresh("loss")
    total.shape = ir.Shape(())
    return total, infos


def _summed(term: LossTerm) -> LossTerm:
    """The term over a micro-batch: the sum over targets, since the mean over none of them is no number."""
    return term.model_copy(update={"options": {**term.options, "reduction": "sum"}})


def _part_weight(graph: ir.Graph, op: Builder, term: int, like: ir.Value) -> ir.Value:
    """What the sum over a micro-batch's targets is multiplied with: one over those of the whole batch, for the mean."""
    value = ir.Value(name=op.names.fresh("loss_weight"), type=like.type, shape=ir.Shape(()))
    graph.inputs.append(set_role(value, "scalar", of=f"loss_weight.{term}"))
    return value


def _options_checked(term: LossTerm) -> Callable[[Any, ir.Value, ir.Value], ir.Value]:
    declared = LOSSES[term.name]
    unknown = [k for k in term.options if k not in declared.options]
    if unknown:
        known = ", ".join(declared.options)
        raise RecipeError(f"loss {term.name}: there is no option {unknown[0]!r}; there are {known}")
    for option, value in term.options.items():
        default = declared.options[option]
        if not _fits(value, default):
            wanted = "numbers" if default is None else f"a {type(default).__name__}"
            raise RecipeError(f"loss {term.name}: {option} must be {wanted}, not {value!r}")
    return lambda op, output, labels: declared.function(op, output, labels, **term.options)


def _fits(value: Any, default: Any) -> bool:
    """Whether an option is of its default's type; those without one are numbers, or lists of them."""
    if default is None:
        return value is None or all(_fits(v, 0.0) for v in (value if isinstance(value, list) else [value]))
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is type(default)


def _resolve(term: LossTerm, outputs: dict[str, ir.Value]) -> LossTerm:
    if term.output is not None:
        if term.output not in outputs:
            raise RecipeError(f"loss {term.name}: the model has no output {term.output!r}; there are {', '.join(outputs)}")
        output = outputs[term.output]
    else:
        floats = [v for v in outputs.values() if is_float(v)]
        if not floats:
            raise ModelError(_no_float_output(outputs.values()))
        output = floats[0]
    if not is_float(output):
        raise RecipeError(f"loss {term.name}: output {of(output)!r} is not floating point")
    if term.name != "none" and term.name not in LOSSES and not term.name.endswith(".onnx") and ".py:" not in term.name:
        known = ", ".join([*LOSSES, "none"])
        raise RecipeError(f"loss: there is no loss {term.name!r}; there are {known}, or a file: LOSS.onnx, LOSS.py:FUNCTION")
    return term.model_copy(update={"output": of(output)})


def _recognise(graph: ir.Graph) -> tuple[LossTerm, str]:
    """The loss of a model whose recipe names none."""
    floats = [v for v in graph.outputs if is_float(v)]
    for value in floats:
        if dims(value) == ():
            return LossTerm(name="none", output=of(value)), f"output {of(value)!r} is a float scalar"
    for value in floats:
        shape = dims(value)
        if shape is not None and len(shape) in (2, 3) and isinstance(shape[-1], int) and shape[-1] > 1:
            reason = f"output {of(value)!r} of shape {list(shape)} looks like scores of {shape[-1]} classes"
            return LossTerm(name="cross_entropy", output=of(value)), reason
    if not floats:
        raise ModelError(_no_float_output(graph.outputs))
    return LossTerm(name="mse", output=of(floats[0])), f"output {of(floats[0])!r} has no class dimension"


def _no_float_output(outputs: Iterable[ir.Value]) -> str:
    has = ", ".join(f"{of(v)!r} ({v.dtype.name.lower() if v.dtype else 'of unknown type'})" for v in outputs)
    return (
        f"no output of the model is floating point, so no loss can be computed from it; there are {has}. "
        "An integer-only or quantised model cannot be trained; export it in floating point."
    )


def _name_target(term: LossTerm, data: Sequence[str], outputs: Sequence[str]) -> LossTerm:
    """The term with the name under which a batch holds its target: one that no input or output of the model has."""
    if term.name not in LOSSES:
        return term
    for names, what in ((data, "a data input"), (outputs, "an output")):
        if term.labels in names:
            raise RecipeError(f"loss {term.name}: labels={term.labels!r} is {what} of the model; choose another name")
    key = term.labels or "labels"
    while key in data or key in outputs:
        key = f"{key}_target"
    return term.model_copy(update={"labels": key})


def _label_input(graph: ir.Graph, op: Builder, term: LossTerm, output: ir.Value, targets: dict[str, ir.Value]) -> ir.Value:
    key = term.labels
    assert key is not None
    dtype = ir.DataType.INT64 if term.name in INTEGER_TARGETS else output.dtype
    shape = _target_shape(term, output)
    if key in targets:
        have = targets[key]
        if have.dtype != dtype or dims(have) != shape:
            raise RecipeError(f"two losses read {key!r} with different types or shapes; give each its own labels=NAME")
        return have
    return add_target(graph, op, key, dtype, shape, targets)


def add_target(
    graph: ir.Graph, op: Builder, key: str, dtype: ir.DataType | None, shape: Dims | None, targets: dict[str, ir.Value]
) -> ir.Value:
    """A new graph input for a target."""
    value = ir.Value(name=op.names.fresh(key), type=ir.TensorType(dtype or ir.DataType.FLOAT))
    value.shape = None if shape is None else ir.Shape(shape)
    graph.inputs.append(set_role(value, "label", of=key))
    targets[key] = value
    return value


def _describe(term: LossTerm, why: str, output: ir.Value, key: str | None) -> LossInfo:
    integer = term.name in INTEGER_TARGETS
    classes = None
    if integer:
        shape = dims(output)
        size = shape[_class_axis(term, output)] if shape else None
        classes = size if isinstance(size, int) else None
    ignore = int(term.options.get("ignore_index", -100)) if integer else None
    return LossInfo(
        name=term.name,
        output=term.output or "",
        labels=key,
        weight=term.weight,
        axis=_class_axis(term, output) if integer and rank(output) else None,
        classes=classes,
        ignore_index=ignore,
        class_weights=term.options.get("class_weights") if integer else None,
        reduction=term.options.get("reduction", "mean") if term.name in LOSSES else "samples",
        chosen=why,
    )


def _warn(c: Compilation, term: LossTerm, output: ir.Value) -> None:
    producer = output.producer()
    if producer is not None and producer.op_type in WANTS_LOGITS.get(term.name, ()):
        c.warnings.append(
            f"output {of(output)!r} comes from {producer.op_type} (node {producer.name!r}), but {term.name} wants logits: "
            "the loss applies it a second time; name the output before it, or choose another loss"
        )


def _copy_input(graph: ir.Graph, value: ir.Value) -> ir.Value:
    copy = ir.Value(name=value.name, type=value.type, shape=value.shape)
    graph.inputs.append(set_role(copy, "output", of=of(value)))
    return copy
