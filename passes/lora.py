"""LoRA (Hu et al., arXiv 2106.09685): weights stay as they are, and low-rank products beside them train.

A weight W has a left factor L and a right factor R, and counts as W + alpha/rank · L·R. Where W is read by an operator of the
table below, the product is never made: y = W·x becomes y + alpha/rank · L·(R·x). Any other use reads the sum, so that a
weight which is used in several ways is the same in all of them. The paper calls the factor at the input's side A and the
other B: of ``x·W`` A is the left one, of ``x·Wᵀ`` (Gemm with transB) and of a convolution the right one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, matches, set_role
from ortc.errors import RecipeError
from ortc.graph.builder import Builder
from ortc.graph.shapes import FLOAT_TYPES, rank, type_name
from ortc.plan import AdapterInfo, ParameterInfo

# ---- the table: what reads a weight -> what its factors add to the output ---------------------------------------------


def _matmul(op, node, left, right, scale):
    return op.MatMul(_scaled(op, op.MatMul(node.inputs[0], left), scale, left), right)


def _gemm(op, node, left, right, scale):
    x = node.inputs[0]
    x = op.Transpose(x, perm=[1, 0]) if node.attributes.get_int("transA", 0) else x
    if node.attributes.get_int("transB", 0):
        left, right = op.Transpose(right, perm=[1, 0]), op.Transpose(left, perm=[1, 0])
    return op.MatMul(_scaled(op, op.MatMul(x, left), scale * node.attributes.get_float("alpha", 1.0), left), right)


def _gather(op, node, left, right, scale):
    return op.MatMul(_scaled(op, op.Gather(left, node.inputs[1], axis=0), scale, left), right)


def _conv(op, node, left, right, scale):
    """Every group has the right factor's rows: of a kernel [m, n/g, k…] L is [m, r, 1…], R is [r, n/g, k…]."""
    groups = node.attributes.get_int("group", 1)
    kernel = right if groups == 1 else op.Concat(*[right] * groups, axis=0)
    attributes = dict(node.attributes.items())
    return op.Conv(_scaled(op, op.Conv(node.inputs[0], kernel, **attributes), scale, left), left, group=groups)


def _scaled(op, x, scale, like):
    """Here x is smallest; in a model that is exported nothing says its type."""
    return op.Mul(x, op.const(scale, like=like))


@dataclass(frozen=True)
class _Form:
    """How an operator reads a weight.

    Attributes:
        path: what the factors add to the output.
        position: the weight's among the inputs.
        transposed: whether the factor at the input's side is the right one.
        is_lookup: whether it picks rows: then the factor that is picked from starts at zero, as the paper's code has it.
    """

    path: Callable[..., ir.Value]
    position: int = 1
    transposed: Callable[[ir.Node], bool] = lambda node: False
    is_lookup: bool = False


FORMS = {
    "MatMul": _Form(_matmul),
    "Gemm": _Form(_gemm, transposed=lambda node: bool(node.attributes.get_int("transB", 0))),
    "Conv": _Form(_conv, transposed=lambda node: True),
    "Gather": _Form(_gather, position=0, is_lookup=True),
}


Use = tuple[ir.Node, int]  # a node, and which of its inputs


def _form(node: ir.Node, index: int) -> _Form | None:
    """How a use of a weight is adapted, if it is one of the table's."""
    form, weight = FORMS.get(node.op_type), node.inputs[index]
    if form is None or node.domain or index != form.position or weight is None:
        return None
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) != 0:
        return None
    return form if rank(weight) == 2 or (node.op_type == "Conv" and (rank(weight) or 0) > 2) else None


# ---- the pass ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddAdapters(Pass):
    """Adds low-rank adapters to the weights that the recipe's ``lora.targets`` name, to the model and to what is exported."""

    name = "lora"
    after = ("choose-parameters", "decompose")

    def run(self, c: Compilation) -> bool:
        chosen = c.recipe.lora
        if chosen is None:
            return False
        by_name = {v.name: v for v in c.graph.inputs}
        found = [(p, uses) for p in c.parameters if p.role == "parameter" and (uses := _uses(by_name[p.name]))]
        for glob in chosen.targets:
            if not any(_is_target(p, uses, [glob]) for p, uses in found):
                c.complain(
                    f"lora.targets: {glob!r} names no weight that {', '.join(FORMS)} reads, and no such node; `ortc inspect` "
                    "lists the weights"
                )
        op = Builder(c.graph)
        following: dict[ir.Node, ir.Node] = dict(pairwise(c.graph))
        made = []
        for info, uses in found:
            if _is_target(info, uses, chosen.targets):
                if c.part is not None and info.name in {w.name for w in c.part.tied}:
                    raise RecipeError(
                        f"lora.targets: {info.name!r} is a weight of several stages, whose adapter they would share: name "
                        "others, or compile the stages together (--stage-models)"
                    )
                weight = by_name[info.name]
                left, right = _factors(c, op, info, uses[0])
                adapter = AdapterInfo(
                    weight=info.name, left=left.name or "", right=right.name or "", scale=chosen.alpha / chosen.rank
                )
                adapt(op, weight, left, right, adapter.scale, following)
                made.append((adapter, left, right))
        c.adapters = [adapter for adapter, _, _ in made]
        template = c.graphs["export"].clone()
        _adapt_template(template, made)
        c.graphs["adapters"] = template
        return True


def _uses(weight: ir.Value) -> list[Use]:
    """The uses that the table has."""
    return (
        [(node, index) for node, index in weight.uses() if _form(node, index) is not None]
        if weight.dtype in FLOAT_TYPES
        else []
    )


def _is_target(info: ParameterInfo, uses: Sequence[Use], globs: Sequence[str]) -> bool:
    """By the weight's name or a reader's: some exporters give names to nodes only."""
    return matches(info.name, globs) or any(matches(node.name or "", globs) for node, _ in uses)


def _factors(c: Compilation, op: Builder, info: ParameterInfo, use: Use) -> tuple[ir.Value, ir.Value]:
    """New parameters: the factors of a weight, of the type that it has.

    One factor starts at random, as the paper's code has it (Kaiming-uniform with a = √5: ± 1/√fan-in; of a table that rows are
    picked from with unit variance, ± √3), the other at zero: so the first loss is that of the model without adapters.
    """
    form = _form(*use)
    assert form is not None
    assert c.recipe.lora is not None
    count, inner = c.recipe.lora.rank, math.prod(info.shape[1:])
    spatial = [1] * (len(info.shape) - 2)
    shapes = ([info.shape[0], count, *spatial], [count, *info.shape[1:]])
    names = ("lora_B", "lora_A") if form.transposed(use[0]) else ("lora_A", "lora_B")
    random = 1 if form.is_lookup or form.transposed(use[0]) else 0
    bound = math.sqrt(3.0) if form.is_lookup else 1 / math.sqrt(inner if random == 1 else info.shape[0])
    like = c.weights[info.name].dtype
    values = []
    for side, (shape, suffix) in enumerate(zip(shapes, names, strict=True)):
        name = op.names.fresh(f"{info.name}.{suffix}")
        array = _uniform(shape, bound, c.recipe.seed, name) if side == random else np.zeros(shape)
        tensor = ir.tensor(array.astype(like.numpy()), name=name)
        value = ir.Value(name=name, type=ir.TensorType(like), shape=ir.Shape(shape))
        c.graph.inputs.append(set_role(value, "parameter", of=name))
        c.weights[name] = tensor
        reason = f"an adapter of {info.name!r}"
        c.parameters.append(
            ParameterInfo(name=name, role="parameter", dtype=type_name(like), shape=shape, trainable=True, reason=reason)
        )
        values.append(value)
    if count > min(info.shape[0], inner):
        c.warnings.append(f"lora: rank {count} is more than {info.name!r} of shape {info.shape} can use")
    return values[0], values[1]


def _uniform(shape: Sequence[int], bound: float, seed: int, name: str) -> np.ndarray:
    """Uniform in ± bound, a pure function of seed and name: raw bits of Philox, the same in every version of NumPy."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.Philox(np.random.SeedSequence([seed, key])).random_raw(math.prod(shape))
    return ((raw >> np.uint64(11)) * 2.0**-52 - 1.0).reshape(shape) * bound


def adapt(
    op: Builder,
    weight: ir.Value,
    left: ir.Value,
    right: ir.Value,
    scale: float,
    following: dict[ir.Node, ir.Node],
) -> None:
    """Let every use of a weight see its adapter, in place.

    Args:
        op: a builder on the weight's graph.
        weight, left, right: the weight and its factors.
        scale: of the factors' product.
        following: the node after each, as the graph was.
    """
    merged: ir.Value | None = None
    for node, index in list(weight.uses()):
        form = _form(node, index)
        if form is not None and node.graph is op.graph:
            _add_path(op, node, form, left, right, scale, following)
            continue
        if merged is None:
            first = next(iter(op.graph))
            with op.scope(f"{weight.name}.lora", before=first, origin=weight.name or "", rule="LoRA", pass_="lora"):
                merged = _merged(op, weight, left, right, scale)
        node.replace_input_with(index, merged)


def _merged(op: Builder, weight: ir.Value, left: ir.Value, right: ir.Value, scale: float) -> ir.Value:
    if rank(weight) == 2:
        product = op.MatMul(left, right)
    else:
        assert left.shape is not None
        rows, count = left.shape.numpy()[:2]
        flat = op.MatMul(op.Reshape(left, [rows, count]), op.Reshape(right, [count, -1]))
        product = op.Reshape(flat, list(weight.shape.numpy()))  # type: ignore[union-attr]
    return op.Add(weight, product * scale, _like=weight)


def _add_path(
    op: Builder,
    node: ir.Node,
    form: _Form,
    left: ir.Value,
    right: ir.Value,
    scale: float,
    following: dict[ir.Node, ir.Node],
) -> None:
    """Add to a node's output; the sum takes its name, so that cuts and the user's other names stay true."""
    y = node.outputs[0]
    users, is_output = list(y.uses()), y.is_graph_output()
    with op.scope(f"{node.name}.lora", before=following.get(node), origin=node.name or "", rule="LoRA", pass_="lora"):
        total = op.Add(y, form.path(op, node, left, right, scale), _like=y)
    for use in users:
        use.node.replace_input_with(use.idx, total)
    if is_output:
        op.graph.outputs[op.graph.outputs.index(y)] = total
    name, y.name = y.name or "", op.names.fresh(f"{y.name}.base")
    total.name = name
    total.metadata_props.update(y.metadata_props)
    y.metadata_props.clear()


def _adapt_template(template: ir.Model, made: Sequence[tuple[AdapterInfo, ir.Value, ir.Value]]) -> None:
    """The model that is exported with the adapters as inputs."""
    graph = template.graph
    op = Builder(graph)
    following: dict[ir.Node, ir.Node] = dict(pairwise(graph))
    for adapter, *factors in made:
        inputs = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in factors]
        for value in inputs:
            graph.inputs.append(set_role(value, "parameter", of=value.name))
        adapt(op, graph.initializers[adapter.weight], inputs[0], inputs[1], adapter.scale, following)
