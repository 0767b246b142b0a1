"""What sessions have in memory: kernels and predicted peaks against measured ones; the order changes no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile
from ortc.passes.costs import Shapes, concrete_sizes, learned_sizes
from ortc.passes.memory import value_bytes
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime.trainer import Trainer
from ortc.source import load_model

MODELS = Path(__file__).parent / "data" / "models"
SIZES = {"batch": 4, "sequence": 8, "N": 4}


def compiled(
    name: str,
    folder: Path,
    *,
    ordered: bool = True,
    target: str = TARGETS[-1].name,
    sizes: dict[str, int] | None = None,
    **pipeline: object,
) -> Plan:
    axis = -1 if name.startswith(("gpt", "bert")) else 1
    recipe = {
        "target": target,
        "loss": [{"name": "cross_entropy", "options": {"axis": axis}}],
        "passes": {"off": [] if ordered else ["order"]},
        "pipeline": {"sizes": sizes or {}, **pipeline},
    }
    return compile(MODELS / f"{name}.onnx", folder, parse_recipe(recipe))


def batch_of(trainer: Trainer, sizes: dict[str, int], parts: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays = {}
    for name, port in trainer.inputs.ports.items():
        shape = [d if isinstance(d, int) else sizes[d] for d in port.shape]
        shape[0] *= parts
        integer = "int" in port.dtype
        arrays[name] = random.integers(0, 2, shape) if integer else random.standard_normal(shape).astype(np.float32)
    return arrays


# ---- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divided", [{}, {"micro_batches": 2}, {"stages": 2, "micro_batches": 2, "schedule": "zb-h1"}])
@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.legacy_train", "lstm.dynamo", "mlp_dropout.legacy_train"])
def test_the_order_changes_no_bit(name: str, divided: dict, tmp_path: Path):
    found = []
    for ordered in (True, False):
        folder = tmp_path / str(ordered)
        compiled(name, folder, ordered=ordered, **divided)
        with Trainer(folder, threads=1) as trainer:
            sizes = {d: 4 for p in trainer.inputs.ports.values() for d in p.shape if isinstance(d, str)}
            found.append(trainer.gradients(batch_of(trainer, sizes)))
    (loss, gradients), (other, others) = found
    assert loss == other
    assert gradients.keys() == others.keys()
    assert all(np.array_equal(gradients[k], others[k]) for k in others)
    if not divided:
        orders = [[n.name for n in onnx.load(tmp_path / o / "stage-0/train.onnx").graph.node] for o in ("True", "False")]
        assert sorted(orders[0]) == sorted(orders[1])
        peaks = [
            json.loads((tmp_path / o / "plan.json").read_text())["stages"][0]["phases"]["train"]["memory"]
            for o in ("True", "False")
        ]
        assert peaks[0]["peak_bytes"] <= peaks[1]["peak_bytes"]


def test_some_real_models_peak_lower(tmp_path: Path):
    for name in ("gpt2_eager.legacy", "bert.dynamo"):
        peaks = [
            compiled(name, tmp_path / f"{name}{ordered}", ordered=ordered).stages[0].phases["train"].memory.peak_bytes
            for ordered in (True, False)
        ]
        assert peaks[0] < 0.97 * peaks[1]


def test_outputs_that_are_left_out_take_no_memory(tmp_path: Path):
    """The gradient of a picture is not computed; its kernel has a place for it."""
    plan = compiled("resnet.legacy_train", tmp_path / "o", target="ort-training")
    graph = load_model(tmp_path / "o" / plan.stages[0].phases["train"].file).graph
    outputs = [v for node in graph for v in node.outputs]
    sizes = value_bytes(graph, learned_sizes(graph, {"batch": 4}))
    assert any(v.name == "" for v in outputs)
    assert not any(sizes.get(v) for v in outputs if not v.name)


def test_gradients_of_micro_batches_are_added_at_once(tmp_path: Path):
    """Else all of them would be there at the end, beside the arrays that they are added to."""
    compiled("gpt2_eager.legacy", tmp_path / "o", micro_batches=2)
    nodes = list(onnx.load(tmp_path / "o/stage-0/train.onnx").graph.node)
    at = {output: i for i, node in enumerate(nodes) for output in node.output}
    adds = [(i, node) for i, node in enumerate(nodes) if any(o.endswith(".total") for o in node.output)]
    assert len(adds) > 10
    late = [i - at[node.input[1]] for i, node in adds if node.input[1] in at]
    assert sorted(late)[len(late) // 2] == 1


# ---- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.legacy_train", "lstm.dynamo", "vit.dynamo", "encoder.dynamo"])
def test_learned_sizes_are_those_of_an_inference(name: str, tmp_path: Path):
    compiled(name, tmp_path / "o")
    graph = load_model(tmp_path / "o/stage-0/train.onnx").graph
    names = {d: 3 for v in graph.inputs for d in (v.shape or ()) for d in [getattr(d, "value", None)] if isinstance(d, str)}
    learned = learned_sizes(graph, names)
    again = learned_sizes(graph, names)  # now every name is known
    expected = concrete_sizes(graph, names)
    for node in graph:
        for value in node.outputs:
            assert learned.of(value) == again.of(value) == expected.of(value), value.name


# ---- against measurements ----------------------------------------------------------------------------------------------

# Every large allocation is a mapping of its own, which glibc gives back at once: resident memory is what is alive.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}

needs_linux = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK) or os.confstr_names.get("CS_GNU_LIBC_VERSION") is None,
    reason="needs Linux and glibc",
)

# What each measuring script starts with: sessions have no arena.
PRELUDE = """
import json, sys
import numpy as np
import onnxruntime

def resident(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

class Bare(onnxruntime.SessionOptions):
    def __init__(self):
        super().__init__()
        self.enable_cpu_mem_arena = False

onnxruntime.SessionOptions = Bare
"""

PROBE = '''
from onnx import TensorProto, helper

ROWS, COLUMNS = 2048, 4096

def peak(operator, operands, attributes):
    """What a node and its operands have alive, in their size."""
    nodes = [helper.make_node("Expand", ["x", "shape"], [f"v{i}"]) for i in range(operands)]
    nodes.append(helper.make_node(operator, [f"v{i}" for i in range(operands)], ["y"], **attributes))
    nodes.append(helper.make_node("ReduceMax", ["y"], ["z"]))
    value = helper.make_tensor_value_info
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [ROWS, COLUMNS])
    graph = helper.make_graph(
        nodes, "probe", [value("x", TensorProto.FLOAT, [1, COLUMNS])], [value("z", TensorProto.FLOAT, None)], [shape],
        value_info=[value(name, TensorProto.FLOAT, [ROWS, COLUMNS]) for name in (*(f"v{i}" for i in range(operands)), "y")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = options.enable_mem_reuse = False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"x": np.ones((1, COLUMNS), np.float32)}
    session.run(None, feeds)
    before = resident("VmRSS")
    reset()
    session.run(None, feeds)
    return (resident("VmHWM") - before) / (4 * ROWS * COLUMNS)

print(json.dumps([peak(*row) for row in json.loads(sys.argv[1])]))
'''


def measured(script: str, *arguments: str) -> Any:
    """What a script prints, after the prelude, in a process of its own."""
    command = [sys.executable, "-c", PRELUDE + script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **EXACT}, timeout=300)
    return json.loads(done.stdout)


@needs_linux
def test_kernels_deal_with_memory_as_the_table_says():
    """A view and work in place take one buffer, others one for each operand, one for the output, and their scratch."""
    from ortc.passes.memory import node_memory

    rows = [
        *((op, 1, {}) for op in ("Identity", "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Elu", "Selu", "LeakyRelu")),
        *(
            (op, 1, {})
            for op in ("HardSigmoid", "Softmax", "LogSoftmax", "Clip", "Exp", "Sqrt", "Neg", "Abs", "Erf", "Transpose")
        ),
        ("Cast", 1, {"to": 1}),
        *((op, 2, {}) for op in ("Add", "Sub", "Mul", "Div", "Pow")),
        ("Sum", 3, {}),
        ("HardSwish", 1, {}),
        ("Mish", 1, {}),
        *((op, 1, {"axis": 0}) for op in ("Softmax", "LogSoftmax")),
    ]
    peaks = measured(PROBE, json.dumps(rows))
    for (op, operands, attributes), peak in zip(rows, peaks, strict=True):
        node = _node(op, operands, attributes)
        known = node_memory(node, Shapes(dict.fromkeys((*node.inputs, *node.outputs), (2048, 4096))))
        scratch = known.scratch / (4 * 2048 * 4096)
        assert round(peak) == operands + (0 if known.views or known.in_place else 1) + scratch, (op, peak)


def _node(op: str, operands: int, attributes: dict[str, int]):
    import onnx_ir as ir

    inputs = [ir.Value(name=f"v{i}") for i in range(operands)]
    return ir.node(op, inputs, attributes=attributes or None)


SESSION = """
import ortc
from ortc.runtime import stage

peaks, run = {}, stage.Phase.run

def watched(phase, *feeds):
    before = resident("VmRSS")
    reset()
    made = run(phase, *feeds)
    peaks[phase.graph.file] = resident("VmHWM") - before
    return made

trainer = ortc.Trainer(sys.argv[1], threads=1)
with np.load(sys.argv[2]) as archive:
    batch = dict(archive)
trainer.step(batch)
stage.Phase.run = watched
trainer.step(batch)
print(json.dumps(peaks))
"""


@needs_linux
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2_eager.legacy", {"batch": 128, "sequence": 16}),
        ("resnet.legacy_train", {"batch": 512}),
        ("vit.dynamo", {"batch": 256}),
        ("lenet_bn.legacy_train", {"batch": 512}),
    ],
)
def test_sessions_peak_as_predicted(name: str, sizes: dict[str, int], tmp_path: Path):
    plan = compiled(name, tmp_path / "o", sizes=sizes)
    with Trainer(tmp_path / "o", threads=1) as trainer:
        np.savez(tmp_path / "batch.npz", **batch_of(trainer, {**dict.fromkeys(_names(trainer), 16), **sizes}))
    found = measured(SESSION, str(tmp_path / "o"), str(tmp_path / "batch.npz"))
    train = plan.stages[0].phases["train"]
    assert train.memory.peak_bytes > 2**22
    assert found[train.file] == pytest.approx(train.memory.peak_bytes, rel=0.1)


def _names(trainer: Trainer) -> set[str]:
    return {d for p in trainer.inputs.ports.values() for d in p.shape if isinstance(d, str)}
