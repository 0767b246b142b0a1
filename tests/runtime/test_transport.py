"""Values arrive whole, reductions have the same bits everywhere, and no rank waits for one that is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortc.errors import OrtcError
from ortc.runtime.transport import (
    HandshakeError,
    RankFailed,
    Transport,
    handshake,
    launched_by_mpi,
    run_threads,
    thread_world,
)

pytestmark = pytest.mark.ranks

SECONDS = 60  # nothing here waits so long unless it hangs
DTYPES = [bool, np.int64, np.uint8, np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 5), (100_003,)]

MPIEXEC = Path(sys.executable).with_name("mpiexec")
needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="needs mpi4py and an MPI beside this interpreter: ortc[mpi]"
)


def values(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 4).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def in_rank_order(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """The reduction as a loop over the ranks, narrow types in float32."""
    dtype = arrays[0].dtype
    wide = np.float32 if dtype.itemsize < 4 and dtype.name.startswith(("float", "bfloat")) else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op](total, array.astype(wide))
    return total.astype(dtype)


def everything(transport: Transport) -> dict[str, str]:
    """One program over every part of a transport; the bytes it ends with. It asserts what it can know by itself."""
    rank, size = transport.rank, transport.size
    seen: dict[str, str] = {}

    def see(name: str, array: np.ndarray) -> None:
        seen[name] = f"{array.dtype} {array.shape} {hash_of(array)}"

    after, before = (rank + 1) % size, (rank - 1) % size
    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate(SHAPES):
            seed = 100 * i + 10 * j
            sent = [transport.send(values(shape, dtype, seed + rank), after, tag) for tag in (7, 8)]
            into = np.empty(shape, dtype)
            pending = transport.receive_into(into, before, 8)  # out of order: another tag
            got = transport.receive(before, 7)
            pending.wait()
            for request in sent:
                request.wait()
            expected = values(shape, dtype, seed + before)
            assert same_bits(got, expected)
            assert same_bits(into, expected)
            transport.release(got)
        for op in ("sum", "max", "min"):
            if (dtype, op) == (bool, "sum"):
                continue
            for shape in SHAPES:
                array = values(shape, dtype, 1000 + rank)
                transport.all_reduce(array, op)
                assert same_bits(array, in_rank_order([values(shape, dtype, 1000 + r) for r in range(size)], op))
                see(f"{np.dtype(dtype)} {op} {shape}", array)

    sizes = [3 * r for r in range(size)]  # rank 0's part is empty
    array = values((sum(sizes),), np.float32, rank)
    part = transport.reduce_scatter(array, sizes=sizes)
    expected = in_rank_order([values((sum(sizes),), np.float32, r) for r in range(size)], "sum")
    start = sum(sizes[:rank])
    assert same_bits(part, expected[start : start + sizes[rank]])
    transport.all_gather(array, sizes)
    assert same_bits(array, expected)

    array = values((5, 5), np.float32, rank)
    transport.broadcast(array, root=size - 1)
    assert same_bits(array, values((5, 5), np.float32, size - 1))
    assert transport.gather_object({"rank": rank}) == ([{"rank": r} for r in range(size)] if rank == 0 else None)
    assert transport.broadcast_object(["é", rank], root=1) == ["é", 1]

    even_odd = transport.split([list(range(0, size, 2)), list(range(1, size, 2))])
    array = np.array([rank])
    even_odd.all_reduce(array)
    assert array[0] == sum(range(rank % 2, size, 2))
    turned = transport.split([[1, 0]])  # its ranks are numbered as listed; others are alone
    assert (turned.rank, turned.size) == ((1 - rank, 2) if rank < 2 else (0, 1))
    assert turned.ranks == ((1, 0) if rank < 2 else (rank,))
    transport.barrier()
    handshake(transport, {"plan": "1"})
    return seen


def hash_of(array: np.ndarray) -> int:
    return int.from_bytes(array.tobytes(), "little") % (2**61 - 1)


# Threads


@pytest.mark.parametrize("size", [2, 3, 8])
def test_everything_in_threads(size: int):
    results = run_threads(thread_world(size, SECONDS), everything)
    assert results == [results[0]] * size


def test_a_value_is_handed_over_and_not_copied():
    sent = np.zeros(3)

    def hand_over(transport: Transport) -> np.ndarray | None:
        if transport.rank == 0:
            transport.send(sent, 1, 0).wait()
            return None
        return transport.receive(0, 0)

    assert run_threads(thread_world(2, SECONDS), hand_over)[1] is sent


def test_a_send_is_done_when_it_was_received():
    def exchange(transport: Transport) -> None:
        if transport.rank == 0:
            request = transport.send(np.ones(2), 1, 0)
            assert not request.done()
            transport.barrier()
            request.wait()
            assert request.done()
        else:
            array = np.zeros(2)
            request = transport.receive_into(array, 0, 0)
            transport.barrier()
            request.wait()
            assert array.tolist() == [1, 1]

    run_threads(thread_world(2, SECONDS), exchange)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 6),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    dtype=st.sampled_from([np.int32, np.float16, np.float32, np.float64, ml_dtypes.bfloat16]),
    op=st.sampled_from(["sum", "max", "min"]),
    delays=st.lists(st.floats(0, 2e-3), min_size=6, max_size=6),
)
def test_a_reduction_does_not_depend_on_timing(size, shape, dtype, op, delays):
    arrays = [values(shape, dtype, r) for r in range(size)]
    expected = in_rank_order(arrays, op)

    def reduce(transport: Transport) -> None:
        time.sleep(delays[transport.rank])
        transport.all_reduce(arrays[transport.rank], op)

    run_threads(thread_world(size, SECONDS), reduce)
    for array in arrays:
        assert same_bits(array, expected)


def waits_in_receive(transport: Transport) -> None:
    transport.receive(1, 3)


def waits_in_receive_into(transport: Transport) -> None:
    transport.receive_into(np.zeros(2), 1, 3).wait()


def waits_in_send(transport: Transport) -> None:
    transport.send(np.zeros(2), 1, 3).wait()


def waits_in_all_reduce(transport: Transport) -> None:
    transport.all_reduce(np.zeros(2))


def waits_in_group(transport: Transport) -> None:
    transport.split([[0, 1, 2]]).barrier()


WAITS = [waits_in_receive, waits_in_receive_into, waits_in_send, waits_in_all_reduce, waits_in_group, Transport.barrier]


@pytest.mark.parametrize("wait", WAITS)
def test_an_error_in_one_thread_wakes_the_others(wait: Callable[[Transport], None]):
    caught = {}

    def run(transport: Transport) -> None:
        if transport.rank == 1:
            time.sleep(0.05)
            raise KeyError("lost")
        try:
            wait(transport)
        except RankFailed as error:
            caught[transport.rank] = error
            raise

    with pytest.raises(KeyError, match="lost"):
        run_threads(thread_world(3, SECONDS), run)
    assert sorted(caught) == [0, 2]
    assert all(error.rank == 1 and isinstance(error.cause, KeyError) for error in caught.values())


def test_abort_wakes_the_others_with_the_message():
    def run(transport: Transport) -> None:
        if transport.rank == 2:
            transport.abort("the disk is full")
        else:
            transport.barrier()

    with pytest.raises(RankFailed, match="rank 2 failed: the disk is full"):
        run_threads(thread_world(3, SECONDS), run)


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (waits_in_receive, "rank 0 waits for tag 3 from rank 1, for more than 0.05 s"),
        (waits_in_receive_into, "rank 0 waits for tag 3 from rank 1, for more than 0.05 s"),
        (waits_in_send, "rank 0 waits for rank 1 to receive tag 3, for more than 0.05 s"),
        (waits_in_all_reduce, "rank 0 waits for a collective from rank 1, for more than 0.05 s"),
    ],
)
def test_who_waits_too_long_says_for_whom(wait: Callable[[Transport], None], text: str):
    transport = thread_world(2, timeout=0.05)[0]
    with pytest.raises(OrtcError, match=text):
        wait(transport)


def test_a_group_names_the_ranks_of_the_job():
    def run(transport: Transport) -> None:
        group = transport.split([[2, 3]])
        if transport.rank == 2:
            group.receive(1, 9)

    with pytest.raises(OrtcError, match="rank 2 waits for tag 9 from rank 3"):
        run_threads(thread_world(4, timeout=0.05), run)


def test_a_value_of_another_shape_is_told():
    def run(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(np.zeros((2, 3), np.float32), 1, 4)
        else:
            transport.receive_into(np.zeros((3, 2), np.float16), 0, 4).wait()

    with pytest.raises(OrtcError, match=r"tag 4 from rank 0 as float16\[3, 2\], but float32\[2, 3\] was sent"):
        run_threads(thread_world(2, SECONDS), run)


def test_the_handshake_names_who_differs_in_what():
    facts = {"plan": "a1", "ortc": "0.1.0"}
    offers = [facts, facts, facts | {"ortc": "0.2.0"}, {"plan": "b2", "ortc": "0.1.0"}]
    messages = []

    def run(transport: Transport) -> None:
        try:
            handshake(transport, offers[transport.rank])
        except HandshakeError as error:
            messages.append(str(error))

    run_threads(thread_world(4, SECONDS), run)
    assert len(messages) == 4
    assert len(set(messages)) == 1
    assert "rank 2: ortc is 0.2.0, rank 0 has 0.1.0" in messages[0]
    assert "rank 3: plan is b2, rank 0 has a1" in messages[0]
    assert "rank 1:" not in messages[0]


def test_booleans_have_no_sum():
    with pytest.raises(ValueError, match="use max"):
        thread_world(2)[0].all_reduce(np.zeros(2, bool))


def test_the_bytes_are_counted():
    def run(transport: Transport) -> tuple[int, int]:
        array = np.zeros(1000)
        if transport.rank == 0:
            transport.send(array, 1, 0).wait()
        else:
            transport.receive(0, 0)
        transport.all_reduce(array)  # 8000 bytes: each sends all of it
        return transport.counters.sent, transport.counters.received

    assert run_threads(thread_world(2, SECONDS), run) == [(16000, 8000), (8000, 16000)]


@pytest.mark.parametrize(("variable", "launched"), [("PMI_RANK", True), ("OMPI_COMM_WORLD_RANK", True), ("PATH", False)])
def test_the_launcher_is_seen_in_the_environment(monkeypatch, variable: str, launched: bool):
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "0")
    assert launched_by_mpi() is launched


# MPI


def mpi(size: int, body: str, **options) -> subprocess.Popen:
    """Run ``body`` on each rank, with ``transport`` at hand."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    program = (
        f"import sys, os, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import numpy as np\n"
        "from ortc.runtime.transport import *\n"
        f"with mpi_world(timeout={options.pop('timeout', SECONDS)}) as transport:\n"
        "    rank = transport.rank\n"
        f"{lines}\n"
    )
    # Open MPI asks for leave to run as root, and to run more ranks than there are cores.
    leave = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return subprocess.Popen(
        [MPIEXEC, "-n", str(size), sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | leave,
    )


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@needs_mpi
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("state", ["waiting", "computing"])
def test_a_killed_rank_ends_the_job_and_is_named(state: str, victim: int):
    wait = "transport.barrier()" if state == "waiting" else "while True: np.ones((200, 200)) @ np.ones((200, 200))"
    body = f"""
transport.barrier()
if rank == {victim}:
    print(os.getpid())
    time.sleep(60)
{wait}
"""
    job = mpi(4, body)
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code, _, err = finished(job)
    assert time.monotonic() - killed < 5
    assert code != 0
    assert re.findall(r"ortc: rank (\d+) \(process (\d+)", err) == [(str(victim), str(pid))], err


@needs_mpi
def test_an_error_in_one_rank_ends_the_job_with_its_message():
    started = time.monotonic()
    job = mpi(
        3, "from ortc.errors import OrtcError\nif rank == 1: raise OrtcError('the disk is full')\ntransport.receive(1, 0)"
    )
    code, _, err = finished(job)
    assert time.monotonic() - started < 20
    assert code == 2
    assert "ortc: rank 1: the disk is full\n" in err
    assert "Traceback" not in err
    assert "died" not in err


@needs_mpi
def test_a_fault_in_one_rank_ends_the_job_with_its_traceback():
    code, _, err = finished(mpi(2, "if rank == 1: raise KeyError('lost')\ntransport.barrier()"))
    assert code != 0
    assert "KeyError: 'lost'" in err


@needs_mpi
def test_the_handshake_is_told_once():
    code, _, err = finished(mpi(3, "handshake(transport, {'plan': 'ab'[rank == 2]})"))
    assert code == 2
    assert err.count("rank 2: plan is b, rank 0 has a") == 1


@needs_mpi
def test_who_waits_too_long_under_mpi_says_for_whom():
    body = "if rank == 0: transport.receive(1, 3)\ntime.sleep(20)"
    code, _, err = finished(mpi(2, body, timeout=0.5))
    assert code == 2
    assert "rank 0: rank 0 waits for tag 3 from rank 1, for more than 0.5 s" in err


@needs_mpi
def test_a_value_of_another_shape_is_told_under_mpi():
    body = """
if rank == 0:
    transport.send(np.zeros((2, 3), np.float32), 1, 4).wait()
else:
    transport.receive_into(np.zeros((3, 1), np.float16), 0, 4).wait()
transport.barrier()
"""
    code, _, err = finished(mpi(2, body))
    assert code == 2
    assert "tag 4 from rank 0 as float16[3, 1], but float32[2, 3] was sent" in err


@needs_mpi
def test_received_memory_is_used_again():
    body = """
places = set()
for i in range(5):
    request = transport.send(np.full((100, 3), i), 1 - rank, 0)
    array = transport.receive(1 - rank, 0)
    assert (array == i).all()
    places.add(array.ctypes.data)
    transport.release(array)
    request.wait()
assert len(places) == 1, places
"""
    code, _, err = finished(mpi(2, body))
    assert code == 0, err


@needs_mpi
@pytest.mark.slow
def test_an_array_beyond_two_gib_arrives():
    body = """
n = (2 << 30) + 5
if rank == 0:
    array = np.zeros(n, np.uint8)
    array[:: 1 << 20] = np.arange(2049) % 251
    array[-1] = 7
    transport.send(array, 1, 0).wait()
else:
    array = transport.receive(0, 0)
    assert array.size == n and array[-1] == 7
    assert (array[:: 1 << 20] == np.arange(2049) % 251).all()
    assert np.count_nonzero(array) == np.count_nonzero(np.arange(2049) % 251) + 1
"""
    code, _, err = finished(mpi(2, body))
    assert code == 0, err


@needs_mpi
@pytest.mark.parametrize("size", [2, 4, 8])
def test_mpi_gives_the_bytes_that_threads_give(size: int):
    body = "import json, test_transport\nresults = transport.gather_object(test_transport.everything(transport))\n"
    code, out, err = finished(mpi(size, body + "if rank == 0: print(json.dumps(results))"))
    assert code == 0, err
    assert err == ""
    expected = run_threads(thread_world(size, SECONDS), everything)[0]
    assert json.loads(out) == [expected] * size
