"""One run per folder at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from ortc.errors import OrtcError
from ortc.runtime.files import refuse_link


def lock_folder(folder: Path) -> IO[str]:
    """Hold the folder's lock until the returned file is closed or the process ends, however it ends.

    Raises:
        OrtcError: if another run holds it, or the folder cannot be written.
    """
    path = folder / ".lock"
    refuse_link(path)
    try:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (the caller closes it)
    except OSError as error:
        raise OrtcError(f"cannot write in {folder}: {error.strerror}") from None
    try:
        _lock(file)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise OrtcError(
            f"another run (process {holder}) is training in {folder}: wait for it or stop it; "
            "two at a time would overwrite each other's checkpoints"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


if os.name == "nt":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        file.seek(1 << 20)  # a byte beyond the text, which stays readable for others
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
