"""Pipeline schedules: no deadlock, the published bubbles and memory, messages in order, text, errors, timelines."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import seconds

from ortc.errors import RecipeError
from ortc.runtime.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    format_schedule,
    gpipe,
    interleaved,
    make_schedule,
    neighbours,
    one_f_one_b,
    parse_action,
    parse_schedule,
    with_transfers,
    zb_h1,
)
from ortc.runtime.simulate import Costs, Timed, chrome_trace, equal_costs, grid, simulate

pytestmark = pytest.mark.ranks

SIZES = [
    (name, stages, micro_batches, ranks)
    for stages, micro_batches in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 5, 8, 13))
    for name in SCHEDULES
    for ranks in ([r for r in range(1, stages + 1) if stages % r == 0] if name == "interleaved" else [stages])
]
SKIPS = {(0, 2), (0, 3), (1, 3)}

sizes = st.sampled_from(SIZES)
kinds = st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"])


def edges_of(stages: int, skips: AbstractSet[tuple[int, int]] = SKIPS) -> frozenset[tuple[int, int]]:
    return neighbours(stages) | {(s, t) for s, t in skips if t < stages}


def run(schedule: Schedule, edges: AbstractSet[tuple[int, int]], seed: int) -> None:
    """Executes the lists with their transfers, ranks taking turns at random over channels that know only order.

    Every value carries its name, so that a message taken for another one is seen, as is one that comes too late.
    """
    rows = with_transfers(schedule, edges)
    channels: dict[tuple[int, int], deque] = defaultdict(deque)
    values: list[set] = [set() for _ in rows]  # what each rank has: (stage that made it, "F" or "B", micro-batch)
    position = [0] * len(rows)
    rng = random.Random(seed)
    while alive := [r for r, row in enumerate(rows) if position[r] < len(row)]:
        moved = False
        for rank in rng.sample(alive, len(alive)):
            action = rows[rank][position[rank]]
            kind, stage, m, peer = action.kind, action.stage, action.micro_batch, action.peer or 0
            if kind.startswith("RECV"):
                channel = channels[schedule.stage_rank[peer], rank]
                if not channel:
                    continue
                assert channel.popleft() == (peer, stage, kind[-1], m), f"rank {rank} takes another message for {action}"
                values[rank].add((peer, kind[-1], m))
            elif kind.startswith("SEND"):
                assert (stage, kind[-1], m) in values[rank]
                channels[rank, schedule.stage_rank[peer]].append((stage, peer, kind[-1], m))
            elif kind == "F":
                assert all((s, "F", m) in values[rank] for s, t in edges if t == stage), f"{action} lacks a value"
                values[rank].add((stage, "F", m))
            elif kind in ("B", "I"):
                assert (stage, "F", m) in values[rank]
                assert all((t, "B", m) in values[rank] for s, t in edges if s == stage), f"{action} lacks a gradient"
                values[rank].add((stage, "B", m))
            position[rank] += 1
            moved = True
        assert moved, f"deadlock at {[str(rows[r][position[r]]) for r in alive]}"
    assert not any(channels.values()), "messages that nobody takes"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_run_to_their_end(name):
    """On ordered channels, with and without skip connections, also for M < S, M = 1 and S = 1."""
    for _, stages, micro_batches, ranks in (size for size in SIZES if size[0] == name):
        schedule = make_schedule(name, stages, micro_batches, ranks)
        assert (schedule.name, schedule.stages, schedule.ranks, schedule.micro_batches) == (name, stages, ranks, micro_batches)
        for edges in (neighbours(stages), edges_of(stages)):
            check(schedule, edges)
            run(schedule, edges, seed=stages * micro_batches)


@given(sizes, st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda e: e[0] < e[1])), st.integers(0, 9))
def test_any_skip_connections(size, skips, seed):
    name, stages, micro_batches, ranks = size
    run(make_schedule(name, stages, micro_batches, ranks), edges_of(stages, skips), seed)


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_ascend_within_a_stage(name):
    """So that gradients are summed in one order under every schedule."""
    schedule = make_schedule(name, 4, 7, 2 if name == "interleaved" else None)
    for kind in ("F", "W") if name == "zb-h1" else ("F", "B"):
        for stage in range(4):
            row = [a.micro_batch for a in schedule.actions[schedule.stage_rank[stage]] if (a.kind, a.stage) == (kind, stage)]
            assert row == list(range(7))


PYTORCHS = {  # as PyTorch 2.13 makes them (ScheduleInterleaved1F1B; ScheduleInterleavedZeroBubble with one stage on a rank)
    "interleaved": """
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7
3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
""",
    "zb-h1": """
0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
""",
}


@pytest.mark.parametrize("name", PYTORCHS)
def test_schedules_are_pytorchs(name):
    stages = 8 if name == "interleaved" else 4
    assert parse_schedule(PYTORCHS[name], stages, name=name) == make_schedule(name, stages, 8, 4)


def test_1f1b_is_the_published_one():
    """Narayanan et al. 2021 (arXiv 2104.04473), figure 4, above: the first and the last of four ranks."""
    lines = format_schedule(one_f_one_b(4, 8)).splitlines()[1:]
    assert lines[0] == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    assert lines[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"


TIMES = [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.5, 0.5), (3.0, 2.0, 2.0)]  # seconds of F, I, W


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 2), (3, 5), (4, 4), (4, 9), (8, 3), (8, 16)])
def test_bubbles_are_the_published_ones(p, m, times):
    """What a step takes beyond the work itself, for equal stages without transfer times."""
    forward, inputs, weights = times
    work = forward + inputs + weights

    def bubble(schedule: Schedule) -> float:
        simulation = simulate(schedule, equal_costs(schedule.stages, *times))
        chunks = schedule.stages // schedule.ranks
        assert simulation.busy == pytest.approx([m * work * chunks] * schedule.ranks)
        assert simulation.idle == pytest.approx([simulation.end - m * work * chunks] * schedule.ranks)
        assert simulation.bubble == pytest.approx(simulation.idle[0] / simulation.end)
        return simulation.end - m * work * chunks

    assert bubble(gpipe(p, m)) == pytest.approx((p - 1) * work)
    assert bubble(one_f_one_b(p, m)) == pytest.approx((p - 1) * work)
    if m >= p:  # with fewer there is no W left to fill the end with
        assert bubble(zb_h1(p, m)) == pytest.approx((p - 1) * (forward + inputs - weights))
    if m % p == 0:
        for v in (2, 3):  # a rank's work on a micro-batch is v times that of a stage
            assert bubble(interleaved(p * v, m, p)) == pytest.approx((p - 1) * (v * work) / v)


def test_surplus_micro_batches_of_interleaved_cost_no_time():
    """A number that the ranks do not divide takes no longer than the next one that they do, and still beats 1F1B."""
    for m in range(5, 20):
        some, more = (simulate(interleaved(8, n, 4), equal_costs(8)).end for n in (m, -(-m // 4) * 4))
        assert some <= more
        assert some < simulate(one_f_one_b(4, m), equal_costs(4, 2.0, 2.0, 2.0)).end


def test_transfers_take_time():
    """One micro-batch through three stages: its way there and back, step by step; stages of one rank hand over at once."""
    costs = replace(equal_costs(3), transfer={(0, 1): 10.0, (1, 2): 100.0})
    assert simulate(gpipe(3, 1), costs).end == 3 * 3 + 2 * 110
    assert simulate(interleaved(3, 1, 1), costs).end == 3 * 3
    costs = replace(costs, transfer=lambda s, t: 1000.0 if (s, t) == (0, 2) else 0.0)
    assert simulate(gpipe(3, 1), costs, edges_of(3)).end == 2 * 1000 + 2 * 3  # stage 1 works meanwhile


def test_unequal_stages():
    """The slowest stage sets the pace: with many micro-batches its rank is busy but for the way to it and back."""
    costs = replace(equal_costs(3), forward=(1.0, 5.0, 2.0))
    simulation = simulate(one_f_one_b(3, 20), costs)
    assert simulation.busy == (60.0, 140.0, 80.0)
    assert 140 <= simulation.end <= 140 + 1 + 2 + 2 + 4


def stash_costs(stages: int, stash: int, rest: int) -> Costs:
    return replace(equal_costs(stages), stash_bytes=(stash,) * stages, weight_stash_bytes=(rest,) * stages)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 2), (4, 4), (4, 11), (8, 16)])
def test_memory_is_the_published_one(p, m):
    """GPipe holds all micro-batches, 1F1B p − rank; ZB-H1 that many whole stashes, and never more than 1F1B's first rank."""
    assert simulate(gpipe(p, m), stash_costs(p, 7, 0)).peak_in_flight == (m,) * p
    plain = simulate(one_f_one_b(p, m), stash_costs(p, 7, 0))
    assert plain.peak_in_flight == tuple(min(p - rank, m) for rank in range(p))
    assert plain.peak_bytes == tuple(7 * n for n in plain.peak_in_flight)
    assert simulate(zb_h1(p, m), stash_costs(p, 7, 0)).peak_bytes == plain.peak_bytes
    for rest in (3, 7):
        zero_bubble = simulate(zb_h1(p, m), stash_costs(p, 7, rest))
        assert max(zero_bubble.peak_bytes) == max(plain.peak_bytes)
        assert max(zero_bubble.peak_in_flight) == max(plain.peak_in_flight)
        if m >= p:
            assert zero_bubble.peak_bytes == tuple(7 * (p - rank) + rest * rank for rank in range(p))
            assert zero_bubble.peak_in_flight == (p,) * p


def test_static_bytes_count_for_every_stage_of_a_rank():
    costs = replace(stash_costs(4, 1, 0), static_bytes=(1000, 100, 10, 1), stash_bytes=(0,) * 4)
    assert simulate(interleaved(4, 4, 2), costs).peak_bytes == (1010, 101)


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulating_a_large_world_is_linear_in_its_actions(name):
    small, schedule = (make_schedule(name, 64, parts, 16 if name == "interleaved" else None) for parts in (32, 256))
    assert seconds(lambda: simulate(schedule, equal_costs(64))) < 8 * 3 * seconds(lambda: simulate(small, equal_costs(64)), 5)
    simulation = simulate(schedule, equal_costs(64))
    assert len(simulation.timed) == 64 * 256 * (3 if name == "zb-h1" else 2)
    bubble = {"zb-h1": 63 * (1 + 1 - 1), "interleaved": 15 * 3}.get(name, 63 * 3)
    assert simulation.idle == (bubble,) * schedule.ranks


@given(kinds, st.integers(0, 99), st.integers(0, 999), st.none() | st.integers(0, 99))
def test_action_text_round_trip(kind, stage, micro_batch, peer):
    action = Action(kind, stage, micro_batch, peer if len(kind) > 1 else None)
    if action.peer is None or action.peer >= 0:  # stage 0 has no neighbour before it
        assert parse_action(str(action)) == action


def test_action_text_is_pytorchs():
    actions = ["2F0", "2B0", "2I0", "2W0", "2SEND_F0", "3RECV_F0", "3SEND_B0", "2RECV_B0"]
    assert [str(parse_action(text)) for text in actions] == actions
    assert [parse_action(text).peer for text in actions] == [None] * 4 + [3, 2, 2, 3]
    assert str(Action("SEND_F", 0, 1, 3)) == "0SEND_F1>3"
    assert str(Action("RECV_F", 3, 1, 0)) == "3RECV_F1<0"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "F20", "2F0>3", "0SEND_F1<3", "3RECV_F1>0", "2f0", "-1F0", "2F0 2B0"])
def test_no_action(text):
    with pytest.raises(RecipeError, match=re.escape(repr(text))):
        parse_action(text)


@given(sizes)
def test_schedule_text_round_trip(size):
    name, stages, micro_batches, ranks = size
    schedule = make_schedule(name, stages, micro_batches, ranks)
    assert parse_schedule(format_schedule(schedule), stages, name=name) == schedule


def test_a_persons_own_file():
    """Comments, blank lines, commas; stages on ranks as one likes; a backward whole here, split there."""
    text = """
        # two ranks, the first holds the ends
        0F0, 0F1, 2F0, 2B0, 2F1, 2I1, 0B0, 2W1, 0B1   # rank 0

        1F0  1F1  1B0  1B1
    """
    schedule = parse_schedule(text, 3)
    assert (schedule.ranks, schedule.micro_batches, schedule.stage_rank) == (2, 2, (0, 1, 0))
    run(schedule, neighbours(3), 0)


BROKEN = {
    "a missing backward": ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", r"rank 0 never does 0B1"),
    "a missing forward of all": ("0F0 0B0 0F1 0B1\n1F0 1B0", r"rank 1 never does 1F1"),
    "a missing weights' backward": ("0F0 0I0\n1F0 1B0", r"rank 0 never does 0W0"),
    "twice": ("0F0 0F0 0B0\n1F0 1B0", r"rank 0, action 2 \(0F0\): it was done before"),
    "a backward before its forward": ("0F0 0B0\n1B0 1F0", r"rank 1, action 1 \(1B0\): a backward before its forward: put 1F0"),
    "W before I": ("0F0 0W0 0I0\n1F0 1B0", r"rank 0, action 2 \(0W0\): .*put 0I0 before"),
    "I after B": ("0F0 0B0 0I0\n1F0 1B0", r"rank 0, action 3 \(0I0\): 0B0 was done before"),
    "W after B": ("0F0 0B0 0W0\n1F0 1B0", r"rank 0, action 3 \(0W0\): 0B0 was done before"),
    "B after I": ("0F0 0I0 0B0\n1F0 1B0", r"rank 0, action 3 \(0B0\): 0I0 was done before"),
    "a stage on two ranks": ("0F0 0B0\n1F0 0F1 1B0", r"rank 1, action 2 \(0F1\): stage 0 is on rank 0"),
    "a stage too many": ("0F0 0B0\n1F0 1B0\n2F0 2B0", r"rank 2, action 1 \(2F0\): there is no stage 2"),
    "a stage that nobody has": ("0F0 0B0", r"no rank has actions of stage 1"),
    "nothing": ("# empty", r"no rank has actions of stage 0"),
    "a transfer": ("0F0 0SEND_F0 0B0\n1F0 1B0", r"rank 0, action 2 \(0SEND_F0\): .*take it out"),
    "no action": ("0F0 0B0\n1F0 backward", r"rank 1: 'backward' is no action"),
    "a deadlock": (
        "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
        r"deadlock: rank 0, action 2 \(0B0\) waits for 1B0 of rank 1; rank 1, action 2 \(1F1\) waits for 0F1 of rank 0$",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_schedule_is_explained(case):
    text, message = BROKEN[case]
    with pytest.raises(RecipeError, match=message) as error:
        parse_schedule(text, 2, name="mine.txt")
    assert "mine.txt" in str(error.value)


def test_a_rank_can_wait_for_itself():
    parse_schedule("0F0 2F0 2B0 0B0\n1F0 1B0", 3)
    with pytest.raises(RecipeError, match=r"rank 0, action 1 \(2F0\) waits for 0F0 of rank 0;"):
        parse_schedule("2F0 2B0 0F0 0B0\n1F0 1B0", 3, edges={(0, 2), (0, 1)})


def test_a_schedule_that_does_not_fit_itself():
    schedule = gpipe(2, 2)
    with pytest.raises(RecipeError, match="for 3 ranks"):
        check(replace(schedule, ranks=3))
    with pytest.raises(RecipeError, match=r"rank 0, action 2 \(0F1\): there is no micro-batch 1"):
        check(replace(schedule, micro_batches=1))
    with pytest.raises(RecipeError, match="rank 0 never does 0F2"):
        check(replace(schedule, micro_batches=3))


def test_edges_must_go_forward():
    for edge in ((1, 1), (1, 0), (0, 2), (-1, 0)):
        with pytest.raises(RecipeError, match=f"from stage {edge[0]} to stage {edge[1]}"):
            check(gpipe(2, 1), {edge})


def test_what_cannot_be_scheduled():
    with pytest.raises(RecipeError, match=r"'1f2b'.*gpipe, 1f1b, interleaved, zb-h1"):
        make_schedule("1f2b", 2, 2)
    with pytest.raises(RecipeError, match="4 stages need 4 ranks, not 2"):
        make_schedule("1f1b", 4, 4, 2)
    with pytest.raises(RecipeError, match="6 stages on 4 ranks"):
        make_schedule("interleaved", 6, 4, 4)
    for name in SCHEDULES:
        with pytest.raises(RecipeError, match=r"micro-batches: .* not 0"):
            make_schedule(name, 2, 0)
        with pytest.raises(RecipeError, match=r"stages: .* not 0"):
            make_schedule(name, 0, 2, 0)


def test_transfers_of_1f1b():
    """Right after and right before the work."""
    assert [" ".join(map(str, row)) for row in with_transfers(one_f_one_b(2, 2))] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_message_that_is_overtaken_is_received_early():
    """Rank 1 needs 0's second value first, and on an ordered channel gets the first one before it."""
    schedule = parse_schedule("0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0", 2)
    assert [str(a) for a in with_transfers(schedule)[1]][:4] == ["1RECV_F0", "1RECV_F1", "1F1", "1B1"]
    run(schedule, neighbours(2), 0)


def test_skip_connections_go_direct():
    rows = with_transfers(gpipe(3, 1), {(0, 1), (1, 2), (0, 2)})
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0<2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0>0 2SEND_B0",
    ]


def test_no_transfers_within_a_rank():
    assert with_transfers(interleaved(4, 3, 1)) == interleaved(4, 3, 1).actions


def test_grid():
    for unit in (0.13, 0.26, 1e-6):  # seconds whose sums do not come out even
        assert grid(gpipe(4, 5), equal_costs(4, unit, unit, unit)) == grid(gpipe(4, 5), equal_costs(4))
    assert grid(one_f_one_b(2, 2), equal_costs(2)) == (
        "rank 0  F0 F1 ......B0--- ...B1---\n"
        "rank 1  ...F0 B0--- F1 B1--- ......\n"
    )  # fmt: skip
    assert grid(zb_h1(2, 2), equal_costs(2)) == (
        "rank 0  F0 F1 ...I0 W0 I1 W1\n"
        "rank 1  ...F0 I0 F1 I1 W0 W1\n"
    )  # fmt: skip
    assert (
        grid(interleaved(4, 1, 2), equal_costs(4)).splitlines()[1] == "rank 1  ....1F0 ....3F0 3B0---- ........1B0---- ........"
    )


@given(sizes)
def test_grid_shows_every_action_in_its_order(size):
    name, stages, micro_batches, ranks = size
    schedule = make_schedule(name, stages, micro_batches, ranks)
    for row, line in zip(schedule.actions, grid(schedule, equal_costs(stages)).splitlines(), strict=True):
        shown = re.findall(r"\d*[FBIW]\d+", line)
        assert shown == [str(a) if ranks < stages else str(a).removeprefix(str(a.stage)) for a in row]


@given(sizes, st.lists(st.floats(0.0, 1e3), min_size=24, max_size=24))
def test_grid_for_any_costs(size, seconds):
    """A line for each rank, and nothing but actions, or what there is room for of their names, and idle time."""
    name, stages, micro_batches, ranks = size
    costs = replace(equal_costs(stages), forward=seconds[:8], backward_input=seconds[8:16], backward_weight=seconds[16:])
    text = grid(make_schedule(name, stages, micro_batches, ranks), costs)
    assert re.fullmatch(r"(rank +\d+  [.\dFBIW -]*\n)*", text)
    simulation = simulate(make_schedule(name, stages, micro_batches, ranks), costs)
    busiest = max(t.end - t.start for t in simulation.timed)
    assert len(text.splitlines()) == (ranks if busiest else 0)


def test_trace_is_what_viewers_read():
    schedule = zb_h1(3, 4)
    simulation = simulate(schedule, replace(equal_costs(3), transfer=lambda s, t: 0.5), edges_of(3))
    trace = json.loads(json.dumps(chrome_trace(simulation.timed, edges_of(3), process="predicted", pid=7), allow_nan=False))
    events = trace["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert {event["pid"] for event in events} == {7}
    names = {(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {("process_name", 0, "predicted"), *(("thread_name", r, f"rank {r}") for r in range(3))}

    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(slices) == sum(map(len, schedule.actions))
    for t in simulation.timed:
        event = slices[str(t.action)]
        assert (event["tid"], event["ts"], event["dur"]) == (t.rank, t.start * 1e6, pytest.approx((t.end - t.start) * 1e6))
    looks = {kind: {(e["cat"], e["cname"]) for n, e in slices.items() if n[1] == kind} for kind in "FIW"}
    assert len(set().union(*looks.values())) == len(looks) == 3

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == finishes.keys()
    sends = Counter(a.kind for row in with_transfers(schedule, edges_of(3)) for a in row)
    assert len(starts) == sends["SEND_F"] + sends["SEND_B"] == 3 * 4 * 2
    for id_, start in starts.items():
        maker, taker = re.search(r"(\w+) to (\w+)$", id_).groups()
        for event, name in ((start, maker), (finishes[id_], taker)):
            around = slices[name]
            assert event["tid"] == around["tid"]
            assert around["ts"] < event["ts"] < around["ts"] + around["dur"]
        assert start["ts"] < finishes[id_]["ts"]


def test_trace_has_arrows_between_ranks_only():
    schedule = interleaved(4, 2, 2)
    edges = {(0, 1), (0, 2)}
    events = chrome_trace(simulate(schedule, equal_costs(4), edges).timed, edges)["traceEvents"]
    arrows = {event["name"] for event in events if event["ph"] == "s"}
    assert arrows == {"0F0 to 1F0", "0F1 to 1F1", "1B0 to 0B0", "1B1 to 0B1"}


def test_trace_of_measured_transfers():
    """A measured list may hold transfers, and one rank's actions alone."""
    timed = [
        Timed(1, parse_action("1RECV_F0"), 0.0, 0.5),
        Timed(1, parse_action("1F0"), 0.5, 1.0),
        Timed(1, parse_action("1B0"), 1.0, 2.0),
        Timed(1, parse_action("1SEND_B0"), 2.0, 2.1),
    ]
    events = chrome_trace(timed, process="measured")["traceEvents"]
    assert [e["cat"] for e in events if e["ph"] == "X"] == ["receive", "forward", "backward", "send"]
    assert not [e for e in events if e["ph"] in "sf"]
