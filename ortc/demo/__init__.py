"""The demo's files: a small convolutional network and the UCI handwritten digits (see NOTICE.txt beside them)."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

MODEL = _FOLDER / "digits.onnx"  # x: float32 [batch, 1, 8, 8] in 0..1 -> logits: float32 [batch, 10]; untrained
RECIPE = _FOLDER / "digits.toml"
TRAIN_DATA = _FOLDER / "digits_train.npz"  # x, labels (int64): 1438 digits
EVAL_DATA = _FOLDER / "digits_eval.npz"  # the same for 359 others

BATCH_SIZE = 32
EPOCHS = 30
