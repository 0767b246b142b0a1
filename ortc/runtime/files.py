"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

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
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}") from None
    finally:
        aside.unlink(missing_ok=True)
