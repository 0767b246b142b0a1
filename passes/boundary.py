"""A stage that is compiled apart: what of its graph other stages make and read, as the boundary says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ortc.boundary import Part
from ortc.compiler import Compilation, Pass, of, role, set_role, set_stages
from ortc.errors import RecipeError
from ortc.graph.partition import StageRow, amount
from ortc.passes.partition import PartitionOptions, assign_stages


@dataclass(frozen=True)
class MarkBoundary(Pass):
    """Of a stage that is compiled apart: says which inputs and outputs are between stages."""

    name = "mark-boundary"
    after = ("inference-template",)

    def run(self, c: Compilation) -> bool:
        if c.part is None:
            return False
        inputs, outputs = ({v.name: v for v in values} for values in (c.graph.inputs, c.graph.outputs))
        for crossing in c.part.arriving:
            set_stages(set_role(inputs[crossing.name], "boundary", of=crossing.name), [crossing.source])
        for crossing in c.part.leaving:
            set_stages(set_role(outputs[crossing.name], "boundary", of=crossing.name), crossing.readers)
        return True


def part_row(c: Compilation, part: Part, options: PartitionOptions, sizes: dict[str, int], slots: float) -> StageRow:
    """What the stage is predicted to take and to send.

    Raises:
        RecipeError: it takes more than the options allow.
    """
    alone = replace(options, stages=1, cuts=(), mapping={}, in_flight=[(options.in_flight or [1] * options.stages)[part.stage]])
    found = assign_stages(c.graph, alone, sizes, slots)
    row = found.table[0]
    size = {of(v): found.shapes.bytes(v) for v in [*c.graph.inputs, *c.graph.outputs] if role(v) == "boundary"}
    sends: dict[int, int] = {}
    for value in part.leaving:
        for reader in value.readers:
            sends[reader] = sends.get(reader, 0) + size[value.name]
    crossing = sum(size[v.name] * (1 + v.differentiable) for v in [*part.arriving, *part.leaving])
    memory = replace(row.memory, boundary=crossing)
    if options.memory_limit is not None and memory.total > options.memory_limit:
        raise RecipeError(
            f"stage {part.stage} would take {amount(memory.total)}, more than the limit of {amount(options.memory_limit)}: "
            f"{memory}"
        )
    return replace(row, stage=part.stage, sends=dict(sorted(sends.items())), memory=memory)
