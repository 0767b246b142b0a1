"""ONNX Runtime's on-device training API, without PyTorch, which its package asks for although this part does not need it."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def is_there() -> bool:
    """Whether the installed build has it."""
    from onnxruntime.capi import _pybind_state

    return hasattr(_pybind_state, "Module")


def api(name: str) -> Any:
    """The module ``onnxruntime.training.<name>``; the package around it, whose start needs PyTorch, is left out."""
    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
    sys.modules.setdefault("onnxruntime.training", package)
    return importlib.import_module(f"onnxruntime.training.{name}")


class Device:
    """A module, its optimizer and their state, from a folder of artifacts."""

    def __init__(self, folder: Path, checkpoint: Path | None = None, lr: float = 1e-3) -> None:
        training, options = api("api"), onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.CheckpointState = training.CheckpointState
        self.state = training.CheckpointState.load_checkpoint(str(checkpoint or folder / "checkpoint"))
        files = [str(folder / f"{name}_model.onnx") for name in ("training", "eval", "optimizer")]
        self.module = training.Module(files[0], self.state, files[1], session_options=options)
        self.optimizer = training.Optimizer(files[2], self.module)
        self.optimizer.set_learning_rate(lr)

    def run(self, batch: dict[str, np.ndarray]) -> Any:
        """One forward and backward, or an evaluation: the outputs."""
        return self.module(*(batch[name] for name in self.module.input_names()))

    def step(self, batch: dict[str, np.ndarray]) -> float:
        """One training step: the loss."""
        self.module.train()
        outputs = self.run(batch)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(outputs[0] if isinstance(outputs, tuple) else outputs)

    def evaluate(self, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The loss and the outputs."""
        self.module.eval()
        return list(self.run(batch))

    def save(self, path: Path) -> None:
        """A checkpoint with the optimizer's state."""
        self.CheckpointState.save_checkpoint(self.state, str(path), True)

    def export(self, path: Path) -> None:
        """The inference model with all outputs but the loss."""
        self.module.eval()
        self.module.export_model_for_inferencing(str(path), self.module.output_names()[1:])
