"""Recurrent layers: LSTM.

The pre-activations of all steps are two large products, since the hidden states are known: Y, shifted by one step. Only
the cell states need a walk forwards, over element-wise operators. Of the way backwards, only what depends on the next
step lies in a Scan: its body holds one product (with R), and element-wise factors that were made for all steps at once.
The gradients of X, W, R and B follow as large products from those of the pre-activations. Formulas: the chain rule on
the equations of the ONNX specification.
"""

from __future__ import annotations

from ortc.rules import Unsupported, gradient

# ---- what the layers share -------------------------------------------------------------------------------------------


def _directions(op, one, direction, layout, X, weights, initial, lens, Y, dY, last):
    """The gradients of both directions together.

    Args:
        one: called for each direction as ``one(x, weights, initial, lens, y, dy, last, reverse)``, steps first, without an
            axis of directions; returns dx, and the gradients of weights and initial states.
        weights: W, R, B, …; [directions, …] each.
        initial: the states before the first step, [directions, batch, hidden] each (None: zeros).
        last: the gradients of the states after the last step (None: zeros).

    Returns:
        dX, gradients of the weights, gradients of the initial states; None where the input is.
    """
    if layout:
        X, Y, dY = op.Transpose(X, perm=[1, 0, 2]), _perm(op, Y, [1, 2, 0, 3]), _perm(op, dY, [1, 2, 0, 3])
        initial, last = ([_perm(op, s, [1, 0, 2]) for s in states] for states in (initial, last))
    both = direction == "bidirectional"

    def part(x, d, axis=0):
        if x is None:
            return None
        return op.Gather(x, d, axis=axis) if both else op.Squeeze(x, [axis])

    found = [
        one(
            X,
            [part(w, d) for w in weights],
            [part(s, d) for s in initial],
            lens,
            part(Y, d, 1),
            part(dY, d, 1),
            [part(s, d) for s in last],
            d == 1 or direction == "reverse",
        )
        for d in range(1 + both)
    ]

    def stacked(parts, like):
        if like is None:
            return None
        ahead = [op.Unsqueeze(p, [0]) for p in parts]
        return op.Concat(*ahead, axis=0, _like=like) if both else ahead[0]

    dX = op.Add(found[0][0], found[1][0]) if both else found[0][0]
    dweights = [stacked(parts, w) for *parts, w in zip(*(f[1] for f in found), weights, strict=True)]
    dinitial = [stacked(parts, s) for *parts, s in zip(*(f[2] for f in found), initial, strict=True)]
    if layout:
        dX, dinitial = op.Transpose(dX, perm=[1, 0, 2]), [_perm(op, s, [1, 0, 2]) for s in dinitial]
    return dX, dweights, dinitial


def _perm(op, x, perm):
    return None if x is None else op.Transpose(x, perm=perm)


def _zeros_before(op, y):
    """A state of zeros, [batch, hidden], for hidden states [steps, batch, hidden]."""
    return op.zeros(op.vector(op.dim(y, 1), op.dim(y, 2)), like=y)


def _valid(op, x, lens):
    """Which steps belong to the sequences: [steps, batch, 1]; None for all."""
    if lens is None:
        return None
    numbers = op.Range(op.const(0), op.Squeeze(op.vector(op.dim(x, 0))), op.const(1))
    return op.Less(op.Unsqueeze(numbers, [1, 2]), op.Unsqueeze(op.Cast(lens, to=7), [0, 2]))


def _previous(op, states, first, reverse, lens):
    """The state before each step, from those after it and the one before the first step."""
    ahead = op.Unsqueeze(first, [0])
    if not reverse:
        return op.Concat(ahead, op.Slice(states, [0], [-1], [0]), axis=0, _like=states)
    before = op.Concat(op.Slice(states, [1], [2**62], [0]), ahead, axis=0, _like=states)
    if lens is None:
        return before
    numbers = op.Range(op.const(1), op.Add(op.Squeeze(op.vector(op.dim(states, 0))), 1), op.const(1))
    starts = op.Equal(op.Unsqueeze(numbers, [1, 2]), op.Unsqueeze(op.Cast(lens, to=7), [0, 2]))
    return op.Where(starts, ahead, before, _like=states)


def _product(op, x, w, b=None):
    """x · wᵀ + b for all steps at once, as a matrix of one row per step and sequence."""
    return op.Gemm(op.Flatten(x, axis=2), w, b, transB=1)


def _unflatten(op, rows, like):
    """A matrix of one row per step and sequence as [steps, batch, …]."""
    return op.Reshape(rows, op.vector(op.dim(like, 0), op.dim(like, 1), op.dim(rows, 1)), allowzero=1)


def _activations(op, names, alpha, beta, clip):
    """For each activation a pair: its value at x, and its derivative at x where it is y."""
    return [_activation(op, name, clip) for name in names]


def _activation(op, name, clip):
    values = {"Sigmoid": op.Sigmoid, "Tanh": op.Tanh, "Relu": op.Relu}
    slopes = {
        "Sigmoid": lambda x, y: op.Mul(y, op.Sub(1.0, y)),
        "Tanh": lambda x, y: op.Sub(1.0, op.Mul(y, y)),
        "Relu": lambda x, y: op.cast(op.Greater(y, 0.0), y),
    }
    if name not in values:
        raise Unsupported(f"activation {name}; Sigmoid, Tanh and Relu are covered")
    return values[name], slopes[name]


# ---- LSTM ------------------------------------------------------------------------------------------------------------

_STATES = {"initial_h": (1, 2, 4), "initial_c": (1, 2, 4)}
_FORWARD = {"X": (5, 2, 3), "W": (1, 16, 3), "R": (1, 16, 4), "hidden_size": 4}
_BOTH = {"X": (5, 2, 3), "W": (2, 16, 3), "R": (2, 16, 4), "hidden_size": 4, "direction": "bidirectional"}
_LSTM = (
    {**_FORWARD, "_outputs": 3},
    {**_FORWARD, "B": (1, 32), **_STATES, "_outputs": ["Y"]},
    {**_FORWARD, "B": (1, 32), **_STATES, "direction": "reverse", "_outputs": ["", "Y_h"]},
    {**_FORWARD, "B": (1, 32), "initial_c": (1, 2, 4), "_outputs": ["", "", "Y_c"]},
    {**_FORWARD, "X": (1, 2, 3), "_outputs": ["Y"]},
    {**_BOTH, "B": (2, 32), "initial_h": (2, 2, 4), "initial_c": (2, 2, 4), "_outputs": 3},
    {**_BOTH, "_outputs": ["Y", "unused"]},
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
    """C = f⊙C₋ + i⊙g, H = o⊙h(C), with gates of a = x·Wᵀ + H₋·Rᵀ + b:

    dC += dH⊙o⊙h'(C);  da = (dC⊙g⊙i', dH⊙h(C)⊙o', dC⊙C₋⊙f', dC⊙i⊙g');  dC₋ = dC⊙f, dH₋ = da·R
    """
    if sequence_lens is not None or P is not None or activations or clip or input_forget:
        raise Unsupported("LSTM with sequence_lens, peepholes, activations, clip or input_forget")

    def one(x, weights, initial, lens, y, dy, last, reverse):
        (w, r, b), (f, g, h) = weights, _activations(op, ("Sigmoid", "Tanh", "Tanh"), (), (), clip)
        h_first, c_first = (_zeros_before(op, y) if s is None else s for s in initial)
        h_before = _previous(op, y, h_first, reverse, lens)
        bias = None if b is None else op.Add(*op.Split(b, axis=0, num_outputs=2, _outputs=2))
        rows = _product(op, h_before, r, _product(op, x, w, bias))
        ai, ao, af, ag = op.Split(_unflatten(op, rows, x), axis=2, num_outputs=4, _outputs=4)
        i, o, keep, new = f[0](ai), f[0](ao), f[0](af), g[0](ag)

        def forward(op, c, keep, add):
            c = op.Add(op.Mul(keep, c), add, _like=c)
            return [c], [c]

        _, (c,) = op.scan(forward, [c_first], [keep, op.Mul(i, new)], reverse)
        c_before = _previous(op, c, c_first, reverse, lens)
        out = h[0](c)
        through_h = op.Mul(o, h[1](c, out))
        factors = [
            op.Mul(new, f[1](ai, i)),
            op.Mul(out, f[1](ao, o)),
            op.Mul(c_before, f[1](af, keep)),
            op.Mul(i, g[1](ag, new)),
        ]
        slopes = op.Concat(*factors, axis=2)

        def backward(op, dh, dc, through_h, slopes, keep, dy=None):
            total = dh if dy is None else op.Add(dh, dy)
            dcell = op.Add(dc, op.Mul(total, through_h))
            da = op.Mul(op.Concat(dcell, total, dcell, dcell, axis=1), slopes)
            return [op.MatMul(da, r, _like=dh), op.Mul(dcell, keep, _like=dc)], [da]

        start = [_zeros_before(op, y) if s is None else s for s in last]
        walked = [through_h, slopes, keep] + ([] if dy is None else [dy])
        dinitial, (da,) = op.scan(backward, start, walked, not reverse)
        db = op.ReduceSum(da, [0, 1], keepdims=0)
        da_rows = op.Flatten(da, axis=2)
        dweights = [
            op.Gemm(da_rows, op.Flatten(x, axis=2), transA=1),
            op.Gemm(da_rows, op.Flatten(h_before, axis=2), transA=1),
            op.Concat(db, db, axis=0),
        ]
        return op.MatMul(da, w, _like=x), dweights, dinitial

    dX, (dW, dR, dB), (dh, dc) = _directions(
        op, one, direction, layout, X, [W, R, B], [initial_h, initial_c], sequence_lens, Y, dY, [dY_h, dY_c]
    )
    return dX, dW, dR, dB, dh, dc, None
