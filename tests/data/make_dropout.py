"""Attention with dropout of its weights, exported in training mode: the model of tests/test_fusions.py that drops.

    pip install torch onnx && python make_dropout.py

PyTorch's random numbers are not ours, so there are no gradients to compare with: the test compares ours, fused and not.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.gate = nn.Linear(16, 48), nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x):
        batch, steps, width = x.shape
        q, k, v = self.qkv(x).view(batch, steps, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        weights = functional.dropout((q @ k.transpose(-2, -1) / (width // 2) ** 0.5).softmax(-1), 0.25, self.training)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, steps, width)
        return self.out(mixed + functional.dropout(self.gate(x).softmax(-1), 0.1, self.training))


if __name__ == "__main__":
    torch.manual_seed(0)
    path = Path(__file__).parent / "attention_dropout.legacy_train.onnx"
    torch.onnx.export(
        Attention().train(),
        (torch.randn(3, 5, 16),),
        path,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch", 1: "steps"}, "logits": {0: "batch", 1: "steps"}},
        opset_version=17,
    )
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.doc_string = ""
    onnx.save(proto, path)
