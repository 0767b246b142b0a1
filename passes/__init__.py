"""What the compiler knows: the passes, and the tables of losses, optimizers, gradients, lowerings and targets.

:func:`standard` is the way of a model, in order.
"""

from __future__ import annotations

from ortc.compiler import Pass
from ortc.passes.absorb import Absorb
from ortc.passes.boundary import MarkBoundary
from ortc.passes.forms import ForkEvaluation, InferenceTemplate, TrainingForm
from ortc.passes.fused_update import FuseUpdate
from ortc.passes.fusion import (
    FuseAttention,
    FuseBiasGelu,
    FuseLayerNorm,
    FuseRMSNorm,
    FuseSilu,
    FuseSoftmaxDropout,
    ScoresOfAttention,
)
from ortc.passes.gelu import FuseGelu
from ortc.passes.lora import AddAdapters
from ortc.passes.loss import AttachLoss
from ortc.passes.on_device import OnDevice
from ortc.passes.optimizer import BuildOptimizer
from ortc.passes.order import Order, PredictMemory
from ortc.passes.parameters import ChooseParameters, DecideTraining
from ortc.passes.pipeline import CleanUp, Decompose, Gradients, Lower, Prepare, Simplify, Upgrade
from ortc.passes.precision import CastToHalf
from ortc.passes.quantization import PairQuantizers
from ortc.passes.recompute import Recompute
from ortc.passes.sessions import SESSIONS as SESSIONS
from ortc.passes.stages import CutStages, SplitPhases
from ortc.passes.stash import NarrowStash, PackStash

# What `ortc rewrite` runs before a pass that it runs alone: the one form that all of them know.
NORMAL_FORM = ("prepare", "upgrade", "pair-quantizers", "choose-parameters", "simplify")


def standard() -> list[Pass]:
    """The passes of every compilation."""
    return [
        Prepare(),
        InferenceTemplate(),
        MarkBoundary(),
        Upgrade(),
        PairQuantizers(),
        ChooseParameters(),
        Simplify(),
        Decompose(),
        FuseGelu(),
        FuseLayerNorm(),
        AddAdapters(),
        AttachLoss(),
        DecideTraining(),
        ForkEvaluation(),
        CastToHalf(),
        TrainingForm(),
        CutStages(),
        FuseRMSNorm(),
        FuseSilu(),
        FuseBiasGelu(),
        ScoresOfAttention(),
        FuseAttention(),
        FuseSoftmaxDropout(),
        Gradients(),
        BuildOptimizer(),
        Lower(),
        CleanUp(),
        Absorb(),
        Recompute(),
        PackStash(),
        NarrowStash(),
        FuseUpdate(),
        Order(),
        SplitPhases(),
        PredictMemory(),
        OnDevice(),
    ]
