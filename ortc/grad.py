"""``ortc grad``: loss and gradients of one batch, and their comparison with finite differences."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ortc.artifacts import compile
from ortc.compiler import matches
from ortc.errors import OrtcError, RecipeError
from ortc.graph.unused import remove_unused
from ortc.plan import Port
from ortc.recipe import Recipe, unfused
from ortc.runtime.batch import Batch, key, numpy_type, synthetic_batch
from ortc.runtime.data import read_npz
from ortc.runtime.files import replaced
from ortc.runtime.trainer import Trainer

# Of finite differences: errors of order STEP² and 1e-16/STEP are both far below every tolerance.
STEP = 1e-6

# How far a right gradient may be off, relative to its norm, by the narrowest type that a graph computes in: some hundred
# roundings in half precision, some thousand in float32, the accuracy of the differences in float64. Wrong rules err more.
TOLERANCES = (
    (onnx.TensorProto.BFLOAT16, "bfloat16", 0.4),
    (onnx.TensorProto.FLOAT16, "float16", 0.05),
    (onnx.TensorProto.FLOAT, "float32", 1e-3),
    (onnx.TensorProto.DOUBLE, "float64", 1e-6),
)

# A gradient whose norm is below this part of the largest is judged against that part: it may be zero but for rounding.
VANISHING = 1e-3

Verdict = Literal["right", "at a kink", "straight-through", "WRONG"]

NOT_JUDGED: dict[Verdict, str] = {
    "at a kink": "the loss has no derivative there (a ReLU at 0, equal maxima, a jump, …); other data may avoid it",
    "straight-through": "a rounding lies before the loss, whose gradient is declared, and no derivative",
}


@dataclass(frozen=True)
class Checked:
    """A gradient along one random direction: as ortc has it, as a finite difference, and the relative error."""

    name: str
    exact: float
    numeric: float
    error: float
    verdict: Verdict


def write_gradients(
    model: Path, data: Path, output: Path, recipe: Recipe, *, rules: Sequence[Path] = (), force: bool = False
) -> str:
    """Compile the model, run one batch, and write ``loss`` and one array per trained parameter (and per ``wrt`` input).

    Args:
        model: the forward model.
        data: an ``.npz`` with one array per graph input by its name, and the targets under ``labels``.
        output: the ``.npz`` to write; it appears whole or not at all.
        recipe: loss, parameters, batch norm.
        rules: the user's own rule files.
        force: replace an existing output.

    Returns:
        A line for the terminal.
    """
    if output.exists() and not force:
        raise OrtcError(f"{output} exists already; choose another name, or --force to replace it")
    batch = read_npz(data)
    with compiled(model, unfused(recipe), rules) as trainer:
        loss, gradients = trainer.gradients(batch)
    if "loss" in gradients:
        raise OrtcError("a parameter of the model is called 'loss', like the loss in the output; freeze it or rename it")
    _save(output, {"loss": np.asarray(loss), **gradients})
    terms = ", ".join(f"{term.name} of {term.output!r}" for term in trainer.plan.losses)
    return f"{output}: loss {loss:.7g} ({terms}), {len(gradients)} gradients"


def check_gradients(
    model: Path, data: Path | None, recipe: Recipe, *, parameters: Sequence[str] = (), rules: Sequence[Path] = ()
) -> bool:
    """Compare the gradients of one batch with finite differences, and print a table with one row per parameter.

    The gradients are those of a training step: ONNX Runtime's, in training form. The differences are taken of the same forward
    graph in float64, run by ONNX's reference evaluator: (f(w + h·v) - f(w - h·v)) / 2h for one random direction v per
    parameter, two forward runs each. Dropout drops the same elements in all of them.

    Args:
        model: the forward model.
        data: an ``.npz`` as for :func:`write_gradients`; None: a batch is made up.
        recipe: loss, parameters, batch norm.
        parameters: globs of the parameters (and ``wrt`` inputs) to check; all if there are none.
        rules: the user's own rule files.

    Returns:
        Whether no gradient is wrong.

    Raises:
        OrtcError: for a mistake in the model, the recipe or the data; if the forward graph has an operator that ONNX's
            reference evaluator lacks; or if its loss is not ONNX Runtime's.
    """
    given = read_npz(data) if data else None
    with compiled(model, unfused(recipe), rules) as trainer:
        batch = trainer.inputs.fit(synthetic_batch(trainer.inputs.ports) if given is None else given)
        loss, gradients = trainer.gradients(batch)
        phase = trainer.plan.stages[0].phases["train"]
        graph = onnx.load_model(trainer.folder / phase.file)
        feeds = {port.name: _fed(port, batch, trainer) for port in phase.inputs}
    names = {key(port): port.name for port in phase.inputs if port.role in ("parameter", "data")}
    checked = [key(port) for port in phase.outputs if port.role == "gradient" and matches(key(port), parameters or ["*"])]
    if not checked:
        raise RecipeError(f"--parameters: no trained parameter is called {', '.join(map(repr, parameters))}")
    kind, tolerance = narrowest(graph)
    function = _LossInDouble(graph, feeds)
    if not abs(function.here - loss) <= tolerance * max(1.0, abs(function.here)):
        raise OrtcError(
            f"the loss is {loss:.7g} in ONNX Runtime and {function.here:.7g} in float64, so that differences tell nothing "
            "of the gradients; a loss that is not finite, or a model that overflows its type, does this"
        )
    floor = VANISHING * max(_norm(g) for g in gradients.values())
    console = Console()
    rows = [
        _unjudged(name, gradients[name])
        if names[name] in function.straight_through
        else check_one(name, gradients[name], partial(function, names[name]), function.here, tolerance, floor)
        for name in track(checked, "differences", console=Console(stderr=True), transient=True, disable=not console.is_terminal)
    ]
    _print(console if console.is_terminal else Console(width=240), rows, kind, tolerance)
    return all(row.verdict != "WRONG" for row in rows)


def check_one(
    name: str,
    gradient: np.ndarray,
    loss: Callable[[np.ndarray], float],
    here: float,
    tolerance: float,
    floor: float = 0.0,
) -> Checked:
    """Compare one gradient with a difference along a random direction.

    Args:
        name: of what; the direction depends on it.
        gradient: any shape.
        loss: of a displacement in the gradient's shape.
        here: the loss without one.
        tolerance: relative to the gradient's norm (or the difference, if that is larger).
        floor: the least norm to be relative to.
    """
    direction = _direction(name, gradient)
    exact = float(np.sum(gradient.astype(np.float64) * direction))
    scale = max(_norm(gradient), floor)
    numeric, smooth = difference(lambda h: loss(h * direction), here, exact, tolerance * scale)
    error = abs(exact - numeric) / max(scale, abs(numeric), np.finfo(np.float64).tiny)
    return Checked(name, exact, numeric, error, "right" if error <= tolerance else "WRONG" if smooth else "at a kink")


def _direction(name: str, like: np.ndarray) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).standard_normal(like.shape)


def _unjudged(name: str, gradient: np.ndarray) -> Checked:
    exact = float(np.sum(gradient.astype(np.float64) * _direction(name, gradient)))
    return Checked(name, exact, math.nan, math.nan, "straight-through")


def difference(loss: Callable[[float], float], here: float, expected: float, tolerance: float) -> tuple[float, bool]:
    """The central difference at 0, and whether it is the derivative.

    A second, smaller step is taken if the first gives not what is expected: there may be a kink between. At a kink (or a jump)
    the differences to either side differ, and a smaller step brings them no nearer, as it does where only the slope changes.

    Args:
        loss: of a step.
        here: its value at 0.
        expected: the derivative that is to be confirmed.
        tolerance: how far off the difference may be.
    """
    gaps = []
    for step in (STEP, STEP / 16):
        ahead, behind = loss(step), loss(-step)
        numeric = (ahead - behind) / (2 * step)
        if abs(numeric - expected) <= tolerance:
            return numeric, True
        gaps.append(abs(ahead - 2 * here + behind) / step)
    return numeric, not (gaps[1] > tolerance and gaps[1] > gaps[0] / 4)


class _LossInDouble:
    """The loss of a training graph in float64, as a function of one input's displacement.

    Attributes:
        here: the loss without one.
        straight_through: the inputs that reach it through a rounding whose gradient is declared to be no derivative.
    """

    def __init__(self, graph: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
        from ortc.passes.reference import STRAIGHT_THROUGH, evaluator, widened

        forward = ir.from_proto(graph)
        del forward.graph.outputs[1:]  # the first is the loss
        remove_unused(forward)
        rounding = [n for n in forward.graph if n.metadata_props.get("ortc.rule") in STRAIGHT_THROUGH]
        self.straight_through = _inputs_before(rounding)
        self._evaluator = evaluator(widened(ir.to_proto(forward)))
        read = set(self._evaluator.input_names)
        self._feeds = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items() if k in read}
        self.here = self._run(self._feeds)

    def __call__(self, name: str, displacement: np.ndarray) -> float:
        return self._run({**self._feeds, name: self._feeds[name] + displacement})

    def _run(self, feeds: Mapping[str, np.ndarray]) -> float:
        try:
            with np.errstate(all="ignore"):
                [loss] = self._evaluator.run(None, dict(feeds))
                return float(loss)
        except Exception as error:
            raise OrtcError(f"ONNX's reference evaluator cannot run the forward graph in float64: {error}") from None


def _inputs_before(nodes: Iterable[ir.Node]) -> set[str]:
    """The names of the graph inputs that the nodes depend on."""
    left, seen = list(nodes), set()
    found: set[str] = set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None:
                left.append(producer)
            elif value is not None:
                found.add(value.name or "")
    return found


def _fed(port: Port, batch: Batch, trainer: Trainer) -> np.ndarray:
    """What the first training step feeds to an input of the training graph."""
    if port.role in ("data", "label"):
        return batch[key(port)]
    if port.role in ("parameter", "buffer"):
        return trainer.parameters[key(port)]
    if port.role == "gradient":  # what it is added to
        return np.zeros_like(trainer.parameters[key(port)], numpy_type(port.dtype, port.name))
    counters = {"seed": trainer.seed, "step": trainer.step_number + 1, "micro_batch": 0}
    return np.asarray(counters[key(port)], port.dtype)


def narrowest(graph: onnx.ModelProto) -> tuple[str, float]:
    """The narrowest type that the graph computes in, and the tolerance for it."""
    values = [*graph.graph.input, *graph.graph.value_info, *graph.graph.output]
    types = {v.type.tensor_type.elem_type for v in values}
    return next((name, tolerance) for kind, name, tolerance in TOLERANCES if kind in types)


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _print(console: Console, rows: Sequence[Checked], kind: str, tolerance: float) -> None:
    table = Table(title="gradients along a random direction", title_justify="left", box=None)
    table.add_column("parameter", overflow="fold")
    for column in ("ortc", "finite difference", "relative error"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(row.name, f"{row.exact:.7g}", f"{row.numeric:.7g}", f"{row.error:.1e}", row.verdict)
    console.print(table)
    judged = [row for row in rows if row.verdict in ("right", "WRONG")]
    if judged:
        worst = max(judged, key=lambda row: row.error)
        text = f"worst: {worst.name}, relative error {worst.error:.1e} (tolerance {tolerance:g}, for the rounding of {kind})"
        console.print(text, markup=False)
    for verdict, why in NOT_JUDGED.items():
        count = sum(row.verdict == verdict for row in rows)
        if count:
            console.print(f"{count} of {len(rows)} {verdict}, not judged: {why}", markup=False)
    wrong = [row.name for row in rows if row.verdict == "WRONG"]
    if wrong:
        console.print(f"WRONG: {len(wrong)} of {len(rows)}; a rule between the loss and {wrong[-1]} is at fault", markup=False)


@contextlib.contextmanager
def compiled(model: Path, recipe: Recipe, rules: Sequence[Path] = (), threads: int | None = None) -> Iterator[Trainer]:
    """A trainer on the model's training graphs, which are kept only as long as it."""
    with tempfile.TemporaryDirectory(prefix="ortc-grad-") as folder:
        compile(model, Path(folder) / "stages", recipe, rules=rules)
        with Trainer(Path(folder) / "stages", threads=threads) as trainer:
            yield trainer


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        with replaced(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise OrtcError(f"cannot write {path}: {error.strerror}") from None
