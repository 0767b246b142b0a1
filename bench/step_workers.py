"""Who trains in step_time.py: ortc, ONNX Runtime's own training artifacts, PyTorch eager and compiled. Each in its interpreter.

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


def inductor(job: dict[str, Any], folder: Path) -> tuple[Step, str]:
    """As `torch`, the module and its loss by torch.compile; the optimizer's own update is left as it is, foreach."""
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
        model.parameters(), lr=job["lr"], betas=betas, eps=adamw["epsilon"], weight_decay=adamw["weight_decay"]
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

    return step, f"PyTorch {torch.__version__} {'by torch.compile' if compiled else 'eager'}"


def _runtime() -> str:
    import onnxruntime

    return onnxruntime.__version__


def _peak() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


WORKERS = {f.__name__: f for f in (ortc, artifacts, torch, inductor)}


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
