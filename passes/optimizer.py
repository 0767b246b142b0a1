"""The optimizers, and the pass that builds one graph which updates all parameters.

An optimizer is ``f(op, p, g, state, t, *, options…) -> new p``. It is called once per parameter:

* ``p``, ``g`` are the parameter and its gradient, of the same shape and type;
* ``state(slot)`` is the optimizer's state of that name: zeros before the first step, of the parameter's shape or the one
  given: ``state(slot, shape)``. ``state.update(slot, value)`` says what it becomes;
* ``t`` holds the scalars that all parameters share: ``t.step`` (1 at the first update) and ``t.lr``, in float64, so that
  bias corrections such as 1 - 0.999^1 keep their digits; ``t.number(x, like)`` rounds one to a parameter's type. What is
  computed from them alone stands under ``with t.shared():``, which names it for all parameters.

``weight_decay`` arrives as the parameter's own (0 for biases and norms, a group's where one matches), ``t.lr`` as its
group's. Each output may share its input's memory: nothing may read a parameter or state after its new value is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import onnx_ir as ir

from ortc.compiler import INITIAL, Compilation, Pass, new_graph, of, role, set_role
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.plan import AVERAGE, ParameterInfo
from ortc.rules import OPTIMIZERS, Declared, op_key, optimizer, optimizer_kernel

_DOUBLE = int(ir.DataType.DOUBLE)

# A parameter of at least so many elements is updated in chunks that fit into a core's cache with all that the update makes
# (`bench/optimizers.py` measures it).
_LARGE, _LARGEST_CHUNK, _SMALLEST_CHUNK = 1 << 18, 1 << 15, 1 << 12


# Means of gradients, which forget enough in a step to be stored in bfloat16: a step changes them by more than its rounding. A
# mean of squares that forgets 1/1000 would stay what it is: bfloat16 keeps 8 bits, what is below 1/512 of a number is lost.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum"})
_FORGETS_ENOUGH = 2.0**-7


@optimizer("sgd", elementwise=True)
def sgd(op, p, g, state, t, *, weight_decay=0.0, decoupled=False, momentum=0.0, dampening=0.0, nesterov=False):
    """SGD with momentum (Sutskever et al. 2013, in PyTorch's form)

    g += λ·p;  b = μ·b + (1 - dampening)·g, b = g at the first step;  g = g + μ·b if nesterov else b;  p -= lr·g
    """
    p, g = _decay(p, g, t, weight_decay, decoupled)
    if momentum:
        fresh = g if not dampening else g * t.number(op.where(op.Equal(t.step, 1.0), 1, 1 - dampening, like=t.step), p)
        buffer = state.update("momentum", momentum * state("momentum") + fresh)
        g = g + momentum * buffer if nesterov else buffer
    return p - t.number(t.lr, p) * g


@optimizer("adam", elementwise=True)
def adam(op, p, g, state, t, *, weight_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8, amsgrad=False):
    """Adam (Kingma & Ba, arXiv 1412.6980, algorithm 1); weight decay as L2: g += λ·p

    m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²;  p -= lr/(1-β1^t) · m / (√v/√(1-β2^t) + ε)

    With ``amsgrad`` (Reddi et al., arXiv 1904.09237, algorithm 2, in PyTorch's form) the largest v so far divides.
    """
    p, g = _decay(p, g, t, weight_decay, decoupled=False)
    return p - _adam_step(op, p, g, state, t, beta1, beta2, epsilon, amsgrad)


@optimizer("adamw", elementwise=True)
def adamw(op, p, g, state, t, *, weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8, amsgrad=False):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101): Adam with decoupled weight decay, p *= 1 - lr·λ first"""
    step = _adam_step(op, p, g, state, t, beta1, beta2, epsilon, amsgrad)
    p, _ = _decay(p, g, t, weight_decay, decoupled=True)
    return p - step


def _adam_step(op, p, g, state, t, beta1, beta2, epsilon, amsgrad):
    m = state.update("exp_avg", beta1 * state("exp_avg") + (1 - beta1) * g)
    v = state.update("exp_avg_sq", beta2 * state("exp_avg_sq") + (1 - beta2) * (g * g))
    if amsgrad:
        v = state.update("max_exp_avg_sq", op.Max(state("max_exp_avg_sq"), v))
    with t.shared():
        size = t.number(t.lr / (1.0 - op.Pow(op.const(beta1, like=t.step), t.step)), p)
        correction = t.number(1.0 / op.Sqrt(1.0 - op.Pow(op.const(beta2, like=t.step), t.step)), p)
    return size * (m / (op.Sqrt(v) * correction + epsilon))


@optimizer_kernel("adam", "com.microsoft::AdamOptimizer")
def adam_kernel(op, p, g, state, t, *, weight_decay, beta1, beta2, epsilon, amsgrad):
    if amsgrad:
        return None
    p, g = _decay(p, g, t, weight_decay, decoupled=False)
    return _adam_kernel(op, p, g, state, t, 0.0, beta1, beta2, epsilon)


@optimizer_kernel("adamw", "com.microsoft::AdamOptimizer")
def adamw_kernel(op, p, g, state, t, *, weight_decay, beta1, beta2, epsilon, amsgrad):
    return None if amsgrad else _adam_kernel(op, p, g, state, t, weight_decay, beta1, beta2, epsilon)


def _adam_kernel(op, p, g, state, t, weight_decay, beta1, beta2, epsilon):
    """What adamw and _adam_step say, in one pass over memory; the numbers 1 - β are float32's there"""
    m, v = state("exp_avg"), state("exp_avg_sq")
    _, m, v, p = op.AdamOptimizer(
        t.number(t.lr, p), t.own_count(), p, g, m, v, _domain="com.microsoft",
        _outputs=[ir.Value(type=x.type, shape=x.shape) for x in (t.count, m, v, p)],
        alpha=beta1, beta=beta2, epsilon=epsilon, do_bias_correction=1,
        weight_decay_mode=0, **{"lambda": weight_decay},
    )  # fmt: skip
    state.update("exp_avg", m)
    state.update("exp_avg_sq", v)
    return p


@optimizer("lamb")
def lamb(op, p, g, state, t, *, weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-6, min_ratio=0.0, max_ratio=math.inf):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2, φ the identity)

    m, v as in Adam;  r = m̂ / (√v̂ + ε) + λ·p;  p -= lr · ‖p‖/‖r‖ · r

    The trust ratio ‖p‖/‖r‖ is held between ``min_ratio`` and ``max_ratio``; it is 1 where either norm is 0.
    """
    if not 0 <= min_ratio <= max_ratio:
        raise RecipeError(f"optimizer lamb: 0 <= min_ratio <= max_ratio must hold, not {min_ratio} and {max_ratio}")
    m = state.update("exp_avg", beta1 * state("exp_avg") + (1 - beta1) * g)
    v = state.update("exp_avg_sq", beta2 * state("exp_avg_sq") + (1 - beta2) * (g * g))
    with t.shared():
        first = t.number(1.0 / (1.0 - op.Pow(op.const(beta1, like=t.step), t.step)), p)
        second = t.number(1.0 / (1.0 - op.Pow(op.const(beta2, like=t.step), t.step)), p)
    r = (m * first) / (op.Sqrt(v * second) + epsilon)
    if weight_decay:
        r = r + weight_decay * p
    norm_p, norm_r = op.Sqrt(op.ReduceSumSquare(p, keepdims=0)), op.Sqrt(op.ReduceSumSquare(r, keepdims=0))
    zero = op.const(0, like=p)
    defined = op.And(op.Greater(norm_p, zero), op.Greater(norm_r, zero))
    ratio = norm_p / op.where(defined, norm_r, 1, like=p)
    if min_ratio > 0 or max_ratio < math.inf:
        ratio = op.Clip(ratio, min_ratio, max_ratio)
    return p - (t.number(t.lr, p) * op.where(defined, ratio, 1, like=p)) * r


@optimizer("adafactor")
def adafactor(op, p, g, state, t, *, weight_decay=0.0, beta2_decay=-0.8, epsilon1=2.0**-23, epsilon2=1e-3, clip_threshold=1.0):
    """Adafactor (Shazeer & Stern, arXiv 1804.04235, algorithms 4 and 5, in PyTorch's form: it says where ε1 goes)

    β = 1 - t^τ;  α = max(ε2, RMS(p)) · min(lr, 1/√t);  p *= 1 - lr·λ
    of vectors:            v = β·v + (1-β)·g²
    of the last two axes:  r = β·r + (1-β)·mean of g² over columns, c alike over rows;  v = r·c / max(mean(r), ε1)
    u = g / max(√v, ε1);  p -= α · u / max(1, RMS(u)/d)

    ``beta2_decay`` is τ, ``clip_threshold`` is d. The default of ε1 is float32's.
    """

    def rms(x):
        return op.Sqrt(op.ReduceSumSquare(x, keepdims=0) / op.size(x))

    def average(slot, new, shape=None):
        return state.update(slot, beta * state(slot, shape) + rest * new)

    with t.shared():
        share = op.Pow(t.step, op.const(beta2_decay, like=t.step))
        beta, rest = t.number(1.0 - share, p), t.number(share, p)
        rate = t.number(op.Min(t.lr, 1.0 / op.Sqrt(t.step)), p)
    alpha = op.Max(rms(p), op.const(epsilon2, like=p)) * rate
    if len(p.shape) > 1:
        *batch, rows, columns = p.shape
        r = average("row_var", op.ReduceSumSquare(g, [-1], keepdims=1) / op.size(g, [-1]), (*batch, rows, 1))
        c = average("col_var", op.ReduceSumSquare(g, [-2], keepdims=1) / op.size(g, [-2]), (*batch, 1, columns))
        v = (r / op.Max(op.ReduceMean(r, [-2], keepdims=1), op.const(epsilon1, like=p))) * c
    else:
        v = average("variance", g * g)
    u = g / op.Max(op.Sqrt(v), op.const(epsilon1, like=p))
    p, _ = _decay(p, g, t, weight_decay, decoupled=True)
    return p - (alpha / op.Max(rms(u) / clip_threshold, op.const(1, like=p))) * u


@optimizer("lion", elementwise=True)
def lion(op, p, g, state, t, *, weight_decay=0.0, beta1=0.9, beta2=0.99):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2)

    c = β1·m + (1-β1)·g;  m = β2·m + (1-β2)·g;  p -= lr · (sign(c) + λ·p)
    """
    c = beta1 * state("exp_avg") + (1 - beta1) * g
    state.update("exp_avg", beta2 * state("exp_avg") + (1 - beta2) * g)
    p, _ = _decay(p, g, t, weight_decay, decoupled=True)
    return p - t.number(t.lr, p) * op.Sign(c)


@optimizer("rmsprop", elementwise=True)
def rmsprop(op, p, g, state, t, *, weight_decay=0.0, decoupled=False, alpha=0.99, epsilon=1e-8, momentum=0.0, centered=False):
    """RMSprop (Tieleman & Hinton, lecture 6e of 2012, in PyTorch's form; centred as in Graves, arXiv 1308.0850)

    g += λ·p;  v = α·v + (1-α)·g²;  if centred: a = α·a + (1-α)·g, v - a² in place of v below
    u = g / (√v + ε);  with momentum: b = μ·b + u, u = b;  p -= lr·u
    """
    p, g = _decay(p, g, t, weight_decay, decoupled)
    v = state.update("square_avg", alpha * state("square_avg") + (1 - alpha) * (g * g))
    if centered:
        a = state.update("grad_avg", alpha * state("grad_avg") + (1 - alpha) * g)
        v = op.Relu(v - a * a)  # a variance, which rounding may make negative
    u = g / (op.Sqrt(v) + epsilon)
    if momentum:
        u = state.update("momentum", momentum * state("momentum") + u)
    return p - t.number(t.lr, p) * u


@optimizer("adagrad", elementwise=True)
def adagrad(op, p, g, state, t, *, weight_decay=0.0, decoupled=False, lr_decay=0.0, initial_accumulator=0.0, epsilon=1e-10):
    """Adagrad (Duchi et al., JMLR 12, 2011, with diagonal matrices, in PyTorch's form)

    g += λ·p;  s = s + g², from ``initial_accumulator`` on;  p -= lr/(1 + (t-1)·lr_decay) · g / (√s + ε)
    """
    p, g = _decay(p, g, t, weight_decay, decoupled)
    s = state.update("sum", state("sum") + g * g)
    if initial_accumulator:
        s = s + initial_accumulator  # the state starts at zero
    with t.shared():
        rate = t.number(t.lr / (1.0 + (t.step - 1.0) * lr_decay) if lr_decay else t.lr, p)
    return p - rate * (g / (op.Sqrt(s) + epsilon))


def _decay(p, g, t, weight_decay, decoupled):
    """Parameter and gradient with weight decay: L2, g += λ·p, or decoupled (arXiv 1711.05101), p *= 1 - lr·λ"""
    if not weight_decay:
        return p, g
    if not decoupled:
        return p, g + weight_decay * p
    with t.shared():
        keep = t.number(1.0 - t.lr * weight_decay, p)
    return p * keep, g


# ---- the pass -----------------------------------------------------------------------------------------------------------


@dataclass
class Scalars:
    """The shared scalars, as one parameter sees them."""

    op: Builder
    step: ir.Value
    lr: ir.Value
    count: ir.Value | None = None  # the step as it came, in int64
    gradient_scale: ir.Value | None = None  # what clipping leaves of all gradients
    exact_lr: ir.Value | None = None  # the learning rate before it was cast

    def number(self, scalar: ir.Value, like: ir.Value) -> ir.Value:
        # ONNX Runtime 1.19.2 drops a cast that undoes another, also where a nested graph reads it.
        if scalar is self.lr and self.exact_lr is not None and self.exact_lr.dtype == like.dtype:
            return self.exact_lr
        with self.shared():
            return self.op.cast(scalar, like)

    def own_count(self) -> ir.Value:
        """The step for one node that writes over it. ONNX Runtime merges equal nodes, so each has another bound below."""
        assert self.count is not None
        known = ir.Value(type=self.count.type, shape=self.count.shape)  # inference would look at each bound anew
        own: ir.Value = self.op.Max(self.count, -len(self.op.graph), _outputs=[known])
        return own

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self.op.around(), self.op.scope("scalars", pass_="optimizer"):
            yield


@dataclass
class State:
    """The states of one parameter, made when they are first read.

    Attributes:
        narrow: first moments are stored in bfloat16. What is computed with them is in the parameter's type.
        now, new: as they are stored, before and after the step.
    """

    op: Builder
    parameter: ir.Value
    narrow: bool = False
    now: dict[str, ir.Value] = field(default_factory=dict)
    new: dict[str, ir.Value] = field(default_factory=dict)
    _wide: dict[str, ir.Value] = field(default_factory=dict)

    def __call__(self, slot: str, shape: Sequence[int] | None = None, initial: str | None = None) -> ir.Value:
        if slot not in self._wide:
            self._wide[slot] = self.op.cast(self.stored(slot, shape, initial), self.parameter)
        return self._wide[slot]

    def stored(self, slot: str, shape: Sequence[int] | None = None, initial: str | None = None) -> ir.Value:
        if slot not in self.now:
            value = _input(self.op, f"{self.parameter.name}.{slot}", self.parameter)
            value.shape = value.shape if shape is None else ir.Shape(shape)
            if self._in_half(slot):
                value.type = ir.TensorType(ir.DataType.BFLOAT16)
            self.now[slot] = set_role(value, "state", of(self.parameter), slot)
            if initial is not None:
                value.metadata_props[INITIAL] = initial
        return self.now[slot]

    def update(self, slot: str, value: ir.Value) -> ir.Value:
        self.new[slot] = self.op.Cast(value, to=int(ir.DataType.BFLOAT16)) if self._in_half(slot) else value
        return value

    def _in_half(self, slot: str) -> bool:
        return self.narrow and slot in FIRST_MOMENTS and self.parameter.dtype == ir.DataType.FLOAT


@dataclass(frozen=True)
class BuildOptimizer(Pass):
    """Builds the graph that updates every trained parameter from its gradient."""

    name = "optimizer"
    after = ("gradients",)

    def run(self, c: Compilation) -> None:
        declared = checked_optimizer(c)
        trained = {p.name: p for p in c.parameters if p.trainable}
        inputs = [phases["train"].graph.inputs if "train" in phases else () for phases in c.stages]
        held = [[v for v in values if role(v) == "parameter" and of(v) in trained] for values in inputs]
        for phases, values, shards in zip(c.stages, held, _shards(c, held), strict=True):
            for phase, names in shards.items():
                own = [(trained[of(v)], v) for v in values if of(v) in names]
                if own:
                    phases[phase] = _optimizer(c, declared, own)
        if c.recipe.optimizer.moments == "bf16":
            _check_moments(c, declared)


def _check_moments(c: Compilation, declared: Declared) -> None:
    """That there is a first moment, and that it forgets enough."""
    models = [model for phases in c.stages for name, model in phases.items() if name.startswith("optimizer")]
    stored = [v for model in models for v in model.graph.inputs if role(v) == "state"]
    if models and not any(v.dtype == ir.DataType.BFLOAT16 for v in stored):
        raise RecipeError(
            f"optimizer.moments: {declared.name} as it is here has no first moment ({', '.join(sorted(FIRST_MOMENTS))}) of a "
            "float32 parameter to store in bf16: leave out --moments, or take adamw, lion or sgd:momentum=0.9"
        )
    options = {**declared.options, **c.recipe.optimizer.options}
    option = "beta2" if declared.name == "lion" else "beta1" if "beta1" in options else "momentum"
    if 1 - float(options.get(option, 0)) < _FORGETS_ENOUGH:
        c.warnings.append(
            f"optimizer.moments: of {option}={options[option]} a step moves a moment by less than bfloat16 rounds: it stalls"
        )


def _shards(c: Compilation, held: Sequence[Sequence[ir.Value]]) -> list[dict[str, set[str]]]:
    """The names that each optimizer phase of each stage updates.

    Shards are made of whole parameters, since an optimizer may look at all of one (LAMB's norms).
    """
    pipeline = c.recipe.pipeline
    if pipeline.zero == 0:
        return [{"optimizer": {of(v) for v in values}} for values in held]
    if pipeline.replicas == 1:
        raise RecipeError(
            "pipeline.zero: 1 shares the optimizer's state out to replicas, but there is one: add --data-parallel N"
        )
    sizes = [{of(v): _bytes(v) for v in values} for values in held]
    # Stages that are compiled apart agree on what they share.
    tied = [w.name for w in c.part.boundary.weights if w.tied] if c.part is not None else []
    owners = _owners(sizes, pipeline.replicas, {name: i % pipeline.replicas for i, name in enumerate(tied)})
    for stage, size in enumerate(sizes):
        largest = max(size, key=size.__getitem__, default="")
        if size and size[largest] * pipeline.replicas > sum(size.values()):
            c.warnings.append(
                f"zero: {largest!r} is {size[largest] / sum(size.values()):.0%} of what stage {stage} trains, and stays whole: "
                f"one of the {pipeline.replicas} replicas keeps that much of the optimizer's state"
            )
    replicas = range(pipeline.replicas)
    return [{f"optimizer.{r}": {name for name in size if owners[name] == r} for r in replicas} for size in sizes]


def _owners(stages: Sequence[Mapping[str, int]], replicas: int, given: Mapping[str, int]) -> dict[str, int]:
    """Which replica updates a parameter, in every stage that holds it: the largest first, where least lies so far.

    Args:
        stages: bytes by parameter, for each stage.
        replicas: how many there are.
        given: parameters that are dealt out already.
    """
    sizes = {name: size for stage in stages for name, size in stage.items()}
    loads = [[0] * replicas for _ in stages]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (name not in given, -sizes[name])):
        holding = [load for stage, load in zip(stages, loads, strict=True) if name in stage]
        least = min(range(replicas), key=lambda r: max(load[r] for load in holding))
        owners[name] = given.get(name, least)
        for load in holding:
            load[owners[name]] += sizes[name]
    return owners


def _bytes(value: ir.Value) -> int:
    assert value.dtype is not None
    return int(value.dtype.itemsize * _elements(value))


def _elements(value: ir.Value) -> int:
    assert value.shape is not None
    return math.prod(value.shape.numpy())


def state_slots(c: Compilation) -> float:
    """How many float32 numbers of state (of two in bfloat16, one) a rank keeps for each element of a parameter, as a mean over
    those that train."""
    declared, states, elements = checked_optimizer(c), 0.0, 0
    trained = [info for info in c.parameters if info.trainable]
    for shape, count in Counter(tuple(info.shape) for info in trained).items():
        states += count * sum(_bytes(v) for v in _aside(c, declared, trained[0], shape).outputs if role(v) == "state") / 4
        elements += count * math.prod(shape)
    slots = states / max(elements, 1)
    return slots / c.recipe.pipeline.replicas if c.recipe.pipeline.zero else slots


def _aside(c: Compilation, declared: Declared, info: ParameterInfo, shape: tuple[int, ...]) -> ir.Graph:
    """The update of a parameter of this shape, in a graph of its own."""
    op = Builder(new_graph("aside", c.target.opset, c.target.ir_version).graph)
    like = ir.Value(name=info.name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    own = info.model_copy(update={"shape": list(shape)})
    op.graph.outputs.extend(_update(op, declared, c, own, like, _scalars(op, clipped=_clips(c)), chunked=False))
    return op.graph


def _clips(c: Compilation) -> bool:
    return c.recipe.optimizer.max_norm is not None or c.recipe.precision.scaling != "none"


def _gains_by_chunks(c: Compilation, declared: Declared, info: ParameterInfo) -> bool:
    """Whether the update makes several passes over a large parameter, and keeps state: chunks of less are slower."""
    update = _aside(c, declared, info, (1,))
    passes = [node for node in update if any(v.shape != ir.Shape(()) for v in node.outputs)]
    return declared.elementwise and len(passes) > 1 and any(role(v) == "state" for v in update.outputs)


def _optimizer(c: Compilation, declared: Declared, held: list[tuple[ParameterInfo, ir.Value]]) -> ir.Model:
    model = new_graph("optimizer", c.target.opset, c.target.ir_version)
    op = Builder(model.graph)
    chunked = _gains_by_chunks(c, declared, held[0][0])
    scalars = _scalars(op, clipped=_clips(c))
    outputs: list[ir.Value] = []
    for info, value in held:
        outputs += _update(op, declared, c, info, value, scalars, chunked)
    model.graph.outputs.extend(outputs)
    return model


def checked_optimizer(c: Compilation) -> Declared:
    """The recipe's optimizer, its options checked against the declaration."""
    chosen = c.recipe.optimizer
    if chosen.name not in OPTIMIZERS:
        raise RecipeError(f"optimizer: there is no optimizer {chosen.name!r}; there are {', '.join(OPTIMIZERS)}")
    declared = OPTIMIZERS[chosen.name]
    for option, value in chosen.options.items():
        if option not in declared.options:
            known = ", ".join(declared.options)
            raise RecipeError(f"optimizer {chosen.name}: there is no option {option!r}; there are {known}")
        wanted = type(declared.options[option])
        if isinstance(value, bool) != (wanted is bool) or not isinstance(value, int | float):
            raise RecipeError(f"optimizer {chosen.name}: {option} must be a {wanted.__name__}, not {value!r}")
    return declared


def _scalars(op: Builder, *, clipped: bool) -> Scalars:
    step = ir.Value(name=op.names.fresh("step"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
    lr = ir.Value(name=op.names.fresh("lr"), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    for value, what in ((step, "step"), (lr, "lr")):
        op.graph.inputs.append(set_role(value, "scalar", of=what))
    scalars = Scalars(op, step, lr)
    if clipped:
        factor = ir.Value(name=op.names.fresh("gradient_scale"), type=lr.type, shape=ir.Shape(()))
        op.graph.inputs.append(set_role(factor, "scalar", of="gradient_scale"))
        scalars = replace(scalars, gradient_scale=factor)
    with scalars.shared():
        return replace(scalars, step=op.Cast(step, to=_DOUBLE), lr=op.Cast(lr, to=_DOUBLE), count=step, exact_lr=lr)


def _input(op: Builder, name: str, like: ir.Value) -> ir.Value:
    value = ir.Value(name=op.names.fresh(name), type=like.type, shape=like.shape)
    op.graph.inputs.append(value)
    return value


def _update(
    op: Builder,
    declared: Declared,
    c: Compilation,
    info: ParameterInfo,
    source: ir.Value,
    scalars: Scalars,
    chunked: bool,
) -> list[ir.Value]:
    """Append one parameter's update; returns the outputs."""
    chunk = _chunk(math.prod(info.shape)) if chunked else None
    if chunk is not None:
        source = ir.Value(type=source.type, shape=ir.Shape([math.prod(info.shape) // chunk, chunk]))
    p = set_role(_input(op, info.name, source), "parameter", info.name)
    g = set_role(_input(op, f"{info.name}.grad", source), "gradient", info.name)
    state = State(op, p, narrow=c.recipe.optimizer.moments == "bf16")
    with op.scope(info.name, origin=info.name, rule=declared.name, pass_="optimizer"):
        update = updated if chunk is None else _in_chunks
        new = update(op, declared, c, info, p, g, state, scalars)
    new.name = op.names.fresh(f"{info.name}.new")
    new.shape = p.shape
    for slot, value in state.new.items():
        value.name = op.names.fresh(f"{info.name}.{slot}.new")
        value.shape = state.now[slot].shape
        set_role(value, "state", info.name, slot)
    return [set_role(new, "parameter", info.name), *state.new.values()]


def updated(
    op: Builder,
    declared: Declared,
    c: Compilation,
    info: ParameterInfo,
    p: ir.Value,
    g: ir.Value,
    state: State,
    scalars: Scalars,
) -> ir.Value:
    """The declared update, from the gradient clipped."""
    options, lr_scale = options_of(declared, c, info)
    own = scalars
    if lr_scale != 1:
        with scalars.shared():
            own = replace(scalars, lr=scalars.lr * lr_scale, exact_lr=None)
    g = clipped(op, c, g, scalars)
    own = replace(own, gradient_scale=None)
    kernels = [k for operator, k in declared.kernels.items() if c.target.keeps(*op_key(operator), info.dtype)]
    made = (f(op, p, g, state, own, **options) for f in (*kernels, declared.function))
    new = next(value for value in made if value is not None)
    if c.recipe.optimizer.ema is not None:
        _average(op, new, state, scalars, c.recipe.optimizer.ema)
    return new


def clipped(op: Builder, c: Compilation, g: ir.Value, scalars: Scalars) -> ir.Value:
    """A gradient, scaled for all gradients' norm and cut off element by element, as the recipe asks."""
    if scalars.gradient_scale is not None:
        g = g * scalars.number(scalars.gradient_scale, g)
    if c.recipe.optimizer.max_value is not None:
        g = op.Clip(g, -c.recipe.optimizer.max_value, c.recipe.optimizer.max_value)
    return g


def _average(op: Builder, updated: ir.Value, state: State, scalars: Scalars, decay: float) -> None:
    """a += (1-d)·(p - a), and a = p after the first step (as PyTorch's swa_utils.AveragedModel has it)."""
    with scalars.shared():
        share = op.where(op.Equal(scalars.step, 1.0), 1, 1 - decay, like=scalars.step)
    average = state(AVERAGE, initial="parameter")
    state.update(AVERAGE, average + scalars.number(share, updated) * (updated - average))


def _in_chunks(
    op: Builder,
    declared: Declared,
    c: Compilation,
    info: ParameterInfo,
    p: ir.Value,
    g: ir.Value,
    state: State,
    scalars: Scalars,
) -> ir.Value:
    """The update of a large parameter as a Scan over its rows: one pass over memory, intermediate results stay in the cache."""
    part = ir.Shape(p.shape[1:])  # type: ignore[index]
    pieces = [ir.Value(name=op.names.fresh(f"{v.name}.chunk"), type=v.type, shape=part) for v in (p, g)]
    with op.nested(pieces) as inner:
        inside = State(inner, pieces[0], state.narrow)
        new = updated(inner, declared, c, info, pieces[0], pieces[1], inside, replace(scalars, op=inner))
        inner.give([new, *inside.new.values()])
    states = [state.stored(slot, initial=value.metadata_props.get(INITIAL)) for slot, value in inside.now.items()]
    made = [ir.Value(type=v.type, shape=p.shape) for v in (new, *inside.new.values())]
    op.Scan(p, g, *states, _outputs=made, body=inner.graph, num_scan_inputs=2 + len(states))
    state.new.update(zip(inside.new, made[1:], strict=True))
    return made[0]


@cache
def _chunk(elements: int) -> int | None:
    """Elements of each chunk of a large parameter, if it can be divided so."""
    if elements < _LARGE:
        return None
    return next((size for size in range(_LARGEST_CHUNK, _SMALLEST_CHUNK - 1, -1) if elements % size == 0), None)


def options_of(declared: Declared, c: Compilation, info: ParameterInfo) -> tuple[dict[str, Any], float]:
    """The optimizer's options for one parameter, and the factor on its learning rate."""
    options = {**declared.options, **c.recipe.optimizer.options}
    group = c.recipe.groups[info.group] if info.group is not None else None
    if group is not None and group.weight_decay is not None:
        options["weight_decay"] = group.weight_decay
    elif len(info.shape) < 2 and not c.recipe.optimizer.decay_all:
        options["weight_decay"] = 0.0
    return {k: v if isinstance(v, bool) else float(v) for k, v in options.items()}, 1.0 if group is None else group.lr_scale
