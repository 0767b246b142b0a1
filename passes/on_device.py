"""ONNX Runtime's own layout of training artifacts, which its on-device API trains with (Module and Optimizer; Python, C, C++,
C#, Java; up to 1.19).

Its runtime goes by names and order (orttraining/training_api, module.cc and optimizer.cc):

* ``training_model.onnx``: the inputs are the user's, then every parameter of the checkpoint, then
  ``<parameter>_grad.accumulation.buffer``, and ``lazy_reset_grad``. The first output is the loss; outputs called
  ``<parameter>_grad.accumulation.out`` are not given to the user. A value is written in place by InPlaceAccumulatorV2.
* ``eval_model.onnx``: the same parameters in the same order; its other outputs are what an exported model can have.
* ``optimizer_model.onnx``: learning_rate, step, and the sequences params, gradients, first_order_moments (and
  second_order_moments, where the graph has an AdamWOptimizer node), whose tensors are in an order that is not known, and
  which only AdamWOptimizer and SGDOptimizerV2 write in place. Exactly one of these nodes must stand in the outer graph.

So running statistics are parameters that are overwritten, and dropout counts its steps in a parameter of its own. Adam and
AdamW are the kernel's. Any other optimizer is applied to each element of the sequences (SequenceMap), which takes small
parameters many times as long; SGDOptimizerV2, with a learning rate of one, subtracts the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, new_graph, of, role, set_role
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.names import all_graphs
from ortc.passes.optimizer import Scalars, State, checked_optimizer, clipped, options_of, updated
from ortc.plan import STEP_COUNTER, ParameterInfo
from ortc.rules import Declared

FOLDER = "ort"

_MICROSOFT = "com.microsoft"
_RESET = "lazy_reset_grad"
_RESERVED = ("_grad", "_grad.accumulation.buffer", "_grad.accumulation.out")
_MOMENTS = ("first_order_moments", "second_order_moments")
_NO_OPERATION = frozenset({"Add", "Sub", "Mul", "Div"})


@dataclass(frozen=True)
class OnDevice(Pass):
    """Makes the three graphs of ONNX Runtime's on-device layout, where the recipe asks for it (``artifacts = ["ort"]``)."""

    name = "on-device"
    after = ("clean-up", "phases")

    def run(self, c: Compilation) -> bool:
        if "ort" not in c.recipe.artifacts:
            return False
        _check(c)
        train, evaluation = c.stages[0]["train"].clone(), c.stages[0]["eval"].clone()
        counted = _count_steps(c, train)
        _training(c, train, counted)
        _evaluation(c, evaluation, counted)
        c.graphs[f"{FOLDER}/training_model.onnx"] = train
        c.graphs[f"{FOLDER}/eval_model.onnx"] = evaluation
        c.graphs[f"{FOLDER}/optimizer_model.onnx"] = _optimizer(c)
        return True


def _refuse(text: str) -> RecipeError:
    return RecipeError(f"artifacts: ONNX Runtime's own layout {text}")


def _check(c: Compilation) -> None:
    """What the layout cannot hold."""
    if c.target.name != "ort-training":
        raise _refuse("runs on its training build alone: add --target ort-training, or leave out --artifacts")
    if c.recipe.pipeline.divided or c.part is not None:
        raise _refuse(
            "is one graph that sees a whole batch: leave out --stages, --micro-batches and --data-parallel. (Gradients add up "
            "over calls of the module until the optimizer steps.)"
        )
    if c.recipe.precision.scaling != "none":
        raise _refuse("has no scale of the loss: give --loss-scale none, or --precision bf16 or fp32")
    if c.recipe.optimizer.moments != "fp32":
        raise _refuse("has the optimizer's moments in float32: leave out --moments")
    if c.recipe.stash.dtype == "int8":
        raise _refuse("takes int8 for quantised products: give --stash-dtype bf16 or fp16")
    trained = [p for p in c.parameters if p.trainable]
    if not trained:
        raise _refuse("needs a parameter that trains; `ortc inspect` of the model says why none does")
    written = [p for p in c.parameters if (p.trainable or p.role == "buffer") and p.dtype != "float32"]
    if written:
        raise _refuse(f"trains float32 alone, {written[0].name!r} is {written[0].dtype}: --freeze it, or export it in float32")
    for value in c.stages[0]["train"].graph.inputs:
        if role(value) in ("data", "label") and (of(value) == _RESET or of(value).endswith(_RESERVED)):
            raise _refuse(f"takes an input called {of(value)!r} for a gradient of its own: call it otherwise")
    warned = False
    for node in c.stages[0]["train"].graph:
        if node.op_type == "QuantizeLinear" and not warned:
            c.warnings.append(
                "artifacts: ONNX Runtime's own layout leaves it to the session whether quantised products are integers"
            )
            warned = True
        if node.op_type in _NO_OPERATION and any(_is_empty(v) for v in node.inputs):
            raise _refuse(f"cannot hold node {node.name!r}: ONNX Runtime 1.19 reads beyond its empty constant")


def _is_empty(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.shape is not None and 0 in value.shape.dims


# ---- the training and the evaluation graph --------------------------------------------------------------------------------


def _count_steps(c: Compilation, model: ir.Model) -> bool:
    """Take the counters of random numbers from a parameter that each run increases; whether there are any.

    The steps are those of ``ortc run``, which calls the graph once a step. One node reads the parameter, and its new value
    depends on it: so it is never read after it was written.
    """
    graph = model.graph
    scalars = {of(v): v for v in graph.inputs if role(v) == "scalar"}
    if not scalars:
        return False
    op = Builder(graph)
    counter = ir.Value(name=STEP_COUNTER, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    with op.scope("steps", before=next(iter(graph)), pass_="on-device"):
        step = op.Add(op.Cast(counter, to=int(ir.DataType.INT64)), 1)
        given = {"step": step, "seed": op.const(c.recipe.seed), "micro_batch": op.const(0)}
        for name, value in scalars.items():
            ir.convenience.replace_all_uses_with(value, given[name])
            graph.inputs.remove(value)
    graph.inputs.append(set_role(counter, "buffer", of=STEP_COUNTER))
    with op.scope("steps", pass_="on-device"):
        graph.outputs.append(set_role(op.Cast(step, to=int(ir.DataType.FLOAT)), "buffer", of=STEP_COUNTER))
    return True


def _training(c: Compilation, model: ir.Model, counted: bool) -> None:
    """Order and name the inputs as the runtime wants them, and let it add gradients up and overwrite buffers."""
    graph = model.graph
    outputs = list(graph.outputs)
    parameters = _arrange_inputs(c, graph, counted)
    trained = [p.name for p in c.parameters if p.trainable]
    loss = next(v for v in outputs if role(v) == "loss")
    gradients = {of(v): v for v in outputs if role(v) == "gradient" and of(v) in trained}
    of_inputs = [v for v in outputs if role(v) == "gradient" and of(v) not in trained]
    buffers = [v for v in outputs if role(v) == "buffer"]
    flag = ir.TensorType(ir.DataType.BOOL)
    reset = ir.Value(name=_RESET, type=flag, shape=ir.Shape([1]))
    sums = {n: ir.Value(name=f"{n}_grad.accumulation.buffer", type=g.type, shape=g.shape) for n, g in gradients.items()}
    done = [ir.Value(type=flag, shape=ir.Shape([1])) for _ in (*gradients, *buffers)]
    op = Builder(graph)
    with op.scope("accumulate", pass_="on-device"):
        written = [(sums[n], gradients[n], reset) for n in trained]
        written += [(parameters[of(v)], v, op.const(np.array([True]))) for v in buffers]
        for operands, flagged in zip(written, done, strict=True):
            op.node("InPlaceAccumulatorV2", *operands, _domain=_MICROSOFT, _outputs=[flagged])
    graph.outputs.clear()
    graph.outputs.extend([loss, *of_inputs, *done])
    graph.inputs.extend([*sums.values(), reset])
    names = {v: f"{n}_grad.accumulation.out" for n, v in zip([*trained, *map(of, buffers)], done, strict=True)}
    names |= {v: f"{n}_grad.accumulation.buffer" for n, v in sums.items()}
    _rename(graph, {**{v: of(v) for v in graph.inputs if role(v) is not None}, **names, reset: _RESET})
    for value in of_inputs:
        if (value.name or "").endswith(_RESERVED):
            value.name = f"{value.name}.of_input"
    set_role(reset, "scalar", of=_RESET)


def _evaluation(c: Compilation, model: ir.Model, counted: bool) -> None:
    graph = model.graph
    _arrange_inputs(c, graph, counted)
    given = [v for v in graph.outputs if role(v) == "output" and not v.is_graph_input()]
    _rename(graph, {v: of(v) for v in (*graph.inputs, *given)})


def _arrange_inputs(c: Compilation, graph: ir.Graph, counted: bool) -> dict[str, ir.Value]:
    """The user's inputs, then all parameters in the order of the checkpoint, also those that nothing reads."""
    there = {of(v): v for v in graph.inputs if role(v) in ("parameter", "buffer")}
    held = [(p.name, p.dtype, p.shape, p.role) for p in c.parameters]
    held += [(STEP_COUNTER, "float32", [], "buffer")] if counted else []
    for name, dtype, shape, what in held:
        if name not in there:
            kind = ir.TensorType(ir.DataType[_ONNX_NAMES.get(dtype, dtype).upper()])
            there[name] = set_role(ir.Value(name=name, type=kind, shape=ir.Shape(shape)), what, of=name)
    data = [v for v in graph.inputs if role(v) in ("data", "label")]
    ordered = {name: there[name] for name, *_ in held}
    graph.inputs.clear()
    graph.inputs.extend([*data, *ordered.values()])
    return ordered


_ONNX_NAMES = {"float32": "float", "float64": "double"}


def _rename(graph: ir.Graph, names: Mapping[ir.Value, str]) -> None:
    """Give values their names; other values that have one of them get another."""
    wanted = {name: value for value, name in names.items()}
    if len(wanted) < len(names):
        double = next(name for value, name in names.items() if wanted[name] is not value)
        raise _refuse(f"needs the name {double!r} for two things: call the parameter otherwise")
    op = Builder(graph)
    for value in _values(graph):
        if value.name in wanted and value not in names:
            value.name = op.names.fresh(f"{value.name}.inner")
    for value, name in names.items():
        value.name = name


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    for g in all_graphs(graph):
        yield from (*g.inputs, *list(g.initializers.values()), *(v for node in g for v in node.outputs))


# ---- the optimizer ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kinds:
    """One of the trained parameters with fewer than two dimensions, and one of the others."""

    vector: ParameterInfo
    matrix: ParameterInfo


def _optimizer(c: Compilation) -> ir.Model:
    """The recipe's optimizer over sequences."""
    declared = replace(checked_optimizer(c), kernels={})  # the other builds of ONNX Runtime have none of them
    trained = [p for p in c.parameters if p.trainable]
    slots = _slots(c, declared, trained[0])
    # Which parameter an element is nobody knows there; but whether it is a matrix or a bias, which the weight decay depends on.
    few, many = (_alike(c, declared, [p for p in trained if (len(p.shape) < 2) is small]) for small in (True, False))
    kinds = _Kinds(few or many or trained[0], many or few or trained[0])
    model = new_graph("optimizer", c.target.opset, c.target.ir_version)
    graph, op = model.graph, Builder(model.graph)
    lr = ir.Value(name="learning_rate", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    step = ir.Value(name="step", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    kept = max(1, len(slots))  # the runtime keeps one sequence of moments at least
    sequences = [_sequence(n) for n in ("params", "gradients", *_MOMENTS[:kept])]
    graph.inputs.extend([lr, step, *sequences])
    parameters, gradients, *moments = sequences
    with op.scope("scalars", pass_="optimizer"):
        # Reshaped last: ONNX Runtime 1.19.2 drops a cast that undoes another, also where a nested graph reads it.
        double = [op.Reshape(op.Cast(v, to=int(ir.DataType.DOUBLE)), np.array([], np.int64)) for v in (step, lr)]
        scalars = Scalars(op, *double)
        if c.recipe.optimizer.max_norm is not None:
            scalars = replace(scalars, gradient_scale=_clip_factor(op, gradients, c.recipe.optimizer.max_norm))
    with op.scope("update", pass_="optimizer", rule=declared.name):
        decay = _adam_decay(c, declared, kinds)
        if decay is not None:
            graph.outputs.append(_adam(c, declared, op, scalars, lr, step, sequences, *decay))
        else:
            read = [parameters, gradients, *moments[: len(slots)]]
            changes = _map(op, read, 1 + len(slots), lambda inner, v: _changes(c, declared, inner, scalars, slots, v, kinds))
            _mark(op, step, two=kept == 2)
            graph.outputs.extend(_subtract(op, step, [(parameters, changes[0]), *zip(moments, changes[1:], strict=False)]))
    return model


def _slots(c: Compilation, declared: Declared, info: ParameterInfo) -> list[str]:
    """The names of the optimizer's states, found by applying it aside."""
    op = Builder(new_graph("aside", c.target.opset, c.target.ir_version).graph)
    step, lr = (ir.Value(name=n, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(())) for n in ("step", "lr"))
    p, g = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3, 4])) for n in ("p", "g"))
    state = State(op, p)
    with op.scope("aside"):
        updated(op, declared, c, info, p, g, state, Scalars(op, step, lr))
    if c.recipe.optimizer.ema is not None:
        raise _refuse("has no moving average of the weights: leave out optimizer.ema (--ema)")
    if len(state.now) > 2 or any(v.shape != p.shape for v in state.now.values()):
        raise _refuse(
            f"keeps at most two values for each element of a parameter, optimizer {declared.name} with these options keeps "
            "others: choose another one, such as adamw or sgd"
        )
    return list(state.now)


def _sequence(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.SequenceType(ir.TensorType(ir.DataType.FLOAT)))


def _map(
    op: Builder, sequences: Sequence[ir.Value], results: int, body: Callable[[Builder, list[ir.Value]], Sequence[ir.Value]]
) -> list[ir.Value]:
    """Sequences of what the body makes of the elements of sequences."""
    inner = [ir.Value(name=op.names.fresh(f"{v.name}.element"), type=ir.TensorType(ir.DataType.FLOAT)) for v in sequences]
    with op.nested(inner) as nested:
        nested.give(body(nested, inner))
    made = [ir.Value(type=sequences[0].type) for _ in range(results)]
    op.node("SequenceMap", *sequences, _outputs=made, body=nested.graph)
    return made


def _clip_factor(op: Builder, gradients: ir.Value, most: float) -> ir.Value:
    """min(1, most / ‖g‖), of all gradients together."""
    [squares] = _map(op, [gradients], 1, lambda inner, g: [inner.ReduceSumSquare(g[0], keepdims=0)])
    total = ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None]))
    op.node("ConcatFromSequence", squares, _outputs=[total], axis=0, new_axis=1)
    norm = op.Sqrt(op.ReduceSum(total, keepdims=0))
    return op.Where(op.LessOrEqual(norm, most), op.const(1, like=norm), most / norm)


def _adam_decay(c: Compilation, declared: Declared, kinds: _Kinds) -> tuple[float, float] | None:
    """The weight decay of vectors and of matrices, if AdamWOptimizer computes what the recipe says."""
    (few, few_scale), (many, many_scale) = (options_of(declared, c, info) for info in (kinds.vector, kinds.matrix))
    decay = few["weight_decay"], many["weight_decay"]
    if few_scale != 1 or many_scale != 1 or many.get("amsgrad") or declared.name not in ("adam", "adamw"):
        return None
    return decay if declared.name == "adamw" or decay == (0, 0) else None


def _adam(
    c: Compilation,
    declared: Declared,
    op: Builder,
    scalars: Scalars,
    lr: ir.Value,
    step: ir.Value,
    sequences: Sequence[ir.Value],
    few: float,
    many: float,
) -> ir.Value:
    """AdamWOptimizer, after the weight decay where that is not everywhere the same; the flag that it was done."""
    parameters, gradients, first, second = sequences
    options, _ = options_of(declared, c, next(p for p in c.parameters if p.trainable))
    if scalars.gradient_scale is not None or c.recipe.optimizer.max_value is not None:
        [gradients] = _map(op, [gradients], 1, lambda inner, v: [clipped(inner, c, v[0], replace(scalars, op=inner))])
    decayed = None
    if few != many:
        rates = [op.Cast(scalars.lr * decay, to=int(ir.DataType.FLOAT)) for decay in (many, few)]
        [changes] = _map(op, [parameters], 1, lambda inner, v: [v[0] * inner.Where(_is_matrix(inner, v[0]), *rates)])
        [decayed] = _subtract(op, step, [(parameters, changes)])
    done = ir.Value(type=ir.TensorType(ir.DataType.BOOL))
    op.node(
        "AdamWOptimizer", lr, step, parameters, gradients, first, second, decayed, _domain=_MICROSOFT, _outputs=[done],
        alpha=options["beta1"], beta=options["beta2"], epsilon=options["epsilon"], weight_decay=few if few == many else 0.0,
        adam_mode=0, correct_bias=1,
    )  # fmt: skip
    return op.Reshape(done, [1])


def _is_matrix(op: Builder, p: ir.Value) -> ir.Value:
    return op.Greater(op.Size(op.Shape(p)), 1)


def _changes(
    c: Compilation,
    declared: Declared,
    op: Builder,
    scalars: Scalars,
    slots: Sequence[str],
    values: Sequence[ir.Value],
    kinds: _Kinds,
) -> list[ir.Value]:
    """What is subtracted from one parameter and its states."""
    if options_of(declared, c, kinds.vector) == options_of(declared, c, kinds.matrix):
        return _apply(c, declared, op, scalars, slots, values, kinds.matrix)
    branches: dict[str, Any] = {}
    for branch, info in (("then_branch", kinds.matrix), ("else_branch", kinds.vector)):
        with op.nested([]) as inner:
            inner.give(_apply(c, declared, inner, scalars, slots, values, info))
        branches[branch] = inner.graph
    made = [ir.Value(type=v.type) for v in (values[0], *values[2:])]
    op.node("If", _is_matrix(op, values[0]), _outputs=made, **branches)
    return made


def _alike(c: Compilation, declared: Declared, parameters: Sequence[ParameterInfo]) -> ParameterInfo | None:
    """One of several parameters that are all updated with the same options; None if there are none."""
    for p in parameters:
        if options_of(declared, c, p) != options_of(declared, c, parameters[0]):
            raise _refuse(
                "does not tell its optimizer which parameter is which, only how many dimensions it has: the groups must not "
                f"treat {parameters[0].name!r} and {p.name!r} differently"
            )
    return parameters[0] if parameters else None


def _apply(
    c: Compilation,
    declared: Declared,
    op: Builder,
    scalars: Scalars,
    slots: Sequence[str],
    values: Sequence[ir.Value],
    info: ParameterInfo,
) -> list[ir.Value]:
    p, g, *states = values
    state = State(op, p, now=dict(zip(slots, states, strict=True)))
    new = updated(op, declared, c, info, p, g, state, replace(scalars, op=op))
    return [p - new, *(now - state.new[slot] for slot, now in state.now.items())]


def _mark(op: Builder, step: ir.Value, two: bool) -> None:
    """The one node of the outer graph by which the runtime knows how many moments to keep; it works on zeros of its own."""
    zero = op.const(np.zeros(1, np.float32))
    zeros = _sequence("zeros")
    op.node("SequenceConstruct", zero, _outputs=[zeros])
    done = ir.Value(type=ir.TensorType(ir.DataType.BOOL))
    operands = (zero, step, zeros, zeros, zeros, zeros) if two else (zero, zeros, zeros)
    op.node("AdamWOptimizer" if two else "SGDOptimizerV2", *operands, _domain=_MICROSOFT, _outputs=[done])
    op.graph.outputs.append(op.Reshape(done, [1]))


def _subtract(op: Builder, step: ir.Value, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> list[ir.Value]:
    """Subtract sequences from sequences in place; flags that it was done.

    In a branch, which is always taken: of the nodes outside the runtime lets only one be.
    """
    flag = ir.TensorType(ir.DataType.BOOL)
    with op.nested([]) as then, op.nested([]) as otherwise:
        for values, changes in pairs:
            done = ir.Value(type=flag)
            then.node(
                "SGDOptimizerV2", then.const(np.ones(1, np.float32)), values, changes, _domain=_MICROSOFT, _outputs=[done]
            )
            then.give([then.Reshape(done, [1])])
            otherwise.give([otherwise.const(np.array([False]))])
    made = [ir.Value(type=flag, shape=ir.Shape([1])) for _ in pairs]
    op.node("If", op.Greater(step, 0), _outputs=made, then_branch=then.graph, else_branch=otherwise.graph)
    return made
