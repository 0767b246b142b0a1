"""Where the time of one training step goes, and how far each class of operators is from what the machine can do.

    python bench/explain.py FOLDER [NAME ...] [--threads 1] [--rounds 5] [--slowest 10]

FOLDER holds the models of bench/make_models.py; batches and recipe are those of bench/step_time.py. ONNX Runtime's profile of
the quickest of the steps is read: what each operator took (a Scan without the operators of its body), with the sizes that it
had. Operations and bytes are counted as ortc.passes.costs does. The limit is the roofline (Williams, Waterman & Patterson
2009): for each operator the larger of its operations over the peak of a large matrix product, and of its bytes over that of a
stream through memory. ONNX Runtime measures both in the same run with the same threads. Arrays that are still in a cache can
beat it. The limit of an optimizer in a session of its own is that of what the session reads and writes, once: all between
could stay in a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper
from step_time import CASES, WARM_UP, prepare, processor

import ortc
from ortc.graph.names import all_graphs
from ortc.passes.costs import Cost, Shapes, concrete_sizes, forward_cost
from ortc.runtime.engine import Engine

CLASSES = {
    "matrix products": "MatMul FusedMatMul TransposeMatMul Gemm FusedGemm Einsum LSTM GRU RNN Attention MultiHeadAttention",
    "convolutions": "Conv FusedConv NhwcConv ConvGrad ConvTranspose DeformConv Im2Col Col2Im",
    "reductions, norms, softmax, pools": """
        ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp ArgMax ArgMin
        CumSum TopK Softmax LogSoftmax SoftmaxGrad LogSoftmaxGrad SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossGrad
        LayerNormalization SimplifiedLayerNormalization SkipLayerNormalization LayerNormalizationGrad
        BatchNormalization InstanceNormalization GroupNormalization
        MaxPool MaxPoolGrad AveragePool AveragePoolGrad GlobalAveragePool GlobalMaxPool""",
    "data movement": """
        Transpose Concat Split Slice Pad Tile Expand Cast Identity Reshape Flatten Squeeze Unsqueeze Shape Size Range Trilu
        Gather GatherElements GatherND GatherGrad GatherElementsGrad ScatterElements ScatterND OneHot Compress NonZero EyeLike
        ConstantOfShape DepthToSpace SpaceToDepth ReverseSequence ReorderInput ReorderOutput""",
    "control flow, but for bodies": "Scan Loop If",
}
CLASS_OF = {operator: name for name, operators in CLASSES.items() for operator in operators.split()}
OPTIMIZER, ELEMENT_WISE, REST = "optimizer", "element-wise", "rest: the runtime, sessions, batches"


@dataclass(frozen=True)
class Kernel:
    """One operator in one step: microseconds, and what it does. `what` is the operator and its inputs' sizes."""

    kind: str
    what: str
    time: float
    cost: Cost


@dataclass(frozen=True)
class Peak:
    """Operations and bytes a second."""

    flops: float
    bytes: float

    def limit(self, cost: Cost) -> float:
        """Microseconds."""
        return 1e6 * max(cost.flops / self.flops, cost.bytes / self.bytes)


def measure_peak(threads: int, rounds: int = 5) -> Peak:
    """A product of matrices of 2048 × 2048, and x + y over 128 MiB each."""
    size, length = 2048, 1 << 25
    product = _quickest("MatMul", (size, size), threads, rounds)
    return Peak(2 * size**3 / product, 3 * 4 * length / _quickest("Add", (length,), threads, rounds))


def _quickest(operator: str, shape: tuple[int, ...], threads: int, rounds: int) -> float:
    """Seconds of an operator of two inputs and one output that are all alike."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "abc"]
    graph = helper.make_graph([helper.make_node(operator, ["a", "b"], ["c"])], "peak", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    arrays = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, 0.5, np.float32)) for name in "abc"}
    binding.bind_ortvalue_input("a", arrays["a"])
    binding.bind_ortvalue_input("b", arrays["b"])
    binding.bind_ortvalue_output("c", arrays["c"])
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - begin)
    return min(times)


def kernels(events: Iterable[Mapping[str, Any]], nodes: Mapping[str, ir.Node], kind: str | None) -> Iterator[list[Kernel]]:
    """Of each run of a session its operators.

    Args:
        events: as ONNX Runtime wrote them.
        nodes: of the session's file, by name; ONNX Runtime may make others of them.
        kind: the class of all of them; None for each its own.
    """
    runs = sorted((e["ts"], e["dur"]) for e in events if e.get("name") == "model_run")
    timed = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    timed.sort(key=lambda e: (e["ts"], -e["dur"]))  # an operator before those of its body
    for begin, length in runs:
        found: list[Kernel] = []
        around: list[tuple[int, float]] = []  # the operators in whose bodies we are, and when they end
        for event in (e for e in timed if begin <= e["ts"] <= begin + length):
            while around and event["ts"] >= around[-1][1]:
                around.pop()
            if around:
                outer = found[around[-1][0]]
                found[around[-1][0]] = replace(outer, time=outer.time - event["dur"])
            around.append((len(found), event["ts"] + event["dur"]))
            found.append(_kernel(event, nodes, kind))
        yield found


def _kernel(event: Mapping[str, Any], nodes: Mapping[str, ir.Node], kind: str | None) -> Kernel:
    told = event["args"]
    operator = told["op_name"]
    inputs, outputs = ([_value(v) for v in told.get(f"{side}_type_shape", ())] for side in ("input", "output"))
    what = f"{operator} " + " ".join(str(sizes).replace(" ", "") for _, sizes in inputs[:3])
    node = nodes.get(event["name"].removesuffix("_kernel_time"))
    if node is not None and node.metadata_props.get("ortc.pass") in ("optimizer", "fuse-update"):
        kind = OPTIMIZER
    cost = Cost() if operator in CLASSES["control flow, but for bodies"].split() else _cost(operator, node, inputs, outputs)
    return Kernel(kind or CLASS_OF.get(operator, ELEMENT_WISE), what, event["dur"], cost)


Told = tuple[ir.Value, tuple[int, ...]]


def _value(told: Mapping[str, list[int]]) -> Told:
    (name, sizes), *_ = told.items()
    dtype = ir.DataType.__members__.get(name.upper(), ir.DataType.FLOAT)
    return ir.Value(name="there", type=ir.TensorType(dtype)), tuple(sizes)


def _cost(operator: str, node: ir.Node | None, inputs: list[Told], outputs: list[Told]) -> Cost:
    """Of the operator with the sizes that it had. The profile leaves absent inputs and outputs out."""
    if node is None or node.op_type != operator:  # ONNX Runtime's own: attributes are not known
        domain, attributes, read, made = "", [], [v for v, _ in inputs], [v for v, _ in outputs]
    else:
        domain, attributes = node.domain, [a for a in node.attributes.values() if not a.is_ref()]
        there, written = (iter([v for v, _ in side]) for side in (inputs, outputs))
        read = [None if v is None else next(there, None) for v in node.inputs]
        made = [next(written, ir.Value(name="")) if v.name else ir.Value(name="") for v in node.outputs]
    copy = ir.Node(domain, operator, read, attributes, outputs=made)
    return forward_cost(copy, Shapes(dict([*inputs, *outputs])))


@dataclass(frozen=True)
class Profile:
    """Operators of the quickest step, its microseconds, the median of others without it; bytes that an optimizer's session
    reads and writes."""

    kernels: list[Kernel]
    time: float
    plain: float
    optimizer_bytes: float


def profile(job: Mapping[str, Any], folder: Path, rounds: int) -> Profile:
    """Trains the stages in the folder, first without and then with ONNX Runtime's profile."""
    with np.load(job["batches"]) as archive:
        named = {name.removeprefix("input."): archive[name] for name in archive.files}
    batches = [{name: array[i] for name, array in named.items()} for i in range(rounds + WARM_UP)]
    with ortc.Trainer(folder / "stages", threads=job["threads"]) as trainer:
        plain = median([_step(trainer, batch) for batch in batches][WARM_UP:])
    with ortc.Trainer(folder / "stages", threads=job["threads"], engine=Engine(profile=folder)) as trainer:
        times = [_step(trainer, batch) for batch in batches]
        traces = trainer.traces() or []
    quickest = min(range(WARM_UP, len(times)), key=times.__getitem__)
    found, least = [], 0.0
    for trace in traces:
        phase = trace.session.split()[-1]
        graph = ir.load(folder / "stages" / trainer.plan.stages[0].phases[phase].file).graph
        nodes = {n.name: n for g in all_graphs(graph) for n in g if n.name}
        runs = list(kernels(trace.events, nodes, OPTIMIZER if phase == "optimizer" else None))
        if len(runs) == len(times):  # not a session that only evaluates
            found += runs[quickest]
        if phase == "optimizer":
            sizes = concrete_sizes(graph, {})
            least = sum(map(sizes.bytes, [*graph.inputs, *graph.outputs]))
    return Profile(found, times[quickest], plain, least)


def _step(trainer: ortc.Trainer, batch: Mapping[str, np.ndarray]) -> float:
    begin = time.perf_counter()
    trainer.step(batch)
    return 1e6 * (time.perf_counter() - begin)


def tell(name: str, told: Profile, peak: Peak, slowest: int) -> None:
    """The classes, the most time first, and the operators that are furthest from their limit."""
    print(f"\n{name}: {told.plain / 1e3:.1f} ms a step, {told.time / 1e3:.1f} ms the one below, with ONNX Runtime's profile")
    print(_row("class", ("ms", "share", "calls", "GFLOP", "MB", "GFLOP/s", "GB/s", "limit ms", "x limit")))
    groups: dict[str, list[Kernel]] = {}
    for kernel in told.kernels:
        groups.setdefault(kernel.kind, []).append(kernel)
    limits = {kind: sum(peak.limit(k.cost) for k in group) for kind, group in groups.items()}
    if told.optimizer_bytes:
        limits[OPTIMIZER] = peak.limit(Cost(0, told.optimizer_bytes))
    for kind, group in sorted(groups.items(), key=lambda pair: -sum(k.time for k in pair[1])):
        print(_row(kind, _figures(group, told.time, limits[kind])))
    rest = Kernel(REST, "", told.time - sum(k.time for k in told.kernels), Cost())
    print(_row(REST, _figures([rest], told.time, 0)))
    print(_row("all", _figures([*told.kernels, rest], told.time, sum(limits.values()))))
    alike: dict[str, list[Kernel]] = {}
    for kernel in told.kernels:
        alike.setdefault(f"{kernel.what}{' (optimizer)' if kernel.kind == OPTIMIZER else ''}", []).append(kernel)
    limits = {what: sum(peak.limit(k.cost) for k in group) for what, group in alike.items()}
    over = {what: sum(k.time for k in group) - limits[what] for what, group in alike.items()}
    print("furthest from the limit, alike ones together")
    for what in sorted(over, key=over.__getitem__, reverse=True)[:slowest]:
        print(_row(f"  {what}", _figures(alike[what], told.time, limits[what])))


def _figures(group: list[Kernel], whole: float, limit: float) -> tuple[str, ...]:
    spent, cost = sum(k.time for k in group), sum((k.cost for k in group), Cost())
    seconds = max(spent, 1e-3) / 1e6
    return (
        *(f"{spent / 1e3:.2f}", f"{spent / whole:.1%}", f"{len(group)}", f"{cost.flops / 1e9:.3f}", f"{cost.bytes / 1e6:.1f}"),
        *(f"{cost.flops / seconds / 1e9:.1f}", f"{cost.bytes / seconds / 1e9:.1f}", f"{limit / 1e3:.2f}"),
        f"{spent / limit:.1f}" if limit >= 1 else "-",
    )


def _row(first: str, cells: Iterable[str]) -> str:
    return f"{first:<60.60}" + "".join(f"{cell:>9}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowest", type=int, default=10, help="how many operators to name")
    args = parser.parse_args()
    peak = measure_peak(args.threads)
    print(f"ortc {ortc.__version__}, onnxruntime {onnxruntime.__version__}; {processor()}; {args.threads} threads")
    print(f"peak: {peak.flops / 1e9:.1f} GFLOP/s (product of 2048 × 2048), {peak.bytes / 1e9:.1f} GB/s (x + y of 128 MiB each)")
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            job = json.loads(prepare(name, args.folder, Path(folder), args.threads, args.rounds + WARM_UP).read_text())
            tell(name, profile(job, Path(folder), args.rounds), peak, args.slowest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
