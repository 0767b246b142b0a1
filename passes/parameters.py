"""Which weights train: the fate of every initialiser, and the reason that is shown to the user.

Parameters and buffers become inputs of the training graph; their values go to the checkpoint. Everything else stays an
initialiser and may be folded.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.autodiff import reached
from ortc.compiler import Compilation, Pass, ends, matches, role, set_role
from ortc.errors import ModelError, RecipeError
from ortc.graph.shapes import FLOAT_TYPES, is_float, type_name
from ortc.passes.sharing import TORCH_FOLDED_FROM
from ortc.plan import ParameterInfo

# Inputs that an operator updates while it trains, without a gradient: their initialisers are buffers.
BUFFER_INPUTS = {"BatchNormalization": (3, 4)}

# Inputs that describe quantised numbers; trained, they would no longer describe them.
QUANTISATION_INPUTS = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "FakeQuantize": (1, 2),
    "MatMulNBits": (1, 2, 3, 4),
}

# Names that modules give to tensors which are no weights, where only a folded value is left of one.
BUFFER_LEAVES = frozenset({"inv_freq", "original_inv_freq", "position_ids", "mask", "bias_mask", "num_batches_tracked"})

FROZEN = "frozen by the recipe"

# What PyTorch's dynamo exporter writes about each tensor of the exported program.
TORCH_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


@dataclass(frozen=True)
class ChooseParameters(Pass):
    """Turns the weights and buffers of the model into graph inputs."""

    name = "choose-parameters"
    after = ("upgrade",)

    def run(self, c: Compilation) -> None:
        graph = c.graph
        active = reached(graph, [v for v in graph.outputs if is_float(v)])
        marked = any(TORCH_KIND in v.metadata_props for v in graph.initializers.values())
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            assert tensor is not None
            scalar = _is_scalar_parameter(value, marked, c.model.producer_name)
            why = _why_constant(value, value in active, marked, scalar, c.recipe.parameters.train)
            is_buffer = _is_buffer(value)
            if why is not None and not is_buffer:
                c.constants.append((value.name or "", why))
                continue
            role = "buffer" if is_buffer else "parameter"
            buffer_of_module = value.metadata_props.get(TORCH_KIND) == "BUFFER"
            reason = "a buffer, not a parameter, of the PyTorch module it came from" if buffer_of_module else ""
            _make_input(c, value, role)
            c.parameters.append(
                ParameterInfo(
                    name=value.name or "",
                    role=role,  # type: ignore[arg-type]
                    dtype=type_name(tensor.dtype),
                    shape=[int(d) for d in tensor.shape],  # type: ignore[arg-type]
                    trainable=role == "parameter" and not buffer_of_module,
                    reason="a running statistic, updated in training" if is_buffer else reason,
                    copies=[copy for copy, original in c.tied.items() if original == value.name],
                )
            )


def _is_scalar_parameter(value: ir.Value, marked: bool, producer: str | None) -> bool:
    """Whether a scalar is a weight: PyTorch's exporters say so, by a mark or by not writing it as a Constant node."""
    if marked or producer != "pytorch":
        return value.metadata_props.get(TORCH_KIND) == "PARAMETER"
    return "ortc.constant_node" not in value.metadata_props and not (value.name or "").startswith("onnx::")


def _why_constant(value: ir.Value, active: bool, marked: bool, is_scalar_parameter: bool, wanted: list[str]) -> str | None:
    """The reason why an initialiser cannot be a parameter, or None."""
    tensor = value.const_value
    assert tensor is not None
    if tensor.dtype not in FLOAT_TYPES:
        return f"its elements are {type_name(tensor.dtype)}, not floating point"
    if not value.uses() and not value.is_graph_output():
        return "nothing uses it"
    if not active:
        return "no gradient reaches it: only shapes, indices, bounds or other non-differentiable inputs read it"
    if _only_read_as(value, QUANTISATION_INPUTS):
        return "it belongs to quantised numbers"
    if value.name in wanted:
        return None
    if len(tensor.shape) == 0 and not is_scalar_parameter:
        return "a scalar constant (to train it, give its exact name to --train)"
    if tensor.size == 1 and "ortc.constant_node" in value.metadata_props:
        return "a constant of the exporter (to train it, give its exact name to --train)"
    if marked and _is_unmarked_constant(value):
        return "a constant of the exporter (to train it, give its exact name to --train)"
    return None


def _is_unmarked_constant(value: ir.Value) -> bool:
    """In a file that marks the module's tensors: one without a mark, a module's name, or a weight it was folded from."""
    props = value.metadata_props
    sources = [] if TORCH_FOLDED_FROM not in props else re.findall(r"'([^']*)'", props[TORCH_FOLDED_FROM])
    weights = [s for s in sources if "." in s and s.rpartition(".")[2] not in BUFFER_LEAVES]
    return TORCH_KIND not in props and "." not in (value.name or "") and not weights


def _is_buffer(value: ir.Value) -> bool:
    return _only_read_as(value, BUFFER_INPUTS)


def _only_read_as(value: ir.Value, inputs: Mapping[str, Sequence[int]]) -> bool:
    uses = value.uses()
    return bool(uses) and all(u.idx in inputs.get(u.node.op_type, ()) for u in uses)


def _make_input(c: Compilation, value: ir.Value, role: str) -> None:
    tensor = value.const_value
    assert tensor is not None
    c.graph.initializers.pop(value.name or "")
    c.weights[value.name or ""] = tensor
    value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
    value.const_value = None
    c.graph.inputs.append(set_role(value, role, of=value.name))


@dataclass(frozen=True)
class DecideTraining(Pass):
    """Decides which parameters train: those that the loss reaches, as the recipe's globs select."""

    name = "decide-training"
    after = ("choose-parameters", "loss")

    def run(self, c: Compilation) -> None:
        active = reached(c.graph, ends(c))
        by_name = {v.name: v for v in c.graph.inputs}
        chosen = c.recipe.parameters
        adapters = {name for adapter in c.adapters for name in (adapter.left, adapter.right)}
        c.parameters = [self._decide(c, p, by_name[p.name] in active, adapters) for p in c.parameters]
        self._check_globs(c)
        trainable = [p.name for p in c.parameters if p.trainable]
        for name in c.recipe.wrt:
            _check_wrt(c, name, by_name, active)
        if c.part is not None:  # another stage may train
            return
        if not trainable and not c.recipe.wrt:
            raise ModelError(_nothing_trains(c))
        if chosen.train and not trainable:
            raise RecipeError("parameters.train selects nothing that can train")

    def _decide(self, c: Compilation, p: ParameterInfo, active: bool, adapters: Container[str]) -> ParameterInfo:
        globs = c.recipe.parameters
        update: dict[str, object] = {"group": _group(c, p.name)}
        active = active or (c.part is not None and p.name in {w.name for w in c.part.tied})  # elsewhere, if not here
        if p.role == "buffer":
            return p
        if not active:
            update.update(trainable=False, reason="the loss does not depend on it")
        elif matches(p.name, globs.freeze):
            update.update(trainable=False, reason=FROZEN)
        elif p.name in globs.train:
            update.update(trainable=True, reason="named by the recipe")
        elif not p.trainable or p.name in adapters:
            pass
        elif c.recipe.lora is not None and not matches(p.name, globs.train):
            update.update(trainable=False, reason="beside the adapters weights stay as they are, but for what --train names")
        elif globs.train and not matches(p.name, globs.train):
            update.update(trainable=False, reason="not selected by the recipe")
        else:
            update.update(trainable=True, reason="the loss depends on it")
        return p.model_copy(update=update)

    def _check_globs(self, c: Compilation) -> None:
        fates = {p.name: p.reason for p in c.parameters if not p.trainable} | dict(c.constants)
        names = [p.name for p in c.parameters] + [name for name, _ in c.constants]
        for field, globs in (("train", c.recipe.parameters.train), ("freeze", c.recipe.parameters.freeze)):
            for glob in globs:
                if not any(matches(name, [glob]) for name in names):
                    c.complain(f"parameters.{field}: nothing in the model is called {glob!r}")
                elif field == "train" and glob in fates and not matches(glob, c.recipe.parameters.freeze):
                    raise RecipeError(f"parameters.train: {glob!r} cannot train: {fates[glob]}")


def _group(c: Compilation, name: str) -> int | None:
    return next((i for i, group in enumerate(c.recipe.groups) if matches(name, group.match)), None)


def _check_wrt(c: Compilation, name: str, by_name: dict[str | None, ir.Value], active: Container[ir.Value]) -> None:
    value = by_name.get(name)
    if value is None or role(value) != "data":
        data = [v.name for v in c.graph.inputs if role(v) == "data"]
        there = f"; there are {', '.join(map(str, data))}" if c.part is None else ""
        c.complain(f"wrt: {name!r} is not a data input of the model{there}")
        return
    if not is_float(value):
        assert value.dtype is not None
        raise RecipeError(f"wrt: the input {name!r} holds {type_name(value.dtype)}, which has no gradient")
    if value not in active:
        raise RecipeError(f"wrt: the loss does not depend on the input {name!r}")


def _nothing_trains(c: Compilation) -> str:
    reasons = [(p.name, p.reason) for p in c.parameters if not p.trainable] + c.constants
    lines = ["the model has no trainable parameter" + (":" if reasons else ": it holds no weights at all.")]
    lines += [f"- {name}: {reason}" for name, reason in reasons[:12]]
    if len(reasons) > 12:
        lines.append(f"- … and {len(reasons) - 12} more")
    if not any(p.role == "parameter" for p in c.parameters) and c.constants:
        lines.append("An integer-only or quantised model cannot be trained; export it in floating point.")
    if any(p.reason == FROZEN for p in c.parameters):
        lines.append("Freeze less, or ask for the gradient of an input (--wrt INPUT).")
    return "\n".join(lines)
