"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ortc.errors import OrtcError


def refuse_link(path: Path) -> None:
    """Before something is written under a name that a folder, which may be somebody else's, can hold already.

    Raises:
        OrtcError: there is a link, which would lead the writing to another place.
    """
    if path.is_symlink():
        raise OrtcError(f"{path} is a link, and what is written there would land elsewhere: remove it")


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of text in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write or replace a file; when this returns, it survives a crash.

    Raises:
        OrtcError: if it cannot be written; then what was there before still is.
    """
    try:
        with replaced(path) as file:
            file.write(data)
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of another at the end of the block, and then survives a crash.

    Raises:
        OSError: if it cannot be written; then, as after any exception in the block, what was there before still is.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
