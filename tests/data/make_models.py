"""Small models by both of PyTorch's ONNX exporters, each with PyTorch's own loss and gradients.

    pip install torch transformers onnx onnxscript onnxruntime && python make_models.py FOLDER [NAME.VARIANT ...]

``models/`` holds a selection of them (and ``mlp`` and ``lenet_bn``, from an earlier script, in the same format).

For each model and variant: ``<name>.<variant>.onnx`` and ``<name>.<variant>.ref.npz``, and all of them described in
``index.json``. Variants:

* ``legacy``: the TorchScript exporter, and ``dynamo``: the newer one, both of ``model.eval()``. Batch norm holds its
  stored statistics.
* ``legacy_train``: the TorchScript exporter in training mode, nothing folded. Batch norm takes the batch's statistics.

Keys of the reference: ``in/<input>``; ``target``; ``loss``; ``grad/<initialiser>`` in the initialiser's own layout, an
element that cannot be told apart from another is NaN; for ``legacy_train`` also ``after/<buffer>``, PyTorch's running
statistics after one forward pass (the variance is the unbiased one). PyTorch computes in float64 from the float32
weights and inputs.

Losses: ``ce`` is the mean cross-entropy over the last axis, ``ce_nchw`` over axis 1, ``mse``, ``bce`` with logits.

``index.json``: ``diff`` is the largest difference between ONNX Runtime's output and PyTorch's in float32, null where
ONNX Runtime cannot run the model; ``constants`` are the float initialisers that are neither a parameter nor a running
statistic, ``dropped`` the parameters that no initialiser holds; ``vanishing`` are gradients that are zero but for
rounding (a bias that a softmax or a normalisation cancels), to be compared absolutely.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS = 32, 4, 2, 64, 24
VANISHING = 1e-12
TRANSFORMER = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}

Arrays = dict[str, np.ndarray]


# ---- the models -----------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 32), nn.Linear(32, 16), nn.Linear(16, 5)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.fc3(self.drop(torch.tanh(self.fc2(self.drop(functional.relu(self.fc1(x)))))))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 8, 3)
        self.f1, self.f2 = nn.Linear(8 * 3 * 3, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.c1(x)), 2)
        x = functional.avg_pool2d(torch.sigmoid(self.c2(x)), 2)
        return self.f2(torch.relu(self.f1(x.flatten(1))))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.down = (
            nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            if stride != 1
            else nn.Identity()
        )

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.block1, self.block2 = BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 6)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.bn(self.conv(x))), 3, 2, 1)
        return self.fc(self.pool(self.block2(self.block1(x))).flatten(1))


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.expand, self.bn1 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project, self.bn3 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 6)

    def forward(self, x):
        x = functional.hardswish(self.bn0(self.stem(x)))
        y = functional.relu6(self.bn1(self.expand(x)))
        y = functional.hardswish(self.bn2(self.depthwise(y)))
        scale = torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = y * functional.hardsigmoid(self.excite(scale))
        return self.fc((x + self.bn3(self.project(y))).mean((2, 3)))


class NormedSegmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.c3 = nn.Conv2d(8, 4, 1)
        self.group, self.instance = nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        x = functional.silu(self.group(self.c1(x)))
        return self.c3(functional.leaky_relu(self.instance(self.c2(x)), 0.1))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.e1, self.e2 = nn.Conv2d(1, 6, 3, 2, padding=1), nn.Conv2d(6, 8, 3, 2, padding=1)
        self.d1 = nn.ConvTranspose2d(8, 6, 3, 2, padding=1, output_padding=1)
        self.d2 = nn.ConvTranspose2d(6, 1, 4, 2, padding=1)

    def forward(self, x):
        x = functional.elu(self.e2(functional.elu(self.e1(x))))
        return torch.sigmoid(self.d2(functional.softplus(self.d1(x))))


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(24, 4)

    def forward(self, input_ids):
        states, _ = self.lstm(self.emb(input_ids))
        return self.fc(states[:, -1])


class MeanOfEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.fc = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, input_ids):
        return self.fc(self.emb(input_ids).mean(1))


class Tied(nn.Module):
    """One matrix is the embedding and, transposed, the head."""

    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, input_ids):
        x = self.emb(input_ids)
        return self.head(self.norm(x + functional.gelu(self.mix(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.read, self.encoder = nn.Linear(6, WIDTH), nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.fc(self.encoder(self.read(x)))


class GPT2(nn.Module):
    def __init__(self, attention: str):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False
        )
        config._attn_implementation = attention
        self.m = GPT2LMHeadModel(config)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None and not torch.compiler.is_exporting():
            attention_mask = torch.ones_like(input_ids)  # without one the library calls what TorchScript cannot export
        return self.m(input_ids, attention_mask=attention_mask, use_cache=False).logits


class BERT(nn.Module):
    def __init__(self):
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, intermediate_size=64, num_labels=2, **TRANSFORMER
        )
        config._attn_implementation = "eager"
        self.m = BertForSequenceClassification(config)

    def forward(self, input_ids, attention_mask):
        return self.m(input_ids, attention_mask=attention_mask).logits


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """A decoder's block of today: RMSNorm, attention that is causal, a gate by SiLU; then one with the quick GELU."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(RMSNorm() for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        batch, steps = input_ids.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, steps, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).masked_fill(hidden, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, WIDTH))
        h = self.norms[1](x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        h = self.wide(self.norms[2](x))
        return self.head(x + self.narrow(h * torch.sigmoid(1.702 * h)))


class ViT(nn.Module):
    def __init__(self):
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        config = ViTConfig(image_size=16, patch_size=4, intermediate_size=64, num_labels=5, **TRANSFORMER)
        config._attn_implementation = "sdpa"
        self.m = ViTForImageClassification(config)

    def forward(self, pixel_values):
        return self.m(pixel_values).logits


@dataclass(frozen=True)
class Case:
    """One model. ``inputs`` gives each input's dimensions (a name is symbolic) and, for ids, the number of classes."""

    build: Callable[[], nn.Module]
    inputs: dict[str, tuple[tuple[int | str, ...], int]]
    loss: str
    opsets: dict[str, int]
    output: str = "logits"
    tied: tuple[str, str] | None = None
    folded: dict[str, str] = field(default_factory=dict)  # convolution: its batch norm
    fixed: dict[str, str] = field(default_factory=dict)  # variant: the dimension whose size that exporter burns in


SIZES = {"batch": 3, "sequence": 7}  # no output has another dimension of these sizes
IDS = {"input_ids": (("batch", "sequence"), VOCABULARY)}
MASKED = {**IDS, "attention_mask": (("batch", "sequence"), 2)}


def image(channels: int, size: int, name: str = "x") -> dict[str, tuple[tuple[int | str, ...], int]]:
    return {name: (("batch", channels, size, size), 0)}


RESNET = {"conv": "bn", "block1.conv1": "block1.bn1", "block1.conv2": "block1.bn2", "block2.conv1": "block2.bn1"}
RESNET |= {"block2.conv2": "block2.bn2", "block2.down.0": "block2.down.1"}
MOBILE = {"stem": "bn0", "expand": "bn1", "depthwise": "bn2", "project": "bn3"}
GPT2_TIED = ("m.transformer.wte.weight", "m.lm_head.weight")

CASES = {
    "mlp_dropout": Case(MLP, {"x": (("batch", 12), 0)}, "bce", {"legacy": 13, "dynamo": 20, "legacy_train": 15}),
    "lenet": Case(LeNet, image(1, 16), "ce", {"legacy": 14, "dynamo": 18}),
    "resnet": Case(ResNet, image(3, 16), "ce", {"legacy": 16, "dynamo": 19, "legacy_train": 15}, folded=RESNET),
    "mobilenet": Case(MobileNet, image(3, 12), "ce", {"legacy": 17, "dynamo": 18, "legacy_train": 14}, folded=MOBILE),
    "norms": Case(NormedSegmenter, image(3, 10), "ce_nchw", {"legacy": 13, "dynamo": 20}),
    "autoencoder": Case(AutoEncoder, image(1, 12), "mse", {"legacy": 18, "dynamo": 18}, output="reconstruction"),
    "lstm": Case(LSTMClassifier, IDS, "ce", {"legacy": 14, "dynamo": 18}),
    "embeddings": Case(MeanOfEmbeddings, IDS, "ce", {"legacy": 19, "dynamo": 19}),
    "tied": Case(Tied, IDS, "ce", {"legacy": 16, "dynamo": 20, "legacy_train": 20}, tied=("emb.weight", "head.weight")),
    "encoder": Case(
        Encoder, {"x": (("batch", "sequence", 6), 0)}, "ce", {"legacy": 15, "dynamo": 18}, fixed={"legacy": "sequence"}
    ),
    "gated": Case(Gated, IDS, "ce", {"legacy": 17, "dynamo": 18}),
    "gpt2_eager": Case(lambda: GPT2("eager"), MASKED, "ce", {"legacy": 13, "dynamo": 20}, tied=GPT2_TIED),
    "gpt2_sdpa": Case(lambda: GPT2("sdpa"), IDS, "ce", {"legacy": 17, "dynamo": 18}, tied=GPT2_TIED),
    "bert": Case(BERT, MASKED, "ce", {"legacy": 17, "dynamo": 18}),
    "vit": Case(ViT, image(3, 16, "pixel_values"), "ce", {"legacy": 20, "dynamo": 20}),
}


# ---- weights, inputs, reference -------------------------------------------------------------------------------------


def randomise(model: nn.Module, seed: int) -> None:
    """Give every element of every parameter its own value, to recognise it in whatever an exporter makes of it.

    A constant initial value (biases, scales) would also hide mistakes.
    """
    rng = np.random.default_rng(seed)
    parameters = list(model.parameters())
    values = np.concatenate([p.detach().numpy().ravel() for p in parameters])
    values += (0.05 * rng.standard_normal(values.size)).astype(np.float32)
    while (repeated := np.setdiff1d(np.arange(values.size), np.unique(values, return_index=True)[1])).size:
        values[repeated] += (0.01 * rng.standard_normal(repeated.size)).astype(np.float32)
    with torch.no_grad():
        for p, value in zip(parameters, np.split(values, np.cumsum([p.numel() for p in parameters])), strict=False):
            p.copy_(torch.from_numpy(value).view_as(p))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.from_numpy(0.2 * rng.standard_normal(buffer.shape)))
            if name.endswith("running_var"):
                buffer.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, buffer.shape)))


def example(case: Case, rng: np.random.Generator) -> Arrays:
    """One batch of the model's inputs. A mask looks at least at its first position."""
    batch: Arrays = {}
    for name, (dims, classes) in case.inputs.items():
        shape = tuple(SIZES.get(d, d) for d in dims)  # type: ignore[arg-type]
        if classes:
            batch[name] = rng.integers(0, classes, shape)
            if name == "attention_mask":
                batch[name] = np.sort(batch[name], axis=1)[:, ::-1].copy()
                batch[name][:, 0] = 1
        else:
            batch[name] = rng.standard_normal(shape).astype(np.float32)
    return batch


def target_of(loss: str, output: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if loss == "ce":
        return rng.integers(0, output.shape[-1], output.shape[:-1])
    if loss == "ce_nchw":
        return rng.integers(0, output.shape[1], (output.shape[0], *output.shape[2:]))
    values = rng.uniform(0, 1, output.shape)
    return (values if loss == "mse" else values < 0.5).astype(np.float32)


def loss_of(kind: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if kind == "ce":
        return functional.cross_entropy(output.movedim(-1, 1), target)
    if kind == "ce_nchw":
        return functional.cross_entropy(output, target)
    function = {"mse": functional.mse_loss, "bce": functional.binary_cross_entropy_with_logits}[kind]
    return function(output, target.to(output.dtype))


def in_double(batch: Arrays) -> list[torch.Tensor]:
    return [torch.from_numpy(a.astype(np.float64) if a.dtype == np.float32 else a) for a in batch.values()]


def gradients(model: nn.Module, batch: Arrays, target: np.ndarray, loss: str) -> tuple[float, Arrays, Arrays]:
    """Loss, gradient of each parameter, and buffers afterwards, by PyTorch in float64. The model stays as it is."""
    model = copy.deepcopy(model).double()
    value = loss_of(loss, model(*in_double(batch)), torch.from_numpy(target))
    value.backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    after = {n: b.numpy().astype(np.float32) for n, b in model.named_buffers() if n.endswith(("_mean", "_var"))}
    return value.item(), grads, after


def untied(model: nn.Module, tied: tuple[str, str]) -> nn.Module:
    """The same model whose second use of a weight is a weight of its own."""
    model = copy.deepcopy(model)
    owner, _, name = tied[1].rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(model.get_parameter(tied[0]).detach().clone()))
    return model


# ---- from parameters to initialisers --------------------------------------------------------------------------------


class Lookup:
    """The gradient of each element, found by its value: exporters rename, transpose, permute, split and join."""

    def __init__(self, values: Arrays, grads: Arrays):
        names = sorted(grads)
        flat = np.concatenate([values[n].ravel() for n in names])
        order = np.argsort(flat)
        self.values = flat[order]
        self.grads = np.concatenate([grads[n].ravel() for n in names])[order]
        self.owners = np.concatenate([np.full(values[n].size, i) for i, n in enumerate(names)])[order]
        self.names = names
        twice = self.values[1:] == self.values[:-1]
        self.grads[1:][twice] = self.grads[:-1][twice] = np.nan

    def __call__(self, array: np.ndarray) -> tuple[np.ndarray, set[str]] | None:
        """Gradient in the array's layout and the parameters that it holds; None if it holds anything else."""
        at = np.minimum(np.searchsorted(self.values, array.ravel()), len(self.values) - 1)
        if not np.array_equal(self.values[at], array.ravel()):
            return None
        return self.grads[at].reshape(array.shape), {self.names[i] for i in np.unique(self.owners[at])}


def folded_weights(model: nn.Module, folded: dict[str, str], grads: Arrays) -> list[tuple[np.ndarray, np.ndarray, set[str]]]:
    """Weights of convolutions with their batch norm folded in, their gradients, and the parameters that they hold.

    W' = s·W and b' = beta - s·mean, with s = gamma/√(var + ε), for a convolution without bias. So dL/dW' = dL/dW / s,
    and dL/db' = dL/dbeta, because beta is added where b' is.
    """
    found = []
    for conv_name, norm_name in folded.items():
        conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
        scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach().numpy()
        by_channel = scale.reshape(-1, 1, 1, 1)
        weight = conv.weight.detach().numpy() * by_channel
        bias = norm.bias.detach().numpy() - scale * norm.running_mean.numpy()
        parts = {f"{conv_name}.weight", f"{norm_name}.weight", f"{norm_name}.bias"}
        found.append((weight, grads[f"{conv_name}.weight"] / by_channel, parts))
        found.append((bias, grads[f"{norm_name}.bias"], parts))
    return found


def is_close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-6)


def map_gradients(graph: onnx.GraphProto, model: nn.Module, case: Case, run: Callable) -> tuple[Arrays, list[str], list[str]]:
    """Gradients under initialisers' names, the other float initialisers, the parameters that no initialiser holds.

    ``run`` gives the gradients of a model's parameters.
    """
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    grads = run(model)
    lookup = Lookup(values, grads)
    folded = folded_weights(model, case.folded, grads)
    found: Arrays = {}
    held: set[str] = set()
    constants: list[str] = []
    copies: list[str] = []  # initialisers that hold the tied weight
    for initializer in graph.initializer:
        array = numpy_helper.to_array(initializer)
        if array.dtype != np.float32:
            continue
        match = lookup(array)
        if match is None:
            match = next((m for value, *m in folded if is_close(value, array)), None)
        if match is None:
            if not initializer.name.endswith(("running_mean", "running_var")):
                constants.append(initializer.name)
            continue
        found[initializer.name] = match[0].astype(np.float32)
        held |= match[1]
        if case.tied and case.tied[0] in match[1]:
            copies.append(initializer.name)
    if len(copies) > 1:
        # The exporter wrote the shared weight twice: two parameters now, each with its own part of the gradient.
        apart = untied(model, case.tied)  # type: ignore[arg-type]
        parts = run(apart)
        looked_up = {n for node in graph.node if node.op_type == "Gather" for n in node.input}
        arrays = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        for name in copies:
            part = case.tied[0 if name in looked_up else 1]  # type: ignore[index]
            one = Lookup({part: apart.get_parameter(part).detach().numpy()}, {part: parts[part]})
            match = one(arrays[name])
            assert match is not None
            found[name] = match[0].astype(np.float32)
    return found, constants, sorted(set(values) - held)


# ---- export ---------------------------------------------------------------------------------------------------------


def export(model: nn.Module, case: Case, variant: str, batch: Arrays, output_shape: tuple[int, ...], path: Path) -> None:
    names = list(case.inputs)
    dims = {size: d for d, size in SIZES.items() if d != case.fixed.get(variant)}
    symbolic = {n: {i: d for i, d in enumerate(case.inputs[n][0]) if d in dims.values()} for n in names}
    arguments = tuple(torch.from_numpy(a) for a in batch.values())
    common = {"input_names": names, "output_names": [case.output], "opset_version": case.opsets[variant]}
    if variant == "dynamo":
        sizes = {d: torch.export.Dim(d) for axes in symbolic.values() for d in axes.values()}
        shapes = tuple({i: sizes[d] for i, d in symbolic[n].items()} for n in names)
        torch.onnx.export(
            model, arguments, path, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False, **common
        )
    else:
        training = variant == "legacy_train"
        mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
        axes = {**symbolic, case.output: {i: dims[size] for i, size in enumerate(output_shape) if size in dims}}
        torch.onnx.export(
            model,
            arguments,
            path,
            dynamo=False,
            dynamic_axes=axes,
            training=mode,
            do_constant_folding=not training,
            **common,
        )
    strip(path)


def strip(path: Path) -> None:
    """Drop what tells where the exporting program lay on its machine: stack traces."""
    proto = onnx.load(path)
    for owner in [proto.graph, *proto.functions]:
        for node in owner.node:
            node.doc_string = ""
            kept = [p for p in node.metadata_props if "stack_trace" not in p.key]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
    onnx.save(proto, path)


def difference(path: Path, batch: Arrays, expected: np.ndarray) -> float | None:
    """Between ONNX Runtime's output and PyTorch's, None if ONNX Runtime cannot run the model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        output = session.run(None, batch)[0]
    except Exception as error:
        print(f"  ONNX Runtime: {str(error)[:200]}")
        return None
    assert output.shape == expected.shape
    return float(np.abs(output - expected).max())


def make(name: str, variant: str, folder: Path) -> dict:
    """Write one model and its reference; returns its entry of the index."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().train(variant == "legacy_train")
    randomise(model, seed=1)
    rng = np.random.default_rng(2)
    batch = example(case, rng)
    path = folder / f"{name}.{variant}.onnx"
    with torch.no_grad():
        expected = copy.deepcopy(model)(*(torch.from_numpy(a) for a in batch.values())).numpy()
    target = target_of(case.loss, expected, rng)
    export(copy.deepcopy(model), case, variant, batch, expected.shape, path)

    loss, _, after = gradients(model, batch, target, case.loss)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    grads, constants, dropped = map_gradients(proto.graph, model, case, lambda m: gradients(m, batch, target, case.loss)[1])
    arrays = {f"in/{n}": a for n, a in batch.items()} | {f"grad/{n}": g for n, g in grads.items()}
    if variant == "legacy_train":
        arrays |= {f"after/{n}": b for n, b in after.items()}
    np.savez_compressed(folder / f"{name}.{variant}.ref.npz", loss=np.float64(loss), target=target, **arrays)
    entry = {
        "variant": variant,
        "loss": case.loss,
        "output": proto.graph.output[0].name,
        "opset": {o.domain or "ai.onnx": o.version for o in proto.opset_import},
        "nodes": len(proto.graph.node),
        "diff": difference(path, batch, expected),
        "constants": constants,
        "dropped": dropped,
        "vanishing": sorted(n for n, g in grads.items() if np.abs(g).max() < VANISHING),
    }
    nans = {n: int(np.isnan(g).sum()) for n, g in grads.items() if np.isnan(g).any()}
    size = sum((folder / f"{name}.{variant}{s}").stat().st_size for s in (".onnx", ".ref.npz"))
    print(f"{name}.{variant}: {size / 1e3:.0f} kB, {len(grads)} gradients, NaN {nans}, {json.dumps(entry)}", flush=True)
    return entry


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index_path = folder / "index.json"
    index = json.loads(index_path.read_text(encoding="utf-8")) if index_path.exists() else {}
    for full in names or [f"{name}.{variant}" for name, case in CASES.items() for variant in case.opsets]:
        name, variant = full.split(".")
        index[full] = make(name, variant, folder)
        index_path.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operator has no ONNX form
    main(Path(sys.argv[1]), sys.argv[2:])
