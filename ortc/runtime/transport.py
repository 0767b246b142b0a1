"""How ranks exchange values: threads of one process, or processes under MPI.

Both transports move bytes from one rank to another and nothing else; every collective is built on that, here, once. So a
reduction adds in rank order, whatever the timing, the number of messages or the MPI: its result has the same bits on every
rank, in every run, and over both transports. MPI's own reductions promise none of that.

Every use stands in ``with transport:``, so that an error in one rank ends all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from ortc.errors import CheckpointError, OrtcError
from ortc.runtime.batch import aligned_zeros
from ortc.runtime.watch import GOODBYE

Op = Literal["sum", "max", "min"]
T = TypeVar("T")

_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}

# Where each rank sends everything to each other instead of a part: one exchange, not two. Measured with 2 to 8 ranks.
_SMALL = 16 << 10
# A part is reduced in pieces of so many bytes: what the received pieces need in memory, and what a cache holds.
_PIECE = 1 << 20
# MPI-3 counts bytes in 31 bits. Messages between two ranks with one tag keep their order.
_LARGEST_MESSAGE = 1 << 30

# A message's header is int64: index into this list, number of dimensions, dimensions. The order is the format.
_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int4", "uint4", "float4_e2m1fn"),
]
_HEADER = 2 + 64  # NumPy's arrays have at most 64 dimensions

# Set by the launchers of MPICH and its kin, of Open MPI, and of PMIx.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


class RankFailed(OrtcError):
    """Another rank has ended with an error, and so this one cannot go on."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        super().__init__(f"rank {rank} failed: {cause or type(cause).__name__}")
        self.rank, self.cause = rank, cause


class HandshakeError(OrtcError):
    """The ranks do not belong together. Raised alike on every rank."""


@dataclass
class Counters:
    """What a rank and its groups have exchanged: payload bytes, and the seconds in which it waited for others."""

    sent: int = 0
    received: int = 0
    blocked: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, sent: int = 0, received: int = 0, blocked: float = 0.0) -> None:
        with self._lock:
            self.sent += sent
            self.received += received
            self.blocked += blocked


class Request(ABC):
    """A send or a receive under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is complete; does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is complete.

        Raises:
            OrtcError: if that takes longer than the transport's timeout, or what arrives is of another type or shape.
            RankFailed: if another rank has failed.
        """


# Seconds that a rank waits for another: more than saving, opening sessions or an export takes, and not for ever.
TIMEOUT = 1800.0


class Transport(ABC):
    """One rank's connection to the others of its group.

    Send and receive may be used from several threads of a rank. Collectives are called by every rank of the group, in the
    same order; to run them beside others, in another thread, take another group (:meth:`split`).

    Attributes:
        rank: this rank's number in the group.
        size: ranks in the group.
        ranks: the numbers in the whole job of the group's ranks; they are what messages name.
        timeout: seconds that anything may wait for another rank; None for ever.
        counters: bytes and seconds, together with those of the groups split from this one.
        tag_limit: the greatest tag.
    """

    tag_limit: int

    def __init__(self, rank: int, ranks: Sequence[int], timeout: float | None, counters: Counters) -> None:
        self.rank, self.ranks, self.size = rank, tuple(ranks), len(ranks)
        self.timeout, self.counters = timeout, counters
        self._splits = 0
        self._pool = _Pool()

    # Between two ranks

    @abstractmethod
    def send(self, array: np.ndarray, to: int, tag: int) -> Request:
        """Send an array of any type and shape; returns at once.

        The array must not change until the request is done. If the receiver takes it with :meth:`receive`, it is the
        receiver's from then on in threads (it is the same object), and the sender must not use that memory again.
        """

    @abstractmethod
    def receive_into(self, array: np.ndarray, source: int, tag: int) -> Request:
        """Receive into a contiguous array, which must have the type and shape of what was sent; returns at once."""

    @abstractmethod
    def receive(self, source: int, tag: int) -> np.ndarray:
        """Wait for an array of a type and shape that only the sender knows. :meth:`release` it after use."""

    @abstractmethod
    def release(self, array: np.ndarray) -> None:
        """Give back an array that :meth:`receive` returned, so that its memory serves the next of that type and shape."""

    @abstractmethod
    def progress(self) -> None:
        """Let sends under way go on; called between pieces of long work."""

    # Between all ranks

    def all_reduce(self, array: np.ndarray, op: Op = "sum") -> None:
        """Replace a contiguous array, of one type and shape on all ranks, by the reduction over them.

        Adds in rank order, types under 32 bits in float32 and rounded once, so the result is that of adding the ranks'
        arrays in a loop, bit for bit, on every rank.
        """
        _check_reduction(array, op)
        if self.size == 1:
            return
        if array.nbytes > _SMALL:
            self.reduce_scatter(array, op)
            self.all_gather(array)
            return
        flat = _flat(array)
        others = [s for s in range(self.size) if s != self.rank]
        sends = [self._post(flat, to) for to in others]
        total = self._reduce_from(flat, flat.size, op)
        _wait_all(sends)
        flat[:] = total

    def reduce_scatter(self, array: np.ndarray, op: Op = "sum", sizes: Sequence[int] | None = None) -> np.ndarray:
        """Reduce each rank's part of a contiguous array onto that rank; the other parts stay as they are.

        Args:
            array: of one type and shape on all ranks.
            op: as in :meth:`all_reduce`, in the same order.
            sizes: elements in each rank's part of the flattened array; None for parts as equal as can be.

        Returns:
            This rank's part, a view of ``array``, flat.
        """
        _check_reduction(array, op)
        parts = self._parts(array, sizes)
        own = parts[self.rank]
        sends = []
        for to, part in enumerate(parts):
            if to != self.rank:
                sends += [self._post(piece, to) for piece in _pieces(part)]
        for piece in _pieces(own):
            piece[:] = self._reduce_from(piece, piece.size, op)
        _wait_all(sends)
        return own

    def all_gather(self, array: np.ndarray, sizes: Sequence[int] | None = None) -> None:
        """Fill a contiguous array of which each rank has its own part (as in :meth:`reduce_scatter`) with all parts."""
        parts = self._parts(array, sizes)
        others = [r for r in range(self.size) if r != self.rank]
        receives = [self._fetch(parts[r], r) for r in others]
        sends = [self._post(parts[self.rank], r) for r in others]
        _wait_all(receives + sends)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Replace a contiguous array, of one type and shape on all ranks, by the root's."""
        flat = _flat(array)
        if self.rank == root:
            _wait_all([self._post(flat, r) for r in range(self.size) if r != root])
        else:
            self._fetch(flat, root).wait()

    def barrier(self) -> None:
        """Return when every rank has come here."""
        nothing = np.empty(0, np.uint8)
        distance = 1
        while distance < self.size:
            send = self._post(nothing, (self.rank + distance) % self.size)
            self._fetch(nothing, (self.rank - distance) % self.size).wait()
            send.wait()
            distance *= 2

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Each rank's value, in rank order, on the root; None elsewhere. For small values that JSON can hold."""
        if self.rank != root:
            self._post_object(value, [root])
            return None
        return [value if r == root else self._fetch_object(r) for r in range(self.size)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's value, everywhere. For small values that JSON can hold."""
        if self.rank != root:
            return self._fetch_object(root)
        self._post_object(value, [r for r in range(self.size) if r != root])
        return value

    # The group

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """The transport of the group that this rank is in; a group of its own where none names it.

        Every rank calls it with the same groups, which have no rank in common; a group's ranks are numbered as listed.
        """

    @abstractmethod
    def abort(self, message: str) -> None:
        """End all ranks, saying that this one cannot go on and why."""

    @abstractmethod
    def close(self) -> None:
        """The regular end: returns when every rank has come to it."""

    def __enter__(self) -> Transport:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends all ranks if this one fails."""

    # What a transport is made of: messages of known size, apart from those of send and receive

    @abstractmethod
    def _post(self, array: np.ndarray, to: int) -> Request:
        """Send a flat array, which must not change until the request is done."""

    @abstractmethod
    def _fetch(self, array: np.ndarray, source: int) -> Request:
        """Receive what was posted, of the same type and size, into a flat array."""

    def _reduce_from(self, own: np.ndarray, size: int, op: Op) -> np.ndarray:
        """The reduction of flat arrays that the other ranks post, and of this rank's own; in the wider type."""
        arrived = {r: self._pool.take((size,), own.dtype) for r in range(self.size) if r != self.rank}
        requests = {r: self._fetch(array, r) for r, array in arrived.items()}
        wide = _wide(own.dtype)
        total: np.ndarray | None = None
        for r in range(self.size):
            if r != self.rank:
                requests[r].wait()
            value = arrived.get(r, own)
            if total is None:
                total = value.astype(wide)
            else:
                _REDUCTIONS[op](total, value.astype(wide, copy=False), out=total)
        for array in arrived.values():
            self._pool.release(array)
        assert total is not None
        return total.astype(own.dtype, copy=False)

    def _parts(self, array: np.ndarray, sizes: Sequence[int] | None) -> list[np.ndarray]:
        flat = _flat(array)
        if sizes is None:
            sizes = [flat.size // self.size + (r < flat.size % self.size) for r in range(self.size)]
        if len(sizes) != self.size or sum(sizes) != flat.size:
            raise ValueError(f"parts of {list(sizes)} for {flat.size} elements and {self.size} ranks")
        return [flat[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]

    def _post_object(self, value: Any, to: Sequence[int]) -> None:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        size = np.array([data.size])
        _wait_all([self._post(array, r) for r in to for array in (size, data)])

    def _fetch_object(self, source: int) -> Any:
        size = np.empty(1, np.int64)
        self._fetch(size, source).wait()
        data = np.empty(size[0], np.uint8)
        self._fetch(data, source).wait()
        return json.loads(data.tobytes())

    def _group(self, groups: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """The index of this rank's group, and its members."""
        members = [r for group in groups for r in group]
        if len(set(members)) != len(members) or not set(members) <= set(range(self.size)):
            raise ValueError(f"groups {groups} of {self.size} ranks: a rank is named twice or does not exist")
        for index, group in enumerate(groups):
            if self.rank in group:
                return index, list(group)
        return len(groups) + self.rank, [self.rank]

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self.tag_limit:
            raise OrtcError(f"tag {tag} is beyond this transport's limit of {self.tag_limit}")

    def _waiting(self, source: int, tag: int | None) -> str:
        what = "a collective" if tag is None else f"tag {tag}"
        return f"rank {self.ranks[self.rank]} waits for {what} from rank {self.ranks[source]}"

    def _delivering(self, to: int, tag: int | None) -> str:
        what = "a collective" if tag is None else f"tag {tag}"
        return f"rank {self.ranks[self.rank]} waits for rank {self.ranks[to]} to receive {what}"


def handshake(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare what each rank takes for granted (plan, version, checkpoint) before the first step.

    Raises:
        HandshakeError: on every rank, listing which differs from rank 0 in which fact.
    """
    offers = transport.gather_object(dict(facts))
    wrong = None
    if offers is not None:
        wrong = [
            f"rank {transport.ranks[rank]}: {name} is {offer.get(name, 'missing')}, "
            f"rank {transport.ranks[0]} has {offers[0].get(name, 'none')}"
            for rank, offer in enumerate(offers)
            for name in sorted(offers[0] | offer)
            if offer.get(name) != offers[0].get(name)
        ]
    wrong = transport.broadcast_object(wrong)
    if wrong:
        raise HandshakeError(
            "the ranks do not belong together:\n  " + "\n  ".join(wrong) + "\n"
            "give every rank the same output folder, checkpoint and version of ortc"
        )


# Threads


@dataclass
class _Message:
    array: np.ndarray
    taken: bool = False


class _Hub:
    """What the threads of one world share: letter boxes, and whether one of them has failed."""

    def __init__(self, size: int) -> None:
        lock = threading.Lock()
        self.changed = [threading.Condition(lock) for _ in range(size)]  # one a rank
        self.boxes: defaultdict[tuple, deque[_Message]] = defaultdict(deque)
        self.failure: RankFailed | None = None

    def put(self, to: int, box: tuple, message: _Message) -> None:
        with self.changed[to]:
            self.boxes[box].append(message)
            self.changed[to].notify_all()

    def take(self, box: tuple) -> _Message | None:
        """The oldest message in a box. The caller holds the lock."""
        waiting = self.boxes.get(box)
        if not waiting:
            return None
        message = waiting.popleft()
        if not waiting:
            del self.boxes[box]
        return message

    def mark_taken(self, source: int, message: _Message) -> None:
        with self.changed[source]:
            message.taken = True
            self.changed[source].notify_all()

    def fail(self, rank: int, cause: BaseException) -> None:
        """The first failure is the one that counts; everybody wakes."""
        with self.changed[0]:
            self.failure = self.failure or RankFailed(rank, cause)
            for condition in self.changed:
                condition.notify_all()


class _ThreadSend(Request):
    def __init__(self, transport: ThreadTransport, message: _Message, to: int, tag: int | None) -> None:
        self._transport, self._message, self._to, self._tag = transport, message, to, tag

    def done(self) -> bool:
        return self._message.taken

    def wait(self) -> None:
        if not self._message.taken:
            self._transport._await(lambda: self._message.taken, lambda: self._transport._delivering(self._to, self._tag))


class _ThreadReceive(Request):
    def __init__(self, transport: ThreadTransport, array: np.ndarray, source: int, tag: int | None) -> None:
        self._transport, self._array, self._source, self._tag = transport, array, source, tag
        self._complete = False

    def done(self) -> bool:
        if not self._complete:
            message = self._transport._try_take(self._source, self._tag)
            if message is not None:
                self._accept(message)
        return self._complete

    def wait(self) -> None:
        if not self._complete:
            self._accept(self._transport._take(self._source, self._tag))

    def _accept(self, message: _Message) -> None:
        sent = message.array
        _check_arrival(self._transport._waiting(self._source, self._tag), self._array, sent.dtype, sent.shape)
        self._array[...] = sent
        self._transport._mark_taken(self._source, message)
        self._complete = True


class ThreadTransport(Transport):
    """Ranks are threads of one process; see :func:`thread_world`."""

    tag_limit = sys.maxsize

    def __init__(
        self, hub: _Hub, rank: int, ranks: Sequence[int], timeout: float | None, counters: Counters, context: tuple = ()
    ) -> None:
        super().__init__(rank, ranks, timeout, counters)
        self._hub, self._context = hub, context

    def send(self, array: np.ndarray, to: int, tag: int) -> Request:
        self._check_tag(tag)
        return self._put(array, to, tag)

    def receive_into(self, array: np.ndarray, source: int, tag: int) -> Request:
        self._check_tag(tag)
        return _ThreadReceive(self, array, source, tag)

    def receive(self, source: int, tag: int) -> np.ndarray:
        """The very object that was sent."""
        self._check_tag(tag)
        message = self._take(source, tag)
        self._mark_taken(source, message)
        return message.array

    def release(self, array: np.ndarray) -> None:
        """Nothing to do: the array is the caller's."""

    def progress(self) -> None:
        """Nothing to do: a message is there at once."""

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadTransport:
        index, group = self._group(groups)
        self._splits += 1
        ranks = [self.ranks[r] for r in group]
        context = (*self._context, self._splits, index)
        return ThreadTransport(self._hub, group.index(self.rank), ranks, self.timeout, self.counters, context)

    def abort(self, message: str) -> None:
        self._hub.fail(self.ranks[self.rank], OrtcError(message))

    def close(self) -> None:
        self.barrier()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._hub.fail(self.ranks[self.rank], error)

    def _post(self, array: np.ndarray, to: int) -> Request:
        return self._put(array, to, None)

    def _fetch(self, array: np.ndarray, source: int) -> Request:
        return _ThreadReceive(self, array, source, None)

    def _put(self, array: np.ndarray, to: int, tag: int | None) -> Request:
        message = _Message(array)
        self._hub.put(self.ranks[to], (self._context, self.rank, to, tag), message)
        self.counters.add(sent=array.nbytes)
        return _ThreadSend(self, message, to, tag)

    def _try_take(self, source: int, tag: int | None) -> _Message | None:
        with self._hub.changed[self.ranks[self.rank]]:
            return self._hub.take((self._context, source, self.rank, tag))

    def _take(self, source: int, tag: int | None) -> _Message:
        box = (self._context, source, self.rank, tag)
        return self._await(lambda: self._hub.take(box), lambda: self._waiting(source, tag))

    def _mark_taken(self, source: int, message: _Message) -> None:
        self.counters.add(received=message.array.nbytes)
        self._hub.mark_taken(self.ranks[source], message)

    def _await(self, ready: Callable[[], T | None], what: Callable[[], str]) -> T:
        """What ``ready`` returns once it is true; it runs under the hub's lock."""
        started = time.perf_counter()
        changed = self._hub.changed[self.ranks[self.rank]]
        with changed:
            result = changed.wait_for(lambda: self._hub.failure or ready(), self.timeout)
        self.counters.add(blocked=time.perf_counter() - started)
        if self._hub.failure is not None:
            raise RankFailed(self._hub.failure.rank, self._hub.failure.cause)
        if not result:
            raise _too_long(what(), self.timeout)
        return result  # type: ignore[return-value]


def thread_world(size: int, timeout: float | None = None) -> list[Transport]:
    """The transports of ``size`` ranks that are threads of this process, one for each thread.

    Values are handed over and not copied: what :meth:`Transport.receive` returns is the object that was sent.
    """
    hub = _Hub(size)
    return [ThreadTransport(hub, rank, range(size), timeout, Counters()) for rank in range(size)]


def run_threads(world: Sequence[Transport], function: Callable[[Transport], T]) -> list[T]:
    """Run a function in one thread per rank, and return what each returned.

    Raises:
        BaseException: what the first rank that failed raised, once all threads have ended.
    """
    results: list[Any] = [None] * len(world)
    failures: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            with transport:
                results[transport.rank] = function(transport)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(t,), name=f"rank {t.rank}", daemon=True) for t in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((e for e in failures if not isinstance(e, RankFailed)), failures[0])
    return results


# MPI

# Seconds that the other ranks leave to rank 0: of a mistake that all of them see, such as missing data, it alone speaks.
_COURTESY = 2.0

# Seconds for the launcher to pass a last message on: when a rank aborts it ends at once, and what it has not read yet is lost
# (MPICH; seen in one of ten aborts on a loaded machine).
_FORWARDING = 0.5

# A wait first asks without a pause, then lets others have the core, then sleeps: MPI itself would spin, and eight ranks on two
# cores would take turns at spinning.
_EAGER_POLLS, _YIELDING_POLLS, _PAUSE = 20, 200, 100e-6


class _MpiRequest(Request):
    """MPI requests that belong together. The arrays are kept, since MPI works on their memory."""

    def __init__(
        self,
        transport: MpiTransport,
        handles: list[Any],
        what: Callable[[], str],
        kept: Any,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        self._transport, self._handles, self._what, self._kept, self._arrived = transport, handles, what, kept, arrived

    def done(self) -> bool:
        with self._transport._lock:  # a request must not be completed by two threads
            while self._handles and self._handles[0].Test():
                del self._handles[0]
                if self._arrived is not None:  # the header is there
                    self._arrived()
                    self._arrived = None
            if not self._handles:
                self._kept = None
            return not self._handles

    def wait(self) -> None:
        if self.done():
            return
        started = time.perf_counter()
        polls = 0
        while not self.done():
            polls += 1
            if polls > _YIELDING_POLLS:
                time.sleep(_PAUSE)
                waited = time.perf_counter() - started
                if self._transport.timeout is not None and waited > self._transport.timeout:
                    raise _too_long(self._what(), self._transport.timeout)
            elif polls > _EAGER_POLLS:
                _yield_core()
        self._transport.counters.add(blocked=time.perf_counter() - started)


class MpiTransport(Transport):
    """One rank a process, over mpi4py's buffers; see :func:`mpi_world`."""

    def __init__(self, comm: Any, ranks: Sequence[int], timeout: float | None, counters: Counters) -> None:
        super().__init__(comm.Get_rank(), ranks, timeout, counters)
        from mpi4py import MPI

        self._comm, self._collective = comm, comm.Dup()
        self.tag_limit = comm.Get_attr(MPI.TAG_UB)
        self._lock = threading.RLock()
        self._sends: list[_MpiRequest] = []
        self._watch: socket.socket | None = None

    def send(self, array: np.ndarray, to: int, tag: int) -> Request:
        self._check_tag(tag)
        self.progress()
        array = np.ascontiguousarray(array).reshape(array.shape)  # the former makes a scalar's shape (1,)
        header = _header(array)
        handles = [self._comm.Isend(memory, to, tag) for memory in (header, *_messages(_flat(array)))]
        request = _MpiRequest(self, handles, lambda: self._delivering(to, tag), (header, array))
        self.counters.add(sent=array.nbytes)
        with self._lock:
            self._sends.append(request)
        return request

    def receive_into(self, array: np.ndarray, source: int, tag: int) -> Request:
        self._check_tag(tag)
        self.progress()
        header = np.empty(_HEADER, np.int64)

        def check() -> None:
            _check_arrival(self._waiting(source, tag), array, *_described(header))
            self.counters.add(received=array.nbytes)

        handles = [self._comm.Irecv(memory, source, tag) for memory in (header, *_messages(_flat(array)))]
        return _MpiRequest(self, handles, lambda: self._waiting(source, tag), (header, array), check)

    def receive(self, source: int, tag: int) -> np.ndarray:
        self._check_tag(tag)
        self.progress()
        header = np.empty(_HEADER, np.int64)
        self._receive([header], source, tag)
        dtype, shape = _described(header)
        array = self._pool.take(shape, dtype)
        self._receive(_messages(_flat(array)), source, tag)
        self.counters.add(received=array.nbytes)
        return array

    def _receive(self, memories: Sequence[np.ndarray], source: int, tag: int) -> None:
        handles = [self._comm.Irecv(memory, source, tag) for memory in memories]
        _MpiRequest(self, handles, lambda: self._waiting(source, tag), memories).wait()

    def release(self, array: np.ndarray) -> None:
        self._pool.release(array)

    def progress(self) -> None:
        with self._lock:
            self._sends = [s for s in self._sends if not s.done()]

    def split(self, groups: Sequence[Sequence[int]]) -> MpiTransport:
        index, group = self._group(groups)
        comm = self._comm.Split(index, group.index(self.rank))
        return MpiTransport(comm, [self.ranks[r] for r in group], self.timeout, self.counters)

    def abort(self, message: str) -> NoReturn:
        print(f"ortc: rank {self.ranks[self.rank]}: {message}", file=sys.stderr, flush=True)
        time.sleep(_FORWARDING)
        self._say_goodbye()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(2)
        raise SystemExit(2)

    def close(self) -> None:
        _wait_all(self._sends)
        self.barrier()
        self._say_goodbye()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, HandshakeError | CheckpointError) and self.rank != 0:
            self._say_goodbye()
            time.sleep(10)  # rank 0 has it too: it says it for all, and ends all
        elif isinstance(error, OrtcError) and self.rank != 0:
            time.sleep(_COURTESY)
        if not isinstance(error, OrtcError):
            traceback.print_exception(kind, error, trace)
        self.abort(str(error) or type(error).__name__)

    def _post(self, array: np.ndarray, to: int) -> Request:
        self.counters.add(sent=array.nbytes)
        handles = [self._collective.Isend(memory, to, 0) for memory in _messages(array)]
        return _MpiRequest(self, handles, lambda: self._delivering(to, None), array)

    def _fetch(self, array: np.ndarray, source: int) -> Request:
        self.counters.add(received=array.nbytes)
        handles = [self._collective.Irecv(memory, source, 0) for memory in _messages(array)]
        return _MpiRequest(self, handles, lambda: self._waiting(source, None), array)

    def _start_watch(self) -> None:
        """Connect to the process that names a rank that dies (watch.py); the first rank of each host starts it."""
        hosts = self.broadcast_object(self.gather_object(socket.gethostname()))
        first = hosts.index(hosts[self.rank])
        address = _start_watcher(hosts.count(hosts[self.rank])) if first == self.rank else ""
        address = self.broadcast_object(self.gather_object(address))[first]
        if address:
            self._watch = socket.socket(socket.AF_UNIX)
            self._watch.connect(address)
            self._watch.sendall(f"{self.rank} {os.getpid()}\n".encode())
        self.barrier()

    def _say_goodbye(self) -> None:
        if self._watch is not None:
            with contextlib.suppress(OSError):  # the watcher may have gone first
                self._watch.sendall(GOODBYE)
            self._watch.close()
            self._watch = None


def launched_by_mpi() -> bool:
    """Whether this process was started by an MPI launcher, as its environment says; MPI is not imported."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def mpi_world(timeout: float | None = None) -> Transport:
    """The transport of this process's rank among those that mpiexec started.

    On one host MPI copies a large value from the sender's memory without its help. Between hosts, or where the system forbids
    that, a send goes on only while its sender is in the transport: call :meth:`Transport.progress`, or set
    ``MPIR_CVAR_ASYNC_PROGRESS=1`` (MPICH), which costs a thread.

    Raises:
        OrtcError: if MPI is not installed, or another MPI than the launcher's.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise OrtcError(f"MPI cannot be used ({error}): install it with `pip install 'ortc[mpi]'`") from None
    size = MPI.COMM_WORLD.Get_size()
    launched = next((os.environ[name] for name in _SIZE_VARIABLES if name in os.environ), str(size))
    if launched != str(size):
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        raise OrtcError(
            f"mpiexec started {launched} ranks, but MPI sees {size}: it is {library}; use the mpiexec that belongs to it"
        )
    transport = MpiTransport(MPI.COMM_WORLD, range(size), timeout, Counters())
    transport._start_watch()
    return transport


def _start_watcher(count: int) -> str:
    """Start watch.py for the ranks of this host; returns its address, or nothing where the system has no such sockets."""
    if not hasattr(socket, "AF_UNIX"):
        return ""
    # Isolated and in a session of its own: what the launcher kills does not include it.
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watch.py")), str(count)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert watcher.stdout is not None
    _watchers.append(watcher)
    return watcher.stdout.readline().decode().strip()


_watchers: list[subprocess.Popen] = []  # their stdin stays open as long as this process lives


def _yield_core() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


# Arrays


class _Pool:
    """Memory that is used again for the next array of the same type and shape."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple, list[np.ndarray]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        try:
            return self._free[shape, dtype].pop()
        except IndexError:
            return aligned_zeros(shape, dtype)

    def release(self, array: np.ndarray) -> None:
        self._free[array.shape, array.dtype].append(array)


def _flat(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError("a transport works on contiguous arrays")
    return array.reshape(-1)


def _pieces(flat: np.ndarray) -> list[np.ndarray]:
    step = max(_PIECE // flat.itemsize, 1)
    return [flat[i : i + step] for i in range(0, flat.size, step)]


def _messages(flat: np.ndarray) -> list[np.ndarray]:
    """The array's memory in as many messages as MPI needs; at least one."""
    memory = flat.view(np.uint8)
    return [memory[i : i + _LARGEST_MESSAGE] for i in range(0, max(memory.size, 1), _LARGEST_MESSAGE)]


def _is_narrow(dtype: np.dtype) -> bool:
    """A floating type under 32 bits, NumPy's or of ml_dtypes."""
    return dtype.itemsize < 4 and dtype.name.startswith(("float", "bfloat"))


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if _is_narrow(dtype) else dtype


def _check_reduction(array: np.ndarray, op: Op) -> None:
    if op == "sum" and array.dtype == np.bool_:
        raise ValueError("booleans have no sum: use max (any) or min (all)")


def _header(array: np.ndarray) -> np.ndarray:
    """
    Raises:
        OrtcError: if the type has no code.
    """
    if array.dtype.name not in _DTYPES:
        raise OrtcError(f"values of type {array.dtype} cannot be sent to another rank")
    header = np.zeros(_HEADER, np.int64)
    header[0], header[1] = _DTYPES.index(array.dtype.name), array.ndim
    header[2 : 2 + array.ndim] = array.shape
    return header


def _described(header: np.ndarray) -> tuple[np.dtype, tuple[int, ...]]:
    name = _DTYPES[header[0]]
    try:
        dtype = np.dtype(name)
    except TypeError:  # not NumPy's own: known by that name once ml_dtypes is there
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    return dtype, tuple(int(n) for n in header[2 : 2 + header[1]])


def _check_arrival(where: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if (array.dtype, array.shape) != (dtype, shape):
        raise OrtcError(
            f"{where} as {array.dtype}{list(array.shape)}, but {dtype}{list(shape)} was sent: "
            "the ranks' plans or batches do not fit each other"
        )


def _wait_all(requests: Sequence[Request]) -> None:
    for request in requests:
        request.wait()


def _too_long(what: str, timeout: float | None) -> OrtcError:
    return OrtcError(f"{what}, for more than {timeout:g} s: that rank hangs, or the schedule has a deadlock")
