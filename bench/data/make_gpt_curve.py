"""Makes gpt.onnx and gpt_curve.npz: a character-level GPT and its loss under PyTorch's AdamW.

    pip install torch onnx numpy && PYTHONPATH=.. python make_gpt_curve.py

``gpt.onnx`` holds the initial weights; input ``input_ids`` int64 [batch, 64], output ``logits`` [batch, 64, classes].
``gpt_curve.npz``: ``loss`` float32 [200], the loss of each step's batch before its update, computed in float32;
``loss_float64``, the same run in float64, which shows how far float32 rounding carries a run; ``batches`` uint8
[200, 16, 65] (see gpt_text.batches); ``vocabulary``; and the recipe: ``lr``, ``betas``, ``epsilon``, ``weight_decay``,
with ``decayed``, the initialisers that it decays (matrices; no bias or norm).
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import gpt_text
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).parent
LAYERS, WIDTH, HEADS, BLOCK = 2, 64, 4, 64
STEPS, BATCH, SEED = 200, 16, 0
LR, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
OPSET = 17


class Block(nn.Module):
    """Attention and a feed-forward network, each after its norm and beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(WIDTH // HEADS)
        mixed = scores.masked_fill(~self.mask, -math.inf).softmax(-1) @ v
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Parameter(torch.empty(BLOCK, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids):
        return self.head(self.norm(self.blocks(self.tokens(input_ids) + self.positions)))


def train(model: nn.Module, batches: np.ndarray) -> np.ndarray:
    """The loss of each batch before its update."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPSILON)
    losses = []
    for batch in torch.from_numpy(batches.astype(np.int64)):
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokens, vocabulary = gpt_text.encode(gpt_text.text())
    batches = gpt_text.batches(tokens, steps=STEPS, batch=BATCH, block=BLOCK, seed=SEED)
    model = GPT(len(vocabulary))
    path = FOLDER / "gpt.onnx"
    torch.onnx.export(
        copy.deepcopy(model),
        (torch.zeros(2, BLOCK, dtype=torch.int64),),
        path,
        dynamo=False,
        opset_version=OPSET,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_axes={"input_ids": {0: "batch"}, "logits": {0: "batch"}},
        training=torch.onnx.TrainingMode.TRAINING,  # else equal weights, as the norms', become one
        do_constant_folding=False,  # keeps the parameters' names
    )
    graph = onnx.load(path).graph
    parameters = {n: p.detach().numpy() for n, p in model.named_parameters()}
    initial = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    assert all(np.array_equal(initial[n], p) for n, p in parameters.items())
    np.savez_compressed(
        FOLDER / "gpt_curve.npz",
        loss_float64=train(copy.deepcopy(model).double(), batches),
        loss=train(model, batches).astype(np.float32),
        batches=batches,
        vocabulary=np.array(vocabulary),
        lr=np.float64(LR),
        betas=np.array(BETAS),
        epsilon=np.float64(EPSILON),
        weight_decay=np.float64(WEIGHT_DECAY),
        decayed=np.array([n for n, p in parameters.items() if p.ndim > 1]),
    )


if __name__ == "__main__":
    main()
