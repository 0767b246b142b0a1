"""Nodes of ONNX Runtime's own operators, for test_contrib.py."""

# ruff: noqa: E501  (a case is one line)

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import onnx
from onnx import helper

SIZES = {"B": 2, "S": 4, "T": 5, "2*B": 4}  # a dimension is a number, or one of these names
LENGTHS = np.array([3, 2], np.int32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
IDS = np.random.default_rng(7).integers(0, 10, (2, 4)).astype(np.int32)
MS = "com.microsoft"
POSITIONS = np.array([[0, 1, 2, 3], [2, 3, 4, 5]])
PROJECTED = ["B S 6", "6 36"]
GROUPED = ["B S 64", "B S 32", "B S 32", None, None, (np.array([3, 3], np.int32), "B"), (np.array(4, np.int32), "")]

# (name, operator, inputs in order: a shape in words, or an array and its shape; attributes; how many outputs, negative
# if only the first and the last of them)
# fmt: off
CASES: list[tuple[str, str, list[Any], dict[str, Any], int]] = [
    ("gelu", "Gelu", ["B 3"], {}, 1),
    ("fast_gelu", "FastGelu", ["B 3"], {}, 1),
    ("fast_gelu_bias", "FastGelu", ["B S 3", "3"], {}, 1),
    ("bias_gelu", "BiasGelu", ["B S 3", "3"], {}, 1),
    ("quick_gelu", "QuickGelu", ["B 3"], {"alpha": 1.3}, 1),
    ("matmul", "FusedMatMul", ["B S 3", "B 3 5"], {"alpha": 0.5}, 1),
    ("matmul_ta", "FusedMatMul", ["B 3 S", "3 5"], {"transA": 1}, 1),
    ("matmul_tb", "FusedMatMul", ["B S 3", "B 5 3"], {"transB": 1, "alpha": 2.0}, 1),
    ("matmul_batch", "FusedMatMul", ["S B 3", "3 B 5"], {"transBatchA": 1, "transBatchB": 1}, 1),
    (
        "matmul_batch_t",
        "FusedMatMul",
        ["3 B S", "5 B 3"],
        dict.fromkeys(("transA", "transB", "transBatchA", "transBatchB"), 1),
        1,
    ),
    ("matmul_batch4", "FusedMatMul", ["S B 2 3", "B 2 5 3"], {"transBatchA": 1, "transB": 1}, 1),
    (
        "gemm",
        "FusedGemm",
        ["B 3", "3 5", "5"],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5, "beta": 2.0},
        1,
    ),
    ("gemm_sigmoid", "FusedGemm", ["3 B", "5 3"], {"activation": "Sigmoid", "transA": 1, "transB": 1}, 1),
    ("gemm_selu", "FusedGemm", ["B 3", "3 5"], {"activation": "Selu", "activation_alpha": 1.5, "activation_gamma": 1.2}, 1),
    ("conv", "FusedConv", ["B 2 S T", "3 2 3 3", "3"], {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1),
    ("conv_sum", "FusedConv", ["B 2 S T", "3 2 1 1", "3", "B 3 S T"], {"activation": "Tanh", "kernel_shape": [1, 1]}, 1),
    ("conv_clip", "FusedConv", ["B 2 S T", "3 2 2 2"], {"activation": "Clip", "activation_params": [-0.5, 0.7]}, 1),
    ("rms", "SimplifiedLayerNormalization", ["B S 6", "6"], {"epsilon": 0.1}, 1),
    ("rms_axis", "SimplifiedLayerNormalization", ["B 3 6", "3 6"], {"axis": 1}, 2),
    ("skip_norm", "SkipLayerNormalization", ["B S 6", "B S 6", "6", "6", "6"], {"epsilon": 0.1}, -4),
    ("skip_norm_few", "SkipLayerNormalization", ["S 6", "S 6", "6"], {}, 1),
    ("skip_norm_broadcast", "SkipLayerNormalization", ["B S 6", "S 6", "6", "6"], {}, 1),
    ("skip_rms", "SkipSimplifiedLayerNormalization", ["B S 6", "B S 6", "6", "6"], {"epsilon": 0.1}, -4),
    ("skip_rms_broadcast", "SkipSimplifiedLayerNormalization", ["B S 6", "1 S 6", "6"], {}, 1),
    (
        "embed",
        "EmbedLayerNormalization",
        [(IDS, "B S"), (IDS // 5, "B S"), "10 6", "8 6", "2 6", "6", "6", (MASK, "B S")],
        {},
        2,
    ),
    ("embed_few", "EmbedLayerNormalization", [(IDS, "B S"), None, "10 6", "8 6", None, "6", "6"], {"epsilon": 0.1}, 2),
    (
        "embed_positions",
        "EmbedLayerNormalization",
        [(IDS, "B S"), None, "10 6", "8 6", None, "6", "6", None, (IDS[:1, ::-1] // 2, "1 S")],
        {},
        3,
    ),
    ("trilu", "Trilu", ["B S T"], {"upper": 0}, 1),
    ("trilu_k", "Trilu", ["B S T", (np.array(1), "")], {}, 1),
    ("bias_add", "BiasAdd", ["B S 3", "3", "B S 3"], {}, 1),
    ("split_gelu", "BiasSplitGelu", ["B S 6", "6"], {}, 1),
    ("gemm_gelu", "GemmFastGelu", ["B S 3", "3 5", "5"], {}, 1),
    ("conv_last", "NhwcConv", ["B S T 3", "2 1 2 3", "2"], {}, 1),
    ("group_norm", "GroupNorm", ["B S T 6", "6", "6"], {"groups": 2, "activation": 1}, 1),
    ("group_norm_first", "GroupNorm", ["B 6 S T", "6", "6"], {"groups": 3, "activation": 0, "channels_last": 0}, 1),
    ("skip_group_norm", "SkipGroupNorm", ["B S T 6", "6", "6", "B S T 6", "6"], {"groups": 2, "activation": 0}, 2),
    ("skip_group_norm_few", "SkipGroupNorm", ["B S T 6", "6", "6", "B 6"], {"groups": 2, "activation": 0}, 1),
    ("rfft", "Rfft", ["B S 6"], {"signal_ndim": 1, "onesided": 1}, 1),
    ("irfft", "Irfft", ["B S 4 2"], {"signal_ndim": 1, "onesided": 1}, 1),
    ("attention", "Attention", [*PROJECTED, "36"], {"num_heads": 3}, 1),
    ("attention_present", "Attention", [*PROJECTED, "36"], {"num_heads": 3, "scale": 0.3}, 2),
    ("attention_no_bias", "Attention", PROJECTED, {"num_heads": 3, "unidirectional": 1}, 1),
    ("attention_sizes", "Attention", ["B S 6", "6 22", "22"], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 6]}, 1),
    ("attention_mask", "Attention", [*PROJECTED, "36", (MASK, "B S")], {"num_heads": 3}, 1),
    ("attention_mask_causal", "Attention", [*PROJECTED, "36", (MASK, "B S")], {"num_heads": 3, "unidirectional": 1}, 1),
    ("attention_mask_left", "Attention", [*PROJECTED, "36", (MASK[:, ::-1], "B S")], {"num_heads": 3, "unidirectional": 1}, 1),
    ("attention_mask_light", "Attention", [*PROJECTED, "36", (MASK, "B S")], {"num_heads": 3, "mask_filter_value": -1.0}, 1),
    (
        "attention_mask_light_causal",
        "Attention",
        [*PROJECTED, "36", (MASK, "B S")],
        {"num_heads": 3, "unidirectional": 1, "mask_filter_value": -1.0},
        1,
    ),
    ("attention_lengths", "Attention", [*PROJECTED, "36", (LENGTHS, "B")], {"num_heads": 3}, 1),
    ("attention_ranges", "Attention", [*PROJECTED, "36", (np.array([3, 4, 1, 2], np.int32), "2*B")], {"num_heads": 3}, 1),
    ("attention_mask3", "Attention", [*PROJECTED, "36", (np.stack([MASK] * 4, 1), "B S S")], {"num_heads": 3}, 1),
    ("attention_bias", "Attention", [*PROJECTED, "36", None, None, "B 3 S S"], {"num_heads": 3}, 1),
    ("attention_bias_mask", "Attention", [*PROJECTED, "36", (MASK, "B S"), None, "1 3 S S"], {"num_heads": 3}, 1),
    ("attention_past", "Attention", [*PROJECTED, "36", None, "2 B 3 T 4"], {"num_heads": 3, "unidirectional": 1}, 2),
    ("attention_past_mask", "Attention", [*PROJECTED, "36", (np.array([[1, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 0]], np.int32), "B 9"), "2 B 3 T 4"], {"num_heads": 3}, 2),
    ("heads", "MultiHeadAttention", ["B S 12", "B T 12", "B T 12"], {"num_heads": 3}, 1),
    ("heads_bias", "MultiHeadAttention", ["B S 12", "B T 12", "B T 15", "39"], {"num_heads": 3, "scale": 0.4}, 1),
    ("heads_causal", "MultiHeadAttention", ["B S 12", "B S 12", "B S 12"], {"num_heads": 3, "unidirectional": 1}, 1),
    ("heads_present", "MultiHeadAttention", ["B S 12", "B S 12", "B S 12", "36"], {"num_heads": 3}, 3),
    (
        "heads_past",
        "MultiHeadAttention",
        ["B S 12", "B S 12", "B S 12", None, None, None, "B 3 T 4", "B 3 T 4"],
        {"num_heads": 3, "unidirectional": 1},
        3,
    ),
    ("heads_mask", "MultiHeadAttention", ["B S 12", "B S 12", "B S 12", "36", (MASK, "B S")], {"num_heads": 3}, 1),
    ("heads_lengths", "MultiHeadAttention", ["B S 12", "B S 12", "B S 12", None, (LENGTHS, "B")], {"num_heads": 3}, 1),
    ("heads_added", "MultiHeadAttention", ["B S 12", "B T 12", "B T 12", None, None, "1 3 S T"], {"num_heads": 3}, 1),
    ("heads_crossed", "MultiHeadAttention", ["B S 12", "B 3 T 4", "B 3 T 4"], {"num_heads": 3}, 1),
    ("heads_crossed_bias", "MultiHeadAttention", ["B S 12", "B 3 T 4", "B 3 T 4", "36"], {"num_heads": 3}, 1),
    ("heads_packed", "MultiHeadAttention", ["B S 3 3 4", None, None, "36"], {"num_heads": 3}, 1),
    ("heads_packed_pair", "MultiHeadAttention", ["B S 12", "B T 3 2 4"], {"num_heads": 3}, 1),
    ("rotary", "RotaryEmbedding", ["B S 12", (POSITIONS, "B S"), "8 2", "8 2"], {}, 1),
    ("rotary_offset", "RotaryEmbedding", ["B S 12", (np.array([3]), "1"), "8 2", "8 2"], {"interleaved": 1}, 1),
    ("rotary_heads", "RotaryEmbedding", ["B 3 S 4", (POSITIONS, "B S"), "8 2", "8 2"], {"scale": 2.0}, 1),
    ("rotary_part", "RotaryEmbedding", ["B S 18", (POSITIONS, "B S"), "8 2", "8 2"], {"num_heads": 3, "rotary_embedding_dim": 4}, 1),
    ("grouped", "GroupQueryAttention", GROUPED, {"num_heads": 4, "kv_num_heads": 2}, 3),
    ("grouped_scale", "GroupQueryAttention", GROUPED, {"num_heads": 4, "kv_num_heads": 2, "scale": 0.7}, 3),
    ("grouped_window", "GroupQueryAttention", GROUPED, {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2}, 3),
    ("grouped_softcap", "GroupQueryAttention", GROUPED, {"num_heads": 4, "kv_num_heads": 2, "softcap": 0.5}, 3),
    ("grouped_smooth", "GroupQueryAttention", GROUPED, {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1}, 3),
    ("grouped_sink", "GroupQueryAttention", [*GROUPED, None, None, None, None, "4"], {"num_heads": 4, "kv_num_heads": 2}, 3),
    ("grouped_bias", "GroupQueryAttention", [*GROUPED, None, None, None, "B 4 S S"], {"num_heads": 4, "kv_num_heads": 2}, 3),
    ("grouped_padded", "GroupQueryAttention", [*GROUPED[:5], (np.array([3, 1], np.int32), "B"), GROUPED[6], "8 8", "8 8"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, 3),
    ("grouped_past", "GroupQueryAttention", ["1 S 64", "1 S 32", "1 S 32", "1 2 T 16", "1 2 T 16", (np.array([8], np.int32), "1"), (np.array(9, np.int32), ""), "9 8", "9 8"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, 3),
    ("grouped_step", "GroupQueryAttention", ["B 1 64", "B 1 32", "B 1 32", "B 2 T 16", "B 2 T 16", (np.array([5, 5], np.int32), "B"), (np.array(6, np.int32), ""), "9 8", "9 8"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, 3),
    ("grouped_ragged", "GroupQueryAttention", ["B 1 64", "B 1 32", "B 1 32", "B 2 T 16", "B 2 T 16", (np.array([5, 3], np.int32), "B"), (np.array(6, np.int32), ""), "9 8", "9 8"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, 1),
    ("grouped_packed", "GroupQueryAttention", ["B S 128", None, None, *GROUPED[3:]], {"num_heads": 4, "kv_num_heads": 2}, 3),
    ("grouped_rotary", "GroupQueryAttention", [*GROUPED, "8 8", "8 8"], {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, 3),
    (
        "grouped_rotary_interleaved",
        "GroupQueryAttention",
        [*GROUPED, "8 8", "8 8"],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1},
        3,
    ),
    ("grouped_empty_past", "GroupQueryAttention", [*GROUPED[:3], "B 2 0 16", "B 2 0 16", *GROUPED[5:]], {"num_heads": 4, "kv_num_heads": 2}, 3),
    ("transpose_matmul", "TransposeMatMul", ["B 3 S", "3 5"], {"transA": 1, "alpha": 1.5}, 1),
]
# fmt: on


def shape(words: str) -> list[int]:
    return [SIZES[w] if w in SIZES else int(w) for w in words.split()]


def arrays(case: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(zlib.crc32(case[0].encode()))
    made = [None if x is None else random.standard_normal(shape(x)) if isinstance(x, str) else x[0] for x in case[2]]
    return {f"x{i}": array for i, array in enumerate(made) if array is not None}


def model(case: Any, dtype: Any = np.float32, symbolic: bool = False) -> onnx.ModelProto:
    _, operator, inputs, attributes, count = case
    domain = "" if operator == "SimplifiedLayerNormalization" else MS
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    outputs = [f"y{i}" if i in (0, -count - 1) or count > 0 else "" for i in range(abs(count))]
    unread = ["k", "v"] if operator == "GroupQueryAttention" and count == 1 else []  # its kernel needs to have these
    ports = []
    for name, array in arrays(case).items():
        words = inputs[int(name[1:])]
        words = (words if isinstance(words, str) else words[1]).split()
        dims = [w if symbolic and w in SIZES else shape(w)[0] for w in words]
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype) if array.dtype.kind == "f" else array.dtype)
        ports.append(helper.make_tensor_value_info(name, kind, dims))
    node = helper.make_node(operator, names, outputs + unread, domain=domain, name="node", **attributes)
    graph = helper.make_graph([node], "g", ports, [onnx.ValueInfoProto(name=o) for o in outputs if o])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)], ir_version=10)


# What ONNX Runtime 1.19.2 lacks, or does otherwise than later releases: it leaves out the bias of
# SkipSimplifiedLayerNormalization, reads a bias of the scores beyond its batch of one, crashes without a bias of the
# projection, lets a window hold one key more, takes
# several steps for the first, and computes anything for padding.
STORED = (
    *("skip_rms", "attention_no_bias", "attention_bias_mask", "heads_added"),
    *("grouped_window", "grouped_softcap", "grouped_smooth", "grouped_sink", "grouped_bias", "grouped_padded"),
    *("grouped_past", "grouped_ragged"),
)
