"""Fusions: several operators that stand for one.

There are two kinds. Those to an operator of the standard are made before the loss is, so that evaluation and mixed precision
see them. The others are to operators of ortc's own, which exist for their gradients: they are made in each stage's training
graph right before those are, and lowered again. Which are on is decided by measurement (``[fusions]`` of the target;
bench/fusions.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass
from ortc.graph.shapes import Dims, constant, dims, rank
from ortc.plan import RewriteInfo
from ortc.rewrite import REWRITES, Hit, apply_rewrites, commutative, number, rewrite

commutative("Add", "Mul")


class Fusion(Pass):
    """A pass that applies the rewrites that are declared under its name."""

    optional = alone = True
    after: ClassVar[tuple[str, ...]] = ("simplify",)

    def run(self, c: Compilation) -> bool:
        """Replace all matches in the model, or in the stages' training graphs once there are stages."""
        return bool(self.replace(c, self.name))

    def replace(self, c: Compilation, group: str) -> list[Hit]:
        """Apply the rewrites declared under a name, and note how often each did."""
        cuts = {name for cut in c.recipe.pipeline.cuts for name in cut.split(",")}
        hits = [hit for model in training_graphs(c) for hit in apply_rewrites(model.graph, REWRITES[group], self.name, cuts)]
        counts = Counter(hit.rule for hit in hits)
        c.rewrites += [RewriteInfo(by=group, rule=rule, count=count) for rule, count in sorted(counts.items())]
        return hits


def training_graphs(c: Compilation) -> list[ir.Model]:
    """The stages' training graphs, or the model as long as there are none."""
    return [phases["train"] for phases in c.stages if "train" in phases] if c.stages else [c.model]


# ---- layer normalisation -----------------------------------------------------------------------------------------------


def _last_axes(x: ir.Value, *axes: ir.Value) -> int | None:
    """The first of the axes, negative, if all of these constants are the same axes of ``x``, the last ones."""
    r = rank(x)
    found = [constant(a) for a in axes]
    if r is None or any(a is None for a in found):
        return None
    sets = [sorted(int(i) % r for i in a.flat) for a in found if a is not None]
    first = sets[0][0] if sets[0] else r
    return first - r if sets[0] and all(s == list(range(first, r)) for s in sets) else None


def _fits(x: ir.Value, axis: int | None, *scales: ir.Value) -> bool:
    """Whether scale and bias have an element for each of the normalised axes'."""
    known = dims(x)
    return axis is not None and known is not None and all(dims(s) == known[axis:] for s in scales)


def _centred(op: Any, x: Any, axes: Any) -> Any:
    return x - op.ReduceMean(x, axes, keepdims=1)


# x² and x/√v
_SQUARES: tuple[Callable[[Any, Any], Any], ...] = (lambda op, x: op.Pow(x, 2), lambda op, x: x * x)
_QUOTIENTS: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda op, x, v: x / op.Sqrt(v),
    lambda op, x, v: x * op.Reciprocal(op.Sqrt(v)),
    lambda op, x, v: x * (1.0 / op.Sqrt(v)),
    lambda op, x, v: x * op.Pow(v, -0.5),
)


def _declare_layer_norm(square: Callable[..., Any], quotient: Callable[..., Any]) -> None:
    def normal(op, x, axes, axes2, epsilon):
        centred = _centred(op, x, axes)
        return quotient(op, centred, op.ReduceMean(square(op, centred), axes2, keepdims=1) + epsilon)

    sample = {"x": (2, 3, 4), "axes": np.array([-1]), "axes2": np.array([2]), "epsilon": np.float32(1e-5), "scale": (4,)}
    rewrite(
        "layer-norm",
        before=lambda op, x, axes, axes2, epsilon, scale, bias: normal(op, x, axes, axes2, epsilon) * scale + bias,
        after=lambda op, x, axes, epsilon, scale, bias: op.LayerNormalization(
            x, scale, bias, axis=_last_axes(x, axes), epsilon=number(epsilon)
        ),
        when=lambda x, axes, axes2, epsilon, scale, bias: (
            number(epsilon) is not None and _fits(x, _last_axes(x, axes, axes2), scale, bias)
        ),
        tolerance=1e-5,
        samples=({**sample, "bias": (4,)},),
    )
    rewrite(
        "layer-norm",
        before=lambda op, x, axes, axes2, epsilon, scale: normal(op, x, axes, axes2, epsilon) * scale,
        after=lambda op, x, axes, epsilon, scale: op.LayerNormalization(
            x, scale, axis=_last_axes(x, axes), epsilon=number(epsilon)
        ),
        when=lambda x, axes, axes2, epsilon, scale: number(epsilon) is not None and _fits(x, _last_axes(x, axes, axes2), scale),
        tolerance=1e-5,
        samples=(sample,),
    )


def _declare_rms_norm(square: Callable[..., Any], quotient: Callable[..., Any]) -> None:
    rewrite(
        "rms-norm",
        before=lambda op, x, axes, epsilon, scale: (
            quotient(op, x, op.ReduceMean(square(op, x), axes, keepdims=1) + epsilon) * scale
        ),
        after=lambda op, x, axes, epsilon, scale: op.node(
            "RMSNormalization", x, scale, _domain="ortc", axis=_last_axes(x, axes), epsilon=number(epsilon),
            _outputs=_values(x, dims(x), _ones_from(x, _last_axes(x, axes))),
        ),
        when=lambda x, axes, epsilon, scale: number(epsilon) is not None and _fits(x, _last_axes(x, axes), scale),
        tolerance=1e-5,
        samples=({"x": (2, 3, 4), "axes": np.array([-1]), "epsilon": np.float32(1e-5), "scale": (4,)},),
    )  # fmt: skip


def _values(like: ir.Value, *shapes: Dims | None) -> list[ir.Value]:
    """Outputs of a node, of a value's type, and of shapes that ONNX cannot infer."""
    return [ir.Value(type=like.type, shape=None if s is None else ir.Shape(s)) for s in shapes]


def _ones_from(x: ir.Value, axis: int | None) -> Dims:
    known = dims(x)
    assert known is not None and axis is not None
    return (*known[:axis], *[1] * -axis)


for _square in _SQUARES:
    for _quotient in _QUOTIENTS:
        _declare_layer_norm(_square, _quotient)
        _declare_rms_norm(_square, _quotient)


@dataclass(frozen=True)
class FuseLayerNorm(Fusion):
    """Writes (x - mean)/√(variance + ε)·scale + bias over the last axes as LayerNormalization."""

    name = "layer-norm"


@dataclass(frozen=True)
class FuseRMSNorm(Fusion):
    """Takes x/√(mean x² + ε)·scale over the last axes as one operator, whose gradient is two sums over them."""

    name = "rms-norm"
    after = ("stages",)


# ---- activations -------------------------------------------------------------------------------------------------------

rewrite(
    "silu",
    before=lambda op, x: x * op.Sigmoid(x),
    after=lambda op, x: op.node("Swish", x, _domain="ortc"),
    samples=({"x": (2, 3)},),
)
rewrite(
    "silu",
    name="swish",
    before=lambda op, x, alpha: x * op.Sigmoid(x * alpha),
    after=lambda op, x, alpha: op.node("Swish", x, _domain="ortc", alpha=number(alpha)),
    when=lambda alpha: number(alpha) is not None,
    samples=({"x": (2, 3), "alpha": np.float32(1.702)},),
)
rewrite(
    "bias-gelu",
    before=lambda op, x, y, approximate: op.Gelu(x + y, approximate=approximate),
    after=lambda op, x, y, approximate: op.node(
        "BiasGelu", *((x, y) if rank(y) == 1 else (y, x)), _domain="ortc", approximate=approximate
    ),
    when=lambda x, y: 1 in (rank(x), rank(y)) and rank(x) != rank(y),
    samples=({"x": (2, 3, 4), "y": (4,), "approximate": "none"}, {"x": (4,), "y": (2, 4), "approximate": "tanh"}),
)


@dataclass(frozen=True)
class FuseSilu(Fusion):
    """Takes x·sigmoid(α·x) as one operator, whose backward makes the sigmoid again and keeps x alone."""

    name = "silu"
    after = ("stages",)


@dataclass(frozen=True)
class FuseBiasGelu(Fusion):
    """Takes the GELU of a sum with a bias as one operator, whose backward makes the sum again."""

    name = "bias-gelu"
    after = ("stages", "gelu")


# ---- softmax, dropout, attention ---------------------------------------------------------------------------------------

rewrite(
    "softmax-dropout",
    before=lambda op, x, axis, kept, scale, zero: op.Softmax(x, axis=axis) * op.Where(kept, scale, zero),
    after=lambda op, x, axis, kept, scale, zero: op.node(
        "SoftmaxDropout", x, op.Where(kept, scale, zero), _domain="ortc", axis=axis, _outputs=_values(x, dims(x), dims(x))
    ),
    when=lambda scale, zero: number(scale) is not None and number(zero) == 0,
    samples=(
        {"x": (2, 3, 4), "axis": 1, "kept": np.arange(24).reshape(2, 3, 4) % 3 > 0, "scale": np.float32(1.5),
         "zero": np.float32(0)},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FuseSoftmaxDropout(Fusion):
    """Takes dropout of a softmax as one operator, whose backward does not read the mask again."""

    name = "softmax-dropout"
    after = ("stages",)

    def run(self, c: Compilation) -> bool:
        """The shape of a mask is asked of something else first."""
        return _look_past_softmax(c) | super().run(c)


def _look_past_softmax(c: Compilation) -> bool:
    """Whoever wants the shape of a softmax, as dropout does, looks at its input: so nothing else reads what is fused."""
    found = False
    for model in training_graphs(c):
        for node in model.graph:
            if node.op_type == "Softmax" and not node.domain:
                for user, index in list(node.outputs[0].uses()):
                    if user.op_type == "Shape" and not user.domain:
                        user.replace_input_with(index, node.inputs[0])
                        found = True
    return found


# Of the scores of attention, before the softmax: a factor goes to the queries, which are fewer numbers, and a mask that selects
# becomes one that is added: ONNX Runtime's Where takes seven times as long as its Add, and so does the gradient.
rewrite(
    "attention-scores",
    name="scaled",
    before=lambda op, q, k, factor: op.MatMul(q, k) * factor,
    after=lambda op, q, k, factor: op.MatMul(q * factor, k),
    when=lambda q, k, factor: number(factor) is not None and _is_narrow(q, k),
    samples=({"q": (2, 3, 4), "k": (2, 4, 5), "factor": np.float32(0.5)},),
)
rewrite(
    "attention-scores",
    name="scaled",
    before=lambda op, q, k, divisor: op.MatMul(q, k) / divisor,
    after=lambda op, q, k, divisor: op.MatMul(q / divisor, k),
    when=lambda q, k, divisor: bool(number(divisor)) and _is_narrow(q, k),
    samples=({"q": (2, 3, 4), "k": (2, 4, 5), "divisor": np.float32(2)},),
)
rewrite(
    "attention-scores",
    name="masked",
    before=lambda op, x, hidden, fill, axis: op.Softmax(op.Where(hidden, fill, x), axis=axis),
    after=lambda op, x, hidden, fill, axis: op.Softmax(x + op.Where(hidden, fill, op.const(0, like=x)), axis=axis),
    when=lambda x, hidden, fill: _hides(x, hidden, fill),
    samples=({"x": (2, 3, 5), "hidden": np.arange(15).reshape(3, 5) % 4 == 1, "fill": np.float32(-np.inf), "axis": -1},),
)
rewrite(
    "attention-scores",
    name="masked",
    before=lambda op, x, seen, fill, axis: op.Softmax(op.Where(seen, x, fill), axis=axis),
    after=lambda op, x, seen, fill, axis: op.Softmax(x + op.Where(seen, op.const(0, like=x), fill), axis=axis),
    when=lambda x, seen, fill: _hides(x, seen, fill),
    samples=({"x": (2, 3, 5), "seen": np.arange(15).reshape(3, 5) % 4 != 1, "fill": np.float32(-1e38), "axis": -1},),
)

# An exporter's guard of rows that are hidden throughout, whose softmax is NaN: such a row of the mask hides nothing, and
# the result, which is fewer numbers than the weights, is zero there. A weight that is NaN for any other reason stays NaN.
rewrite(
    "attention-scores",
    name="guarded",
    before=lambda op, x, mask, v, axis, zero: _guarded(op, op.Softmax(x + mask, axis=axis), zero, v),
    after=lambda op, x, mask, v, axis: _with_rows_seen(op, x, mask, v, axis),
    when=lambda x, mask, v, axis, zero: _are_scores(x, v, axis) and number(zero) == 0 and _spreads(mask, x),
    samples=(
        {"x": (2, 3, 5), "mask": np.where(np.arange(15).reshape(3, 5) % 7 < [[2], [9], [0]], -np.inf, 0).astype(np.float32),
         "v": (2, 5, 4), "axis": -1, "zero": np.float32(0)},
    ),
)  # fmt: skip


def _with_rows_seen(op: Any, x: ir.Value, mask: ir.Value, v: ir.Value, axis: int) -> ir.Value:
    lowest = op.const(-np.inf, like=mask)
    hidden = op.Equal(op.ReduceMax(mask, [-1], keepdims=1), lowest)
    seen = op.Max(mask, op.Where(hidden, op.const(0, like=mask), lowest))
    made: ir.Value = op.MatMul(op.Softmax(x + seen, axis=axis), v)
    return made * op.Where(hidden, op.const(0, like=mask), op.const(1, like=mask))


def _is_narrow(q: ir.Value, k: ir.Value) -> bool:
    """Whether q [.., S, H] has fewer elements than q·k [.., S, T]; a T that is a symbol counts as large."""
    rows, columns = dims(q), dims(k)
    if not rows or not columns or len(rows) != len(columns) or not isinstance(rows[-1], int):
        return False
    return not isinstance(columns[-1], int) or columns[-1] > rows[-1]


def _hides(x: ir.Value, mask: ir.Value, fill: ir.Value) -> bool:
    """Whether the mask is no larger than x, and the number so low that a sum with it is the number itself."""
    lowest = number(fill)
    return lowest is not None and lowest <= -1e30 and _spreads(mask, x)


def _spreads(mask: ir.Value, x: ir.Value) -> bool:
    """Whether the mask is no larger than x."""
    of_x, of_mask = dims(x), dims(mask)
    if of_x is None or of_mask is None or len(of_mask) > len(of_x):
        return False
    return all(m in (1, d) for m, d in zip(of_mask[::-1], of_x[::-1], strict=False))


# And what becomes of the weights: nothing, zeros in rows that are hidden throughout, or dropout.
rewrite(
    "attention",
    before=lambda op, x, v, axis: op.MatMul(op.Softmax(x, axis=axis), v),
    after=lambda op, x, v: _attend(op, x, v),
    when=lambda x, v, axis: _are_scores(x, v, axis),
    samples=({"x": (2, 3, 5), "v": (2, 5, 4), "axis": -1},),
)
rewrite(
    "attention",
    name="guarded",
    before=lambda op, x, v, axis, zero: _guarded(op, op.Softmax(x, axis=axis), zero, v),
    after=lambda op, x, v: _attend(op, x, v, guarded=1),
    when=lambda x, v, axis, zero: _are_scores(x, v, axis) and number(zero) == 0,
    samples=({"x": (2, 3, 5), "v": (2, 5, 4), "axis": 2, "zero": np.float32(0)},),
)
rewrite(
    "attention",
    name="dropout",
    before=lambda op, x, v, axis, kept, scale, zero: op.MatMul(op.Softmax(x, axis=axis) * op.Where(kept, scale, zero), v),
    after=lambda op, x, v, kept, scale, zero: _attend(op, x, v, op.Where(kept, scale, zero)),
    when=lambda x, v, axis, scale, zero: _are_scores(x, v, axis) and number(scale) is not None and number(zero) == 0,
    samples=(
        {"x": (2, 3, 5), "v": (2, 5, 4), "axis": -1, "kept": np.arange(15).reshape(3, 5) % 3 > 0, "scale": np.float32(1.5),
         "zero": np.float32(0)},
    ),
)  # fmt: skip


def _guarded(op: Any, weights: Any, zero: Any, v: Any) -> Any:
    return op.MatMul(op.Where(op.IsNaN(weights), zero, weights), v)


def _are_scores(x: ir.Value, v: ir.Value, axis: int) -> bool:
    """Whether the softmax is over the axis that the product sums over."""
    r = rank(x)
    return r is not None and r >= 2 and rank(v) == r and axis in (-1, r - 1)


def _attend(op: Any, x: ir.Value, v: ir.Value, mask: ir.Value | None = None, guarded: int | None = None) -> Any:
    scores, values = dims(x), dims(v)
    assert scores is not None and values is not None
    batch = [a if a != 1 else b for a, b in zip(scores[:-2], values[:-2], strict=True)]
    made = _values(x, (*batch, scores[-2], values[-1]), scores, scores)
    return op.node("Attend", x, v, mask, _domain="ortc", guarded=guarded, _outputs=made)


@dataclass(frozen=True)
class ScoresOfAttention(Fusion):
    """Of attention's scores: multiplies the queries with their factor, adds a mask instead of selecting by it.

    Rows that the mask hides throughout are seen to in the mask, where an exporter guards the softmax against them.
    """

    name = "attention-scores"
    after = ("stages",)


@dataclass(frozen=True)
class FuseAttention(Fusion):
    """Takes softmax(scores)·V as one operator, whose backward sums over the channels where softmax's sums over all keys."""

    name = "attention"
    after = ("stages", "attention-scores")

    def run(self, c: Compilation) -> bool:
        """The shape of a mask is asked of something else first."""
        return _look_past_softmax(c) | super().run(c)
