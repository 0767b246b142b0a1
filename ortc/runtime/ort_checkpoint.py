"""ONNX Runtime's checkpoint of on-device training: a FlatBuffer (ort_training_checkpoint.fbs and ort.fbs in
onnxruntime/core/flatbuffers/schema; format version 2, of ONNX Runtime 1.17 to 1.19).

::

    Checkpoint     0 version: int32, 1 module: ModuleState, 2 groups: [OptimizerGroup], 3 properties: PropertyBag
    ModuleState    0 trained: [Tensor], 1 frozen: [Tensor], 2 nominal: bool, 3 external: bool
    Tensor         0 name: string, 2 dims: [int64], 3 type: int32, 4 raw: [uint8], 6 external_offset: int64
    OptimizerGroup 0 name: string, 1 step: int64, 2 initial_learning_rate: float, 3 states: [ParameterState]
    ParameterState 0 parameter: string, 1 momentums: [Tensor]

A FlatBuffer is made of tables and vectors that point to others by unsigned offsets from the pointer's own place. A table
starts with the (signed) distance back to its vtable: uint16 numbers, its own size, the table's size, then where in the table
each field lies, 0 for one that is not there. Everything is little endian, and aligned to its own size.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ortc.errors import CheckpointError
from ortc.runtime.batch import numpy_type

IDENTIFIER, VERSION = b"ODTC", 2
LARGEST = 2**31 - 1  # offsets inside a FlatBuffer are no larger
GROUP, MOMENTUMS = "group0", ("momentum0", "momentum1")

# ONNX's numbers of element types, by numpy's names.
TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip
_MOST_DIMENSIONS = 32
_NAMES = {number: name for name, number in TYPES.items()}


@dataclass(frozen=True)
class Source:
    """A tensor to write: its bytes are written by ``write`` when their place is reached."""

    name: str
    dtype: str
    shape: Sequence[int]
    write: Callable[[BinaryIO], object]


@dataclass
class Checkpoint:
    """What a checkpoint holds; tensors are views of the file, which stays mapped as long as one of them lives.

    Attributes:
        trained, frozen: the parameters.
        step: updates done.
        states: by parameter and name (``momentum0``, …).
    """

    trained: dict[str, np.ndarray] = field(default_factory=dict)
    frozen: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0
    states: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)


def source(name: str, array: np.ndarray) -> Source:
    """An array to write."""

    def write(file: BinaryIO) -> None:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    return Source(name, array.dtype.name, array.shape, write)


# ---- writing ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """A table, a vector or a string, and what it points to."""

    size: int  # from the place that pointers aim at
    emit: Callable[[BinaryIO, Callable[[_Block], int]], object]
    parts: Sequence[_Block] = ()
    align: int = 4
    phase: int = 0  # the place, modulo `align`
    head: int = 0  # bytes before the place


def write_checkpoint(
    path: Path,
    trained: Sequence[Source],
    frozen: Sequence[Source],
    step: int = 0,
    states: Mapping[str, Sequence[Source]] | None = None,
) -> None:
    """Write a checkpoint; tensors go into the file one after the other.

    Args:
        path: the file; it is overwritten.
        trained, frozen: the parameters.
        step: updates done.
        states: the optimizer's states, called :data:`MOMENTUMS`, of all trained parameters; None: they start at zero.

    Raises:
        CheckpointError: the format cannot hold so much.
        OSError: the file cannot be written.
    """
    module = _table({0: _vector([_tensor(t) for t in trained]), 1: _vector([_tensor(t) for t in frozen])})
    fields: dict[int, _Field] = {0: ("<i", VERSION), 1: module}
    if states is not None:
        each = [_table({0: _string(name), 1: _vector([_tensor(t) for t in held])}) for name, held in states.items()]
        group = _table({0: _string(GROUP), 1: ("<q", step), 2: ("<f", 1e-3), 3: _vector(each)})
        fields[2] = _vector([group])
    root = _table(fields)
    places: dict[int, int] = {}
    order: list[_Block] = []
    end = _place(root, 8, places, order)
    if end > LARGEST:
        raise CheckpointError(f"{path}: ONNX Runtime's checkpoints hold at most 2 GiB, this one would have {end:,} bytes")
    with open(path, "wb") as file:
        file.write(struct.pack("<I", places[id(root)]) + IDENTIFIER)
        for block in order:
            file.write(bytes(places[id(block)] - block.head - file.tell()))
            block.emit(file, lambda part: places[id(part)])


_Field = _Block | tuple[str, int | float]


def _place(block: _Block, at: int, places: dict[int, int], order: list[_Block]) -> int:
    """Give the block and what it points to their places, the block first; returns where they end."""
    place = at + block.head
    places[id(block)] = place = place + (block.phase - place) % block.align
    order.append(block)
    at = place + block.size
    for part in block.parts:
        at = _place(part, at, places, order)
    return at


def _table(fields: Mapping[int, _Field]) -> _Block:
    """Each field has eight bytes of its own, so that all are aligned."""
    slots = max(fields) + 1
    vtable = struct.pack(f"<{2 + slots}H", 4 + 2 * slots, 8 + 8 * len(fields), *_offsets(fields, slots))
    head = len(vtable) + -len(vtable) % 8

    def emit(file: BinaryIO, place: Callable[[_Block], int]) -> None:
        file.write(vtable + bytes(head - len(vtable)))
        file.write(struct.pack("<ii", head, 0))
        for value in fields.values():
            if isinstance(value, _Block):
                file.write(struct.pack("<Ii", place(value) - file.tell(), 0))
            else:
                file.write(struct.pack(*value).ljust(8, b"\0"))

    parts = [v for v in fields.values() if isinstance(v, _Block)]
    return _Block(8 + 8 * len(fields), emit, parts, align=8, head=head)


def _offsets(fields: Mapping[int, _Field], slots: int) -> list[int]:
    places = {slot: 8 + 8 * i for i, slot in enumerate(fields)}
    return [places.get(slot, 0) for slot in range(slots)]


def _vector(parts: Sequence[_Block]) -> _Block:
    def emit(file: BinaryIO, place: Callable[[_Block], int]) -> None:
        file.write(struct.pack("<I", len(parts)))
        for part in parts:
            file.write(struct.pack("<I", place(part) - file.tell()))

    return _Block(4 + 4 * len(parts), emit, parts)


def _string(text: str) -> _Block:
    data = text.encode()
    return _Block(5 + len(data), lambda file, _: file.write(struct.pack("<I", len(data)) + data + b"\0"))


def _tensor(t: Source) -> _Block:
    size = numpy_type(t.dtype, t.name).itemsize * math.prod(t.shape)
    # Their number lies before the dimensions, which are aligned to eight bytes.
    dims = struct.pack(f"<I{len(t.shape)}q", len(t.shape), *t.shape)
    shape = _Block(len(dims), lambda file, _: file.write(dims), align=8, phase=4)

    def emit(file: BinaryIO, _: object) -> None:
        file.write(struct.pack("<I", size))
        start = file.tell()
        t.write(file)
        if file.tell() - start != size:
            raise CheckpointError(f"the data of {t.name!r} has another size than its type and shape need")

    raw = _Block(4 + size, emit)
    return _table({0: _string(t.name), 2: shape, 3: ("<i", TYPES[t.dtype]), 4: raw})


# ---- reading ----------------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Every offset is checked to lie inside the file.

    Raises:
        CheckpointError: it is none, of another version, damaged, or nominal (without values).
    """
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty") from None
    try:
        return _read(path, data)
    except (struct.error, IndexError, UnicodeDecodeError):
        raise CheckpointError(f"{path} is damaged: it is cut off, or was changed") from None


def _read(path: Path, data: memoryview) -> Checkpoint:
    if bytes(data[4:8]) != IDENTIFIER:
        raise CheckpointError(f"{path} is no checkpoint of ONNX Runtime's on-device training")
    root = _Table(data, 0).table_at(0)
    version = root.number(0, "<i")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version} of ONNX Runtime's checkpoints, this ortc reads {VERSION}: save it again"
        )
    found = Checkpoint()
    module = root.table(1)
    if module is not None:
        if module.number(2, "<B") or module.number(3, "<B"):
            raise CheckpointError(f"{path} holds no values, or has them in another file: save a complete checkpoint")
        found.trained.update(_tensors(path, module.tables(0)))
        found.frozen.update(_tensors(path, module.tables(1)))
    for group in root.tables(2):
        found.step = max(found.step, int(group.number(1, "<q")))
        for state in group.tables(3):
            held = _tensors(path, state.tables(1))
            found.states.update({(state.string(0), name): array for name, array in held.items()})
    return found


def _tensors(path: Path, tables: Sequence[_Table]) -> dict[str, np.ndarray]:
    found = {}
    for table in tables:
        name, number = table.string(0), int(table.number(3, "<i"))
        if number not in _NAMES:
            raise CheckpointError(f"{path}: {name!r} has the element type {number} of ONNX, which is not supported")
        dtype, shape, raw = numpy_type(_NAMES[number], name), table.vector(2, "<q"), table.bytes(4)
        if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
            raise CheckpointError(f"{path} is damaged: the {len(raw)} bytes of {name!r} are not what its type and shape need")
        found[name] = np.frombuffer(raw, dtype).reshape(shape)
    return found


@dataclass(frozen=True)
class _Table:
    """A table at a place of the file. Places are never negative, which Python would count from the end."""

    data: memoryview
    place: int

    def number(self, slot: int, kind: str) -> int | float:
        """A field; 0 where it is not there."""
        at = self._field(slot)
        return 0 if at is None else _number(self.data, at, kind)

    def table_at(self, pointer: int) -> _Table:
        return _Table(self.data, self._aim(pointer))

    def table(self, slot: int) -> _Table | None:
        at = self._field(slot)
        return None if at is None else self.table_at(at)

    def tables(self, slot: int) -> list[_Table]:
        start, count = self._items(slot, 4)
        return [self.table_at(start + 4 * i) for i in range(count)]

    def vector(self, slot: int, kind: str) -> list[int]:
        size = struct.calcsize(kind)
        start, count = self._items(slot, size)
        return [int(_number(self.data, start + size * i, kind)) for i in range(count)]

    def bytes(self, slot: int) -> memoryview:
        start, count = self._items(slot, 1)
        return self.data[start : start + count]

    def string(self, slot: int) -> str:
        return str(self.bytes(slot), "utf-8")

    def _items(self, slot: int, size: int) -> tuple[int, int]:
        """Where the elements of a vector start, and how many there are: as many as lie in the file."""
        at = self._field(slot)
        if at is None:
            return 0, 0
        place = self._aim(at)
        count = int(_number(self.data, place, "<I"))
        if place + 4 + count * size > len(self.data):
            raise IndexError
        return place + 4, count

    def _aim(self, pointer: int) -> int:
        return pointer + int(_number(self.data, pointer, "<I"))

    def _field(self, slot: int) -> int | None:
        vtable = self.place - int(_number(self.data, self.place, "<i"))
        size = int(_number(self.data, vtable, "<H"))
        offset = int(_number(self.data, vtable + 4 + 2 * slot, "<H")) if 6 + 2 * slot <= size else 0
        return self.place + offset if offset else None


def _number(data: memoryview, at: int, kind: str) -> int | float:
    if at < 0:
        raise IndexError
    return struct.unpack_from(kind, data, at)[0]  # type: ignore[no-any-return]
