"""The order of nodes that needs little memory, and what the phases' sessions have alive in it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortc.compiler import Compilation, Pass
from ortc.graph.liveness import low_peak_order
from ortc.passes.costs import Shapes, learned_sizes
from ortc.passes.memory import kernels, phase_memory, value_bytes
from ortc.passes.stages import assumed_sizes
from ortc.plan import PhaseMemory


@dataclass(frozen=True)
class Order(Pass):
    """Orders training and evaluation for a low peak of memory; the runtime asks ONNX Runtime to keep the order.

    The optimizer stays as it is written: parameter by parameter, in parts that fit a cache.
    """

    name = "order"
    optional = True
    after = ("clean-up",)

    def run(self, c: Compilation) -> None:
        c.sizes = assumed_sizes(c)
        for stage, phases in enumerate(c.stages):
            for name, model in phases.items():
                if name.startswith("optimizer"):
                    continue
                graph = model.graph
                shapes = learned_sizes(graph, c.sizes)
                again = c.recomputed.get(stage) if name == "train" else None
                before = phase_memory(graph, shapes).peak if again is not None else 0
                graph.extend(low_peak_order(graph, value_bytes(graph, shapes), kernels(shapes)))
                if again is not None:
                    less = before - phase_memory(graph, shapes).peak
                    c.recomputed[stage] = again.model_copy(update={"memory_after": again.memory_after - less})


_LARGEST, _STRETCHES = 8, 64  # what the plan tells of a phase


@dataclass(frozen=True)
class PredictMemory(Pass):
    """Predicts what the session of every phase has in memory."""

    name = "memory"
    after = ("phases",)

    def run(self, c: Compilation) -> bool:
        c.sizes = assumed_sizes(c)
        for phases in c.stages:
            c.memory.append({name: _told(m.graph, learned_sizes(m.graph, c.sizes)) for name, m in phases.items()})
        return False


def _told(graph: ir.Graph, shapes: Shapes) -> PhaseMemory:
    found = phase_memory(graph, shapes)
    names = [node.name or node.op_type for node in graph]
    stretch = -(-len(names) // _STRETCHES) or 1
    return PhaseMemory(
        peak_bytes=found.peak,
        node=names[found.at] if names else "",
        largest={value.name or "": size for value, size in found.alive[:_LARGEST]},
        live=[max(found.live[i : i + stretch]) for i in range(0, len(names), stretch)],
    )
