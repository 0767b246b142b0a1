"""PyTorch's files of tensors (``torch.save``, since 1.6), read and written without PyTorch and without running a pickle.

Such a file is a zip archive without compression: ``<name>/data.pkl``, a pickle of nested dictionaries, in which each tensor is
a call of ``torch._utils._rebuild_tensor_v2(storage, offset, size, stride, …)``, and ``<name>/data/<key>``, the bytes of each
storage. The pickle is interpreted here opcode by opcode, and nothing is ever called: an opcode or a global name that tensors do
not need is refused.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ortc.errors import CheckpointError
from ortc.runtime.batch import numpy_type

LARGEST_PICKLE = 64 << 20  # names and shapes of a few hundred thousand tensors
_MOST_NAMES, _DEEPEST = 1_000_000, 50

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A view of a storage: where it starts, its shape and its strides, in elements."""

    storage: str
    elements: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    """What the pickle has that tensors do not need."""


# ---- reading ----------------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> tuple[dict[str, Tensor], Callable[[Tensor], np.ndarray]]:
    """The tensors of a file by name, and what reads one of them. Names of nested dictionaries are joined by dots.

    Raises:
        CheckpointError: the file is none of PyTorch's, is damaged, or holds more than tensors.
    """
    try:
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if len(names) != 1:
        raise CheckpointError(f"{path} is a zip archive, but not a file of tensors that torch.save wrote: it has no data.pkl")
    root = names[0][: -len("data.pkl")]
    if f"{root}constants.pkl" in archive.namelist():
        raise CheckpointError(f"{path} holds a whole TorchScript module: save its state_dict()")
    if f"{root}byteorder" in archive.namelist() and _member(path, archive, f"{root}byteorder", 16) != b"little":
        raise CheckpointError(f"{path} was written on a machine with another order of bytes: convert it there")
    try:
        value = _interpret(_member(path, archive, names[0], LARGEST_PICKLE))
        found = dict(_flatten(value))
    except _Refused as error:
        raise CheckpointError(
            f"{path} is refused, its pickle {error}, and nothing but tensors is accepted (no code ever runs): "
            "save model.state_dict(), or a .safetensors file"
        ) from None
    except Exception as error:  # pickletools raises what it likes; whatever it is, the bytes are no pickle of tensors
        raise CheckpointError(f"{path} is damaged: its pickle cannot be read ({error})") from None
    return found, partial(_read, path, archive, root)


def _member(path: Path, archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    try:
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CheckpointError(f"{path}: {name} is compressed or encrypted, which torch.save never does; it is refused")
        if info.file_size > min(most, path.stat().st_size):
            raise CheckpointError(f"{path}: {name} says that it has {info.file_size:,} bytes, which cannot be")
        return archive.read(info)
    except KeyError:
        raise CheckpointError(f"{path} is damaged: it lacks {name}") from None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged: {name}: {error or 'cut off'}") from None


def _read(path: Path, archive: zipfile.ZipFile, root: str, tensor: Tensor) -> np.ndarray:
    """The tensor as a view of what was read; the shape must have been found to be the wanted one."""
    dtype = numpy_type(tensor.dtype, tensor.storage)
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    size = tensor.elements * dtype.itemsize
    data = _member(path, archive, f"{root}data/{tensor.storage}", size)
    if len(data) != size or (0 not in tensor.shape and last >= tensor.elements):
        raise CheckpointError(f"{path} is damaged: a tensor reaches beyond its storage {tensor.storage!r}")
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, dtype)
    flat = np.frombuffer(data, dtype)[tensor.offset :]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [s * dtype.itemsize for s in tensor.strides], writeable=False)


def _flatten(value: Any) -> list[tuple[str, Tensor]]:
    if not isinstance(value, dict):
        raise _Refused("is no dictionary of tensors")
    found: list[tuple[str, Tensor]] = []
    waiting: list[tuple[str, dict[Any, Any], int]] = [("", value, 0)]
    seen = 0
    while waiting:
        prefix, table, depth = waiting.pop()
        for key, item in table.items():
            seen += 1
            if seen > _MOST_NAMES or depth > _DEEPEST:
                raise _Refused("has too many names")
            if isinstance(item, Tensor):
                found.append((f"{prefix}{key}", item))
            elif isinstance(item, dict):
                waiting.append((f"{prefix}{key}.", item, depth + 1))
    return found


@dataclass(frozen=True)
class _Global:
    """A name that the pickle may mention."""

    name: str


def _global(module: str, name: str) -> _Global:
    full = f"{module}.{name}"
    if full in _CALLS or (module == "torch" and name in _STORAGES):
        return _Global(full)
    raise _Refused(f"names {full!r}")


def _dictionary(*pairs: Any) -> dict[Any, Any]:
    return dict(*pairs)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    numbers = (offset, *size, *stride) if isinstance(size, tuple) and isinstance(stride, tuple) else (None,)
    if not isinstance(storage, tuple) or len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise _Refused("has a tensor with wrong sizes")
    key, dtype, elements = storage
    return Tensor(key, elements, dtype, offset, size, stride)


def _parameter(data: Any, *_: Any) -> Any:
    return data


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dictionary,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}


def _storage(saved: Any) -> tuple[str, str, int]:
    """What stands for a storage: ("storage", its type, key, device, elements)."""
    if not isinstance(saved, tuple) or len(saved) != 5 or saved[0] != "storage" or not isinstance(saved[1], _Global):
        raise _Refused("has a persistent object that is no storage")
    _, kind, key, _, elements = saved
    name = kind.name.rpartition(".")[2]
    if name not in _STORAGES or type(key) is not str or "/" in key or type(elements) is not int or elements < 0:
        raise _Refused("has a storage with wrong fields")
    return key, _STORAGES[name], elements


class _Mark:
    pass


def _interpret(data: bytes) -> Any:
    """What a pickle builds of dictionaries, lists, tuples, numbers, texts and tensors."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    mark = _Mark()

    def popped() -> list[Any]:
        at = len(stack) - 1 - next(i for i, v in enumerate(reversed(stack)) if v is mark)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    opcodes: Iterator[tuple[Any, Any, Any]] = pickletools.genops(data)
    for opcode, argument, _ in opcodes:
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            break
        if name in _LITERALS:
            stack.append(_LITERALS[name]() if argument is None else argument)
        elif name == "MARK":
            stack.append(mark)
        elif name == "TUPLE":
            items = popped()
            stack.append(tuple(items))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            names = [stack.pop(), stack.pop()]
            stack.append(_global(str(names[1]), str(names[0])))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not isinstance(function, _Global) or function.name not in _CALLS:
                raise _Refused("calls what is no function of tensors")
            stack.append(_CALLS[function.name](*arguments))
        elif name == "BUILD":  # attributes of a dictionary, such as a state_dict's versions
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise _Refused("changes an object")
        elif name in ("SETITEM", "SETITEMS"):
            items = popped() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = popped() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        else:
            raise _Refused(f"has the opcode {name}")
    return stack[-1]


_LITERALS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"), lambda: None),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


# ---- writing ----------------------------------------------------------------------------------------------------------------


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a state_dict that ``torch.load`` reads (also with ``weights_only=True``, its default).

    Raises:
        CheckpointError: for an element type that PyTorch lacks.
        OSError: the file cannot be written.
    """
    kinds = {dtype: name for name, dtype in _STORAGES.items()}
    for name, array in arrays.items():
        if array.dtype.name not in kinds:
            raise CheckpointError(f"{name!r} is {array.dtype.name}, which PyTorch's files do not have")
    ordered = b"ccollections\nOrderedDict\n)R"
    items = b"".join(
        _text(name) + _call_of_tensor(str(i), kinds[array.dtype.name], array, ordered)
        for i, (name, array) in enumerate(arrays.items())
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        members = {"data.pkl": b"\x80\x02" + ordered + b"(" + items + b"u.", "byteorder": b"little", "version": b"3\n"}
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
        for i, array in enumerate(arrays.values()):
            archive.writestr(zipfile.ZipInfo(f"archive/data/{i}"), array.tobytes())


def _call_of_tensor(key: str, kind: str, array: np.ndarray, ordered: bytes) -> bytes:
    """_rebuild_tensor_v2(storage, 0, size, stride, requires_grad=False, hooks)"""
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
    storage = b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text(key) + _text("cpu") + _int(array.size) + b"tQ"
    arguments = storage + _int(0) + _tuple(array.shape) + _tuple(strides) + b"\x89" + ordered
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(number: int) -> bytes:
    """LONG1: of any size, in two's complement."""
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _tuple(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"
