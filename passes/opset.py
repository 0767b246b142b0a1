"""Any opset from 7 on to the target's: what changed in the standard's operators, as a table of steps.

Why not a library's converter: ``onnxscript.version_converter`` starts at opset 18 and cannot go down. That of ``onnx``
serialises the model, and over the cases of ``tests/test_normalise.py`` (onnx 1.23.2, outputs compared in ONNX Runtime)
its results are wrong for Hardmax before opset 13 and for Upsample and Resize before 11 (fractional scales, or linear),
and do not run for GroupNormalization before 21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortc.errors import ModelError
from ortc.graph.names import Names, all_graphs, taken_names
from ortc.graph.shapes import constant, dims, rank
from ortc.passes.inference import infer_shapes
from ortc.passes.inlining import inline_call
from ortc.rules import LOWERINGS


def change_opset(model: ir.Model, opset: int) -> None:
    """Rewrite every node for ``opset``, in place; see :func:`ortc.passes.normalise.convert_opset`.

    A node with a ``version`` was written for that opset, the others for the model's.
    """
    have = model.opset_imports[""]
    _upgrade(model, have, opset)
    if have > opset:
        _downgrade(model, have, opset)
    model.opset_imports[""] = opset


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of the standard's domain, bodies included."""
    for g in all_graphs(graph):
        yield from (node for node in list(g) if not node.domain)


# ---- up --------------------------------------------------------------------------------------------------------------

# What an initializer's metadata says if it was no initializer of the user's: single numbers of that kind do not train.
CONSTANT_NODE = "ortc.constant_node"

Step = Callable[["_Editor", ir.Node], None]

# (operator, opset) → what to do with a node that was written before that opset.
_STEPS: dict[tuple[str, int], Step] = {}


def _since(opset: int, *op_types: str) -> Callable[[Step], Step]:
    """Declare what changed in these operators with ``opset``."""

    def register(step: Step) -> Step:
        _STEPS.update({(op_type, opset): step for op_type in op_types})
        return step

    return register


def _upgrade(model: ir.Model, have: int, want: int) -> None:
    nodes = list(_nodes(model.graph))
    due = [range((node.version or have) + 1, want + 1) for node in nodes]
    if any((node.op_type, opset) in _STEPS for node, opsets in zip(nodes, due, strict=True) for opset in opsets):
        infer_shapes(model)
    edit = _Editor(model.graph)
    for node, opsets in zip(nodes, due, strict=True):
        for opset in opsets:
            step = _STEPS.get((node.op_type, opset))
            if step is not None:
                step(edit, node)
        node.version = None
        if node.op_type == "STFT" and "onesided" not in node.attributes:
            _set(node, onesided=1)  # the default, for which ONNX infers the shape of 0


def _made_from(node: ir.Node) -> dict[str, str]:
    return {**node.metadata_props, "ortc.pass": "upgrade", "ortc.origin": node.name or ""}


class _Editor:
    """Writes nodes (as of the newest opset) in front of a given one, and constants into the main graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.main = graph
        self.names = Names(taken_names(graph))

    def const(self, node: ir.Node, what: str, array: Any, dtype: Any = np.int64) -> ir.Value:
        """An initializer, called after the node that it is for."""
        data = np.asarray(array, dtype=dtype)
        name = self.names.fresh(f"{node.name}/{what}")
        value = ir.Value(name=name, const_value=ir.tensor(data, name=name), metadata_props={CONSTANT_NODE: "1"})
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(data.dtype)), ir.Shape(data.shape)
        self.main.register_initializer(value)
        return value

    def before(self, node: ir.Node, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A new node's output, for ``node`` to read."""
        name = self.names.fresh(f"{node.name}/{op_type}")
        new = ir.node(op_type, inputs, attributes, name=name, metadata_props=_made_from(node))
        new.outputs[0].name = name
        assert node.graph is not None
        node.graph.insert_before(node, new)
        return new.outputs[0]

    def after(self, node: ir.Node, op_type: str, *more: ir.Value, **attributes: Any) -> None:
        """A new node on ``node``'s first output, that takes that output's name and uses."""
        y = node.outputs[0]
        name = self.names.fresh(f"{node.name}/{op_type}")
        new = ir.node(op_type, [y, *more], attributes, name=name, metadata_props=_made_from(node))
        z = new.outputs[0]
        z.type, z.shape, z.doc_string = y.type, y.shape, y.doc_string
        z.metadata_props.update(y.metadata_props)
        assert node.graph is not None
        node.graph.insert_after(node, new)
        new.replace_input_with(0, None)
        ir.convenience.replace_all_uses_with(y, z, replace_graph_outputs=True)
        new.replace_input_with(0, y)
        z.name, y.name, y.shape = y.name, self.names.fresh(f"{y.name}/before_{op_type}"), None
        y.metadata_props.clear()


def _pop(node: ir.Node, name: str, default: Any = None) -> Any:
    """Take an attribute away and return its value."""
    attribute = node.attributes.pop(name, None)
    return default if attribute is None else attribute.value


def _set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _set(node: ir.Node, **attributes: Any) -> None:
    for name, value in attributes.items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)


def _refuse(node: ir.Node, why: str) -> ModelError:
    return ModelError(f"node {node.name!r} ({node.op_type}) {why}")


def _element_type(node: ir.Node) -> np.dtype:
    """The element type of the first input; float32 if inference could not find it."""
    x = node.inputs[0]
    return np.dtype(np.float32) if x is None or x.dtype is None else x.dtype.numpy()


def _axes_to_input(edit: _Editor, node: ir.Node) -> None:
    axes = _pop(node, "axes")
    if axes:
        _set_input(node, 1, edit.const(node, "axes", axes))


_since(13, "Squeeze", "Unsqueeze", "ReduceSum")(_axes_to_input)
_since(
    18,
    *("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
)(_axes_to_input)


@_since(9, "BatchNormalization")
def _batch_norm_9(edit: _Editor, node: ir.Node) -> None:
    if _pop(node, "spatial", 1) == 0:
        raise _refuse(node, "has spatial=0 (a mean per position), which no opset from 9 on has")


@_since(14, "BatchNormalization")
def _batch_norm_14(edit: _Editor, node: ir.Node) -> None:
    """More than one output meant training; the batch's own statistics are no longer outputs."""
    if any(v.uses() or v.is_graph_output() for v in node.outputs[3:]):
        raise _refuse(node, "is read at its outputs saved_mean or saved_var, which no opset from 14 on has")
    if len(node.outputs) > 1:
        _set(node, training_mode=1)
        node.resize_outputs(min(len(node.outputs), 3))


@_since(9, "Upsample")
def _upsample_9(edit: _Editor, node: ir.Node) -> None:
    _set_input(node, 1, edit.const(node, "scales", _pop(node, "scales"), np.float32))


@_since(10, "Upsample")
def _upsample_10(edit: _Editor, node: ir.Node) -> None:
    node.op_type = "Resize"


@_since(11, "Resize")
def _resize_11(edit: _Editor, node: ir.Node) -> None:
    """Until then pixels were measured from their corners; which is the nearest nothing said: this is ONNX Runtime's."""
    scales = constant(node.inputs[1])
    shrinks, grows = (False, False) if scales is None else (np.any(scales < 1), np.any(scales > 1))
    if shrinks and grows and node.attributes.get_string("mode", "nearest") == "nearest":
        raise _refuse(node, "shrinks one axis and enlarges another, by a rule that no opset from 11 on has")
    _set_input(node, 2, node.inputs[1])
    node.replace_input_with(1, None)
    _set(node, coordinate_transformation_mode="asymmetric", nearest_mode="ceil" if shrinks else "floor")


@_since(13, "Resize")
def _resize_13(edit: _Editor, node: ir.Node) -> None:
    """Inputs that do not count had to be there, empty; now they are left out."""
    for index in (1, 2):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None and dims(value) == (0,):
            node.replace_input_with(index, None)


@_since(10, "Dropout")
def _dropout_10(edit: _Editor, node: ir.Node) -> None:
    """The mask became boolean."""
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise _refuse(node, "is read at its mask, which is not boolean before opset 10")


@_since(12, "Dropout")
def _dropout_12(edit: _Editor, node: ir.Node) -> None:
    _set_input(node, 1, edit.const(node, "ratio", _pop(node, "ratio", 0.5), np.float32))


@_since(10, "TopK")
def _topk_10(edit: _Editor, node: ir.Node) -> None:
    _set_input(node, 1, edit.const(node, "k", [_pop(node, "k")]))


@_since(10, "Slice")
def _slice_10(edit: _Editor, node: ir.Node) -> None:
    for index, name in enumerate(("starts", "ends", "axes"), start=1):
        given = _pop(node, name)
        if given is not None:
            _set_input(node, index, edit.const(node, name, given))


@_since(11, "Clip")
def _clip_11(edit: _Editor, node: ir.Node) -> None:
    for index, name in enumerate(("min", "max"), start=1):
        bound = _pop(node, name)
        if bound is not None:
            _set_input(node, index, edit.const(node, name, bound, _element_type(node)))


@_since(11, "Pad")
def _pad_11(edit: _Editor, node: ir.Node) -> None:
    _set_input(node, 1, edit.const(node, "pads", _pop(node, "pads")))
    value = _pop(node, "value", 0.0)
    if value:
        _set_input(node, 2, edit.const(node, "value", value, _element_type(node)))


@_since(11, "Scatter")
def _scatter_11(edit: _Editor, node: ir.Node) -> None:
    node.op_type = "ScatterElements"


@_since(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax_13(edit: _Editor, node: ir.Node) -> None:
    """Until then everything from the axis on was one axis."""
    axis = _pop(node, "axis", 1)
    x = node.inputs[0]
    assert x is not None
    r = rank(x)
    if r is not None and axis % max(r, 1) == r - 1:
        _set(node, axis=-1)
        return
    flat = edit.before(node, "Flatten", x, axis=axis)
    shape = edit.before(node, "Shape", x)
    node.replace_input_with(0, flat)
    _set(node, axis=-1)
    edit.after(node, "Reshape", shape)


@_since(13, "Split")
def _split_13(edit: _Editor, node: ir.Node) -> None:
    split = _pop(node, "split")
    if split:
        _set_input(node, 1, edit.const(node, "split", split))


@_since(18, "Split")
def _split_18(edit: _Editor, node: ir.Node) -> None:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        _set(node, num_outputs=len(node.outputs))


@_since(16, "RoiAlign")
def _roi_align_16(edit: _Editor, node: ir.Node) -> None:
    if "coordinate_transformation_mode" not in node.attributes:
        _set(node, coordinate_transformation_mode="output_half_pixel")


@_since(20, "GridSample")
def _grid_sample_20(edit: _Editor, node: ir.Node) -> None:
    renamed = {"bilinear": "linear", "bicubic": "cubic"}
    mode = _pop(node, "mode", "bilinear")
    _set(node, mode=renamed.get(mode, mode))


@_since(20, "DFT")
def _dft_20(edit: _Editor, node: ir.Node) -> None:
    _set_input(node, 2, edit.const(node, "axis", _pop(node, "axis", 1)))


@_since(21, "GroupNormalization")
def _group_norm_21(edit: _Editor, node: ir.Node) -> None:
    """Scale and bias were one number per group, and became one per channel."""
    x, scale, bias = node.inputs
    assert x is not None
    assert scale is not None
    assert bias is not None
    groups = node.attributes.get_int("num_groups", 0)
    if not groups:
        raise _refuse(node, "lacks its attribute num_groups")
    known = dims(x)
    channels = known[1] if known is not None else None
    per = dims(scale)
    if channels == groups or (per is not None and per == (channels,)):
        return
    if isinstance(channels, int):
        repeats: ir.Value = edit.const(node, "repeats", [1, channels // groups])
    else:
        count = edit.before(node, "Shape", x, start=1, end=2)
        each = edit.before(node, "Div", count, edit.const(node, "groups", [groups]))
        repeats = edit.before(node, "Concat", edit.const(node, "one", [1]), each, axis=0)
    column, flat = edit.const(node, "column", [-1, 1]), edit.const(node, "flat", [-1])
    for index, value in ((1, scale), (2, bias)):
        each_group = edit.before(node, "Reshape", value, column)
        each_channel = edit.before(node, "Expand", each_group, repeats)
        node.replace_input_with(index, edit.before(node, "Reshape", each_channel, flat))


@_since(9, "Scan")
def _scan_9(edit: _Editor, node: ir.Node) -> None:
    raise _refuse(node, "is written as of opset 8, with a batch axis, which no later opset has; export the model again")


# ---- down ------------------------------------------------------------------------------------------------------------


def _downgrade(model: ir.Model, have: int, want: int) -> None:
    """Nodes as they are where they mean the same, written out where ONNX defines them through others."""
    if any(_fitting(node, have, want) is None for node in _nodes(model.graph)):
        infer_shapes(model)
    names = Names(taken_names(model.graph))
    problems: list[ir.Node] = []
    waiting = [(node, have) for node in reversed(list(_nodes(model.graph)))]
    while waiting:
        node, opset = waiting.pop()
        attributes = _fitting(node, opset, want)
        if attributes is not None:
            node.attributes.clear()
            node.attributes.update(attributes)
        elif (function := _definition(node, opset)) is not None:
            written_in = function.opset_imports.get("", opset)
            inner = inline_call(node, function, names)
            waiting.extend((n, written_in) for n in reversed(inner) if not n.domain)
        elif ("ortc", node.op_type) in LOWERINGS:
            node.domain = "ortc"
        else:
            problems.append(node)
    if problems:
        lines = [f"- {n.name} ({n.op_type}, opset {_schema(n.op_type, have).since_version})" for n in problems[:20]]
        more = [f"- … and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ModelError(
            f"these nodes of the model (opset {have}) cannot be written in opset {want}, the highest that the target "
            "accepts; export the model for that opset:\n" + "\n".join(lines + more)
        )


def _schema(op_type: str, opset: int) -> Any:
    return onnx.defs.get_schema(op_type, opset, "")


def _fitting(node: ir.Node, have: int, want: int) -> dict[str, ir.Attr] | None:
    """The attributes with which a node of opset ``have`` means the same in ``want``; None if there are none."""
    try:
        new = _schema(node.op_type, have)
    except onnx.defs.SchemaError:
        return dict(node.attributes)
    try:
        old = _schema(node.op_type, want)
    except onnx.defs.SchemaError:
        return None
    if new.since_version == old.since_version:
        return dict(node.attributes)
    attributes = dict(node.attributes)
    for name, declared in new.attributes.items():
        default = declared.default_value
        if name not in old.attributes:
            given = attributes.pop(name, None)
            if given is not None and ir.to_proto(given) != default:
                return None
        elif name not in attributes and default != old.attributes[name].default_value and default.name:
            attributes[name] = ir.from_proto(default)
    if any(a.required and name not in attributes for name, a in old.attributes.items()):
        return None
    fits = _ports_fit(node.inputs, new.inputs, old.inputs) and _ports_fit(node.outputs, new.outputs, old.outputs)
    return attributes if fits else None


def _ports_fit(values: Any, new: Any, old: Any) -> bool:
    """Whether the used inputs (or outputs) are at the same place and of the same kind in both signatures."""
    for i, value in enumerate(values):
        a, b = new[min(i, len(new) - 1)], old[min(i, len(old) - 1)] if i < len(old) or _is_variadic(old) else None
        if value is not None and (b is None or a.name != b.name):
            return False
    return True


def _is_variadic(ports: Any) -> bool:
    return bool(ports) and ports[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def _definition(node: ir.Node, opset: int) -> ir.Function | None:
    """The function through which ONNX defines a node."""
    schema = _schema(node.op_type, opset)
    for name, declared in schema.attributes.items():
        if name not in node.attributes and declared.default_value.name:
            node.attributes[name] = ir.from_proto(declared.default_value)
    if schema.has_function:
        return ir.from_proto(schema.function_body)
    if not schema.has_context_dependent_function:
        return None
    # What is left out in the middle would be missing among the function's outputs.
    for i, value in enumerate(node.outputs):
        value.name = value.name or f"{node.name}.{i}"
    types = [b"" if v is None or v.type is None else _type_proto(v).SerializeToString() for v in node.inputs]
    version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
    body = schema.get_context_dependent_function_with_opset_version(version, ir.to_proto(node).SerializeToString(), types)
    if not body:  # some are only defined for known shapes
        return None
    function = onnx.FunctionProto.FromString(body)
    del function.output[len(node.outputs) :]  # these nobody makes
    return ir.from_proto(function)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(int(value.dtype or 0), dims(value))
