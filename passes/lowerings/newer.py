"""Operators of opsets newer than a target's that ONNX does not define through others; the front calls them ``ortc::…``."""

from __future__ import annotations

from ortc.rules import Unsupported, lowering


@lowering("ortc::CumProd")
def cum_prod(op, x, axis, *, exclusive=0, reverse=0):
    """One factor after the other along the axis"""
    place = op.constant(axis)
    if place is None:
        raise Unsupported("an axis that is not a constant")
    [along] = op.axes(x, place.reshape(()))
    order = [along, *(a for a in range(op.rank(x)) if a != along)]
    factors = op.Transpose(x, perm=order)
    one = op.expand_like(op.const(1, like=x), op.Squeeze(op.Slice(factors, [0], [1], [0]), [0]))

    def body(nested, product, factor):
        grown = product * factor
        return [grown], [nested.Identity(product if exclusive else grown)]

    _, [made] = op.scan(body, [one], [factors], reverse=bool(reverse))
    return (op.Transpose(made, perm=[order.index(a) for a in range(op.rank(x))]),)


@lowering("ortc::TensorScatter")
def tensor_scatter(op, past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """The update takes its places along the axis, from each sample's own first one on"""
    [along] = op.axes(past_cache, axis)
    after = [1] * (op.rank(update) - 1 - along)
    places = op.Range(op.const(0), op.Squeeze(op.vector(op.dim(update, along))), op.const(1))
    places = op.Reshape(places, [-1, *after])
    if write_indices is not None:
        places = places + op.Reshape(write_indices, [-1, *[1] * (op.rank(update) - 1)])
    if mode == "circular":
        places = op.Mod(places, op.vector(op.dim(past_cache, along)))
    return (op.ScatterElements(past_cache, op.expand_like(places, update), update, axis=along),)
