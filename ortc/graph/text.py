"""A model as ONNX text in one canonical form, so that a review reads a small diff.

The printer of the ``onnx`` package is not used: its floats lose digits, it drops metadata, it prints weights in full,
and its output differs between releases. Here

- each input, output, initialiser and node has a line of its own, initialisers sorted by name;
- the type and shape of each node's outputs, and the metadata whose keys start with ``ortc.``, follow as a comment:
  ``y = Relu (x)  # float[N,4] pass=gradients``;
- floats have the fewest digits that read back as the same number;
- a tensor of more than eight elements, or of a type that ONNX text cannot spell, is its hash in the place of an
  external file's name: ``["location": "sha256:…"]``; a short one of such a type has its values in the comment;
- a node's name is printed only where it is not the name of its first output.

``onnx.parser`` reads the text back, except where a node's attribute holds such a hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortc.graph.shapes import dims

TAG = "ortc."

_LONGEST = 8  # elements of a tensor that is printed in full
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r'[^\s"]+')

_Attribute = ir.AttributeType


def graph_text(model: ir.Model) -> str:
    """The model as text: the same for the same model, whatever the release of ``onnx`` and ``numpy``.

    Args:
        model: any model; its weights are read once, to hash them.

    Returns:
        ONNX text, as the module describes, ending with a line feed.
    """
    lines = [f"<ir_version: {model.ir_version}, opset_import: {_opsets(model.opset_imports)}>"]
    lines += _graph(model.graph)
    for function in sorted(model.functions.values(), key=lambda f: f.identifier()):
        lines += ["", *_function(function)]
    return "\n".join(lines) + "\n"


def _graph(graph: ir.Graph) -> list[str]:
    lines = [f"{_name(graph.name or 'graph')} ("]
    lines += _listed([(f"{_type(v)} {_name(v.name)}", _tags(v.metadata_props)) for v in graph.inputs])
    lines += [") => ("]
    lines += _listed([(f"{_type(v)} {_name(v.name)}", _tags(v.metadata_props)) for v in graph.outputs])
    lines += [")"]
    if graph.initializers:
        lines += ["<", *_listed([_initializer(v) for _, v in sorted(graph.initializers.items())]), ">"]
    return [*lines, "{", *_nodes(graph), "}"]


def _function(function: ir.Function) -> list[str]:
    lines = [f'<domain: "{function.domain}", opset_import: {_opsets(function.opset_imports)}>']
    attributes = [_attribute(a) if a.value is not None else name for name, a in sorted(function.attributes.items())]
    signature = f"<{', '.join(attributes)}> " if attributes else ""
    arguments, results = (", ".join(_name(v.name) for v in side) for side in (function.inputs, function.outputs))
    return [*lines, f"{_name(function.name)} {signature}({arguments}) => ({results})", "{", *_nodes(function), "}"]


def _nodes(nodes: Iterable[ir.Node]) -> list[str]:
    return [f"   {line}" for node in nodes for line in _node(node).split("\n")]


def _node(node: ir.Node) -> str:
    outputs = ", ".join(_name(v.name) for v in node.outputs)
    inputs = ", ".join(_name(v.name if v is not None else "") for v in node.inputs)
    named = node.name and node.name != node.outputs[0].name
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.overload:
        operator += f":{node.overload}"
    attributes = [_attribute(a) for _, a in sorted(node.attributes.items())]
    text = f"[{_quoted(node.name or '')}] " if named else ""
    text += f"{outputs} = {operator} "
    text += f"<{', '.join(attributes)}> " if attributes else ""
    return _commented(f"{text}({inputs})", [*(_type(v) for v in node.outputs), *_tags(node.metadata_props)])


def _initializer(value: ir.Value) -> tuple[str, list[str]]:
    tensor = value.const_value
    if tensor is None:
        return f"{_type(value)} {_name(value.name)}", _tags(value.metadata_props)
    shown = [] if _spelled(tensor) or tensor.size > _LONGEST else [str(tensor.numpy().tolist())]
    text = f"{_tensor_type(tensor)} {_name(value.name)} = {_elements(tensor)}"
    return text, [*shown, *_tags(value.metadata_props)]


def _attribute(attribute: ir.Attr) -> str:
    kind = attribute.type.name.lower()
    if attribute.is_ref():
        return f"{attribute.name}: {kind} = @{attribute.ref_attr_name}"
    return f"{attribute.name}: {kind} = {_attribute_value(attribute)}"


def _attribute_value(attribute: ir.Attr) -> str:
    value: Any = attribute.value
    spell: dict[ir.AttributeType, Callable[[Any], str]] = {
        _Attribute.FLOAT: lambda v: str(np.float32(v)),
        _Attribute.INT: str,
        _Attribute.STRING: _quoted,
        _Attribute.TENSOR: lambda v: f"{_tensor_type(v)} {_elements(v)}",
        _Attribute.GRAPH: lambda v: "\n".join(_graph(v)),
        _Attribute.TYPE_PROTO: lambda v: _type_text(v.type, None if v.shape is None else v.shape.simple()),
    }
    if attribute.type in spell:
        return spell[attribute.type](value)
    single = {f"{one.name}S": text for one, text in spell.items()}
    if attribute.type.name in single:
        return f"[{', '.join(single[attribute.type.name](v) for v in value)}]"
    content = ir.to_proto(attribute).SerializeToString(deterministic=True)
    return f'["location": "{_hash(content)}"]'


def _elements(tensor: ir.TensorProtocol) -> str:
    if not _spelled(tensor):
        return f'["location": "{_hash(_content(tensor))}"]'
    flat = tensor.numpy().reshape(-1)
    if tensor.dtype in _INTEGERS:
        return "{" + ", ".join(str(int(v)) for v in flat) + "}"
    return "{" + ", ".join(str(v) for v in flat) + "}"


def _spelled(tensor: ir.TensorProtocol) -> bool:
    return tensor.size <= _LONGEST and tensor.dtype in _INTEGERS | _FLOATS


def _content(tensor: ir.TensorProtocol) -> bytes:
    if tensor.dtype == ir.DataType.STRING:
        return repr(tensor.numpy().tolist()).encode()
    return tensor.tobytes()


def _hash(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def _type(value: ir.Value) -> str:
    return "" if value.type is None else _type_text(value.type, dims(value))


def _tensor_type(tensor: ir.TensorProtocol) -> str:
    return _type_text(ir.TensorType(tensor.dtype), tensor.shape.numpy())


def _type_text(kind: ir.TypeProtocol, shape: Sequence[int | str | None] | None) -> str:
    """``float[N,3]``; a scalar is ``float``, an unknown rank ``float[]``, an unknown dimension ``?``."""
    wrapper = {ir.SequenceType: "seq", ir.OptionalType: "optional", ir.SparseTensorType: "sparse_tensor"}.get(type(kind))
    if wrapper in ("seq", "optional"):
        return f"{wrapper}({_type_text(kind.elem_type, shape)})"  # type: ignore[arg-type]
    element = ir.DataType(kind.dtype).name.lower()
    if shape is not None:
        element += f"[{','.join(_dim(d) for d in shape)}]" if len(shape) else ""
    else:
        element += "[]"
    return f"{wrapper}({element})" if wrapper else element


def _dim(dim: int | str | None) -> str:
    if dim is None:
        return "?"
    return _name(dim) if isinstance(dim, str) else str(dim)


def _opsets(imports: Mapping[str, int]) -> str:
    return "[" + ", ".join(f'"{domain}": {version}' for domain, version in sorted(imports.items())) + "]"


def _tags(metadata: Mapping[str, str]) -> list[str]:
    """``ortc.rule = Relu`` as ``rule=Relu``; a text with blanks is quoted, so that tags stay apart."""
    texts = {key.removeprefix(TAG): text for key, text in sorted(metadata.items()) if key.startswith(TAG)}
    return [f"{key}={text if _PLAIN.fullmatch(text) else _one_line(text)}" for key, text in texts.items()]


def _listed(entries: Sequence[tuple[str, list[str]]]) -> list[str]:
    last = len(entries) - 1
    return ["   " + _commented(text + ("," if i < last else ""), tags) for i, (text, tags) in enumerate(entries)]


def _commented(text: str, tags: Iterable[str]) -> str:
    comment = " ".join(tag for tag in tags if tag)
    return f"{text}  # {comment}" if comment else text


def _name(name: str | None) -> str:
    """Bare where the parser allows it, else quoted."""
    return name if name and _IDENTIFIER.fullmatch(name) else _quoted(name or "")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return _quoted(text.replace("\n", "\\n"))
