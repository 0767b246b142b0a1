"""Low-rank adapters after training: merged into their weights, or in a file for ONNX Runtime's adapter loading.

The file is a FlatBuffer (the format's documentation, flatbuffers.dev, says how one is laid out) of the schema that ONNX Runtime
publishes: ``Adapter{format_version:int; adapter_version:int; model_version:int; parameters:[Parameter]}`` with
``Parameter{name:string; dims:[int64]; data_type:int; raw_data:[uint8] (aligned to 8)}`` and the identifier ``TORT``. It is
written here because the training build of ONNX Runtime has no writer of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ortc.errors import OrtcError
from ortc.plan import AdapterInfo, GraphFile, Plan
from ortc.runtime.export import DATA_TYPES
from ortc.runtime.files import write_bytes

_FORMAT_VERSION = 1


def merged(adapters: Sequence[AdapterInfo], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's own parameters: W + scale · L·R for each weight that has an adapter, computed in float64."""
    found = dict(values)
    for adapter in adapters:
        left, right = (found.pop(name).astype(np.float64) for name in (adapter.left, adapter.right))
        weight = found[adapter.weight]
        product = left.reshape(left.shape[0], -1) @ right.reshape(right.shape[0], -1)
        found[adapter.weight] = (weight + adapter.scale * product.reshape(weight.shape)).astype(weight.dtype)
    return found


def adapter_graph(plan: Plan) -> GraphFile:
    """The inference model that takes the adapters as inputs.

    Raises:
        OrtcError: if there are none.
    """
    if plan.adapter_export is None:
        raise OrtcError(f"{plan.model} was compiled without adapters: compile it with --lora, or leave --adapters out")
    return plan.adapter_export


def check_free(path: Path, force: bool) -> None:
    """
    Raises:
        OrtcError: if the file exists, and may not be replaced.
    """
    if path.exists() and not force:
        raise OrtcError(f"{path} exists already; choose another name, or --force to replace it")


def write_adapters(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write or replace the file; it appears whole or not at all.

    Args:
        path: the ``.onnx_adapter`` file.
        tensors: by the names of the model's inputs.

    Raises:
        OrtcError: the file cannot be written.
    """
    write_bytes(path, encode_adapters(tensors))


def encode_adapters(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of the file. Offsets point forwards: what a table refers to comes after it."""
    out = bytearray(8)
    out[4:8] = b"TORT"
    root = _table(out, (_FORMAT_VERSION, 1, 1, None))
    struct.pack_into("<I", out, 0, root.start)
    _point(out, root.fields[3], _align(out, 4))
    out += struct.pack("<I", len(tensors))
    slots = [_append(out, bytes(4)) for _ in tensors]
    for slot, (name, array) in zip(slots, tensors.items(), strict=True):
        parameter = _table(out, (None, None, DATA_TYPES[array.dtype.name], None))
        _point(out, slot, parameter.start)
        text = name.encode()
        _point(out, parameter.fields[0], _align(out, 4))
        out += struct.pack("<I", len(text)) + text + b"\0"
        _point(out, parameter.fields[1], _align(out, 8, ahead=4))
        out += struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape)
        raw = np.ascontiguousarray(array).tobytes()
        _point(out, parameter.fields[3], _align(out, 8, ahead=4))
        out += struct.pack("<I", len(raw)) + raw
    _align(out, 8)
    return bytes(out)


class _Table:
    """Where a table starts, and where each of its fields lies."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.fields = [start + 4 * (i + 1) for i in range(count)]


def _table(out: bytearray, values: Sequence[int | None]) -> _Table:
    """Append a vtable and its table of four-byte fields; None is an offset that is set later."""
    _align(out, 4, ahead=2 * (len(values) % 2))  # the table, after 2 + count numbers of 16 bits, is aligned too
    vtable, count = len(out), len(values)
    out += struct.pack(f"<{2 + count}H", 4 + 2 * count, 4 + 4 * count, *(4 + 4 * i for i in range(count)))
    table = _Table(len(out), count)
    out += struct.pack(f"<i{count}i", table.start - vtable, *(v or 0 for v in values))
    return table


def _align(out: bytearray, size: int, ahead: int = 0) -> int:
    """Fill up so that what comes ``ahead`` bytes later is aligned; where the next byte goes."""
    out += bytes(-(len(out) + ahead) % size)
    return len(out)


def _append(out: bytearray, data: bytes) -> int:
    out += data
    return len(out) - len(data)


def _point(out: bytearray, at: int, target: int) -> None:
    struct.pack_into("<I", out, at, target - at)
