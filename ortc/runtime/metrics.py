"""Metrics as JSON lines: one object per step and per evaluation."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from ortc.errors import OrtcError


class MetricsFile:
    """Appends to a metrics file; lines beyond ``step`` belong to what is about to be repeated, and are cut.

    Without a path it writes nothing, as on all ranks but the first. Every method raises OrtcError if the file cannot be
    written, the first also if it holds something else.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        if path is None:
            self._file: IO[str] | None = None
            return
        try:
            end = _end_of(path, step) if path.exists() else 0
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  (close() closes it)
            self._file.truncate(end)
        except OSError as error:
            raise OrtcError(f"cannot write the metrics {path}: {error.strerror}") from None

    def write(self, **fields: Any) -> None:
        """Append one object; numbers that are not finite become null."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({k: plain(v) for k, v in fields.items()}) + "\n")
        except OSError as error:
            raise self._failed(error) from None

    def sync(self) -> None:
        """Put the lines so far on disk: those before a checkpoint must not be lost when it is kept."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Close the file. Every line was written when it was made; only one whose writing failed, and was told, is left."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _failed(self, error: OSError) -> OrtcError:
        assert self._file is not None
        return OrtcError(f"cannot write the metrics {self._file.name}: {error.strerror}")


_FIRST = b'{"step": '  # how every line begins


def plain(value: Any) -> Any:
    """A number that JSON has: None for one that is not finite."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value


def _end_of(path: Path, step: int) -> int:
    """Where the last whole line of a step up to this one ends."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                    break
            except (ValueError, KeyError, TypeError):
                is_cut = not line.endswith(b"\n") and _FIRST.startswith(line[: len(_FIRST)])  # by a kill, or a full disk
                if end == 0 and not is_cut:
                    raise OrtcError(f"{path} is not a metrics file of ortc; choose another with --metrics") from None
                break
            end += len(line)
    return end
