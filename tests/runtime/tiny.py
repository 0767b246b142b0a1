"""A tiny output folder, written by hand: a two-layer perceptron with its training graphs in plain ONNX operators.

    h = x·W1 + b1;  with a buffer: h -= mean over the batch (the running mean in inference);  r = relu(h);
    with dropout: r *= mask(seed, step, micro_batch) / 0.8;  logits = r·W2 + b2;
    softmax cross-entropy against labels, -100 ignored.

Tensor names differ from the model's names on purpose: the runtime must go by the plan's roles.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from safetensors.numpy import save_file

from ortc.plan import GraphFile, LossInfo, ParameterInfo, Plan, Port, Sessions, Stage, dump_plan, fingerprint
from ortc.recipe import LearningRate, Recipe
from ortc.runtime.checkpoint import write_index

INPUTS, HIDDEN, CLASSES = 4, 8, 3
SHAPES = {"fc/1.weight": (INPUTS, HIDDEN), "loss": (HIDDEN,), "fc/2.weight": (HIDDEN, CLASSES), "lr": (CLASSES,)}
TENSORS = {"fc/1.weight": "W1", "loss": "b1", "fc/2.weight": "W2", "lr": "b2"}  # the model's names: the graphs' names
BUFFER, BUFFER_TENSOR = "running", "mean"
DTYPES = {"float32": T.FLOAT, "int64": T.INT64}


def weights() -> dict[str, np.ndarray]:
    """The initial values by the model's names."""
    random = np.random.default_rng(7)
    return {name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in SHAPES.items()}


def data(samples: int = 50, seed: int = 1) -> dict[str, np.ndarray]:
    """Points whose class is a function of their coordinates."""
    x = np.random.default_rng(seed).standard_normal((samples, INPUTS)).astype(np.float32)
    return {"x": x, "labels": np.argmax(x[:, :CLASSES] + x[:, 1:4] * 0.3, axis=1).astype(np.int64)}


def make_folder(
    folder: Path,
    *,
    optimizer: str = "adamw",
    buffer: bool = True,
    dropout: bool = True,
    wrt: bool = False,
    batch: int | str = "batch",
    learning_rate: LearningRate | None = None,
) -> Plan:
    """Write the folder, as ``ortc compile`` would."""
    x = Port(name="input.0", role="data", dtype="float32", shape=[batch, INPUTS], of="x")
    y = Port(name="target.0", role="label", dtype="int64", shape=[batch], of="labels")
    output = Port(name="out.0", role="output", dtype="float32", shape=[batch, CLASSES], of="logits")
    total = Port(name="total", role="loss", dtype="float32", shape=[])
    values = [Port(name=TENSORS[n], role="parameter", dtype="float32", shape=list(s), of=n) for n, s in SHAPES.items()]
    gradients = [p.model_copy(update={"name": f"d{p.name}", "role": "gradient"}) for p in values]
    buffers = [Port(name=BUFFER_TENSOR, role="buffer", dtype="float32", shape=[HIDDEN], of=BUFFER)] if buffer else []
    new_buffers = [p.model_copy(update={"name": "mean.new"}) for p in buffers]
    counters = [Port(name=f"n_{n}", role="scalar", dtype="int64", shape=[], of=n) for n in ("seed", "step", "micro_batch")]

    folder.mkdir(parents=True)
    (folder / "stage-0").mkdir()
    wanted = [x.model_copy(update={"name": "dX", "role": "gradient"})] if wrt else []
    train = _write(
        folder,
        "stage-0/train.onnx",
        [*_forward(buffer, True, dropout), *_loss(), *_backward(buffer, dropout)],
        [x, y, *values, *buffers, *(counters if dropout else [])],
        [total, *gradients, *wanted, *new_buffers],
    )
    evaluation = _write(
        folder,
        "stage-0/eval.onnx",
        [*_forward(buffer, False, False), *_loss()],
        [x, y, *values, *buffers],
        [total, output],
    )
    phases = {"train": train, "eval": evaluation, "optimizer": _write_optimizer(folder, optimizer, values, gradients)}
    initial = weights() | ({BUFFER: np.zeros(HIDDEN, np.float32)} if buffer else {})
    parameters = [
        ParameterInfo(
            name=name,
            role="buffer" if name == BUFFER else "parameter",
            dtype="float32",
            shape=list(array.shape),
            trainable=name != BUFFER,
            reason="a test",
        )
        for name, array in initial.items()
    ]
    plan = Plan(
        ortc_version="0",
        model="tiny.onnx",
        fingerprint=fingerprint(parameters),
        recipe=Recipe(learning_rate=learning_rate or LearningRate(base=0.05)),
        target="ort-training",
        opset=17,
        parameters=parameters,
        losses=[
            LossInfo(
                name="cross_entropy",
                output="logits",
                labels="labels",
                weight=1.0,
                classes=CLASSES,
                ignore_index=-100,
                chosen="a test",
            )
        ],
        stages=[Stage(index=0, parameters=list(initial), phases=phases)],
        sessions=Sessions(),
        export=_write_template(folder, buffer, x, output),
        criterion=_write(folder, "criterion.onnx", _loss(), [output, y], [total]),
    )
    checkpoint = folder / "checkpoint" / "step-0"
    checkpoint.mkdir(parents=True)
    save_file(initial, checkpoint / "parameters.safetensors")
    write_index(checkpoint, plan)
    (folder / "plan.json").write_text(dump_plan(plan), encoding="utf-8")
    return plan


def _constant(name: str, value: object, dtype: type) -> onnx.NodeProto:
    array = np.asarray(value, dtype)
    return h.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(array))


def _forward(buffer: bool, training: bool, dropout: bool) -> list[onnx.NodeProto]:
    nodes = [
        _constant("axis0", [0], np.int64),
        h.make_node("MatMul", ["input.0", "W1"], ["xw"]),
        h.make_node("Add", ["xw", "b1"], ["h0"]),
    ]
    hidden = "h0"
    if buffer and training:
        nodes += [
            h.make_node("ReduceMean", ["h0"], ["mean.batch"], axes=[0], keepdims=0),
            h.make_node("Sub", ["h0", "mean.batch"], ["h1"]),
            _constant("keep", 0.9, np.float32),
            _constant("take", 0.1, np.float32),
            h.make_node("Mul", ["mean", "keep"], ["mean.kept"]),
            h.make_node("Mul", ["mean.batch", "take"], ["mean.taken"]),
            h.make_node("Add", ["mean.kept", "mean.taken"], ["mean.new"]),
        ]
        hidden = "h1"
    elif buffer:
        nodes += [h.make_node("Sub", ["h0", "mean"], ["h1"])]
        hidden = "h1"
    nodes += [h.make_node("Relu", [hidden], ["r"])]
    active = "r"
    if dropout:
        nodes += [*_mask(), h.make_node("Mul", ["r", "mask"], ["dropped"])]
        active = "dropped"
    return [
        *nodes,
        h.make_node("Identity", [active], ["active"]),
        h.make_node("MatMul", ["active", "W2"], ["aw"]),
        h.make_node("Add", ["aw", "b2"], ["out.0"]),
    ]


def _mask() -> list[onnx.NodeProto]:
    """1.25 where (31·(7·seed + 13·step + 17·micro_batch) + 73·i) mod 101 < 80, else 0."""
    numbers = {"c7": 7, "c13": 13, "c17": 17, "c31": 31, "c73": 73, "c101": 101, "c80": 80, "c0": 0, "c1": 1}
    return [
        *(_constant(name, value, np.int64) for name, value in numbers.items()),
        _constant("scale", 1.25, np.float32),
        h.make_node("Mul", ["n_seed", "c7"], ["k0"]),
        h.make_node("Mul", ["n_step", "c13"], ["k1"]),
        h.make_node("Mul", ["n_micro_batch", "c17"], ["k2"]),
        h.make_node("Add", ["k0", "k1"], ["k01"]),
        h.make_node("Add", ["k01", "k2"], ["k3"]),
        h.make_node("Mul", ["k3", "c31"], ["k"]),
        h.make_node("Size", ["r"], ["size"]),
        h.make_node("Range", ["c0", "size", "c1"], ["i"]),
        h.make_node("Mul", ["i", "c73"], ["i73"]),
        h.make_node("Add", ["i73", "k"], ["mixed"]),
        h.make_node("Mod", ["mixed", "c101"], ["u"]),
        h.make_node("Less", ["u", "c80"], ["flat"]),
        h.make_node("Shape", ["r"], ["r.shape"]),
        h.make_node("Reshape", ["flat", "r.shape"], ["kept"]),
        h.make_node("Cast", ["kept"], ["kept.f"], to=T.FLOAT),
        h.make_node("Mul", ["kept.f", "scale"], ["mask"]),
    ]


def _loss() -> list[onnx.NodeProto]:
    return [h.make_node("SoftmaxCrossEntropyLoss", ["out.0", "target.0"], ["total"], ignore_index=-100)]


def _backward(buffer: bool, dropout: bool) -> list[onnx.NodeProto]:
    nodes = [
        _constant("ignored", -100, np.int64),
        _constant("zero", 0, np.int64),
        _constant("depth", CLASSES, np.int64),
        _constant("off_on", [0, 1], np.float32),
        _constant("axis1", [1], np.int64),
        h.make_node("Equal", ["target.0", "ignored"], ["is_ignored"]),
        h.make_node("Not", ["is_ignored"], ["is_valid"]),
        h.make_node("Cast", ["is_valid"], ["valid"], to=T.FLOAT),
        h.make_node("ReduceSum", ["valid"], ["count"], keepdims=0),
        h.make_node("Where", ["is_ignored", "zero", "target.0"], ["class"]),
        h.make_node("OneHot", ["class", "depth", "off_on"], ["one_hot"]),
        h.make_node("Softmax", ["out.0"], ["p"], axis=-1),
        h.make_node("Sub", ["p", "one_hot"], ["p_minus"]),
        h.make_node("Div", ["valid", "count"], ["factor"]),
        h.make_node("Unsqueeze", ["factor", "axis1"], ["factor.2"]),
        h.make_node("Mul", ["p_minus", "factor.2"], ["dout"]),
        h.make_node("ReduceSum", ["dout", "axis0"], ["db2"], keepdims=0),
        h.make_node("Transpose", ["active"], ["active.t"]),
        h.make_node("MatMul", ["active.t", "dout"], ["dW2"]),
        h.make_node("Transpose", ["W2"], ["W2.t"]),
        h.make_node("MatMul", ["dout", "W2.t"], ["dactive"]),
    ]
    grad = "dactive"
    if dropout:
        nodes += [h.make_node("Mul", ["dactive", "mask"], ["dr"])]
        grad = "dr"
    nodes += [
        h.make_node("Sign", ["r"], ["positive"]),
        h.make_node("Mul", [grad, "positive"], ["dh1"]),
    ]
    grad = "dh1"
    if buffer:
        nodes += [
            h.make_node("ReduceMean", ["dh1"], ["dh1.mean"], axes=[0], keepdims=0),
            h.make_node("Sub", ["dh1", "dh1.mean"], ["dh0"]),
        ]
        grad = "dh0"
    return [
        *nodes,
        h.make_node("ReduceSum", [grad, "axis0"], ["db1"], keepdims=0),
        h.make_node("Transpose", ["input.0"], ["x.t"]),
        h.make_node("MatMul", ["x.t", grad], ["dW1"]),
        h.make_node("Transpose", ["W1"], ["W1.t"]),
        h.make_node("MatMul", [grad, "W1.t"], ["dX"]),
    ]


def _write_optimizer(folder: Path, name: str, values: list[Port], gradients: list[Port]) -> GraphFile:
    lr = Port(name="rate", role="scalar", dtype="float32", shape=[], of="lr")
    step = Port(name="number", role="scalar", dtype="int64", shape=[], of="step")
    slots = {"sgd": ["momentum"], "adamw": ["exp_avg", "exp_avg_sq"]}[name]
    nodes = _adamw_scalars() if name == "adamw" else [_constant("mu", 0.9, np.float32)]
    inputs, outputs = [lr, step], []
    for value, gradient in zip(values, gradients, strict=True):
        p, g = value.name, gradient.name
        states = [value.model_copy(update={"name": f"{p}.{s}", "role": "state", "slot": s}) for s in slots]
        nodes += _sgd(p, g) if name == "sgd" else _adamw(p, g)
        inputs += [value, gradient, *states]
        outputs += [s.model_copy(update={"name": f"{s.name}.new"}) for s in (value, *states)]
    return _write(folder, "stage-0/optimizer.onnx", nodes, inputs, outputs)


def _sgd(p: str, g: str) -> list[onnx.NodeProto]:
    """m = 0.9·m + g;  p -= lr·m"""
    return [
        h.make_node("Mul", [f"{p}.momentum", "mu"], [f"{p}.a"]),
        h.make_node("Add", [f"{p}.a", g], [f"{p}.momentum.new"]),
        h.make_node("Mul", [f"{p}.momentum.new", "rate"], [f"{p}.b"]),
        h.make_node("Sub", [p, f"{p}.b"], [f"{p}.new"]),
    ]


def _adamw_scalars() -> list[onnx.NodeProto]:
    numbers = {"one": 1.0, "b1": 0.9, "b2": 0.999, "a1": 0.1, "a2": 0.001, "decay": 0.01, "eps": 1e-8}
    return [
        *(_constant(f"c.{name}", value, np.float32) for name, value in numbers.items()),
        h.make_node("Cast", ["number"], ["t"], to=T.FLOAT),
        *(
            node
            for b in ("b1", "b2")
            for node in (
                h.make_node("Pow", [f"c.{b}", "t"], [f"{b}.t"]),
                h.make_node("Sub", ["c.one", f"{b}.t"], [f"correction.{b}"]),
            )
        ),
        h.make_node("Sqrt", ["correction.b2"], ["root.b2"]),
        h.make_node("Div", ["rate", "correction.b1"], ["size"]),
        h.make_node("Mul", ["rate", "c.decay"], ["rate.decay"]),
        h.make_node("Sub", ["c.one", "rate.decay"], ["shrink"]),
    ]


def _adamw(p: str, g: str) -> list[onnx.NodeProto]:
    """AdamW with β = 0.9, 0.999, λ = 0.01, ε = 1e-8, as PyTorch writes it."""
    m, v = f"{p}.exp_avg", f"{p}.exp_avg_sq"
    return [
        h.make_node("Mul", [m, "c.b1"], [f"{p}.m0"]),
        h.make_node("Mul", [g, "c.a1"], [f"{p}.m1"]),
        h.make_node("Add", [f"{p}.m0", f"{p}.m1"], [f"{m}.new"]),
        h.make_node("Mul", [g, g], [f"{p}.gg"]),
        h.make_node("Mul", [v, "c.b2"], [f"{p}.v0"]),
        h.make_node("Mul", [f"{p}.gg", "c.a2"], [f"{p}.v1"]),
        h.make_node("Add", [f"{p}.v0", f"{p}.v1"], [f"{v}.new"]),
        h.make_node("Sqrt", [f"{v}.new"], [f"{p}.root"]),
        h.make_node("Div", [f"{p}.root", "root.b2"], [f"{p}.hat"]),
        h.make_node("Add", [f"{p}.hat", "c.eps"], [f"{p}.denominator"]),
        h.make_node("Div", [f"{m}.new", f"{p}.denominator"], [f"{p}.direction"]),
        h.make_node("Mul", [f"{p}.direction", "size"], [f"{p}.step"]),
        h.make_node("Mul", [p, "shrink"], [f"{p}.shrunk"]),
        h.make_node("Sub", [f"{p}.shrunk", f"{p}.step"], [f"{p}.new"]),
    ]


def _write_template(folder: Path, buffer: bool, x: Port, output: Port) -> GraphFile:
    """The inference model under the model's own names, its weights missing."""
    nodes = [
        h.make_node("MatMul", ["x", "fc/1.weight"], ["xw"]),
        h.make_node("Add", ["xw", "loss"], ["h0"]),
        h.make_node("Sub", ["h0", BUFFER], ["h1"]) if buffer else h.make_node("Identity", ["h0"], ["h1"]),
        h.make_node("Relu", ["h1"], ["r"]),
        h.make_node("MatMul", ["r", "fc/2.weight"], ["aw"]),
        h.make_node("Add", ["aw", "lr"], ["logits"]),
    ]
    return _write(
        folder,
        "export.template",
        nodes,
        [x.model_copy(update={"name": "x"})],
        [output.model_copy(update={"name": "logits"})],
    )


def _write(folder: Path, file: str, nodes: list[onnx.NodeProto], inputs: list[Port], outputs: list[Port]) -> GraphFile:
    infos = [[h.make_tensor_value_info(p.name, DTYPES[p.dtype], p.shape) for p in ports] for ports in (inputs, outputs)]
    graph = h.make_graph(nodes, "tiny", *infos)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    serialized = model.SerializeToString()
    (folder / file).write_bytes(serialized)
    return GraphFile(file=file, sha256=hashlib.sha256(serialized).hexdigest(), inputs=inputs, outputs=outputs)
