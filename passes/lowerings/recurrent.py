"""Recurrent layers: with their batch first (ONNX Runtime 1.19.2 has kernels for steps first only), and their training forms."""

from __future__ import annotations

from ortc.passes.gradients.recurrent import gru_gates, lstm_gates
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


@lowering("com.microsoft::LSTMTraining")
def lstm_training(op, X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, **attributes):
    """An LSTM, with its gates and cell states made again from its hidden states"""
    outputs = op.LSTM(X, W, R, B, None, initial_h, initial_c, _outputs=3, **attributes)
    return *outputs, *lstm_gates(op, X, W, R, B, initial_h, initial_c, outputs[0])


@lowering("com.microsoft::GRUTraining")
def gru_training(op, X, W, R, B=None, sequence_lens=None, initial_h=None, *, linear_before_reset=0, **attributes):
    """A GRU, with its gates made again from its hidden states"""
    outputs = op.GRU(X, W, R, B, None, initial_h, _outputs=2, linear_before_reset=linear_before_reset, **attributes)
    return *outputs, gru_gates(op, X, W, R, B, initial_h, outputs[0], linear_before_reset)
