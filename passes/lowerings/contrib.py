"""ONNX Runtime's own operators (domain com.microsoft) in standard ones, whose rules give their gradients.

Their meaning is that of ONNX Runtime's CPU kernels, where there is one, else of its page of contrib operators. Attention is
in ``contrib_attention.py``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortc.rules import Unsupported, lowering

# ---- activations -----------------------------------------------------------------------------------------------------


@lowering("com.microsoft::Gelu")
def gelu(op, X):
    """Y = X · Φ(X)"""
    return (op.Gelu(X),)


@lowering("com.microsoft::BiasGelu")
def bias_gelu(op, A, B):
    """Y = gelu(A + B)"""
    return (op.Gelu(A + B),)


@lowering("com.microsoft::FastGelu")
def fast_gelu(op, X, bias=None):
    """Y = gelu(X + bias), Φ by tanh"""
    return (op.Gelu(X if bias is None else X + bias, approximate="tanh"),)


@lowering("com.microsoft::QuickGelu")
def quick_gelu(op, X, *, alpha=1.702):
    """Y = X · σ(alpha · X)"""
    return (X * op.Sigmoid(X * alpha),)


@lowering("com.microsoft::BiasAdd")
def bias_add(op, X, bias, skip):
    """Y = X + bias + skip"""
    return (X + bias + skip,)


@lowering("com.microsoft::BiasSplitGelu")
def bias_split_gelu(op, X, bias):
    """Y = left · gelu(right), the halves of the last axis of X + bias"""
    left, right = op.Split(X + bias, axis=-1, num_outputs=2, _outputs=2)
    return (left * op.Gelu(right),)


# Activations that fused kernels apply, with the attributes that their parameters are.
_ACTIVATIONS = {
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}


def _activate(op, x, name, parameters):
    """The activation of that name; parameters that are missing or None have the standard's defaults."""
    if not name:
        return x
    if name == "Clip" and len(parameters) == 2:
        return op.Clip(x, *parameters)
    if name not in _ACTIVATIONS:
        raise Unsupported(f"the activation {name}")
    return op.node(name, x, **dict(zip(_ACTIVATIONS[name], parameters, strict=False)))


# ---- products and convolutions ---------------------------------------------------------------------------------------


@lowering("com.microsoft::FusedMatMul")
def fused_matmul(op, A, B, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """Y = alpha · A·B, either one transposed; transBatch brings a first axis of rows [M, batch…, K] behind the batch"""
    product = op.MatMul(_turned(op, A, transA, transBatchA), _turned(op, B, transB, transBatchB))
    return (product if alpha == 1 else product * alpha,)


lowering("com.microsoft::TransposeMatMul")(fused_matmul)


def _turned(op, x, transposed, rows_first):
    r = op.rank(x)
    perm = [*range(1, r - 1), 0, r - 1] if rows_first else list(range(r))
    if transposed and r > 1:
        perm[-2:] = perm[:-3:-1]
    return x if perm == list(range(r)) else op.Transpose(x, perm=perm)


@lowering("com.microsoft::FusedGemm")
def fused_gemm(
    op, A, B, C=None, *, activation="", activation_alpha=None, activation_beta=None, activation_gamma=None, **attributes
):
    """Y = activation(Gemm(A, B, C))"""
    second = activation_gamma if activation == "Selu" else activation_beta
    return (_activate(op, op.Gemm(A, B, C, **attributes), activation, (activation_alpha, second)),)


@lowering("com.microsoft::GemmFastGelu")
def gemm_fast_gelu(op, X, W, bias=None):
    """Y = gelu(X·W + bias), Φ by tanh"""
    return fast_gelu(op, op.MatMul(X, W), bias)


@lowering("com.microsoft::FusedConv")
def fused_conv(op, X, W, B=None, Z=None, *, activation="", activation_params=(), **attributes):
    """Y = activation(Conv(X, W, B) + Z)"""
    y = op.Conv(X, W, B, **attributes)
    return (_activate(op, y if Z is None else y + Z, activation, activation_params),)


@lowering("com.microsoft::NhwcConv")
def nhwc_conv(op, X, W, B=None, **attributes):
    """Y = Conv(X, W, B), channels last in X, Y and W [M, kH, kW, C/group]"""
    y = op.Conv(_channels_second(op, X), _channels_second(op, W), B, **attributes)
    return (_channels_last(op, y),)


def _channels_second(op, x):
    r = op.rank(x)
    return op.Transpose(x, perm=[0, r - 1, *range(1, r - 1)])


def _channels_last(op, x):
    r = op.rank(x)
    return op.Transpose(x, perm=[0, *range(2, r), 1])


# ---- normalization ---------------------------------------------------------------------------------------------------


@lowering("SimplifiedLayerNormalization")
def simplified_layer_normalization(op, X, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Y = scale · X / √(mean X² + ε), over the axes from ``axis`` on; 1/√… is the second output"""
    x = _wide(op, X)
    axes = list(range(axis % op.rank(X), op.rank(X)))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes, keepdims=1) + epsilon))
    return op.cast(x * inverse * op.cast(scale, x), scale), inverse


def _wide(op, x):
    """Sums of squares overflow in 16 bits."""
    narrow = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return op.Cast(x, to=int(ir.DataType.FLOAT)) if narrow else x


@lowering("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(op, input, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """Y = LayerNormalization(input + skip + bias); also its mean, its 1/σ, and the sum"""
    total = _sum(input, skip, bias)
    return *op.LayerNormalization(total, gamma, beta, epsilon=epsilon, _outputs=3), total


@lowering("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op, input, skip, gamma, bias=None, *, epsilon=1e-12):
    """Y = SimplifiedLayerNormalization(input + skip + bias); also its 1/√…, and the sum; there is no mean"""
    total = _sum(input, skip, bias)
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


def _sum(input, skip, bias):
    total = input + skip
    return total if bias is None else total + bias


@lowering("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(
    op,
    input_ids,
    segment_ids,
    word_embedding,
    position_embedding,
    segment_embedding,
    gamma,
    beta,
    mask=None,
    position_ids=None,
    *,
    epsilon=1e-12,
    mask_index_type=None,
):
    """Y = LayerNormalization(word + position + segment); also the number of ones in each row of the mask, and the sum"""
    if position_ids is None:
        position_ids = op.Unsqueeze(numbers(op, op.dim(input_ids, 1)), [0])
    total = op.Gather(word_embedding, input_ids) + op.Gather(position_embedding, position_ids)
    if segment_embedding is not None:
        total = total + op.Gather(segment_embedding, segment_ids)
    if mask is None:
        count = op.zeros(op.vector(op.dim(input_ids, 0)), like=input_ids)
    else:
        count = op.ReduceSum(op.cast(op.Equal(mask, 1), mask), [1], keepdims=0)
    return op.LayerNormalization(total, gamma, beta, epsilon=epsilon), count, total


@lowering("com.microsoft::GroupNorm")
def group_norm(op, X, gamma, beta, *, groups, activation=0, channels_last=1, epsilon=1e-5):
    """Y = GroupNormalization(X), then y · σ(y) where activation is 1"""
    x = _channels_second(op, X) if channels_last else X
    stash = int(ir.DataType.DOUBLE) if X.dtype == ir.DataType.DOUBLE else None
    gamma, beta = op.cast(gamma, X), op.cast(beta, X)
    y = op.GroupNormalization(x, gamma, beta, num_groups=groups, epsilon=epsilon, stash_type=stash, _like=x)
    y = y * op.Sigmoid(y) if activation else y
    return (_channels_last(op, y) if channels_last else y,)


@lowering("com.microsoft::SkipGroupNorm")
def skip_group_norm(op, X, gamma, beta, skip, bias=None, **attributes):
    """Y = GroupNorm(X + skip + bias); also the sum. A skip or bias of [N, C] is the same everywhere in the image."""
    if attributes.get("channels_last", 1) == 0:
        raise Unsupported("channels that are not last")
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = _sum(X, skip, bias)
    return *group_norm(op, total, gamma, beta, **attributes), total


# ---- others ----------------------------------------------------------------------------------------------------------


@lowering("com.microsoft::Trilu")
def trilu(op, X, k=None, *, upper=1):
    """The standard's Trilu"""
    return (op.Trilu(X, k, upper=upper),)


@lowering("com.microsoft::Rfft")
def rfft(op, X, *, signal_ndim, normalized=0, onesided=1):
    """Y = the first half of the transform of the last axis, real and imaginary parts last"""
    _one_dimension(signal_ndim, normalized, onesided)
    return (op.DFT(op.Unsqueeze(X, [-1]), None, op.const(-2), onesided=1),)


@lowering("com.microsoft::Irfft")
def irfft(op, X, *, signal_ndim, normalized=0, onesided=1):
    """Y = the real signal of even length whose Rfft is X, over its length: the other half of X is conjugate"""
    _one_dimension(signal_ndim, normalized, onesided)
    axis = op.rank(X) - 2
    mirrored = op.Slice(X, [-2], [0], [axis], [-1]) * op.const([1.0, -1.0], like=X)
    whole = op.Concat(X, mirrored, axis=axis)
    signal = op.DFT(whole, None, op.const(axis), inverse=1)
    return (op.Squeeze(op.Slice(signal, [0], [1], [axis + 1]), [axis + 1]),)


def _one_dimension(signal_ndim, normalized, onesided):
    if signal_ndim != 1 or normalized or not onesided:
        raise Unsupported("a transform of several axes, normalised, or two-sided")


def numbers(op, n):
    """0, 1, …, n - 1 as an int64 vector; ``n`` is an int, or a vector of one number."""
    if isinstance(n, int):
        return op.const(np.arange(n))
    return op.Range(op.const(0), op.Squeeze(n, [0]), op.const(1))
