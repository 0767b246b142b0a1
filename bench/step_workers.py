"""Who trains in step_time.py: ortc, ONNX Runtime's own training artifacts, onnxsim, PyTorch eager and compiled.

Each runs in an interpreter of its own.

    python step_workers.py NAME JOB.json

Says what it is on the first line of its output; then, for each line with the number of a batch, trains one step on it and
answers with its loss, the seconds that it took, and the most memory that the process has had, in bytes (0 where the system does
not tell). JOB.json: see step_time.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Step = Callable[[list[np.ndarray], np.ndarray], float]  # data, in the order of the model's inputs, and labels -> loss


def ortc(job: dict[str, Any], folder: Path) -> tuple[Step, str]:
    """The model compiled here, so that the time to the first step has it in."""
    import ortc
    from ortc.recipe import parse_recipe

    ortc.compile(job["model"], folder / "stages", parse_recipe(job["recipe"]))
    trainer = ortc.Trainer(folder / "stages", threads=job["threads"])
    name = f"ortc {ortc.__version__}, onnxruntime {_runtime()}"

    def step(x: list[np.ndarray], labels: np.ndarray) -> float:
        return trainer.step({**dict(zip(job["inputs"], x, strict=True)), "labels": labels}).loss

    return step, name


def artifacts(job: dict[str, Any], folder: Path) -> tuple[Step, str]:
    """onnxruntime.training.artifacts, with the two changes to the model that it needs.

    Its loss wants rows of classes: a text's logits and labels are flattened to them. Its gradient of LayerNormalization reads
    the mean and the inverse deviation: they become outputs of the nodes that leave them out.
    """
    import onnx
    from onnxruntime import SessionOptions
    from onnxruntime.training import artifacts, onnxblock
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    model = onnx.load(job["model"])
    logits = model.graph.output[0]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, job["classes"]]), "rows"))
    model.graph.node.append(onnx.helper.make_node("Reshape", [logits.name, "rows"], ["logits_rows"]))
    logits.CopyFrom(onnx.helper.make_tensor_value_info("logits_rows", onnx.TensorProto.FLOAT, ["rows", job["classes"]]))
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.output) == 1:
            node.output.extend([f"{node.output[0]}.mean", f"{node.output[0]}.deviation"])
    adamw = job["adamw"]
    artifacts.generate_artifacts(
        model,
        requires_grad=job["trained"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(
            betas=(adamw["beta1"], adamw["beta2"]), eps=adamw["epsilon"], weight_decay=adamw["weight_decay"]
        ),
        artifact_directory=str(folder),
    )
    options = SessionOptions()
    options.intra_op_num_threads = job["threads"]
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(job["lr"])
    module.train()

    def step(x: list[np.ndarray], labels: np.ndarray) -> float:
        loss = module(*x, labels.reshape(-1))
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step, f"onnxruntime.training.artifacts, onnxruntime {_runtime()}"


def onnxsim(job: dict[str, Any], folder: Path) -> tuple[Step, str]:
    """onnxsim.compile_training_loop on the model as `_onnxsim_loss` writes it.

    Its Adam is PyTorch's with the same factors (they are constants there), without the decay of the weights, which it has not.
    """
    import onnx
    import onnxruntime
    import onnxsim

    class Options(onnxruntime.SessionOptions):  # it asks for nothing about threads
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = job["threads"]

    onnxruntime.SessionOptions = Options
    with np.load(job["batches"]) as archive:
        sizes = {name: list(archive[f"input.{name}"].shape[1:]) for name in job["inputs"]}
        rows = int(np.prod(archive["labels"].shape[1:]))
    model = _onnxsim_loss(onnx.load(job["model"]), sizes, rows, job["classes"], job["trained"])
    loop = onnxsim.compile_training_loop(model, "loss", job["trained"], optimizer="adam")
    _ = loop.step_graph  # compiled now, so that what it refuses is told before anybody trains

    def step(x: list[np.ndarray], labels: np.ndarray) -> float:
        shares = np.zeros((rows, job["classes"]), np.float32)
        shares[np.arange(rows), labels.reshape(-1)] = -1 / rows
        return loop({**dict(zip(job["inputs"], x, strict=True)), "labels": shares}, job["lr"])

    return step, f"onnxsim {onnxsim.__version__} compile_training_loop (Adam without decay), onnxruntime {_runtime()}"


def _onnxsim_loss(model: Any, sizes: dict[str, list[int]], rows: int, classes: int, trained: list[str]) -> Any:
    """The model with numbers for all sizes, a loss, and only what onnxsim differentiates where that can be said otherwise.

    A Flatten is written as a Reshape, a cube as products, an embedding is read by one row of indices; the loss is the sum of
    log(softmax) times `labels`: float32[rows, classes], -1 / rows where the label is and 0 elsewhere.
    """
    import onnx
    import onnxsim

    make, port = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = [i for i in model.graph.initializer if i.name in trained]
    for weight in weights:  # inputs, so that simplifying merges none and folds nothing into them
        model.graph.initializer.remove(weight)
        model.graph.input.append(port(weight.name, weight.data_type, weight.dims))
    model = onnx.shape_inference.infer_shapes(onnxsim.simplify(model, overwrite_input_shapes=sizes)[0])
    graph = model.graph
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.input, *graph.output)
    }
    shapes |= {i.name: list(i.dims) for i in graph.initializer}
    for old in [i for i in graph.input if i.name in trained]:
        graph.input.remove(old)
    graph.initializer.extend(weights)

    def reshape(value: str, made: str, shape: list[int]) -> Any:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), f"{made}/shape"))
        return make("Reshape", [value, f"{made}/shape"], [made])

    nodes, constants = [], {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer if not i.dims}
    for node in graph.node:
        made = node.output[0]
        if node.op_type == "Constant":
            constants[made] = onnx.numpy_helper.to_array(node.attribute[0].t)
            graph.initializer.append(onnx.numpy_helper.from_array(constants[made], made))
        elif node.op_type == "Pow" and constants.get(node.input[1]) == 3:
            nodes.append(make("Mul", [node.input[0], node.input[0]], [f"{made}/square"]))
            nodes.append(make("Mul", [f"{made}/square", node.input[0]], [made]))
        elif node.op_type == "Flatten":
            nodes.append(reshape(node.input[0], made, shapes[made]))
        elif node.op_type == "Gather" and node.input[0] in trained and len(shapes.get(node.input[1], ())) > 1:
            nodes.append(reshape(node.input[1], f"{made}/indices", [-1]))
            nodes.append(make("Gather", [node.input[0], f"{made}/indices"], [f"{made}/rows"]))
            nodes.append(reshape(f"{made}/rows", made, shapes[made]))
        else:
            nodes.append(node)
    loss = [
        reshape(graph.output[0].name, "bench/rows", [rows, classes]),
        make("Softmax", ["bench/rows"], ["bench/probabilities"], axis=-1),
        make("Log", ["bench/probabilities"], ["bench/log"]),
        make("Mul", ["bench/log", "labels"], ["bench/parts"]),
        make("ReduceSum", ["bench/parts"], ["loss"], keepdims=0),
    ]
    ports = [*graph.input, port("labels", onnx.TensorProto.FLOAT, [rows, classes])]
    result = port("loss", onnx.TensorProto.FLOAT, [])
    made = onnx.helper.make_graph([*nodes, *loss], graph.name, ports, [result], list(graph.initializer))
    return onnx.helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)


def inductor(job: dict[str, Any], folder: Path) -> tuple[Step, str]:
    """As `torch`, the module with its loss by torch.compile, and AdamW in its fused form, PyTorch's quickest."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # what an earlier run compiled does not count
    return torch(job, folder, compiled=True)


def torch(job: dict[str, Any], folder: Path, *, compiled: bool = False) -> tuple[Step, str]:
    """The module that make_models.py exported, with the weights of the file."""
    import make_models
    import onnx
    import torch

    torch.set_num_threads(job["threads"])
    model = make_models.CASES[job["name"]].build().train()
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(job["model"]).graph.initializer}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    adamw = job["adamw"]
    betas = adamw["beta1"], adamw["beta2"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job["lr"],
        betas=betas,
        eps=adamw["epsilon"],
        weight_decay=adamw["weight_decay"],
        fused=compiled or None,
    )

    def loss_of(labels: torch.Tensor, *x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(*x).flatten(0, -2), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def step(x: list[np.ndarray], labels: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = forward(torch.from_numpy(labels), *map(torch.from_numpy, x))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, f"PyTorch {torch.__version__} {'by torch.compile, fused AdamW' if compiled else 'eager'}"


def _runtime() -> str:
    import onnxruntime

    return onnxruntime.__version__


def _peak() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


WORKERS = {f.__name__: f for f in (ortc, artifacts, onnxsim, torch, inductor)}


def main(name: str, job_file: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.loads(Path(job_file).read_text())
    with np.load(job["batches"]) as archive:
        x, labels = [archive[f"input.{name_}"] for name_ in job["inputs"]], archive["labels"]
    with tempfile.TemporaryDirectory() as folder:
        step, what = WORKERS[name](job, Path(folder))
        print(f"{what}, numpy {version('numpy')}", file=answers)
        for line in sys.stdin:
            index = int(line)
            begin = time.perf_counter()
            loss = step([array[index] for array in x], labels[index])
            print(json.dumps([loss, time.perf_counter() - begin, _peak()]), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
