"""The two forms of a model: in training, dropout drops and batch norm uses the batch; in inference neither does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass, clear_role, of, role, set_role
from ortc.errors import ModelError
from ortc.graph.builder import Builder
from ortc.graph.names import take_place
from ortc.graph.shapes import stamp_like
from ortc.passes.normalise import convert_opset, infer_shapes
from ortc.passes.pipeline import lower
from ortc.passes.randomness import RANDOM, Randomness, constant_ratio
from ortc.passes.recurrent import has_training_form, to_training_form


@dataclass(frozen=True)
class InferenceTemplate(Pass):
    """Sets the inference form of the user's own graph aside: `ortc export` adds the trained weights to it.

    It stays at the user's opset, unless that is newer than what the target loads: then nothing there could run or check it.
    """

    name = "inference-template"
    after = ("prepare",)

    def run(self, c: Compilation) -> None:
        template = c.model.clone()
        to_inference(template.graph)
        if template.opset_imports[""] > c.target.opset:
            template = convert_opset(template, c.target.opset)
            lower(infer_shapes(template).graph, lambda n: n.domain == "ortc")
        # Before IR version 4 every weight had to be an input as well.
        template.ir_version = min(max(template.ir_version, 4), c.target.ir_version)
        c.graphs["export"] = template


@dataclass(frozen=True)
class ForkEvaluation(Pass):
    """Sets the evaluation graph aside: the inference form with the loss."""

    name = "fork-evaluation"
    after = ("loss", "decide-training")

    def run(self, c: Compilation) -> None:
        evaluation = c.model.clone()
        to_inference(evaluation.graph)
        c.graphs["eval"] = evaluation


@dataclass(frozen=True)
class TrainingForm(Pass):
    """Gives the graph its training form; running statistics and counters of the random numbers become inputs and outputs."""

    name = "training-form"
    preserves = False
    after = ("fork-evaluation",)

    def run(self, c: Compilation) -> None:
        kept = [v for v in c.graph.outputs if role(v) in ("loss", "boundary")]
        c.graph.outputs.clear()
        c.graph.outputs.extend(kept)
        op = Builder(c.graph)
        random = Randomness(op)
        newest: dict[ir.Value, ir.Value] = {}
        for node in list(c.graph):
            if _is(node, "BatchNormalization"):
                _train_batch_norm(c, op, node, newest)
            elif has_training_form(c.target, node):
                to_training_form(op, node)
            elif _is(node, "Dropout") and constant_ratio(node) == 0:
                _bypass_dropout(op, node)
            elif node.op_type in RANDOM and not node.domain:
                random.replace(node)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and not node.domain


def to_inference(graph: ir.Graph) -> None:
    """Turn dropout off and batch norm to its stored statistics, in place; graph outputs that only training has go."""
    op = Builder(graph)
    for node in list(graph):
        if _is(node, "Dropout"):
            read = list(node.inputs[1:])
            _bypass_dropout(op, node)
            _drop_unused(graph, read)
        elif _is(node, "BatchNormalization"):
            node.attributes.pop("training_mode", None)
            for value in node.outputs[1:]:
                if value.is_graph_output():
                    graph.outputs.remove(value)
                if value.uses():
                    raise ModelError(
                        f"node {node.name!r} (BatchNormalization): its running statistics are used inside the model, "
                        "which has no inference form"
                    )
            node.resize_outputs(1)


def _drop_unused(graph: ir.Graph, values: list[ir.Value | None]) -> None:
    for value in values:
        if value is not None and value.is_initializer() and not value.uses():
            graph.initializers.pop(value.name or "")


def _bypass_dropout(op: Builder, node: ir.Node) -> None:
    """y = x, and an all-true mask where somebody reads it."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    with op.scope(node.name or "Dropout", before=node, origin=node.name or "", rule="Dropout", pass_="inference-form"):
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            take_place(node.outputs[1], op.Expand(op.const(np.array(True)), op.Shape(x)))
        if y.is_graph_output():
            take_place(y, op.Identity(x))
        else:
            ir.convenience.replace_all_uses_with(y, x)
    op.graph.remove(node, safe=True)


def _train_batch_norm(c: Compilation, op: Builder, node: ir.Node, newest: dict[ir.Value, ir.Value]) -> None:
    """Batch statistics, with the new running statistics as outputs (momentum as the node has it).

    A layer that is called more than once updates its statistics as often, one call after the other.

    Args:
        newest: by buffer, what the calls so far have made of it.
    """
    if c.recipe.batch_norm == "frozen":
        node.attributes.pop("training_mode", None)
        node.resize_outputs(1)
        return
    buffers = node.inputs[3:5]
    if any(b is None or role(b) != "buffer" for b in buffers):
        raise ModelError(
            f"node {node.name!r} (BatchNormalization): its running statistics are computed in the model, not stored; "
            "compile with --batch-norm frozen"
        )
    momentum = node.attributes.get_float("momentum", 0.9)
    if momentum in (0.0, 1.0):
        c.warnings.append(
            f"node {node.name!r} (BatchNormalization) has momentum {momentum:g}: its running statistics "
            + ("never change" if momentum == 1.0 else "are those of the last batch alone")
        )
    node.attributes.add(ir.AttrInt64("training_mode", 1))
    node.domain, node.op_type = "com.microsoft", "BatchNormInternal"  # which gives the batch's statistics as well
    c.graph.opset_imports.setdefault(node.domain, 1)
    node.resize_outputs(5)
    for i, (saved, what, buffer) in enumerate(zip(node.outputs[3:], ("mean", "inv_std"), buffers, strict=True), 1):
        assert buffer is not None
        value, earlier = node.outputs[i], newest.get(buffer)
        if earlier is not None:
            node.replace_input_with(2 + i, earlier)
            c.graph.outputs.remove(earlier)
            clear_role(earlier)
        newest[buffer] = value
        value.name = value.name or op.names.fresh(f"{buffer.name}.new")
        saved.name = op.names.fresh(f"{node.name}.saved_{what}")
        for each in (value, saved):
            stamp_like(each, buffer)
        c.graph.outputs.append(set_role(value, "buffer", of=of(buffer)))
