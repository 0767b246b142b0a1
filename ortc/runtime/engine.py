"""How sessions run: execution providers with their options, session options, ONNX Runtime's own profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ortc.errors import RecipeError

CPU = "CPUExecutionProvider"
_sessions = count()


@dataclass(frozen=True)
class Engine:
    """What all sessions of a run are opened with.

    Attributes:
        providers: execution providers with their options, the preferred first; the CPU is always the last.
        options: of :class:`onnxruntime.SessionOptions`: an attribute's name, or a configuration entry's, and its value.
        profile: a folder for ONNX Runtime's traces of the sessions.
    """

    providers: Sequence[tuple[str, Mapping[str, str]]] = ((CPU, {}),)
    options: Mapping[str, str] = field(default_factory=dict)
    profile: Path | None = None

    def apply(self, options: Any, name: str) -> None:
        """Set the session options; ``name`` says whose profile it is."""
        for key, text in self.options.items():
            if "." in key:
                options.add_session_config_entry(key, text)
            else:
                setattr(options, key, _converted(options, key, text))
        if self.profile is not None:
            options.enable_profiling = True
            # ONNX Runtime adds the second only, and replicas open equal graphs at once.
            options.profile_file_prefix = str(self.profile / f"{next(_sessions)}-{name}")


def make_engine(ort: Any, providers: Iterable[str] = (), options: Iterable[str] = (), profile: Path | None = None) -> Engine:
    """From the command line's texts, checked against the installed build.

    Args:
        ort: the module onnxruntime.
        providers: ``cuda,cpu``, or one each with options: ``cuda:device_id=1,gpu_mem_limit=8589934592``.
        options: ``KEY=VALUE`` each.
        profile: see :class:`Engine`.

    Raises:
        RecipeError: the build has no such provider, or there is no such option.
    """
    chosen: list[tuple[str, dict[str, str]]] = []
    for text in providers:
        names, colon, tail = text.partition(":")
        given = dict(_pair(item, f"--ep {text}") for item in tail.split(",")) if colon else {}
        if given and "," in names:
            raise RecipeError(f"--ep {text}: options belong to one provider; repeat --ep for another")
        found = [_provider(ort, name.strip()) for name in names.split(",")]
        if given and CPU in found:  # ONNX Runtime would pass over them in silence
            raise RecipeError(
                f"--ep {text}: ONNX Runtime's CPU provider has no options; --session-option sets those of a session"
            )
        chosen += [(provider, given) for provider in found]
    if CPU not in [name for name, _ in chosen]:
        chosen.append((CPU, {}))
    engine = Engine(tuple(chosen), dict(_pair(text, "--session-option") for text in options), profile)
    try:
        Engine(options=engine.options).apply(ort.SessionOptions(), "")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(f"--session-option: {str(error).splitlines()[0]}") from None
    return engine


def _provider(ort: Any, name: str) -> Any:
    """``cuda`` as ONNX Runtime calls it."""
    known, there = ort.get_all_providers(), ort.get_available_providers()
    found = next((p for p in known if name.lower() in (p.lower(), p.removesuffix("ExecutionProvider").lower())), None)
    short = ", ".join(p.removesuffix("ExecutionProvider").lower() for p in there)
    if found not in there:
        what = f"there is no execution provider {name!r}" if found is None else f"this build has no {found}"
        raise RecipeError(f"--ep {name}: {what}: ONNX Runtime {ort.__version__} as installed has {short}")
    return found


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"{flag}: {text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _converted(options: Any, key: str, text: str) -> Any:
    """The text in the type that the attribute has now."""
    if key.startswith("_") or not hasattr(options, key):
        known = [k for k in dir(options) if not k.startswith("_") and not callable(getattr(options, key, None))]
        raise ValueError(f"ONNX Runtime has no session option {key!r}; there are {', '.join(known)} (and entries with a dot)")
    now = getattr(options, key)
    if isinstance(now, bool):
        if text.lower() not in ("true", "false", "0", "1"):
            raise ValueError(f"{key} must be true or false, not {text!r}")
        return text.lower() in ("true", "1")
    if isinstance(now, int | float | str):
        return type(now)(text)
    if not hasattr(type(now), text):
        names = ", ".join(getattr(type(now), "__members__", {}))
        raise ValueError(f"{key} must be one of {names}, not {text!r}")
    return getattr(type(now), text)


@dataclass(frozen=True)
class Trace:
    """ONNX Runtime's trace of one session.

    Attributes:
        rank: who held the session.
        session: what it ran, such as ``stage-0/train``.
        origin: when the events' clock started, microseconds of the machine's.
        events: as ONNX Runtime wrote them.
    """

    rank: int
    session: str
    origin: float
    events: Sequence[Mapping[str, Any]]


def end_trace(session: Any, rank: int, name: str) -> Trace:
    """Stop the profile of a session and read what it wrote."""
    path = Path(session.end_profiling())
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no run was finished
        events = []
    path.unlink(missing_ok=True)
    return Trace(rank, name, session.get_profiling_start_time_ns() / 1000, events)


_KERNEL = "_kernel_time"


def merge_traces(traces: Sequence[Trace]) -> str:
    """Traces as one, as JSON text for Perfetto or chrome://tracing: a process a rank, a row a session, a kernel by its node."""
    first = min((trace.origin for trace in traces), default=0.0)
    merged: list[dict[str, Any]] = []
    for rank in sorted({trace.rank for trace in traces}):
        merged.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, trace in enumerate(t for t in traces if t.rank == rank):
            place = {"pid": rank, "tid": row}
            merged.append({"name": "thread_name", "ph": "M", **place, "args": {"name": trace.session}})
            for event in trace.events:
                name = str(event.get("name", ""))
                if "ts" not in event or (event.get("cat") == "Node" and not name.endswith(_KERNEL)):
                    continue  # fences
                told = {**event, **place, "ts": event["ts"] + trace.origin - first}
                merged.append({**told, "name": name.removesuffix(_KERNEL)})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": merged}) + "\n"
