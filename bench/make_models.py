"""The models whose training step is timed, with random weights, exported by PyTorch into a folder.

    pip install torch transformers onnx onnxscript && python make_models.py FOLDER [NAME ...]

The batch is symbolic, and so is the length of a text. No dropout; batch norm stands in training mode.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

OPSET = 18


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def lenet() -> nn.Module:
    features = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, *head)


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.down = nn.Identity()
        if stride != 1:
            self.down = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.down(x))


def resnet18() -> nn.Module:
    """He et al. 2015, arXiv:1512.03385, for images of 224 × 224 and 1000 classes."""
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    blocks = [
        BasicBlock(channels_in, channels, stride)
        for channels_in, channels, stride in [
            *((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)),
            *((128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)),
        ]
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class UNet(nn.Module):
    """Ronneberger et al. 2015, arXiv:1505.04597, with batch norm: three levels, two convolutions each."""

    def __init__(self, channels: tuple[int, ...] = (32, 64, 128, 256), classes: int = 8):
        super().__init__()
        self.down = nn.ModuleList(self.double(a, b) for a, b in zip((3, *channels), channels, strict=False))
        pairs = list(zip(channels[::-1], channels[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(self.double(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(channels[0], classes, 1)

    @staticmethod
    def double(a: int, b: int) -> nn.Module:
        convolutions = ((nn.Conv2d(c, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for c in (a, b))
        return nn.Sequential(*(layer for layers in convolutions for layer in layers))

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


class Logits(nn.Module):
    """A transformer whose only output is its logits."""

    def __init__(self, model: nn.Module, **options: bool):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids):
        return self.model(input_ids, attention_mask=torch.ones_like(input_ids), **self.options).logits


class NoDropout(nn.Identity):
    p = 0.0


def without_dropout(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            model.set_submodule(name, NoDropout())
    return model


def bert_mini() -> nn.Module:
    """Turc et al. 2019, arXiv:1908.08962: 4 layers, width 256."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    return Logits(without_dropout(BertForMaskedLM(config)))


def gpt2(layers: int) -> nn.Module:
    """Radford et al. 2019 in its smallest form (12 layers, 124M parameters): width 768, vocabulary 50257."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(without_dropout(GPT2LMHeadModel(GPT2Config(n_layer=layers))), use_cache=False)


class LSTMClassifier(nn.Module):
    """Hochreiter & Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735: the last state of one layer tells the class of a text."""

    def __init__(self, words: int = 10_000, width: int = 128, hidden: int = 256, classes: int = 10):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, input_ids):
        return self.head(self.lstm(self.embedding(input_ids))[0][:, -1])


class DLRM(nn.Module):
    """Naumov et al. 2019, arXiv:1906.00091: tables for the categories, products of all pairs of vectors, two perceptrons."""

    def __init__(self, tables: int = 8, rows: int = 100_000, width: int = 32, dense: int = 13):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = self.perceptron(dense, 256, 64, width)
        self.top = self.perceptron(tables * (tables + 1) // 2 + width, 256, 64)
        self.head = nn.Linear(64, 2)
        rows_, columns = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", rows_ * (tables + 1) + columns)

    @staticmethod
    def perceptron(*widths: int) -> nn.Module:
        layers = ((nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
        return nn.Sequential(*(layer for pair in layers for layer in pair))

    def forward(self, x, categories):
        dense = self.bottom(x)
        vectors = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        return self.head(self.top(torch.cat([dense, products[:, self.pairs]], 1)))


@dataclass(frozen=True)
class Case:
    """A model and, by name, examples of what it reads."""

    build: Callable[[], nn.Module]
    example: Callable[[], dict[str, torch.Tensor]]


def image(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"x": torch.randn(2, *shape)}


def text(length: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"input_ids": torch.randint(0, 1000, (2, length))}


def sample() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 13), "categories": torch.randint(0, 1000, (2, 8))}


CASES = {
    "mlp": Case(mlp, image(784)),
    "lenet": Case(lenet, image(1, 28, 28)),
    "resnet18": Case(resnet18, image(3, 224, 224)),
    "unet": Case(UNet, image(3, 128, 128)),
    "lstm": Case(LSTMClassifier, text(32)),
    "dlrm": Case(DLRM, sample),
    "bert_mini": Case(bert_mini, text(32)),
    "gpt2_4l": Case(lambda: gpt2(4), text(32)),
    "gpt2_12l": Case(lambda: gpt2(12), text(32)),
}


def export(name: str, folder: Path) -> Path:
    """Write one model; returns its file.

    By the TorchScript exporter in training mode with nothing folded: in evaluation mode both exporters write a tied
    weight twice, and this one makes one weight of all that are equal, which the norms' are before training.
    """
    case = CASES[name]
    torch.manual_seed(0)
    example, path = case.example(), folder / f"{name}.onnx"
    lengths = {1: "length"}
    symbolic = {key: {0: "batch"} | (lengths if key == "input_ids" else {}) for key in example}
    torch.onnx.export(
        case.build().train(),
        tuple(example.values()),
        path,
        dynamo=False,
        opset_version=OPSET,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=list(example),
        output_names=["logits"],
        dynamic_axes={**symbolic, "logits": {0: "batch"} | (lengths if name.startswith(("bert", "gpt")) else {})},
    )
    return path


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        path = export(name, folder)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]), sys.argv[2:])
