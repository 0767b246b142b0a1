"""The little of the ONNX format that the runtime reads and writes itself: it needs no ONNX library.

Protobuf messages that follow one another in a file are merged when it is read, and repeated fields appended: so a file is
extended by writing behind it. Field numbers are those of ``onnx.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OP_TYPE, _NODE_ATTRIBUTE = 1, 2, 3, 4, 5
_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS = 6, 11
_VALUE_NAME, _TENSOR_NAME = 1, 8


@dataclass(frozen=True)
class Node:
    """A node of a graph: its name, its operator, and the values it makes."""

    name: str
    op_type: str
    outputs: tuple[str, ...]


def nodes_of(model: bytes) -> list[Node]:
    """The nodes of a model's outermost graph, in order."""
    nodes = []
    for graph in _messages(memoryview(model), MODEL_GRAPH):
        for node in _messages(graph, _GRAPH_NODE):
            found: dict[int, list[str]] = {_NODE_OUTPUT: [], _NODE_NAME: [""], _NODE_OP_TYPE: [""]}
            for number, value in _fields(node):
                if number in found and isinstance(value, memoryview):
                    found[number].append(str(value, "utf-8"))
            outputs = tuple(name for name in found[_NODE_OUTPUT] if name)
            nodes.append(Node(found[_NODE_NAME][-1], found[_NODE_OP_TYPE][-1], outputs))
    return nodes


def with_outputs(model: bytes, names: Iterable[str]) -> bytes:
    """The model with more values of its graph as outputs, behind those that it has."""
    return model + b"".join(
        bytes_field(MODEL_GRAPH, bytes_field(_GRAPH_OUTPUT, bytes_field(_VALUE_NAME, name.encode()))) for name in names
    )


def cut_at(model: bytes, names: Iterable[str]) -> tuple[bytes, list[str]]:
    """The part of a model that makes some values of its outermost graph, and nothing else.

    Args:
        model: an ONNX file.
        names: values that become its outputs, in this order. One of several outputs of the file keeps its type.

    Returns:
        The smaller model, and the names of the inputs that are left, in their order.
    """
    wanted = list(dict.fromkeys(names))
    nodes = [node for graph in _messages(memoryview(model), MODEL_GRAPH) for node in _messages(graph, _GRAPH_NODE)]
    needed, kept = set(wanted), set()
    for i in reversed(range(len(nodes))):  # in order: what a node reads is made before it
        if needed.intersection(_texts(nodes[i], _NODE_OUTPUT)):
            kept.add(i)
            needed.update(_read(nodes[i]))
    head, body, ends, inputs = [], [], {}, []
    at = 0
    for number, value in _fields(memoryview(model)):
        if number != MODEL_GRAPH or isinstance(value, int):
            head.append(_field(number, value))
            continue
        for part, message in _fields(value):
            if part == _GRAPH_NODE:
                at += 1
                keep = at - 1 in kept
            elif part in (_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT):
                assert isinstance(message, memoryview)
                [name] = _texts(message, _TENSOR_NAME if part == _GRAPH_INITIALIZER else _VALUE_NAME)
                keep = name in needed and part != _GRAPH_OUTPUT
                if keep and part == _GRAPH_INPUT:
                    inputs.append(name)
                if part == _GRAPH_OUTPUT:
                    ends[name] = _field(part, message)
            else:
                keep = True
            if keep:
                body.append(_field(part, message))
    body += [ends.get(name) or bytes_field(_GRAPH_OUTPUT, bytes_field(_VALUE_NAME, name.encode())) for name in wanted]
    return b"".join([*head, bytes_field(MODEL_GRAPH, b"".join(body))]), inputs


def _read(node: memoryview) -> Iterator[str]:
    """The values that a node reads, also in its nested graphs: those of their own among them."""
    yield from _texts(node, _NODE_INPUT)
    for attribute in _messages(node, _NODE_ATTRIBUTE):
        for number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
            for graph in _messages(attribute, number):
                for inner in _messages(graph, _GRAPH_NODE):
                    yield from _read(inner)
                for output in _messages(graph, _GRAPH_OUTPUT):
                    yield from _texts(output, _VALUE_NAME)


def _texts(message: memoryview, number: int) -> list[str]:
    return [str(value, "utf-8") for value in _messages(message, number)]


def _field(number: int, value: memoryview | int) -> bytes:
    """A field as it was read, of a message that has no numbers of a fixed size."""
    return varint(number << 3) + varint(value) if isinstance(value, int) else bytes_field(number, bytes(value))


def bytes_field(number: int, value: bytes) -> bytes:
    """A field of bytes, text, or another message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Seven bits a byte, the low ones first; all but the last byte have the high bit."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    return (value for found, value in _fields(data) if found == number and isinstance(value, memoryview))


_FIXED = {1: 8, 5: 4}  # bytes of a field by its wire type


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """The fields of a message; of a number without a fixed size its value, of others their bytes."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _read_varint(data, at)
        else:
            size = _FIXED[kind]
        yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
