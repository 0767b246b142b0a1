"""ONNX's own backend node cases as gradient tests; as a script, the report per operator.

A case is one node (or the function that the standard defines for it) with inputs. Its gradients, built by ortc and run by
ONNX Runtime in float32, with static and with symbolic shapes, for every target that the installed build runs, must equal
central differences of ONNX's reference evaluator in float64, along a random direction in each float input.

    python tests/backend.py > report.md
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
from gradcheck import TARGETS
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ortc.autodiff import build_gradients, reached
from ortc.errors import ModelError
from ortc.graph.builder import Builder
from ortc.graph.shapes import is_float
from ortc.passes.inference import infer_shapes
from ortc.passes.normalise import convert_opset, prepare
from ortc.passes.pipeline import keeps, lower, simplify
from ortc.passes.randomness import RANDOM
from ortc.passes.reference import evaluator, retyped, widened
from ortc.rules import GRADIENTS, OUT_OF_REACH, load_declarations, node_key
from ortc.target import Target, load_target

load_declarations("ortc.passes.gradients")
load_declarations("ortc.passes.lowerings")

OPSET = load_target("onnxruntime").opset
STEP = 1e-5
# Of the scale below which float32 has no digits: 1 - y² of a saturated y keeps an absolute error of 1e-7 per term.
FLOOR = 0.1
HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
FLOATS = (*HALVES, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    ``kind`` is passed, wrong, or one of the reasons why there is nothing to compare; ``text`` says more.
    """

    kind: str
    text: str = ""
    checked: int = 0  # gradients compared


PASSED, WRONG, REFUSED = "passed", "wrong", "refused"
NO_FLOAT = "no float on the way"
STOPS = "declared without gradient"
TYPES = "not tensors of numbers"
RANDOMNESS = "random"
NO_REFERENCE = "ONNX has no reference in float64"
OTHER_FORWARD = "ONNX Runtime fails, or its forward is another"
INFINITE = "infinite or NaN there"
REASONS = {NO_REFERENCE, NO_FLOAT, STOPS, OTHER_FORWARD, RANDOMNESS, TYPES}  # why an operator with a gradient may pass no case


@lru_cache(maxsize=1)
def cases() -> dict[str, TestCase]:
    """Every case of the standard domain, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return {
        c.name: c for c in found if c.model is not None and c.data_sets and operator(c) and not c.model.graph.node[0].domain
    }


# By the names in lower case.
STANDARD = {schema.name.lower(): schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}


def operator(case: TestCase) -> str:
    """The operator that a case is about: its name begins with it."""
    nodes = case.model.graph.node
    plain = case.name.removesuffix("_expanded").removeprefix("test_").replace("_", "")
    named = [name for key, name in STANDARD.items() if plain.startswith(key)]
    return nodes[0].op_type if len(nodes) == 1 else max(named, key=len, default=nodes[0].op_type)


def outcome(case: TestCase) -> Outcome:
    """Check one case."""
    inputs, expected = case.data_sets[0]
    arrays = dict(zip([v.name for v in case.model.graph.input], inputs, strict=False))
    if not all((isinstance(x, np.ndarray) and x.dtype.kind in "fiub") or x is None for x in [*inputs, *expected]) or any(
        v.type.WhichOneof("value") != "tensor_type" for v in [*case.model.graph.input, *case.model.graph.output]
    ):
        return Outcome(TYPES)
    if any(n.op_type in RANDOM for n in case.model.graph.node):
        return Outcome(RANDOMNESS)
    wanted = [v.name for v in case.model.graph.input if v.type.tensor_type.elem_type in FLOATS]
    if not wanted or not any(v.type.tensor_type.elem_type in FLOATS for v in case.model.graph.output):
        return Outcome(NO_FLOAT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compare(case, {k: _single(v) for k, v in arrays.items()}, wanted)
    except ModelError as error:
        return Outcome(REFUSED, str(error))


def _compare(case: TestCase, arrays: Arrays, wanted: list[str]) -> Outcome:
    model = with_constants(case.model, arrays, wanted)
    if not _same_forward(case, model, arrays):
        return Outcome(OTHER_FORWARD)
    counted = len([v for v in model.graph.output if v.type.tensor_type.elem_type in FLOATS])
    try:
        proto, differentiable = gradient_graph(model, wanted, TARGETS[0])
    except ModelError:  # perhaps the first output alone has a gradient
        counted = 1
        del model.graph.output[1:]
        proto, differentiable = gradient_graph(model, wanted, TARGETS[0])
    if not differentiable:
        return Outcome(STOPS)
    made = {(): proto, **_of_unknown_sizes(model, wanted)}
    graphs = [(TARGETS[0], sizes, proto) for sizes, proto in made.items()]
    graphs += [(t, sizes, gradient_graph(sized(model, sizes), wanted, t)[0]) for t, sizes in product(TARGETS[1:], made)]
    arrays = {k: v for k, v in arrays.items() if k in wanted}
    weights = None
    numeric: dict[str, float] = {}
    try:
        double = evaluator(widened(model))
        for attempt in range(5):
            moved = _moved(arrays, attempt)
            weights = [np.random.default_rng(i).standard_normal(y.shape) for i, y in enumerate(_value(double, moved)[:counted])]
            found = {n: _directional(double, moved, weights, n) for n in differentiable}
            if all(f is not None for f in found.values()):
                arrays, numeric = moved, {n: f for n, f in found.items() if f is not None}
                break
        else:
            if not all(np.isfinite(y).all() for y in _value(double, arrays)):
                return Outcome(INFINITE)
            if any(_rounds(double, moved, weights, n) for n in differentiable):
                return Outcome(NO_REFERENCE, "it rounds to float32")
            return Outcome(WRONG, "not smooth anywhere near")
    except Exception as error:
        return Outcome(NO_REFERENCE, f"{type(error).__name__}: {error}"[:200])
    for target, sizes, proto in graphs:
        where = f"{target.name}, unknown sizes {sizes}"
        gradients = dict(zip(differentiable, run(proto, arrays, weights), strict=True))
        for name, g in gradients.items():
            exact = float(np.sum(g.astype(np.float64) * direction(name, g)))
            scale = max(FLOOR, float(np.sum(np.abs(g.astype(np.float64) * direction(name, g)))))
            if g.shape != arrays[name].shape or not abs(exact - numeric[name]) <= 1e-4 * scale:
                return Outcome(WRONG, f"{where}: d{name} {exact} against {numeric[name]}")
    return Outcome(PASSED, checked=len(differentiable))


def _same_forward(case: TestCase, model: onnx.ModelProto, arrays: Arrays) -> bool:
    """Whether ONNX Runtime runs the model, and finds what ONNX expects; half types are not compared."""
    if any(v.type.tensor_type.elem_type in HALVES for v in case.model.graph.input):
        return True
    try:
        made = normalised(model)
        lower(made.graph, lambda n: not keeps(TARGETS[0], n))
        found = run(ir.to_proto(made), arrays, [])
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            return False  # it cannot run it
        raise
    return all(
        y.shape == e.shape and np.allclose(y.astype(np.float64), e.astype(np.float64), 1e-4, 1e-4 * _largest(e), equal_nan=True)
        for y, e in zip(found, case.data_sets[0][1], strict=True)
    )


def _largest(array: np.ndarray) -> float:
    finite = array[np.isfinite(array.astype(np.float64))]
    return max(1.0, float(np.abs(finite.astype(np.float64)).max(initial=0)))


Sizes = tuple[tuple[str, int], ...]  # (input, dimension)


def _of_unknown_sizes(model: onnx.ModelProto, wanted: list[str]) -> dict[Sizes, onnx.ModelProto]:
    """The gradient graph of the first target with symbolic shapes, by the sizes that it leaves open: all of them; or where the
    operator must know its weights' sizes, as it does in real models, all of its first input; or as many of those, from the
    first, as it can go without; none if it can go without none."""
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in model.graph.input}
    everything = [(name, d) for name in wanted for d in range(ranks[name])]
    first = [(name, d) for name, d in everything if name == wanted[0]]
    choices = [everything, *(first[:n] for n in range(len(first), 0, -1)), [s for s in first if s[1] != 1]]
    for sizes in choices:
        try:
            return {tuple(sizes): gradient_graph(sized(model, tuple(sizes)), wanted, TARGETS[0])[0]}
        except ModelError:
            continue
    return {}


def sized(model: onnx.ModelProto, unknown: Sizes) -> onnx.ModelProto:
    """A copy in which some sizes are names."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for value in model.graph.input:
        for i, d in enumerate(value.type.tensor_type.shape.dim):
            if (value.name, i) in unknown:
                d.dim_param = f"{value.name}_{i}"
    for value in model.graph.output if unknown else ():
        value.type.tensor_type.ClearField("shape")
    return model


def _single(array: np.ndarray) -> np.ndarray:
    """Float arrays in float32: the half types have no exact differences, and float64 is compared in float64 anyway."""
    return array.astype(np.float32) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def _moved(arrays: Arrays, attempt: int) -> Arrays:
    """Away from ties and kinks, in which there is no derivative to compare with."""
    if not attempt:
        return arrays
    noise, sign = np.random.default_rng(attempt), 1 if attempt % 2 else -1
    return {
        k: (v + sign * noise.uniform(0.01, 0.09, v.shape) * np.where(v > 0.9, -1, 1)).astype(v.dtype) for k, v in arrays.items()
    }


def direction(name: str, like: np.ndarray) -> np.ndarray:
    """A random direction for an input."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(like.shape)


def with_constants(model: onnx.ModelProto, arrays: Arrays, wanted: list[str]) -> onnx.ModelProto:
    """The case's model in float32; inputs that are not float are constants, as they mostly are in real models."""
    model = retyped(model, onnx.TensorProto.FLOAT)
    kept = [v for v in model.graph.input if v.name in wanted]
    for value in model.graph.input:
        if value.name not in wanted and value.name in arrays:
            model.graph.initializer.append(onnx.numpy_helper.from_array(arrays[value.name], value.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def normalised(model: onnx.ModelProto) -> ir.Model:
    """The model as gradients are built on it."""
    made = simplify(infer_shapes(convert_opset(prepare(ir.from_proto(model)), OPSET)))
    made.ir_version = 10
    lower(made.graph, lambda n: node_key(n) not in GRADIENTS)
    return made


def gradient_graph(model: onnx.ModelProto, wanted: list[str], target: Target) -> tuple[onnx.ModelProto, list[str]]:
    """The gradients of Σ weights·outputs, and of which inputs: those that a gradient reaches by the declared rules.

    The weights are inputs ``weight_<i>``, one for each float output.
    """
    made = normalised(model)
    graph = made.graph
    op = Builder(graph)
    outputs = [v for v in graph.outputs if is_float(v)]
    by_name = {v.name: v for v in graph.inputs}
    via = reached(graph, outputs)
    differentiable = [n for n in wanted if by_name[n] in via and by_name[n] not in graph.outputs]
    if not differentiable:
        return onnx.ModelProto(), []
    seeds = {}
    for i, y in enumerate(outputs):
        weight = ir.Value(name=f"weight_{i}", type=y.type, shape=y.shape)
        graph.inputs.append(weight)
        seeds[y] = weight
    gradients = build_gradients(op, seeds, [by_name[n] for n in differentiable])
    graph.outputs.clear()
    with op.scope("zero"):
        graph.outputs.extend(gradients.get(by_name[n]) or op.zeros_like(by_name[n]) for n in differentiable)
    lower(graph, lambda n: not keeps(target, n))
    RemoveUnusedNodesPass()(made)
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto)
    return proto, differentiable


def run(proto: onnx.ModelProto, arrays: Arrays, weights: list[np.ndarray]) -> list[np.ndarray]:
    """Run a gradient graph with ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {**arrays, **{f"weight_{i}": w.astype(np.float32) for i, w in enumerate(weights)}}
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


def _value(double: ReferenceEvaluator, arrays: Arrays) -> list[np.ndarray]:
    outputs = double.run(None, {k: v.astype(np.float64) for k, v in arrays.items()})
    return [np.asarray(y) for y in outputs if np.asarray(y).dtype.kind == "f"]


def _rounds(double: ReferenceEvaluator, arrays: Arrays, weights: list[np.ndarray], name: str) -> bool:
    """Whether the reference rounds to float32 inside: steps that are tiny for float64 leave the straight line."""
    at = _along(double, arrays, weights, name)
    steps = np.arange(9) * 1e-8
    values = np.array([at(h) for h in steps])
    line = np.polynomial.Polynomial.fit(steps, values, 1)
    return bool(np.abs(line(steps) - values).max() > 1e-10 * max(1.0, np.abs(values).max()))


def _along(double: ReferenceEvaluator, arrays: Arrays, weights: list[np.ndarray], name: str) -> Callable[[float], float]:
    """Σ weights·outputs at a distance along the input's direction."""

    def at(h: float) -> float:
        moved = {**arrays, name: arrays[name].astype(np.float64) + h * direction(name, arrays[name])}
        return sum(float(np.sum(y * w)) for y, w in zip(_value(double, moved), weights, strict=False))

    return at


def _directional(double: ReferenceEvaluator, arrays: Arrays, weights: list[np.ndarray], name: str) -> float | None:
    """The derivative along the input's direction; None where two step sizes do not agree: there is a kink or a jump."""

    at = _along(double, arrays, weights, name)
    here, up, near = at(0), at(STEP), STEP / 16
    wide, narrow = (up - at(-STEP)) / (2 * STEP), (at(near) - at(-near)) / (2 * near)
    one_sided = (up - here) / STEP
    scale = max(1.0, abs(wide))
    smooth = abs(wide - narrow) <= 1e-5 * scale and abs(one_sided - wide) <= 1e-2 * scale
    return wide if smooth else None


def faults(op_type: str, found: Mapping[str, Outcome]) -> list[str]:
    """What must not become of an operator's cases: a wrong gradient; a refusal that does not say which form it is, where the
    operator is not declared out of reach as a whole; no case that passes although there is a rule, without a good reason."""
    bad = [f"{name}: {o.text}" for name, o in found.items() if o.kind == WRONG]
    bad += [
        f"{name}: {o.text}"
        for name, o in found.items()
        if o.kind == REFUSED and ("", op_type) not in OUT_OF_REACH and not says_which_form(o.text)
    ]
    kinds = {o.kind for o in found.values()}
    if ("", op_type) in GRADIENTS and PASSED not in kinds and not kinds <= REASONS:
        bad.append(f"{op_type} has a gradient rule, but no case of it passes: {', '.join(sorted(kinds))}")
    return bad


def says_which_form(text: str) -> bool:
    """Whether a refusal says more than that there is no rule."""
    return "no gradient rule" not in text and "cannot be written in opset" not in text


def main() -> int:
    """Print the report; 1 if there is a fault."""
    by_operator: dict[str, list[tuple[str, Outcome]]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in cases().items():
            by_operator[operator(case)].append((name, outcome(case)))
    kinds = Counter(o.kind for found in by_operator.values() for _, o in found)
    print(f"Targets: {', '.join(t.name for t in TARGETS)}. {sum(kinds.values())} cases:", end=" ")
    print(", ".join(f"{n} {k}" for k, n in kinds.most_common()) + ".\n")
    print("| operator | tried | passed | why not the others |\n| --- | --- | --- | --- |")
    for op_type, found in sorted(by_operator.items()):
        others = Counter(o.kind for _, o in found)
        passed = others.pop(PASSED, 0)
        print(f"| {op_type} | {len(found)} | {passed} | {', '.join(f'{n} {k}' for k, n in sorted(others.items()))} |")
    print("\nWrong, refused, or without a reference:\n")
    for found in by_operator.values():
        for name, o in found:
            if o.kind in (WRONG, REFUSED, NO_REFERENCE):
                told = " ".join(line for line in o.text.splitlines() if line.startswith("- ")) or o.text
                print(f"- {name}: {o.kind}: {told}")
    bad = [fault for op_type, found in sorted(by_operator.items()) for fault in faults(op_type, dict(found))]
    for fault in bad:
        print(f"\nFault: {fault}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
