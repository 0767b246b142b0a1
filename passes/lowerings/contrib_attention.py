"""ONNX Runtime's attention operators in standard ones. Heads are B, N, S, H: batch, head, step, channel."""

from __future__ import annotations

import math

import numpy as np

from ortc.passes.lowerings.contrib import numbers
from ortc.rules import Unsupported, lowering


def attend(op, q, k, v, *, scale=None, bias=None, softcap=0.0, sink=None):
    """softmax(scale · q·kᵀ + bias)·v, of [B, N, S, H] and [B, N, T, H]; the scores may be capped to ±softcap before the bias.

    The result is [B, S, N·H]. ``sink`` holds one more score per head, of a key whose value is zero.
    """
    size = op.dims(q)[3]
    if not scale:
        if not isinstance(size, int):
            raise Unsupported("heads of unknown size, without a scale")
        scale = 1 / math.sqrt(size)
    scores = op.MatMul(q, op.transpose_last(k)) * scale
    if softcap:
        scores = softcap * op.Tanh(scores / softcap)
    scores = scores if bias is None else op.Add(scores, bias, _like=scores)
    if sink is not None:
        column = op.Expand(op.Reshape(sink, [1, -1, 1, 1]), op.vector(op.dim(q, 0), 1, op.dim(q, 2), 1))
        weights = op.Slice(op.Softmax(op.Concat(column, scores, axis=3), axis=-1), [1], [np.iinfo(np.int64).max], [3])
    else:
        weights = op.Softmax(scores, axis=-1)
    return _merged(op, op.MatMul(weights, v))


def _heads(op, x, count):
    """[B, S, N·H] as [B, S, N, H]"""
    hidden = op.dims(x)[2]
    return op.Reshape(x, [0, 0, count, hidden // count if isinstance(hidden, int) else -1])


def _merged(op, x):
    """[B, N, S, H] as [B, S, N·H]"""
    n, size = op.dims(x)[1], op.dims(x)[3]
    return op.Reshape(_turned(op, x), [0, 0, n * size if isinstance(n, int) and isinstance(size, int) else -1])


def _turned(op, x):
    """[B, S, N, H] as [B, N, S, H], and back"""
    return op.Transpose(x, perm=[0, 2, 1, 3])


def _total(terms):
    """The sum of those that are not None."""
    found = [t for t in terms if t is not None]
    return sum(found[1:], found[0]) if found else None


def _causal(op, q, k):
    """0 where a query [.., S, H] sees a key [.., T, H], the last of both being of one step, else the lowest number: [S, T]"""
    steps, keys = op.dim(q, 2), op.dim(k, 2)
    query, key = numbers(op, steps), numbers(op, keys)
    if op.dims(q)[2] != op.dims(k)[2]:
        query = op.Add(query, op.Sub(op.vector(keys), op.vector(steps)))
    seen = op.LessOrEqual(key, op.Unsqueeze(query, [1]))
    return op.where(seen, 0.0, _lowest(q), like=q)


def _lowest(like):
    return float(like.dtype.min)


def _padding(op, mask, q, k, filtered):
    """What a mask adds to the scores, broadcast to [B, N, S, T]: ``filtered`` where it hides.

    The mask is [B, T], [B, S, T] or [B, 1, M, M], not hidden where positive; or [B]: the keys from there on are hidden;
    or [2·B]: also those before the second half's.
    """
    rank = op.rank(mask)
    if rank == 1:
        seen = _within(op, mask, q, k)
    elif rank == 4:
        raise Unsupported("a mask of four dimensions")
    else:
        seen = op.Unsqueeze(op.Greater(mask, 0), [1, 2] if rank == 2 else [1])
    return op.where(seen, 0.0, filtered, like=q)


def _within(op, mask, q, k):
    batch, count = op.dims(q)[0], op.dims(mask)[0]
    key = op.cast(numbers(op, op.dim(k, 2)), mask)
    if count == batch:
        return op.Less(key, op.Unsqueeze(mask, [1, 2, 3]))
    if not (isinstance(count, int) and isinstance(batch, int) and count == 2 * batch) and count != f"2*{batch}":
        raise Unsupported(f"a mask of [{count}] for a batch of {batch}")
    end, start = op.Split(op.Unsqueeze(mask, [1, 2, 3]), axis=0, num_outputs=2, _outputs=2)
    return op.And(op.Less(key, end), op.GreaterOrEqual(key, start))


@lowering("com.microsoft::Attention")
def attention(
    op,
    input,
    weights,
    bias=None,
    mask_index=None,
    past=None,
    attention_bias=None,
    past_sequence_length=None,
    *,
    num_heads,
    unidirectional=0,
    qkv_hidden_sizes=None,
    scale=None,
    mask_filter_value=-10000.0,
    do_rotary=0,
    rotary_embedding_dim=0,
    past_present_share_buffer=0,
):
    """Q, K, V = input·weights + bias; also K and V behind their pasts, stacked"""
    if past_sequence_length is not None or past_present_share_buffer or do_rotary:
        raise Unsupported("a shared cache, or rotation")
    width = op.dims(weights)[1]
    if qkv_hidden_sizes is None and not isinstance(width, int):
        raise Unsupported("weights of unknown width")
    projected = op.MatMul(input, weights)
    projected = projected if bias is None else projected + bias
    parts = op.Split(projected, list(qkv_hidden_sizes or [width // 3] * 3), axis=-1, _outputs=3)
    q, k, v = (_turned(op, _heads(op, part, num_heads)) for part in parts)
    if past is not None:
        old = op.Split(past, axis=0, num_outputs=2, _outputs=2)
        k, v = (op.Concat(op.Squeeze(before, [0]), x, axis=2) for before, x in zip(old, (k, v), strict=True))
    terms = [
        None if mask_index is None else _padding(op, mask_index, q, k, mask_filter_value),
        _causal(op, q, k) if unidirectional else None,
        attention_bias,
    ]
    y = attend(op, q, k, v, scale=scale, bias=_total(terms))
    same = op.dims(k)[3] == op.dims(v)[3]
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0) if same else None


@lowering("com.microsoft::MultiHeadAttention")
def multi_head_attention(
    op,
    query,
    key=None,
    value=None,
    bias=None,
    key_padding_mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    cache_indirection=None,
    *,
    num_heads,
    unidirectional=0,
    scale=None,
    mask_filter_value=-10000.0,
    **others,
):
    """Y = attention over K and V behind their pasts; also these.

    The three come apart as [B, S, N·H] (K and V also as heads [B, N, T, H], without bias), or packed in the query
    [B, S, N, 3, H], or the last two in the key [B, S, N, 2, H].
    """
    if past_sequence_length is not None or cache_indirection is not None or others.get("qk_output"):
        raise Unsupported("a shared cache, beams, or scores as an output")
    q, k, v = _three(op, query, key, value, num_heads)
    if bias is not None:
        q, k, v = _biased(op, bias, q, k, v, num_heads, whole=k is not key)
    q = _turned(op, q)
    if k is not key:
        k, v = _turned(op, k), _turned(op, v)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    terms = [
        None if key_padding_mask is None else _padding(op, key_padding_mask, q, k, mask_filter_value),
        _causal(op, q, k) if unidirectional else None,
        attention_bias,
    ]
    return attend(op, q, k, v, scale=scale, bias=_total(terms)), k, v


def _three(op, query, key, value, count):
    """Q, K and V as [B, S, N, H]; K and V that are heads already as they are."""
    if op.rank(query) == 5:
        return tuple(op.Squeeze(x, [3]) for x in op.Split(query, axis=3, num_outputs=3, _outputs=3))
    q = _heads(op, query, count)
    if op.rank(key) == 5:
        return q, *(op.Squeeze(x, [3]) for x in op.Split(key, axis=3, num_outputs=2, _outputs=2))
    if op.rank(key) == 4:
        return q, key, value
    return q, _heads(op, key, count), _heads(op, value, count)


def _biased(op, bias, q, k, v, count, whole):
    """Each with its part of the bias, [N, H]; keys and values that are heads already (not ``whole``) have none."""
    sizes = [op.dims(x)[3] for x in (q, k, v)]
    if not all(isinstance(size, int) for size in sizes):
        raise Unsupported("heads of unknown size, with a bias")
    parts = op.Split(bias, [count * size for size in sizes], axis=0, _outputs=3)
    biases = [op.Reshape(part, [count, -1]) for part in parts]
    return (q + biases[0], k + biases[1], v + biases[2]) if whole else (q + biases[0], k, v)


@lowering("com.microsoft::RotaryEmbedding")
def rotary_embedding(
    op,
    input,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    interleaved=0,
    num_heads=0,
    rotary_embedding_dim=0,
    is_packed_batching=0,
    scale=1.0,
):
    """Pairs of channels turned by the angle of their step; the input is [B, S, N·H] or [B, N, S, H]"""
    if is_packed_batching:
        raise Unsupported("packed batches")
    heads_first = op.rank(input) == 4
    x = input if heads_first else _heads(op, input, num_heads or _count(op, input, cos_cache))
    if op.rank(position_ids) == 1:
        steps = numbers(op, op.dim(x, 2 if heads_first else 1))
        position_ids = op.Unsqueeze(op.Add(position_ids, steps), [0])
    y = _rotated(op, x, position_ids, cos_cache, sin_cache, interleaved, 1 if heads_first else 2)
    return (y if heads_first else op.reshape_like(y, input),)


def _count(op, x, cos_cache):
    """How many heads there are, if all of their channels turn."""
    hidden, half = op.dims(x)[2], op.dims(cos_cache)[1]
    if not isinstance(hidden, int) or not isinstance(half, int):
        raise Unsupported("heads of unknown size")
    return hidden // (2 * half)


def _rotated(op, x, positions, cos_cache, sin_cache, interleaved, axis):
    """x [B, …, H] with its first channels turned: (a, b) → (a·cos − b·sin, b·cos + a·sin); ``axis`` is that of the heads.

    The pairs are a channel of the first half with one of the second, or neighbours where interleaved.
    """
    half, size = op.dims(cos_cache)[1], op.dims(x)[3]
    if not isinstance(half, int) or not isinstance(size, int):
        raise Unsupported("heads of unknown size")
    cos, sin = (op.Unsqueeze(op.Gather(cache, positions), [axis]) for cache in (cos_cache, sin_cache))
    parts = [2 * half] if size == 2 * half else [2 * half, size - 2 * half]
    turned, *rest = [x] if len(parts) == 1 else op.Split(x, parts, axis=3, _outputs=2)
    if interleaved:
        pairs = op.Reshape(turned, [0, 0, 0, half, 2])
        a, b = (op.Squeeze(p, [4]) for p in op.Split(pairs, axis=4, num_outputs=2, _outputs=2))
        new = [op.Unsqueeze(p, [4]) for p in (a * cos - b * sin, b * cos + a * sin)]
        y = op.Reshape(op.Concat(*new, axis=4), [0, 0, 0, 2 * half])
    else:
        a, b = op.Split(turned, axis=3, num_outputs=2, _outputs=2)
        y = op.Concat(a * cos - b * sin, b * cos + a * sin, axis=3)
    return op.Concat(y, *rest, axis=3) if rest else y


@lowering("com.microsoft::GroupQueryAttention")
def group_query_attention(
    op,
    query,
    key,
    value,
    past_key,
    past_value,
    seqlens_k,
    total_sequence_length,
    cos_cache=None,
    sin_cache=None,
    position_ids=None,
    attention_bias=None,
    head_sink=None,
    *rest,
    num_heads,
    kv_num_heads,
    do_rotary=0,
    rotary_interleaved=0,
    local_window_size=-1,
    scale=None,
    softcap=0.0,
    smooth_softmax=0,
    causal=1,
    **others,
):
    """Causal attention, several heads sharing a key; also K and V, behind their pasts.

    seqlens_k counts each row's keys, less one. What is padding comes after them in the past, and in the new ones; so the
    keys of a row's past are those that its new ones are not. The second and third output are as of rows without padding.
    """
    if any(x is not None for x in rest) or others.get("qk_output") or others.get("sliding_window_cache") or not causal:
        raise Unsupported("a quantised or sliding cache, normalised heads, scores as an output, or no causality")
    if key is None:
        q, k, v = _unpacked(op, query, num_heads, kv_num_heads)
    else:
        q, k, v = _heads(op, query, num_heads), _heads(op, key, kv_num_heads), _heads(op, value, kv_num_heads)
    steps = numbers(op, op.dim(q, 1))
    count = op.Unsqueeze(op.Add(op.cast(seqlens_k, steps), 1), [1])  # [B, 1]
    before = op.Max(op.Sub(count, op.Reshape(op.vector(op.dim(q, 1)), [1])), op.const(0))
    positions = op.Add(before, steps)  # [B, S]
    if do_rotary:
        at = positions if position_ids is None else position_ids
        q, k = (_rotated(op, x, at, cos_cache, sin_cache, rotary_interleaved, 2) for x in (q, k))
    q, k, v = (_turned(op, x) for x in (q, k, v))
    own = op.where(op.Less(positions, count), positions, np.iinfo(np.int64).max, like=positions)
    where = own
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
        old = numbers(op, op.dim(past_key, 2))
        old = op.where(op.Less(old, before), old, np.iinfo(np.int64).max, like=old)
        where = op.Concat(old, own, axis=1)  # the position of every key, beyond all where it is padding: [B, T]
    seen = _seen(op, positions, where, local_window_size)
    bias = op.Unsqueeze(op.where(seen, 0.0, _lowest(q), like=q), [1])
    if attention_bias is not None:
        bias = bias + attention_bias
    sink = head_sink if head_sink is not None else op.zeros(op.const([num_heads]), like=q) if smooth_softmax else None
    shared = [_repeated(op, x, num_heads // kv_num_heads) for x in (k, v)]
    return attend(op, q, *shared, scale=scale, bias=bias, softcap=softcap, sink=sink), k, v


def _unpacked(op, query, num_heads, kv_num_heads):
    heads = _heads(op, query, num_heads + 2 * kv_num_heads)
    return op.Split(heads, [num_heads, kv_num_heads, kv_num_heads], axis=2, _outputs=3)


def _seen(op, positions, keys, window):
    """Which keys a query sees: those of no later step, the last ``window`` only: [B, S, T]"""
    query, key = op.Unsqueeze(positions, [2]), op.Unsqueeze(keys, [1])
    seen = op.LessOrEqual(key, query)
    return seen if window <= 0 else op.And(seen, op.Greater(key, op.Sub(query, window)))


def _repeated(op, x, times):
    """[B, K, T, H] as [B, K·times, T, H], every head ``times`` times in a row"""
    if times == 1:
        return x
    each = op.Expand(op.Unsqueeze(x, [2]), [1, 1, times, 1, 1])
    heads, size = op.dims(x)[1], op.dims(x)[3]
    return op.Reshape(each, op.vector(op.dim(x, 0), heads * times, op.dim(x, 2), size))
