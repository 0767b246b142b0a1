"""Pipeline schedules: which rank works on which stage and micro-batch, in which order.

A schedule is data: one list of actions per rank, in PyTorch's notation (``2F0`` is the forward of stage 2 on
micro-batch 0), made by a pure function or read from a person's own file. It holds the compute actions only; the
transfers follow from them and from the edges, the pairs of stages between which values travel (`with_transfers`).

Within a stage every schedule here goes through the micro-batches in ascending order, so gradients are accumulated in
the same order under all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal, cast

from ortc.errors import RecipeError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Edges = AbstractSet[tuple[int, int]]

OWN = "of your own"  # what errors and tables call a person's own schedule

_NEIGHBOUR: Mapping[str, int] = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    Attributes:
        kind: ``F`` forward; ``B`` full backward, or ``I`` and later ``W``, its parts that give the gradients of the
            stage's inputs and of its weights; ``SEND_F``/``RECV_F`` a value, ``SEND_B``/``RECV_B`` a gradient.
        stage: the stage that computes, sends or receives.
        micro_batch: which micro-batch.
        peer: the stage at the other end of a transfer, by default the neighbour; None for a compute action.
    """

    kind: Kind
    stage: int
    micro_batch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.peer is None and self.kind in _NEIGHBOUR:
            object.__setattr__(self, "peer", self.stage + _NEIGHBOUR[self.kind])

    def __str__(self) -> str:
        """``2F0``; a transfer that is not between neighbours names its peer: ``0SEND_F1>3``, ``3RECV_F1<0``."""
        text = f"{self.stage}{self.kind}{self.micro_batch}"
        if self.peer is None or self.peer == self.stage + _NEIGHBOUR[self.kind]:
            return text
        return f"{text}{'>' if self.kind.startswith('SEND') else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """The action that `str` writes as ``text``."""
    match = _ACTION.fullmatch(text)
    if match:
        stage, kind, micro_batch, arrow, peer = match.groups()
        if arrow is None or arrow == {"SEND": ">", "RECV": "<"}.get(kind[:4]):
            return Action(cast(Kind, kind), int(stage), int(micro_batch), None if peer is None else int(peer))
    raise RecipeError(
        f"{text!r} is no action: write stage, kind and micro-batch, like 2F0, with one of the kinds F (forward), B (backward), "
        "I (backward of the inputs) and W (backward of the weights)"
    )


@dataclass(frozen=True)
class Schedule:
    """The compute actions of every rank, in order.

    Attributes:
        name: its name on the command line, or a person's own.
        stages: how many stages the model has.
        ranks: how many pipeline ranks hold them.
        micro_batches: how many micro-batches make a step.
        actions: for each rank its actions (``F``, ``B``, ``I``, ``W``).
        stage_rank: for each stage the rank that holds it.
    """

    name: str
    stages: int
    ranks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    With equal stages a rank idles (p−1)(F+B); every rank holds all micro-batches at its peak.
    """
    _positive(stages=stages, micro_batches=micro_batches)
    return _one_stage_a_rank("gpipe", stages, micro_batches, lambda _: micro_batches)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn, after as many forwards as there are later stages (PipeDream-Flush, arXiv 2006.09503).

    With equal stages a rank idles (p−1)(F+B), as in GPipe, but rank r holds at most p−r micro-batches.
    """
    _positive(stages=stages, micro_batches=micro_batches)
    return _one_stage_a_rank("1f1b", stages, micro_batches, lambda rank: stages - 1 - rank)


def interleaved(stages: int, micro_batches: int, ranks: int) -> Schedule:
    """1F1B where rank r holds the stages r, r + ranks, … (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    With equal stages, v of them on each rank, and micro-batches a multiple of the ranks, a rank idles (p−1)(F+B)/v, F and B
    being its times for all its stages; it holds more micro-batches than under 1F1B and sends v times as much.

    Another number of micro-batches is scheduled as the next multiple, and the surplus left out. That cannot lock up: actions
    wait only for actions of their own micro-batch, so leaving out whole micro-batches takes waits away and adds none.
    """
    _positive(stages=stages, micro_batches=micro_batches, ranks=ranks)
    if stages % ranks:
        raise RecipeError(
            f"interleaved needs the same number of stages on every rank: {stages} stages on {ranks} ranks do not divide"
        )
    if stages == ranks:
        return replace(one_f_one_b(stages, micro_batches), name="interleaved")
    chunks = stages // ranks
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    rows = []
    for rank in range(ranks):
        held = range(rank, stages, ranks)
        forwards = [Action("F", stage, m) for group in groups for stage in held for m in group]
        backwards = [[Action("B", stage, m)] for group in groups for stage in reversed(held) for m in group]
        row = _in_turn(forwards, backwards, warmup=2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        rows.append(tuple(a for a in row if a.micro_batch < micro_batches))
    return Schedule("interleaved", stages, ranks, micro_batches, tuple(rows), tuple(s % ranks for s in range(stages)))


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1F1B with the backward in two parts, on rank r the weights' r micro-batches late (Qi et al. 2023, arXiv 2401.10241).

    The gradient of a stage's inputs, which the stage before waits for, leaves earlier, and the weights' parts fill the end.
    With equal stages, W no longer than F and than I, and p micro-batches at least, a rank idles (p−1)(F+I−W), which is
    (p−1)(F+B−2W) for a full backward B = I+W. Rank r holds p−r whole stashes at most, as in 1F1B, and what W needs
    of r micro-batches more: where that is not more than a whole stash, no rank needs more than the first one under 1F1B.
    """
    _positive(stages=stages, micro_batches=micro_batches)
    rows = []
    for rank in range(stages):
        forwards = [Action("F", rank, m) for m in range(micro_batches)]
        weights = [Action("W", rank, m) for m in range(micro_batches)]
        backwards = [[Action("I", rank, m), *weights[max(m - rank, 0) : max(m - rank + 1, 0)]] for m in range(micro_batches)]
        rows.append((*_in_turn(forwards, backwards, stages - 1 - rank), *weights[max(micro_batches - rank, 0) :]))
    return Schedule("zb-h1", stages, stages, micro_batches, tuple(rows), tuple(range(stages)))


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}


def is_text(schedule: str) -> bool:
    """Whether this is the text of a schedule, not the name of one: a text has several words."""
    return len(schedule.split()) > 1


def make_schedule(name: str, stages: int, micro_batches: int, ranks: int | None = None) -> Schedule:
    """The schedule of a name in `SCHEDULES`, by default with a rank per stage; ``interleaved`` can do with fewer.

    Or of a person's own text (`parse_schedule`): it may have more micro-batches, which are left out, and it is not looked
    at here whether its ranks come to wait for each other, for that takes the edges (`check`).
    """
    if is_text(name):
        return _own_schedule(name, stages, micro_batches, stages if ranks is None else ranks)
    if name not in SCHEDULES:
        raise RecipeError(f"there is no schedule {name!r}: take one of {', '.join(SCHEDULES)}, or a file of your own")
    if name == "interleaved":
        return interleaved(stages, micro_batches, stages if ranks is None else ranks)
    if ranks not in (None, stages):
        raise RecipeError(
            f"{name} puts one stage on each rank, so {stages} stages need {stages} ranks, not {ranks}; or take interleaved"
        )
    return SCHEDULES[name](stages, micro_batches)


def _own_schedule(text: str, stages: int, micro_batches: int, ranks: int) -> Schedule:
    """Leaving out whole micro-batches takes waits away and adds none."""
    _positive(micro_batches=micro_batches)
    schedule = parse_schedule(text, stages, frozenset(), name=OWN)
    if schedule.ranks != ranks:
        raise RecipeError(
            f"schedule {schedule.name}: it has lines for {schedule.ranks} ranks, where there are {ranks} (--ranks)"
        )
    if micro_batches > schedule.micro_batches:
        raise RecipeError(
            f"schedule {schedule.name}: it has {schedule.micro_batches} micro-batches, where there are {micro_batches} "
            "(--micro-batches)"
        )
    rows = tuple(tuple(a for a in row if a.micro_batch < micro_batches) for row in schedule.actions)
    return replace(schedule, micro_batches=micro_batches, actions=rows)


def size_of(text: str) -> dict[str, int]:
    """The numbers of ``stages``, ``ranks`` and ``micro_batches`` that the text of a schedule names."""
    lines = _lines(text)
    actions = [parse_action(word) for words in lines for word in words]
    if not actions:
        raise RecipeError("the schedule has no action: write a line for each rank, like 0F0 0F1 0B0 0B1")
    return {
        "stages": 1 + max(a.stage for a in actions),
        "ranks": len(lines),
        "micro_batches": 1 + max(a.micro_batch for a in actions),
    }


def neighbours(stages: int) -> frozenset[tuple[int, int]]:
    """The edges of a model whose stages follow one another: (0, 1), (1, 2), …"""
    return frozenset((s, s + 1) for s in range(stages - 1))


def ends(stages: int, edges: Edges | None) -> tuple[list[list[int]], list[list[int]]]:
    """For each stage the stages that it has values from, and those that have values from it; ``edges`` as in `check`."""
    earlier: list[list[int]] = [[] for _ in range(stages)]
    later: list[list[int]] = [[] for _ in range(stages)]
    for s, t in sorted(neighbours(stages) if edges is None else edges):
        if not 0 <= s < t < stages:
            raise RecipeError(
                f"values cannot go from stage {s} to stage {t}: they go to a later one of the {stages} stages (from 0)"
            )
        earlier[t].append(s)
        later[s].append(t)
    return earlier, later


def check(schedule: Schedule, edges: Edges | None = None) -> None:
    """Whether the schedule does everything once, in a possible order, and comes to its end.

    Args:
        schedule: the schedule.
        edges: pairs (from stage, to stage) between which values go forward and gradients back; by default `neighbours`.

    Raises:
        RecipeError: names rank, position (from 1) and action: unknown stage or micro-batch, a stage on another rank,
            an action twice or missing, a backward before its forward, W before I, B beside I or W, a deadlock.
    """
    if len(schedule.actions) != schedule.ranks or len(schedule.stage_rank) != schedule.stages:
        raise RecipeError(
            f"schedule {schedule.name}: {len(schedule.actions)} lists of actions for {schedule.ranks} ranks, "
            f"and ranks of {len(schedule.stage_rank)} stages for {schedule.stages}"
        )
    done: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row, 1):
            fault = _fault(schedule, rank, action, done)
            if fault:
                raise RecipeError(f"schedule {schedule.name}: {_at(rank, position, action)}: {fault}")
            done.add(action)
    for stage, rank in enumerate(schedule.stage_rank):
        for m in range(schedule.micro_batches):
            for kind in ("F", "I", "W") if Action("I", stage, m) in done else ("F", "B"):
                if Action(cast(Kind, kind), stage, m) not in done:
                    raise RecipeError(
                        f"schedule {schedule.name}: rank {rank} never does {stage}{kind}{m}: put it into its line"
                    )
    for _ in execution_order(schedule, edges):
        pass


def execution_order(schedule: Schedule, edges: Edges | None = None) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """All actions in an order in which they can happen, each with its rank and the actions of other stages that it waits for.

    A backward is waited for under the kind that it has in the schedule (``B`` or ``I``). Linear in actions and edges.

    Raises:
        RecipeError: at the end, if ranks wait for each other: which, where and for what.
    """
    waits = _waits(schedule, edges)
    position = [0] * schedule.ranks
    done: set[Action] = set()
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            needs = waits(action)
            missing = next((a for a in needs if a not in done), None)
            if missing:
                waiting[missing].append(rank)
                break
            yield rank, action, needs
            position[rank] += 1
            done.add(action)
            ready.extend(waiting.pop(action, ()))
    if waiting:
        stuck = {rank: missing for missing, ranks in waiting.items() for rank in ranks}
        raise RecipeError(
            f"schedule {schedule.name} comes to a deadlock: "
            + "; ".join(
                f"{_at(rank, position[rank] + 1, schedule.actions[rank][position[rank]])} waits for {missing} of rank "
                f"{schedule.stage_rank[missing.stage]}"
                for rank, missing in sorted(stuck.items())
            )
        )


def in_flight(schedule: Schedule) -> list[int]:
    """Of each stage, the most micro-batches whose forward has run and whose backward (all parts of it) has not."""
    now, peak = [0] * schedule.stages, [0] * schedule.stages
    for row in schedule.actions:
        for action in row:
            now[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return peak


def with_transfers(schedule: Schedule, edges: Edges | None = None) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions, with the sends and receives between ranks put in; stages of one rank hand over without.

    A send stands right after the action that makes the value, and must not block. A receive stands right before the action
    that needs the value, or earlier, where a message sent later on the same way from rank to rank is needed first: so on
    each pair of ranks messages are received in the order of sending, and a transport may match them by order alone. This
    costs no time: whatever was sent before a message has been sent by the time that message arrives.

    Args:
        schedule: the schedule; it is checked.
        edges: as in `check`.
    """
    check(schedule, edges)
    waits, rank_of = _waits(schedule, edges), schedule.stage_rank
    leaving: defaultdict[Action, list[Action]] = defaultdict(list)  # the receives, on other ranks, of what an action makes
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for need in waits(action):
                if rank_of[need.stage] != rank:
                    leaving[need].append(_receive(need, action.stage))
    channels: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for receive in leaving[action]:
                channels[rank, rank_of[receive.stage]].append(receive)
    rows = []
    for rank, row in enumerate(schedule.actions):
        result: list[Action] = []
        received: set[Action] = set()
        for action in row:
            for need in waits(action):
                if rank_of[need.stage] != rank:
                    channel = channels[rank_of[need.stage], rank]
                    while _receive(need, action.stage) not in received:
                        result.append(channel.popleft())
                        received.add(result[-1])
            result.append(action)
            result += [_send(action, receive.stage) for receive in leaving[action]]
        rows.append(tuple(result))
    return tuple(rows)


def format_schedule(schedule: Schedule) -> str:
    """The schedule as text that `parse_schedule` reads: one line per rank, after a comment."""
    header = f"# {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, {schedule.micro_batches} micro-batches\n"
    return header + "".join(" ".join(map(str, row)) + "\n" for row in schedule.actions)


def parse_schedule(text: str, stages: int, edges: Edges | None = None, name: str = "custom") -> Schedule:
    """A person's own schedule, checked.

    Args:
        text: a line per rank, its compute actions separated by blanks or commas; ``#`` starts a comment.
        stages: how many stages the model has.
        edges: as in `check`.
        name: what errors call it, such as the file's name.
    """
    rows = []
    for rank, words in enumerate(_lines(text)):
        try:
            rows.append(tuple(parse_action(word) for word in words))
        except RecipeError as e:
            raise RecipeError(f"schedule {name}: rank {rank}: {e}") from None
    homes: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, rank)
    absent = [stage for stage in range(stages) if stage not in homes]
    if absent:
        raise RecipeError(
            f"schedule {name}: no rank has actions of stage {absent[0]}, and the model has {stages} stages (from 0)"
        )
    micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    schedule = Schedule(name, stages, len(rows), micro_batches, tuple(rows), tuple(homes[s] for s in range(stages)))
    check(schedule, edges)
    return schedule


def _lines(text: str) -> list[list[str]]:
    """The words of each rank."""
    return [words for line in text.splitlines() if (words := line.split("#")[0].replace(",", " ").split())]


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise RecipeError(f"{name.replace('_', '-')}: a schedule needs 1 at least, not {count}")


def _one_stage_a_rank(name: str, stages: int, micro_batches: int, warmup: Callable[[int], int]) -> Schedule:
    rows = []
    for rank in range(stages):
        forwards = [Action("F", rank, m) for m in range(micro_batches)]
        backwards = [[Action("B", rank, m)] for m in range(micro_batches)]
        rows.append(tuple(_in_turn(forwards, backwards, warmup(rank))))
    return Schedule(name, stages, stages, micro_batches, tuple(rows), tuple(range(stages)))


def _in_turn(forwards: list[Action], backwards: list[list[Action]], warmup: int) -> list[Action]:
    """``warmup`` forwards, then a forward before each backward while there are any."""
    row = forwards[:warmup]
    for i, backward in enumerate(backwards, warmup):
        row += forwards[i : i + 1] + backward
    return row


def _at(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, action {position} ({action})"


def _fault(schedule: Schedule, rank: int, action: Action, done: set[Action]) -> str | None:
    """What is wrong with an action after those that are done."""
    kind, stage, m = action.kind, action.stage, action.micro_batch
    if kind in _NEIGHBOUR:
        return "a schedule holds compute actions only, the transfers follow from them: take it out"
    if not 0 <= stage < schedule.stages:
        return f"there is no stage {stage}: the model has {schedule.stages} stages (from 0)"
    if not 0 <= m < schedule.micro_batches:
        return f"there is no micro-batch {m}: a step has {schedule.micro_batches} (from 0)"
    if rank != schedule.stage_rank[stage]:
        return f"stage {stage} is on rank {schedule.stage_rank[stage]}: a stage's actions must all stand in one rank's line"
    if action in done:
        return "it was done before: take one of the two out"
    if kind != "F" and Action("F", stage, m) not in done:
        return f"a backward before its forward: put {stage}F{m} before it"
    clash = {"B": ("I", "W"), "I": ("B",), "W": ("B",)}.get(kind, ())
    for other in clash:
        if Action(cast(Kind, other), stage, m) in done:
            return f"{stage}{other}{m} was done before, and B is I and W in one: use either B, or I and W"
    if kind == "W" and Action("I", stage, m) not in done:
        return f"the weights' backward before the inputs': put {stage}I{m} before it"
    return None


def _waits(schedule: Schedule, edges: Edges | None) -> Callable[[Action], tuple[Action, ...]]:
    """A function that gives the actions of other stages that an action waits for."""
    earlier, later = ends(schedule.stages, edges)
    split = {(a.stage, a.micro_batch) for row in schedule.actions for a in row if a.kind == "I"}

    def waits(action: Action) -> tuple[Action, ...]:
        m = action.micro_batch
        if action.kind == "F":
            return tuple([Action("F", s, m) for s in earlier[action.stage]])
        if action.kind == "W":
            return ()
        return tuple([Action("I" if (t, m) in split else "B", t, m) for t in later[action.stage]])

    return waits


def _receive(made: Action, stage: int) -> Action:
    return Action("RECV_F" if made.kind == "F" else "RECV_B", stage, made.micro_batch, made.stage)


def _send(made: Action, stage: int) -> Action:
    return Action("SEND_F" if made.kind == "F" else "SEND_B", made.stage, made.micro_batch, stage)
