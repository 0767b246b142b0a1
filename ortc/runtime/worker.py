"""One rank: its stages, and what it does in a step, as the schedule says."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortc.errors import OrtcError, PlanError, RecipeError
from ortc.plan import GraphFile, Plan
from ortc.runtime.batch import key
from ortc.runtime.engine import Engine, Trace
from ortc.runtime.schedule import Action, Schedule, make_schedule, with_transfers
from ortc.runtime.stage import DEFAULT_ENGINE, Feed, Part, Stage, square_norm, trained_of, view
from ortc.runtime.tensors import histogram, magnitudes
from ortc.runtime.transport import Request, Transport

if TYPE_CHECKING:
    from ortc.runtime.profile import Recorder

# Phases of the backward by the action that runs them; a full backward runs both parts where the stage has them apart.
_BACKWARD = {"B": ("backward", "backward_input", "backward_weight"), "I": ("backward_input",), "W": ("backward_weight",)}


def ranks_of(plan: Plan) -> int:
    """How many pipeline ranks hold the stages."""
    return plan.recipe.pipeline.ranks or len(plan.stages)


def schedule_of(plan: Plan, micro_batches: int) -> Schedule:
    """The plan's schedule for a number of micro-batches."""
    pipeline = plan.recipe.pipeline
    if len(plan.stages) == 1:
        return make_schedule("gpipe", 1, micro_batches)
    return make_schedule(pipeline.schedule, len(plan.stages), micro_batches, pipeline.ranks)


class Routes:
    """What goes from which stage to which, as the graphs' ports have it.

    Attributes:
        forward: (from, to) -> names of values; of the evaluation: ``evaluation``.
        backward: (from, to) -> names of values whose gradients the later stage, the first of the pair, gives back.
        first: parameters and buffers -> the first stage that holds them, which answers for them.
        tied: parameters that several stages hold and train -> those stages.
    """

    def __init__(self, plan: Plan) -> None:
        self.forward: dict[tuple[int, int], list[str]] = {}
        self.evaluation: dict[tuple[int, int], list[str]] = {}
        self.backward: dict[tuple[int, int], list[str]] = {}
        for stage in plan.stages:
            for phase, graph in stage.phases.items():
                for port in graph.outputs:
                    if port.role == "boundary":
                        routes = self.evaluation if phase == "eval" else self.forward
                        for to in port.stages or []:
                            routes.setdefault((stage.index, to), []).append(key(port))
                    elif port.role == "boundary_gradient":
                        for to in port.stages or []:
                            self.backward.setdefault((stage.index, to), []).append(key(port))
        holders: dict[str, list[int]] = {p.name: [] for p in plan.trainable()}
        for stage in plan.stages:
            for name in stage.parameters:
                if name in holders:
                    holders[name].append(stage.index)
        self.first = {name: stage.index for stage in reversed(plan.stages) for name in stage.parameters}
        self.tied = {name: stages for name, stages in holders.items() if len(stages) > 1}
        self._check(plan)

    def _check(self, plan: Plan) -> None:
        """Ranks that wait for a gradient which nobody makes would wait for ever."""
        trained = {stage.index: set(trained_of(stage)) for stage in plan.stages}
        for name, stages in self.tied.items():
            for s in stages:
                if name not in trained[s]:
                    raise PlanError(
                        f"stages {', '.join(map(str, stages))} hold {name!r}, but stage {s} has no gradient of it, so that it "
                        "would not be trained there: compile the model again"
                    )

    @property
    def edges(self) -> set[tuple[int, int]]:
        """The pairs of stages between which something travels in training, the earlier first."""
        return {*self.forward, *((t, s) for s, t in self.backward)}


class Worker:
    """One rank of a job of ``replicas`` pipelines.

    Args:
        folder: the output folder.
        plan: its plan.
        world: this rank's connection to all ranks; replica r holds the ranks from r · (ranks of a pipeline) on.
        threads, engine: of each session; no number for all cores.

    Attributes:
        stages: the stages that this rank holds, by index.
        replica: which pipeline this rank is part of.
        sharded: each replica reduces, updates and saves the states of its own parameters only.
        recorder: records each step, if there is one.
    """

    def __init__(
        self, folder: Path, plan: Plan, world: Transport, threads: int | None, engine: Engine = DEFAULT_ENGINE
    ) -> None:
        self.plan, self.ranks = plan, ranks_of(plan)
        if world.size % self.ranks:
            raise PlanError(
                f"{folder} was compiled for {self.ranks} ranks; {world.size} ranks are no multiple of that: "
                f"start {self.ranks}, or a multiple for several replicas"
            )
        self.replicas = world.size // self.ranks
        if self.replicas > 1 and not plan.recipe.pipeline.divided:
            raise PlanError(
                f"{folder} was compiled for one rank, and its graphs take the mean of a whole batch: compile the model again "
                f"with --data-parallel {self.replicas}"
            )
        self.sharded = plan.recipe.pipeline.zero > 0
        if self.sharded and self.replicas != plan.recipe.pipeline.replicas:
            raise PlanError(
                f"{folder} was compiled with the optimizer's state in {plan.recipe.pipeline.replicas} shards (--zero 1), and "
                f"{world.size} ranks are {self.replicas} replicas: start {self.ranks * plan.recipe.pipeline.replicas} ranks"
            )
        self.replica, self.rank = divmod(world.rank, self.ranks)
        self.rank_of = schedule_of(plan, 1).stage_rank
        self.routes = Routes(plan)
        here = [s for s in plan.stages if self.rank_of[s.index] == self.rank]
        self.stages = {s.index: Stage(folder, plan, s, threads, self.replica, engine) for s in here}
        self.recorder: Recorder | None = None
        self._predicted: dict[tuple[int, int], list[str]] = {}  # (from, to) -> names of values that a prediction sends
        self._rows: dict[int, tuple[Action, ...]] = {}
        self._inbox: dict[tuple[str, int, int, str, int], Feed] = {}
        self._outbox: dict[tuple[str, int, int, int], list[Any]] = {}
        self._sending: list[tuple[Request, Any]] = []
        self._borrowed: dict[tuple[int, int], list[np.ndarray]] = {}  # received for a stage and micro-batch
        self.connect(world)

    def connect(self, world: Transport) -> None:
        """Use this connection from now on; all ranks call it together."""
        self.world = world
        every = range(self.replicas)
        self.pipe = world.split([[r * self.ranks + s for s in range(self.ranks)] for r in every])
        self.peers = world.split([[r * self.ranks + s for r in every] for s in range(self.ranks)])
        self._inbox.clear()
        self._outbox.clear()
        self._sending.clear()
        self._borrowed.clear()

    # A step

    def train(
        self, parts: Sequence[Part], *, seed: int, step: int, loss_scale: float = 1.0, lr: float = 0.0
    ) -> tuple[float, float]:
        """Forward and backward of this replica's micro-batches. Nothing changes but the stages' gradients and buffers; with
        ``optimizer.fuse`` the parameters and states do, at this learning rate, and there is no gradient whose norm were known.

        Returns:
            The loss and the norm of the gradients (times the loss scale), over all ranks; not finite if anything is not.
        """
        for stage in self.stages.values():
            stage.begin()
            stage.loss_scale, stage.lr = loss_scale, lr
        act = self.act if self.recorder is None else self.recorder.begin(self)
        for action in self._actions(len(parts)):
            act(action, parts[action.micro_batch], seed, step)
        self._wait()
        self._reduce(active=len(parts) > 0)
        loss = np.array([sum(stage.loss for stage in self.stages.values())], np.float64)
        square = np.array([self._square_norm()], np.float64)
        self.world.all_reduce(loss)
        self.pipe.all_reduce(square)
        return float(loss[0]), float(np.sqrt(square[0]))

    def update(self, *, lr: float, step: int, gradient_scale: float) -> None:
        """The optimizer's step on every stage."""
        for stage in self.stages.values():
            stage.update(lr=lr, step=step, gradient_scale=gradient_scale)
            self._gather_trained(stage)
        if self.recorder is not None:
            self.recorder.end(self)

    def swap_averages(self) -> None:
        """Exchange all parameters that train with their moving averages; all ranks call this together."""
        for stage in self.stages.values():
            stage.swap_averages()
            self._gather_trained(stage)

    def _gather_trained(self, stage: Stage) -> None:
        """Where each replica changed its own parameters only, give them to the others."""
        if self.sharded:
            for bucket in stage.trained:
                self.peers.all_gather(bucket.memory, bucket.sizes)

    def evaluate(self, part: Part) -> tuple[float, dict[str, np.ndarray]]:
        """The loss of a batch in inference form, and the model's outputs that this rank makes."""
        loss, outputs = np.zeros(1), {}

        def run(stage: Stage, arrived: Mapping[str, Feed]) -> dict[str, Any]:
            own_loss, own_outputs, leaving = stage.evaluate(part, arrived)
            loss[0] += own_loss
            outputs.update(own_outputs)
            return leaving

        self._through(part, self.routes.evaluation, run)
        self.pipe.all_reduce(loss)
        return float(loss[0]), outputs

    def prepare_prediction(self, graphs: Mapping[int, GraphFile]) -> None:
        """Predict with these parts of the evaluation, by stage, from now on."""
        self._predicted = {}
        for index, graph in graphs.items():
            for port in graph.outputs:
                for to in (port.stages or ()) if port.role == "boundary" else ():
                    self._predicted.setdefault((index, to), []).append(key(port))
        for index, stage in self.stages.items():
            stage.prepare_prediction(graphs.get(index))

    def predict(self, part: Part) -> dict[str, np.ndarray]:
        """On rank 0 the model's outputs of a batch, as prepared; all ranks call this together, and the first replica works."""
        if self.replica:
            return {}
        outputs: dict[str, np.ndarray] = {}

        def run(stage: Stage, arrived: Mapping[str, Feed]) -> dict[str, Any]:
            own_outputs, leaving = stage.predict(part, arrived)
            outputs.update(own_outputs)
            return leaving

        self._through(part, self._predicted, run)
        told = self.pipe.gather_object(list(outputs))
        if told is None:
            for array in outputs.values():
                self.pipe.send(array, 0, 0).wait()
            return {}
        others = [(rank, name) for rank, names in enumerate(told) if rank for name in names]
        return {**outputs, **{name: self.pipe.receive(rank, 0) for rank, name in others}}

    def _through(
        self,
        part: Part,
        routes: Mapping[tuple[int, int], Sequence[str]],
        run: Callable[[Stage, Mapping[str, Feed]], Mapping[str, Any]],
    ) -> None:
        """Run each stage once, forward, with what others send it; it returns what goes on to others."""
        for index, stage in self.stages.items():
            arrived: dict[str, Feed] = {}
            for (source, to), names in routes.items():
                if to == index:
                    arrived.update(self._take("F", source, index, part.index, names))
            leaving = run(stage, arrived)
            for (source, to), names in routes.items():
                if source == index:
                    self._give("F", index, to, part.index, {n: leaving[n] for n in names})
                    self._send("F", index, to, part.index)
            self._give_back(index, part.index)
        self._wait()

    # What this rank answers for: of what several stages hold, the first of them

    def owned_values(self) -> dict[str, np.ndarray]:
        """Parameters and buffers that this rank saves."""
        first = self.routes.first
        own = {name: a for i, stage in self.stages.items() for name, a in stage.values.items() if first[name] == i}
        return own if self.replica == 0 else {}

    def owned_states(self) -> dict[tuple[str, str], np.ndarray]:
        """Optimizer states that this rank saves."""
        own = {k: a for i, stage in self.stages.items() for k, a in stage.states.items() if self.routes.first[k[0]] == i}
        return own if self.sharded or self.replica == 0 else {}

    def _square_norm(self) -> float:
        """The square of the norm of this pipeline rank's gradients, of a tied weight's once; each replica knows its own."""
        held = [(s, name, g) for i, s in self.stages.items() for name, g in s.gradients.items() if self.routes.first[name] == i]
        squares = np.array([square_norm(g) if name in stage.own else 0.0 for stage, name, g in held])
        if self.sharded:
            self.peers.all_reduce(squares)
        return float(sum(squares))

    def not_finite(self) -> list[str]:
        """The parameters whose gradients are not finite, on any rank; all call this together."""
        stages = self.stages.values()
        own = [n for stage in stages for n, g in stage.gradients.items() if n in stage.own and not np.isfinite(g).all()]
        found = {name for names in self.world.broadcast_object(self.world.gather_object(own)) for name in names}
        return [p.name for p in self.plan.parameters if p.name in found]

    def first_not_finite(self, parts: Sequence[Part], *, seed: int, step: int) -> list[str] | None:
        """Name and operator of the first node that makes a value which is not finite, where one rank holds the whole model;
        all ranks call this together."""
        found = None
        if len(self.plan.stages) == 1:
            try:
                node = self.stages[0].first_not_finite(parts, seed=seed, step=step)
                found = None if node is None else [node.name or node.outputs[0], node.op_type]
            except OrtcError:  # all values at once need more memory than a step
                found = None
        told = self.world.broadcast_object(self.world.gather_object(found))
        return next((node for node in told if node is not None), None)

    def gradient_sizes(self) -> dict[str, Any]:
        """How large the elements of each gradient are; all ranks call this together."""
        own = {n: magnitudes(g) for stage in self.stages.values() for n, g in stage.gradients.items() if n in stage.own}
        told = self.world.broadcast_object(self.world.gather_object(own))
        found = {name: sizes for one in reversed(told) for name, sizes in one.items()}
        return {p.name: found[p.name] for p in self.plan.parameters if p.name in found}

    def histograms(self, globs: Sequence[str], loss_scale: float) -> dict[str, Any] | None:
        """On rank 0 the histograms of the parameters and gradients that a glob matches; all ranks call this together."""
        own: dict[str, Any] = {}
        for stage in self.stages.values():
            kinds = (("parameters", stage.values, 1.0), ("gradients", stage.gradients, loss_scale))
            for kind, arrays, scale in kinds:
                for name, array in arrays.items():
                    if (kind == "parameters" or name in stage.own) and any(fnmatch.fnmatchcase(name, g) for g in globs):
                        own[f"{kind}/{name}"] = histogram(array / scale if scale != 1 else array)
        told = self.world.gather_object(own)
        return None if told is None else {tag: shape for one in reversed(told) for tag, shape in one.items()}

    def fetch(self, names: Sequence[str]) -> None:
        """Keep values of each step, by their names in the graphs; all ranks call this together.

        Raises:
            RecipeError: if no graph has one.
        """
        there = {i: stage.fetchable() for i, stage in self.stages.items()}
        for i, stage in self.stages.items():
            stage.fetch = frozenset(names).intersection(there[i])
        known = [name for values in there.values() for name in values]
        told = self.world.broadcast_object(self.world.gather_object(known))
        every = dict.fromkeys(name for one in told for name in one)
        for name in names:
            if name not in every:
                close = difflib.get_close_matches(name, every, 3, 0.4)
                hint = f"; there is {', '.join(map(repr, close))}" if close else ""
                raise RecipeError(f"--fetch: training computes no value called {name!r}{hint}")

    def fetched(self) -> dict[str, dict[int, np.ndarray]] | None:
        """On rank 0 what was fetched in the step, by name and micro-batch; all ranks call this together."""
        rows = [(n, m, a) for stage in self.stages.values() for n, parts in stage.fetched.items() for m, a in parts.items()]
        told = self.world.gather_object([(name, part) for name, part, _ in rows])
        if told is None:
            for _, _, array in rows:
                self.world.send(array, 0, 0).wait()
            return None
        found: dict[str, dict[int, np.ndarray]] = {}
        for rank, listed in enumerate(told):
            for i, (name, part) in enumerate(listed):
                found.setdefault(name, {})[part] = rows[i][2] if rank == 0 else self.world.receive(rank, 0)
        return found

    def traces(self) -> list[Trace] | None:
        """On rank 0 ONNX Runtime's profiles of all sessions, which end here; all ranks call this together."""
        own = [t for stage in self.stages.values() for t in stage.traces(self.world.rank)]
        told = self.world.gather_object([(t.rank, t.session, t.origin, t.events) for t in own])
        return None if told is None else [Trace(*row) for one in told for row in one]

    def close(self) -> None:
        """Release the sessions."""
        for stage in self.stages.values():
            stage.close()

    # Actions

    def _actions(self, micro_batches: int) -> tuple[Action, ...]:
        if not micro_batches:
            return ()
        if micro_batches not in self._rows:
            schedule = schedule_of(self.plan, micro_batches)
            self._rows[micro_batches] = with_transfers(schedule, self.routes.edges)[self.rank]
        return self._rows[micro_batches]

    def act(self, action: Action, part: Part, seed: int, step: int) -> None:
        """Do one action of the schedule, on its micro-batch."""
        stage, kind, m = action.stage, action.kind, action.micro_batch
        if kind == "RECV_F":
            assert action.peer is not None
            self._receive("F", action.peer, stage, m, self.routes.forward.get((action.peer, stage), []))
        elif kind == "RECV_B":
            assert action.peer is not None
            self._receive("B", action.peer, stage, m, self.routes.backward.get((action.peer, stage), []))
        elif kind in ("SEND_F", "SEND_B"):
            assert action.peer is not None
            self._send(kind[-1], stage, action.peer, m)
        elif kind == "F":
            arrived: dict[str, Feed] = {}
            for (source, to), names in self.routes.forward.items():
                if to == stage:
                    arrived.update(self._take("F", source, stage, m, names))
            leaving = self.stages[stage].forward(part, arrived, seed=seed, step=step)
            for (source, to), names in self.routes.forward.items():
                if source == stage:
                    self._give("F", stage, to, m, {n: leaving[n] for n in names})
        elif kind in _BACKWARD:
            self._backward(action, part, seed, step)

    def _backward(self, action: Action, part: Part, seed: int, step: int) -> None:
        stage, m = action.stage, action.micro_batch
        back: dict[tuple[str, int], Feed] = {}
        if action.kind != "W":
            for (source, to), names in self.routes.backward.items():
                if to == stage:
                    back.update({(n, source): v for n, v in self._take("B", source, stage, m, names).items()})
        leaving: dict[tuple[str, int], Any] = {}
        phases = _BACKWARD[action.kind]
        for phase in phases:
            last = action.kind != "I" and phase == phases[-1]
            leaving.update(self.stages[stage].backward(phase, part, back, seed=seed, step=step, last=last))
        if action.kind != "W":
            for (source, to), names in self.routes.backward.items():
                if source == stage:
                    self._give("B", stage, to, m, {n: leaving[n, to] for n in names})
        if action.kind != "I":
            self._give_back(stage, m)

    # Values between stages: a message carries one; both ends know their names and order from the plan. Those of a pair of
    # stages stay in order, and have a tag of their own: a rank with several stages may want another pair's first.

    def _give(self, kind: str, stage: int, to: int, micro_batch: int, values: Mapping[str, Any]) -> None:
        """Hand values over within the rank, or lay them ready for the schedule's SEND."""
        if self.rank_of[to] == self.rank:
            self._inbox.update({(kind, to, micro_batch, name, stage): value for name, value in values.items()})
        else:
            self._outbox[kind, stage, to, micro_batch] = list(values.values())

    def _send(self, kind: str, stage: int, to: int, micro_batch: int) -> None:
        self._sending = [(request, array) for request, array in self._sending if not request.done()]
        for value in self._outbox.pop((kind, stage, to, micro_batch), []):
            array = view(value)
            self._sending.append((self.pipe.send(array, self.rank_of[to], self._tag(stage, to)), array))

    def _receive(self, kind: str, source: int, stage: int, micro_batch: int, names: Sequence[str]) -> None:
        for name in names:
            array = self.pipe.receive(self.rank_of[source], self._tag(source, stage))
            self._inbox[kind, stage, micro_batch, name, source] = array
            self._borrowed.setdefault((stage, micro_batch), []).append(array)

    def _give_back(self, stage: int, micro_batch: int) -> None:
        """A stage has done with a micro-batch: what it received for it is memory for the next."""
        for array in self._borrowed.pop((stage, micro_batch), []):
            self.pipe.release(array)

    def _tag(self, source: int, to: int) -> int:
        return source * len(self.plan.stages) + to

    def _take(self, kind: str, source: int, stage: int, micro_batch: int, names: Sequence[str]) -> dict[str, Feed]:
        if names and (kind, stage, micro_batch, names[0], source) not in self._inbox:
            self._receive(kind, source, stage, micro_batch, names)
        return {name: self._inbox.pop((kind, stage, micro_batch, name, source)) for name in names}

    def _wait(self) -> None:
        for request, _ in self._sending:
            request.wait()
        self._sending.clear()

    # Between the ranks that hold the same

    def _reduce(self, *, active: bool) -> None:
        """Sum gradients over replicas and over the stages that share a weight; average running statistics over replicas.

        Args:
            active: whether this replica had any part of the batch: one that had none has no statistics.
        """
        if self.replicas > 1:
            for stage in self.stages.values():
                for bucket in stage.reduced:
                    if self.sharded:
                        self.peers.reduce_scatter(bucket.memory, sizes=bucket.sizes)
                    else:
                        self.peers.all_reduce(bucket.memory)
                self._average(list(stage.buffers.values()), active)
        for name, stages in self.routes.tied.items():
            if any(name in stage.own for stage in self.stages.values()):
                self._sum_tied(name, stages)

    def _average(self, buffers: Sequence[np.ndarray], active: bool) -> None:
        if not buffers:
            return
        count = np.array([active], np.int64)
        self.peers.all_reduce(count)
        for buffer in buffers:
            if not active:
                buffer[...] = 0
            self.peers.all_reduce(buffer)
            buffer /= count[0]

    def _sum_tied(self, name: str, stages: Sequence[int]) -> None:
        """The first stage adds the others' gradients to its own, in their order, and all take the sum."""
        home = self.rank_of[stages[0]]
        mine = {s: self.stages[s].gradients[name] for s in stages if s in self.stages}
        if self.rank == home:
            total = mine[stages[0]]
            for s in stages[1:]:
                total += mine[s] if s in mine else self.pipe.receive(self.rank_of[s], 0)
            others = [self.pipe.send(total, self.rank_of[s], 0) for s in stages[1:] if s not in mine]
            for request in others:
                request.wait()
            for gradient in mine.values():
                gradient[...] = total
            return
        for gradient in mine.values():
            self.pipe.send(gradient, home, 0).wait()
        for gradient in mine.values():
            self.pipe.receive_into(gradient, home, 0).wait()
