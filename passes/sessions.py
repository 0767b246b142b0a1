"""How ONNX Runtime is to open the compiled graphs. The plan says it (``sessions``), and every loop that can does so."""

from __future__ import annotations

from ortc.plan import Session, Sessions

# Recomputed values must not be merged back into the originals. The search for factors that are 1 reads beyond constants with a
# size of 0 (ONNX Runtime 1.19.2): it gives wrong shapes, or crashes.
_DISABLED = ["CommonSubexpressionElimination", "NoopElimination"]

# In training the nodes run in the order that the compiler gave them: ONNX Runtime runs a node that it makes itself after all
# that could run instead, which keeps whole layers alive.
_MOVING = ["GatherSliceToSplitFusion", "GatherToSliceFusion", "MatmulTransposeFusion", "NchwcTransformer", "ReshapeFusion"]

# They round otherwise than the nodes they stand for (or sum in another order), and which nodes they take depends on who reads
# what lies between: a value that the backward reads in one compilation, and computes again in another, would decide the last
# bits of a gradient.
_ROUNDING = [
    *("TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider"),
    *(
        "MatMulAddFusion",
        "MatMulScaleFusion",
        "MatMulActivationFusion",
        "GemmActivationFusion",
        "GemmSumFusion",
        "DivMulFusion",
    ),
    *("GeluFusion", "FastGeluFusion", "QuickGeluFusion", "BiasGeluFusion", "BiasSoftmaxFusion", "BiasSoftmaxDropoutFusion"),
    *("LayerNormFusion", "SimplifiedLayerNormFusion", "SkipLayerNormFusion", "EmbedLayerNormFusion", "AttentionFusion"),
    *("ConvActivationFusion", "ConvAddActivationFusion", "ConvAddFusion", "ConvMulFusion"),
]

# Quantised products would be computed in integers, some of which saturate: what trains is to see what it trains for.
_ENTRIES = {"session.disable_quant_qdq": "1"}

_OTHERS = Session(
    execution_order="priority_based", deterministic=True, config_entries=_ENTRIES, disabled_optimizers=_DISABLED
)  # the compiler decides the order of the nodes

SESSIONS = Sessions(
    # A reused buffer is held from its first value to its last, a pattern is memory beside what it replaces: both need more than
    # the most that is alive at a time.
    training=_OTHERS.model_copy(update={"reuse_memory": False, "disabled_optimizers": [*_DISABLED, *_MOVING, *_ROUNDING]}),
    others=_OTHERS,
)
