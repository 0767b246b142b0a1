"""Recurrent layers: LSTM, GRU, RNN.

The pre-activations of all steps are large products, since the hidden states are known: Y, shifted by one step. Only the
cell states of an LSTM need a walk forwards, over element-wise operators. Where the target has a kernel that gives the
gates and cell states of the forward (LSTMTraining, GRUTraining), none of this is computed again.

Of the way backwards, only what depends on the next step lies in a Scan: its body holds the product with R, and
element-wise factors that were made for all steps at once. The gradients of X, W, R and B follow as large products from
those of the pre-activations.

Formulas: the chain rule on the equations of the ONNX specification; ⊙ is element-wise, x₋ is x of the step before, and
f' stands for f' at the pre-activation. What the specification leaves open follows ONNX Runtime: ``clip`` bounds the
pre-activations of the gates (not the C in h(C)), and the last states of a sequence of length 0 are 0.
"""

from __future__ import annotations

import numpy as np

from ortc.passes.gradients.activations import (
    elu,
    hard_sigmoid,
    leaky_relu,
    relu,
    sigmoid,
    softplus,
    softsign,
    tanh,
    thresholded_relu,
)
from ortc.rules import Unsupported, gradient

# ---- activations -----------------------------------------------------------------------------------------------------

# Name -> (how many of alpha and beta it has; its value at x; the gradient at x, where its value is y, for g).
_ACTIVATIONS = {
    "Sigmoid": (0, lambda op, x: op.Sigmoid(x), lambda op, x, y, g: sigmoid(op, y, g)),
    "Tanh": (0, lambda op, x: op.Tanh(x), lambda op, x, y, g: tanh(op, y, g)),
    "Relu": (0, lambda op, x: op.Relu(x), lambda op, x, y, g: relu(op, y, g)),
    "Softsign": (0, lambda op, x: op.Softsign(x), lambda op, x, y, g: softsign(op, x, g)),
    "Softplus": (0, lambda op, x: op.Softplus(x), lambda op, x, y, g: softplus(op, x, g)),
    "Affine": (2, lambda op, x, a, b: a * x + b, lambda op, x, y, g, a, b: a * op.expand_like(g, x)),
    "LeakyRelu": (
        1,
        lambda op, x, a: op.LeakyRelu(x, alpha=a),
        lambda op, x, y, g, a: leaky_relu(op, x, g, alpha=a),
    ),
    "ThresholdedRelu": (
        1,
        lambda op, x, a: op.ThresholdedRelu(x, alpha=a),
        lambda op, x, y, g, a: thresholded_relu(op, x, g, alpha=a),
    ),
    "ScaledTanh": (
        2,
        lambda op, x, a, b: a * op.Tanh(b * x),
        lambda op, x, y, g, a, b: tanh(op, op.Tanh(b * x), a * b * g),
    ),
    "HardSigmoid": (
        2,
        lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
        lambda op, x, y, g, a, b: hard_sigmoid(op, x, g, alpha=a, beta=b),
    ),
    "Elu": (1, lambda op, x, a: op.Elu(x, alpha=a), lambda op, x, y, g, a: elu(op, x, g, alpha=a)),
}


def _activations(names, alphas, betas, clip):
    """For every name its value as f(op, x) and its gradient as f(op, x, y, g); scales are taken from the lists in order."""
    left = list(alphas), list(betas)
    found = []
    for name in names:
        if name not in _ACTIVATIONS:
            raise Unsupported(f"activation {name!r}; these are covered: {', '.join(_ACTIVATIONS)}")
        count, value, back = _ACTIVATIONS[name]
        if not all(left[:count]):
            raise Unsupported(
                f"activation {name} without its activation_alpha and activation_beta; runtimes differ in defaults"
            )
        scales = [float(given.pop(0)) for given in left[:count]]
        found.append(_clipped(value, back, scales, float(clip)))
    return found


def _clipped(value, back, scales, clip):
    if not clip:
        return lambda op, x: value(op, x, *scales), lambda op, x, y, g: back(op, x, y, g, *scales)

    def clipped_back(op, x, y, g):
        inside = op.LessOrEqual(op.Abs(x), op.const(clip, like=x))
        return op.where(inside, back(op, x, y, g, *scales), 0, like=x)

    return lambda op, x: value(op, op.Clip(x, -clip, clip), *scales), clipped_back


# ---- what the layers share -------------------------------------------------------------------------------------------


def _directions(op, one, direction, layout, X, weights, initial, lens, Y, dY, last):
    """The gradients of both directions together.

    Args:
        one: called for direction d as ``one(d, reverse, x, weights, initial, lens, y, dy, last)``, steps first, without the
            axis of directions; returns dx, and the gradients of weights and initial states.
        weights: W, R, B, …, [directions, …] each; None where left out.
        initial: the states before the first step, [directions, batch, hidden] each; None for zeros.
        lens: the lengths of the sequences as int64, [batch]; None if all are full.
        last: the gradients of the states after the last step; None for zeros.

    Returns:
        dX, gradients of the weights, gradients of the initial states; None where the input is.
    """
    both = direction == "bidirectional"
    if layout:
        X, Y, dY = op.Transpose(X, perm=[1, 0, 2]), _perm(op, Y, [1, 2, 0, 3]), _perm(op, dY, [1, 2, 0, 3])
        initial, last = ([_perm(op, s, [1, 0, 2]) for s in states] for states in (initial, last))
    if lens is not None:
        lens = op.cast(lens, op.const(0))
        used = op.Greater(op.Unsqueeze(lens, [1]), 0)
        last = [s if s is None else op.where(used, s, 0, like=s) for s in last]
        dY = dY if dY is None else op.where(op.Unsqueeze(_valid(op, X, lens), [1]), dY, 0, like=dY)

    def part(x, d, axis=0):
        if x is None:
            return None
        return op.Gather(x, d, axis=axis) if both else op.Squeeze(x, [axis])

    found = []
    for d in range(1 + both):
        y, dy = part(Y, d, 1), part(dY, d, 1)
        zeros = op.zeros(op.vector(op.dim(y, 1), op.dim(y, 2)), like=y)
        starts, ends = ([zeros if s is None else part(s, d) for s in states] for states in (initial, last))
        reverse = d == 1 or direction == "reverse"
        found.append(one(d, reverse, X, [part(w, d) for w in weights], starts, lens, y, dy, ends))

    def joined(parts, like):
        if like is None:
            return None
        parts = [op.Unsqueeze(p, [0]) for p in parts]
        return op.Concat(*parts, axis=0, _like=like) if both else parts[0]

    dxs, dweights, dinitial = zip(*found, strict=True)
    dX = op.Add(*dxs) if both else dxs[0]
    dweights = [joined(parts, w) for *parts, w in zip(*dweights, weights, strict=True)]
    dinitial = [joined(parts, s) for *parts, s in zip(*dinitial, initial, strict=True)]
    if layout:
        dX, dinitial = op.Transpose(dX, perm=[1, 0, 2]), [_perm(op, s, [1, 0, 2]) for s in dinitial]
    return dX, dweights, dinitial


def _perm(op, x, perm):
    return None if x is None else op.Transpose(x, perm=perm)


def _steps(op, x, start):
    """start, start + 1, … for the steps of ``x``, [steps, 1]."""
    count = op.Squeeze(op.vector(op.dim(x, 0)))
    return op.Unsqueeze(op.Range(op.const(start), op.Add(count, start), op.const(1)), [1])


def _valid(op, x, lens):
    """Which steps belong to the sequences: [steps, batch, 1]."""
    return op.Unsqueeze(op.Less(_steps(op, x, 0), lens), [2])


def _within(op, x, lens, other=0):
    """``x``, [steps, batch, …], with ``other`` in the steps after the end of a sequence."""
    return x if lens is None else op.where(_valid(op, x, lens), x, other, like=x)


def _before(op, states, first, reverse, lens):
    """The state before each step, from those after it and the one before the first."""
    ahead = op.Unsqueeze(first, [0])
    if not reverse:
        return op.Concat(ahead, op.Slice(states, [0], [-1], [0]), axis=0, _like=states)
    shifted = op.Concat(op.Slice(states, [1], [np.iinfo(np.int64).max], [0]), ahead, axis=0, _like=states)
    if lens is None:
        return shifted
    starts = op.Unsqueeze(op.Equal(_steps(op, states, 1), lens), [2])
    return op.Where(starts, ahead, shifted, _like=states)


def _rows(op, x):
    """[steps, batch, n] as a matrix of n columns."""
    return op.Flatten(x, axis=2)


def _pre_activations(op, x, w, b, *more):
    """x·wᵀ + b, plus the same of another x, w and b: [steps, batch, rows of w]."""
    product = op.Gemm(_rows(op, x), w, b, transB=1)
    if more:
        y, r, c = more
        product = op.Gemm(_rows(op, y), r, product if c is None else op.Add(product, c), transB=1)
    return op.Reshape(product, op.vector(op.dim(x, 0), op.dim(x, 1), op.dim(w, 0)), allowzero=1)


def _split(op, x, count, axis):
    return [None] * count if x is None else op.Split(x, axis=axis, num_outputs=count, _outputs=count)


def _summed(op, bias):
    """The two halves of a bias together, where both are added to the same."""
    return None if bias is None else op.Add(*_split(op, bias, 2, 0))


def _over_steps(op, da, x):
    """The gradient of a weight: Σ over steps and sequences of daᵀ·x."""
    return op.Gemm(_rows(op, da), _rows(op, x), transA=1)


def _sum(op, da):
    return op.ReduceSum(da, [0, 1], keepdims=0)


def _walk_back(op, body, starts, factors, dy, lens, reverse):
    """The Scan against the order of the steps: ``body(op, dh, *states, *factors)``, with dH of the step added to dh.

    After the end of a sequence dh passes unchanged.
    """
    walked = [*factors, *([] if dy is None else [dy]), *([] if lens is None else [_valid(op, factors[0], lens)])]

    def step(op, dh, *rest):
        rest = list(rest)
        valid = None if lens is None else rest.pop()
        dh = dh if dy is None else op.Add(dh, rest.pop(), _like=dh)
        (new, *states), results = body(op, dh, *rest)
        new = new if valid is None else op.Where(valid, new, dh, _like=new)
        return [new, *states], results

    return op.scan(step, starts, walked, not reverse)


def _samples(gates, states, count, extra):
    """Samples of a layer: 5 steps (also 1) of 2 sequences of 3 numbers, 4 hidden units."""

    def weights(d):
        return {"X": (5, 2, 3), "W": (d, 4 * gates, 3), "R": (d, 4 * gates, 4), "hidden_size": 4}

    def full(d):
        return {**weights(d), "B": (d, 8 * gates), **dict.fromkeys(states, (d, 2, 4))}

    reverse, both, lens = {"direction": "reverse"}, {"direction": "bidirectional"}, np.array([5, 3], np.int32)
    batch_first = {"X": (2, 5, 3), **dict.fromkeys(states, (2, 2, 4)), "layout": 1}
    last = ["", *[f"last{i}" for i in range(count - 1)]]
    return (
        {**weights(1), "_outputs": count},
        {**full(1), "_outputs": ["Y"]},
        {**full(1), **reverse, "_outputs": last[:2]},
        {**full(1), "X": (1, 2, 3), "_outputs": last},
        {**full(2), **both, "_outputs": count},
        {**weights(2), **both, "_outputs": ["Y", "unused"]},
        {**full(1), "sequence_lens": lens, "_outputs": count},
        {**full(1), **reverse, "sequence_lens": lens, "_outputs": last},
        {**full(2), **both, "sequence_lens": np.array([0, 4], np.int32), "_outputs": count},
        {**full(1), "clip": 0.7, "_outputs": count},
        *({**full(1), "_outputs": count, **e} for e in extra),
        {**full(2), **both, "sequence_lens": lens, "clip": 1.5, "_outputs": count, **extra[0], **_double(extra[0])},
        {**full(2), **both, **batch_first, "_outputs": count},
    )


def _training(gates, states, last, kept):
    """Samples of a training form, which has all its outputs: what it keeps for the gradient is not part of the loss."""
    weights = {"X": (5, 2, 3), "W": (1, 4 * gates, 3), "R": (1, 4 * gates, 4), "hidden_size": 4}
    full = {**weights, "B": (1, 8 * gates), **dict.fromkeys(states, (1, 2, 4))}
    unused = [f"unused_{i}" for i in range(kept)]
    return (
        {**full, "_outputs": ["Y", *last, *unused]},
        {**weights, "_outputs": ["Y", *(f"unused_{name}" for name in last), *unused]},
        {**full, "X": (1, 2, 3), "_outputs": ["unused_Y", *last, *unused]},
    )


def _double(sample):
    """The same for two directions."""
    return {k: (2, *v[1:]) if isinstance(v, tuple) else v * 2 if isinstance(v, list) else v for k, v in sample.items()}


# ---- LSTM ------------------------------------------------------------------------------------------------------------

_LSTM = _samples(
    4,
    ("initial_h", "initial_c"),
    3,
    (
        {"P": (1, 12), "activations": ["Sigmoid", "Softsign", "Relu"]},
        {"P": (1, 12)},
        {"input_forget": 1},
        {"P": (1, 12), "input_forget": 1, "clip": 0.7},
        {
            "activations": ["HardSigmoid", "ScaledTanh", "Affine"],
            "activation_alpha": [0.3, 1.2, 0.9],
            "activation_beta": [0.4, 0.8, 0.1],
        },
    ),
)


@gradient("LSTM", wrt="X W R B initial_h initial_c P", samples=_LSTM)
def lstm(
    op,
    X,
    W,
    R,
    B,
    sequence_lens,
    initial_h,
    initial_c,
    P,
    Y,
    dY,
    dY_h,
    dY_c,
    *,
    activations=None,
    activation_alpha=(),
    activation_beta=(),
    clip=0.0,
    direction="forward",
    hidden_size=None,
    input_forget=0,
    layout=0,
):
    """C = f⊙C₋ + i⊙g, H = o⊙h(C), with a = x·Wᵀ + H₋·Rᵀ + b + peepholes (p⊙C₋ in i and f, p⊙C in o):

    dC += dH⊙o⊙h'(C) + da_o⊙p_o
    da = (dC⊙g⊙i', dH⊙h(C)⊙o', dC⊙C₋⊙f', dC⊙i⊙g'); coupled (f = 1 - i): da_i = dC⊙(g - C₋)⊙i', da_f = 0
    dC₋ = dC⊙f + da_i⊙p_i + da_f⊙p_f,  dH₋ = da·R
    """
    names = activations or ["Sigmoid", "Tanh", "Tanh"] * (1 + (direction == "bidirectional"))
    functions = _activations(names, activation_alpha, activation_beta, clip)
    free = _activations(names, activation_alpha, activation_beta, 0)

    def one(d, reverse, x, weights, starts, lens, y, dy, ends):
        w, r, b, p = weights
        (f, f_back), (g, g_back), _ = functions[3 * d : 3 * d + 3]
        h, h_back = free[3 * d + 2]
        h_before = _before(op, y, starts[0], reverse, lens)
        pre = _pre_activations(op, x, w, _summed(op, b), h_before, r, None)
        ai, ao, af, ag = _split(op, pre, 4, 2)
        pi, po, pf = _split(op, p, 3, 0)
        new = g(op, ag)

        def gates(op, c, ai, af):
            """Pre-activation and value of the input gate, pre-activation of the forget gate and what is kept."""
            ai, af = (ai, af) if p is None else (op.Add(ai, op.Mul(pi, c)), op.Add(af, op.Mul(pf, c)))
            i = f(op, ai)
            return ai, i, af, op.Sub(1, i) if input_forget else f(op, af)

        def cell_with_peepholes(op, c, ai, af, new, valid=None):
            _, i, _, keep = gates(op, c, ai, af)
            after = op.Add(op.Mul(keep, c), op.Mul(i, new), _like=c)
            return after if valid is None else op.Where(valid, after, c, _like=c)

        if p is None:
            ai, i, af, keep = gates(op, None, ai, af)
            keep = _within(op, keep, lens, 1)
            walk, walked = _cell, [keep, _within(op, op.Mul(i, new), lens)]
        else:
            walk, walked = cell_with_peepholes, [ai, af, new] + ([] if lens is None else [_valid(op, new, lens)])
        c = _cells(op, walk, starts[1], walked, reverse)
        c_before = _before(op, c, starts[1], reverse, lens)
        if p is not None:
            ai, i, af, keep = gates(op, c_before, ai, af)
            ao = op.Add(ao, op.Mul(po, c))
        o, out = f(op, ao), h(op, c)

        to_i = f_back(op, ai, i, op.Sub(new, c_before) if input_forget else new)
        to_o = f_back(op, ao, o, out)
        to_f = op.zeros_like(to_i) if input_forget else f_back(op, af, keep, c_before)
        to_c = h_back(op, c, out, o)
        if p is not None:
            to_c = op.Add(to_c, op.Mul(to_o, po))
            keep = op.Add(keep, op.Mul(to_i, pi) if input_forget else op.Add(op.Mul(to_i, pi), op.Mul(to_f, pf)))
            keep = _within(op, keep, lens, 1)
        slopes = _within(op, op.Concat(to_i, to_o, to_f, g_back(op, ag, new, i), axis=2), lens)
        factors = [slopes, _within(op, to_c, lens), keep]
        dx, dweights, dstates, da = _lstm_back(op, x, w, r, h_before, factors, ends, dy, lens, reverse)
        if p is not None:
            di, do, df, _ = _split(op, da, 4, 2)
            parts = [_sum(op, op.Mul(g, c)) for g, c in ((di, c_before), (do, c), (df, c_before))]
            return dx, [*dweights, op.Concat(*parts, axis=0)], dstates
        return dx, [*dweights, None], dstates

    dX, (dW, dR, dB, dP), (dh, dc) = _directions(
        op, one, direction, layout, X, [W, R, B, P], [initial_h, initial_c], sequence_lens, Y, dY, [dY_h, dY_c]
    )
    return dX, dW, dR, dB, dh, dc, dP


def _cell(op, c, keep, add):
    return op.Add(op.Mul(keep, c), add, _like=c)


def _cells(op, cell, first, walked, reverse):
    """The states after each step, by ``cell(op, c, *walked)``."""
    return op.scan(lambda op, *values: ([new := cell(op, *values)], [new]), [first], walked, reverse)[1][0]


def lstm_gates(op, X, W, R, B, initial_h, initial_c, Y):
    """What LSTMTraining gives beside an LSTM's outputs: C and i, o, f, g of every step, [steps, 1, batch, n·hidden]."""
    (w, r, b), y, h, c = _only_direction(op, [W, R, B], Y, initial_h, initial_c)
    pre = _pre_activations(op, X, w, _summed(op, b), _before(op, y, h, False, None), r, None)
    ai, ao, af, ag = _split(op, pre, 4, 2)
    i, o, f, g = op.Sigmoid(ai), op.Sigmoid(ao), op.Sigmoid(af), op.Tanh(ag)
    cells = _cells(op, _cell, c, [f, op.Mul(i, g)], False)
    return op.Unsqueeze(cells, [1]), op.Unsqueeze(op.Concat(i, o, f, g, axis=2), [1])


def _only_direction(op, weights, Y, *initial):
    """Weights, hidden states and initial states without the axis of directions; zeros for those that are left out."""
    y = op.Squeeze(Y, [1])
    zeros = op.zeros(op.vector(op.dim(y, 1), op.dim(y, 2)), like=y)
    weights = [None if w is None else op.Squeeze(w, [0]) for w in weights]
    return weights, y, *(zeros if s is None else op.Squeeze(s, [0]) for s in initial)


def _lstm_back(op, x, w, r, h_before, factors, ends, dy, lens, reverse):
    """Gradients of x, the weights and the initial states, and da, from the factors of da, of dC by dH, and of dC₋ by dC."""

    def back(op, dh, dc, slopes, to_c, keep):
        dc = op.Add(dc, op.Mul(dh, to_c), _like=dc)
        da = op.Mul(op.Concat(dc, dh, dc, dc, axis=1), slopes)
        return [op.MatMul(da, r, _like=dh), op.Mul(dc, keep, _like=dc)], [da]

    dstates, (da,) = _walk_back(op, back, ends, factors, dy, lens, reverse)
    db = _sum(op, da)
    dweights = [_over_steps(op, da, x), _over_steps(op, da, h_before), op.Concat(db, db, axis=0)]
    return op.MatMul(da, w, _like=x), dweights, dstates, da


@gradient(
    "com.microsoft::LSTMTraining",
    wrt="X W R B initial_h initial_c",
    inputs="X W R B sequence_lens initial_h initial_c P",
    outputs="Y Y_h Y_c all_cells gates",
    samples=_training(4, ("initial_h", "initial_c"), ("last", "cell"), 2),
)
def lstm_training(op, X, W, R, B, initial_h, initial_c, Y, all_cells, gates, dY, dY_h, dY_c, *, hidden_size=None):
    """As of an LSTM with its usual activations; the kernel gives C and i, o, f, g of every step"""
    c, gates = (op.Squeeze(v, [1]) for v in (all_cells, gates))

    def one(d, reverse, x, weights, starts, lens, y, dy, ends):
        w, r, _ = weights
        h_before, c_before = (_before(op, v, first, reverse, lens) for v, first in zip((y, c), starts, strict=True))
        i, o, f, g = _split(op, gates, 4, 2)
        out = op.Tanh(c)
        to_a = sigmoid(op, i, g), sigmoid(op, o, out), sigmoid(op, f, c_before), tanh(op, g, i)
        factors = [op.Concat(*to_a, axis=2), tanh(op, out, o), f]
        return _lstm_back(op, x, w, r, h_before, factors, ends, dy, lens, reverse)[:3]

    dX, (dW, dR, dB), (dh, dc) = _directions(
        op, one, "forward", 0, X, [W, R, B], [initial_h, initial_c], None, Y, dY, [dY_h, dY_c]
    )
    return dX, dW, dR, dB, dh, dc


# ---- GRU -------------------------------------------------------------------------------------------------------------

_GRU = _samples(
    3,
    ("initial_h",),
    2,
    (
        {"linear_before_reset": 1, "activations": ["Sigmoid", "Softsign"]},
        {"linear_before_reset": 1},
        {"activations": ["HardSigmoid", "LeakyRelu"], "activation_alpha": [0.3, 0.1], "activation_beta": [0.4]},
    ),
)


@gradient("GRU", wrt="X W R B initial_h", samples=_GRU)
def gru(
    op,
    X,
    W,
    R,
    B,
    sequence_lens,
    initial_h,
    Y,
    dY,
    dY_h,
    *,
    activations=None,
    activation_alpha=(),
    activation_beta=(),
    clip=0.0,
    direction="forward",
    hidden_size=None,
    layout=0,
    linear_before_reset=0,
):
    """H = (1 - z)⊙n + z⊙H₋, with a_n = x·Wᵀ + r⊙u, u = H₋·Rᵀ + b, if linear before the reset, else x·Wᵀ + (r⊙H₋)·Rᵀ:

    da_z = dH⊙(H₋ - n)⊙z',  da_n = dH⊙(1 - z)⊙n'
    linear before:  da_r = da_n⊙u⊙r',  dH₋ = dH⊙z + (da_z, da_r, da_n⊙r)·R
    else:  dq = da_n·R_n,  da_r = dq⊙H₋⊙r',  dH₋ = dH⊙z + dq⊙r + (da_z, da_r)·(R_z, R_r)
    """
    names = activations or ["Sigmoid", "Tanh"] * (1 + (direction == "bidirectional"))
    functions = _activations(names, activation_alpha, activation_beta, clip)

    def one(d, reverse, x, weights, starts, lens, y, dy, ends):
        w, r, b = weights
        (f, f_back), (g, g_back) = functions[2 * d : 2 * d + 2]
        h_before = _before(op, y, starts[0], reverse, lens)
        wb, rb = _split(op, b, 2, 0)
        xz, xr, xn = _split(op, _pre_activations(op, x, w, wb), 3, 2)
        walk = linear_before if linear_before_reset else linear_after
        return walk(x, xz, xr, xn, h_before, w, r, rb, f, f_back, g, g_back, dy, lens, ends, reverse)

    def linear_before(x, xz, xr, xn, h_before, w, r, rb, f, f_back, g, g_back, dy, lens, ends, reverse):
        hz, hr, u = _split(op, _pre_activations(op, h_before, r, rb), 3, 2)
        az, ar = op.Add(xz, hz), op.Add(xr, hr)
        z, reset = f(op, az), f(op, ar)
        an = op.Add(xn, op.Mul(reset, u))
        n = g(op, an)
        to_n = _within(op, g_back(op, an, n, op.Sub(1, z)), lens)
        to_r = f_back(op, ar, reset, op.Mul(to_n, u))
        to_z = f_back(op, az, z, op.Sub(h_before, n))
        return _back_linear_before(op, x, w, r, h_before, z, reset, to_z, to_r, to_n, ends, dy, lens, reverse)

    def linear_after(x, xz, xr, xn, h_before, w, r, rb, f, f_back, g, g_back, dy, lens, ends, reverse):
        rz, rr, rn = _split(op, r, 3, 0)
        bz, br, bn = _split(op, rb, 3, 0)
        az = op.Add(xz, _pre_activations(op, h_before, rz, bz))
        ar = op.Add(xr, _pre_activations(op, h_before, rr, br))
        z, reset = f(op, az), f(op, ar)
        an = op.Add(xn, _pre_activations(op, op.Mul(reset, h_before), rn, bn))
        n = g(op, an)
        to_n = _within(op, g_back(op, an, n, op.Sub(1, z)), lens)
        to_r = _within(op, f_back(op, ar, reset, h_before), lens)
        to_z = _within(op, f_back(op, az, z, op.Sub(h_before, n)), lens)
        return _back_linear_after(op, x, w, r, h_before, z, reset, to_z, to_r, to_n, ends, dy, lens, reverse)

    dX, (dW, dR, dB), (dh,) = _directions(op, one, direction, layout, X, [W, R, B], [initial_h], sequence_lens, Y, dY, [dY_h])
    return dX, dW, dR, dB, dh


def gru_gates(op, X, W, R, B, initial_h, Y, linear_before_reset):
    """What GRUTraining gives beside a GRU's outputs: z, r and n of every step, [steps, 1, batch, 3·hidden]."""
    (w, r, b), y, h = _only_direction(op, [W, R, B], Y, initial_h)
    h_before = _before(op, y, h, False, None)
    wb, rb = _split(op, b, 2, 0)
    xz, xr, xn = _split(op, _pre_activations(op, X, w, wb), 3, 2)
    hz, hr, u = _split(op, _pre_activations(op, h_before, r, rb), 3, 2)
    z, reset = op.Sigmoid(op.Add(xz, hz)), op.Sigmoid(op.Add(xr, hr))
    if linear_before_reset:
        n = op.Mul(reset, u)
    else:
        n = _pre_activations(op, op.Mul(reset, h_before), _split(op, r, 3, 0)[2], _split(op, rb, 3, 0)[2])
    return op.Unsqueeze(op.Concat(z, reset, op.Tanh(op.Add(xn, n)), axis=2), [1])


def _back_linear_before(op, x, w, r, h_before, z, reset, to_z, to_r, to_n, ends, dy, lens, reverse):
    """Gradients of x, the weights and the initial state, from the factors of da_z, da_r and da_n by dH."""
    slopes = _within(op, op.Concat(to_z, to_r, op.Mul(to_n, reset), axis=2), lens)

    def back(op, dh, slopes, z):
        da = op.Mul(op.Concat(dh, dh, dh, axis=1), slopes)
        return [op.Add(op.MatMul(da, r), op.Mul(dh, z), _like=dh)], [da, dh]

    dstates, (da_r, dh) = _walk_back(op, back, ends, [slopes, z], dy, lens, reverse)
    dz, dr, _ = _split(op, da_r, 3, 2)
    da = op.Concat(dz, dr, op.Mul(dh, to_n), axis=2)
    dR = _over_steps(op, da_r, h_before)
    return op.MatMul(da, w, _like=x), [_over_steps(op, da, x), dR, op.Concat(_sum(op, da), _sum(op, da_r), axis=0)], dstates


def _back_linear_after(op, x, w, r, h_before, z, reset, to_z, to_r, to_n, ends, dy, lens, reverse):
    """Likewise, from the factors of da_z and da_n by dH, and of da_r by dq."""
    rz, rr, rn = _split(op, r, 3, 0)
    r_gates = op.Concat(rz, rr, axis=0)

    def back(op, dh, to_z, to_r, to_n, z, reset):
        dn = op.Mul(dh, to_n)
        dq = op.MatMul(dn, rn)
        dgates = op.Concat(op.Mul(dh, to_z), op.Mul(dq, to_r), axis=1)
        around = op.Add(op.Mul(dh, z), op.Mul(dq, reset))
        return [op.Add(op.MatMul(dgates, r_gates), around, _like=dh)], [dgates, dn]

    dstates, (dgates, dn) = _walk_back(op, back, ends, [to_z, to_r, to_n, z, reset], dy, lens, reverse)
    da = op.Concat(dgates, dn, axis=2)
    dR = op.Concat(_over_steps(op, dgates, h_before), _over_steps(op, dn, op.Mul(reset, h_before)), axis=0)
    db = _sum(op, da)
    return op.MatMul(da, w, _like=x), [_over_steps(op, da, x), dR, op.Concat(db, db, axis=0)], dstates


@gradient(
    "com.microsoft::GRUTraining",
    wrt="X W R B initial_h",
    inputs="X W R B sequence_lens initial_h",
    outputs="Y Y_h gates",
    samples=(
        *_training(3, ("initial_h",), ("last",), 1),
        *({**sample, "linear_before_reset": 1} for sample in _training(3, ("initial_h",), ("last",), 1)),
    ),
)
def gru_training(op, X, W, R, B, initial_h, Y, gates, dY, dY_h, *, linear_before_reset=0, hidden_size=None):
    """As of a GRU with its usual activations; the kernel gives z, r and n of every step"""
    gates = op.Squeeze(gates, [1])

    def one(d, reverse, x, weights, starts, lens, y, dy, ends):
        w, r, b = weights
        h_before = _before(op, y, starts[0], reverse, lens)
        z, reset, n = _split(op, gates, 3, 2)
        to_n, to_z = tanh(op, n, op.Sub(1, z)), sigmoid(op, z, op.Sub(h_before, n))
        if linear_before_reset:
            rn, (_, rb) = _split(op, r, 3, 0)[2], _split(op, b, 2, 0)
            u = _pre_activations(op, h_before, rn, _split(op, rb, 3, 0)[2])
            back, to_r = _back_linear_before, sigmoid(op, reset, op.Mul(to_n, u))
        else:
            back, to_r = _back_linear_after, sigmoid(op, reset, h_before)
        return back(op, x, w, r, h_before, z, reset, to_z, to_r, to_n, ends, dy, lens, reverse)

    dX, (dW, dR, dB), (dh,) = _directions(op, one, "forward", 0, X, [W, R, B], [initial_h], None, Y, dY, [dY_h])
    return dX, dW, dR, dB, dh


# ---- RNN -------------------------------------------------------------------------------------------------------------

_RNN = _samples(
    1,
    ("initial_h",),
    2,
    (
        {"activations": ["Softplus"]},
        {"activations": ["Elu"], "activation_alpha": [1.3]},
        {"activations": ["ThresholdedRelu"], "activation_alpha": [0.2]},
        {"activations": ["Affine"], "activation_alpha": [0.4], "activation_beta": [0.1]},
    ),
)


@gradient("RNN", wrt="X W R B initial_h", samples=_RNN)
def rnn(
    op,
    X,
    W,
    R,
    B,
    sequence_lens,
    initial_h,
    Y,
    dY,
    dY_h,
    *,
    activations=None,
    activation_alpha=(),
    activation_beta=(),
    clip=0.0,
    direction="forward",
    hidden_size=None,
    layout=0,
):
    """H = f(a), a = x·Wᵀ + H₋·Rᵀ + b:  da = dH⊙f', dH₋ = da·R"""
    names = activations or ["Tanh"] * (1 + (direction == "bidirectional"))
    functions = _activations(names, activation_alpha, activation_beta, clip)

    def one(d, reverse, x, weights, starts, lens, y, dy, ends):
        (w, r, b), (_, back_f) = weights, functions[d]
        h_before = _before(op, y, starts[0], reverse, lens)
        a = _pre_activations(op, x, w, _summed(op, b), h_before, r, None)
        slope = _within(op, back_f(op, a, y, op.const(1, like=y)), lens)

        def back(op, dh, slope):
            da = op.Mul(dh, slope)
            return [op.MatMul(da, r, _like=dh)], [da]

        dstates, (da,) = _walk_back(op, back, ends, [slope], dy, lens, reverse)
        db = _sum(op, da)
        dweights = [_over_steps(op, da, x), _over_steps(op, da, h_before), op.Concat(db, db, axis=0)]
        return op.MatMul(da, w, _like=x), dweights, dstates

    dX, (dW, dR, dB), (dh,) = _directions(op, one, direction, layout, X, [W, R, B], [initial_h], sequence_lens, Y, dY, [dY_h])
    return dX, dW, dR, dB, dh
