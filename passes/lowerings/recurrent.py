"""Recurrent layers whose batch comes first: ONNX Runtime 1.19.2 has kernels for steps first only."""

from __future__ import annotations

from ortc.rules import Unsupported, lowering


def _steps_first(operator, states):
    """With its sequences and ``states`` states transposed."""

    def lowered(op, X, W, R, B=None, sequence_lens=None, *rest, layout=0, **attributes):
        if not layout:
            raise Unsupported("it has steps first already")
        initial = [None if s is None else op.Transpose(s, perm=[1, 0, 2]) for s in rest[:states]]
        X = op.Transpose(X, perm=[1, 0, 2])
        layer = op.node(operator, X, W, R, B, sequence_lens, *initial, *rest[states:], _outputs=1 + states, **attributes)
        return op.Transpose(layer[0], perm=[2, 0, 1, 3]), *(op.Transpose(s, perm=[1, 0, 2]) for s in layer[1:])

    return lowered


lowering("LSTM")(_steps_first("LSTM", 2))
lowering("GRU")(_steps_first("GRU", 1))
lowering("RNN")(_steps_first("RNN", 1))
