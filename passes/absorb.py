"""What one kernel does by itself, where gradient rules and exporters wrote two operators.

ONNX Runtime would do some of it too, but a node that it makes runs when it likes, not where the compiler put it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortc.compiler import Compilation, Pass
from ortc.graph.builder import Builder
from ortc.graph.names import all_graphs
from ortc.graph.shapes import constant, dims, rank
from ortc.graph.unused import remove_unused
from ortc.passes.fusion import training_graphs
from ortc.rewrite import REWRITES, apply_rewrites, rewrite
from ortc.rules import node_key

_CONTRIB = "com.microsoft"

# Products of two matrices, the last two axes of their first two inputs, which may say that those are transposed; the types
# that their CPU kernels have.
_PRODUCTS = {
    ("", "MatMul"): (ir.DataType.FLOAT,),
    (_CONTRIB, "FusedMatMul"): (ir.DataType.FLOAT,),
    ("", "Gemm"): (ir.DataType.FLOAT, ir.DataType.DOUBLE),
}


@dataclass(frozen=True)
class Absorb(Pass):
    """Products read transposed operands where they lie, and scatters add to a sum that is there already."""

    name = "absorb"
    optional = alone = True
    after = ("clean-up",)

    def run(self, c: Compilation) -> None:
        for model in training_graphs(c):
            outermost = Builder(model.graph)
            for part in all_graphs(model.graph):
                _Transposes(outermost if part is model.graph else Builder(part, outermost)).into_products()
            apply_rewrites(model.graph, REWRITES[self.name], self.name)
            remove_unused(model)


# ---- transposes --------------------------------------------------------------------------------------------------------


@dataclass
class _Transposes:
    """Those of one graph."""

    op: Builder
    # What is left of a permutation when a product swaps the last two axes.
    _rest: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = field(default_factory=dict)

    def into_products(self) -> None:
        """Merge transposes of transposes, and fold them into products."""
        for node in list(self.op.graph):
            if _permutation(node) is not None:
                self._merge(node)
            elif node_key(node) in _PRODUCTS and node.inputs[0] is not None:
                self._fold(node)

    def _merge(self, node: ir.Node) -> None:
        perm, source = _permutation(node), node.inputs[0]
        before = None if source is None else source.producer()
        first = None if before is None or before.graph is not node.graph else _permutation(before)
        if perm is None or before is None or first is None:
            return
        both = [first[i] for i in perm]
        value = before.inputs[0]
        assert value is not None
        if both != list(range(len(both))):
            node.replace_input_with(0, value)
            node.attributes["perm"] = ir.AttrInt64s("perm", both)
        elif not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(value)

    def _fold(self, node: ir.Node) -> None:
        operands = [self._operand(node, position) for position in (0, 1)]
        if not any(swap for _, swap in operands):
            return
        values = [value for value, _ in operands]
        flags = [
            int(swap) ^ node.attributes.get_int(name, 0) for (_, swap), name in zip(operands, ("transA", "transB"), strict=True)
        ]
        flat = all(rank(v) == 2 for v in values) and node.domain == ""
        # The node itself changes: to put another in the place of a graph's output takes time in all outputs.
        node.op_type, node.domain = ("Gemm", "") if flat else ("FusedMatMul", _CONTRIB)
        self.op.root.opset_imports.setdefault(node.domain, 1)
        for position, value in enumerate(values):
            node.replace_input_with(position, value)
        for key, flag in zip(("transA", "transB"), flags, strict=True):
            node.attributes.pop(key, None)
            if flag:
                node.attributes[key] = ir.AttrInt64(key, 1)
        node.metadata_props.setdefault("ortc.origin", node.name or "")
        node.metadata_props["ortc.pass"] = Absorb.name
        node.name = self.op.names.fresh(f"{node.name}/{node.op_type}")

    def _operand(self, node: ir.Node, position: int) -> tuple[ir.Value, bool]:
        """The value to read in place of an operand, and whether its last two axes are to be swapped."""
        value = node.inputs[position]
        assert value is not None
        transpose = value.producer()
        perm = None if transpose is None or transpose.graph is not node.graph else _permutation(transpose)
        if perm is None or len(perm) < 2 or transpose is None or value.dtype not in _PRODUCTS[node_key(node)]:
            return value, False
        other = node.inputs[1 - position]
        if other is None or (rank(other) or 0) < 2 or any(node.attributes.get_int(f"transBatch{x}", 0) for x in "AB"):
            return value, False
        source = transpose.inputs[0]
        assert source is not None
        swapped = (*perm[:-2], perm[-1], perm[-2])
        if swapped == tuple(range(len(perm))):
            return source, True
        # Rows that stay whole are copied much quicker than elements.
        return (self._moved(source, swapped, transpose), True) if swapped[-1] == len(perm) - 1 else (value, False)

    def _moved(self, source: ir.Value, perm: Sequence[int], instead: ir.Node) -> ir.Value:
        key = source, tuple(perm)
        if key not in self._rest:
            with self._in_place_of(instead):
                self._rest[key] = self.op.Transpose(source, perm=list(perm))
        return self._rest[key]

    def _in_place_of(self, node: ir.Node) -> AbstractContextManager[None]:
        """A scope for what stands for a node: where that came from, this does."""
        tags = {f"{key.removeprefix('ortc.')}_": text for key, text in node.metadata_props.items() if key.startswith("ortc.")}
        tags = {"origin_": node.name or "", **tags, "pass_": Absorb.name}
        return self.op.scope(node.name or node.op_type, before=node, **tags)


def _permutation(node: ir.Node) -> list[int] | None:
    """Of a transpose."""
    if node_key(node) != ("", "Transpose"):
        return None
    given = node.attributes.get_ints("perm", None)
    if given is not None:
        return list(given)
    r = None if node.inputs[0] is None else rank(node.inputs[0])
    return None if r is None else list(reversed(range(r)))


# ---- sums --------------------------------------------------------------------------------------------------------------


def _is_zero(value: ir.Value) -> bool:
    """Whether all of a value's elements are known to be 0."""
    node = value.producer()
    if node is None or node_key(node) != ("", "ConstantOfShape"):
        known = constant(value)
        return known is not None and not known.any()
    given = node.attributes.get("value")
    return given is None or not given.as_tensor().numpy().any()


def adds_to_zeros(node: ir.Node | None) -> bool:
    """Whether a node adds to zeros, its first input, in the shape that it has: it might add to something else as well."""
    if node is None or node_key(node) != ("", "ScatterElements") or node.attributes.get_string("reduction", "none") != "add":
        return False
    zeros = node.inputs[0]
    assert zeros is not None
    return _is_zero(zeros) and dims(zeros) is not None and dims(zeros) == dims(node.outputs[0])


# The gradient of a table that is also read as a whole (a tied embedding): rows are added to what is there, not to zeros that
# are added afterwards.
rewrite(
    "absorb",
    before=lambda op, total, zeros, indices, updates, axis: (
        total + op.ScatterElements(zeros, indices, updates, axis=axis, reduction="add")
    ),
    after=lambda op, total, indices, updates, axis: op.ScatterElements(total, indices, updates, axis=axis, reduction="add"),
    when=lambda total, zeros: _is_zero(zeros) and dims(total) is not None and dims(total) == dims(zeros),
    samples=(
        {
            "total": (5, 3),
            "zeros": np.zeros((5, 3), np.float32),
            "indices": np.array([[1, 1, 1], [4, 4, 4], [1, 1, 1]]),
            "updates": (3, 3),
            "axis": 0,
        },
    ),
)
