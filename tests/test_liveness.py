"""Live bytes of graphs, and orders with a low peak: by hand, against a count that keeps nothing, and against all orders."""

from __future__ import annotations

import random

import onnx_ir as ir
import pytest

from ortc.graph.liveness import NodeMemory, liveness, low_peak_order

KINDS = {"View": NodeMemory(views=((0, 0),)), "Over": NodeMemory(in_place=((0, 0),)), "Busy": NodeMemory(scratch=7)}


def memory(node: ir.Node) -> NodeMemory:
    return KINDS.get(node.op_type, NodeMemory())


def value(name: str, size: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size]))


def make(inputs: str, outputs: str, *lines: str) -> tuple[ir.Graph, dict[ir.Value, int]]:
    """A graph from lines like ``a:4 = Op x y``, where a has 4 bytes, or 4 and 5 of ``a:4 b:5 = Op x``."""
    made = {name: value(name, 100) for name in inputs.split()}
    sizes: dict[ir.Value, int] = {}
    nodes = []
    for line in lines:
        left, right = line.split(" = ")
        op, *reads = right.split()
        fresh = [part.split(":") for part in left.split()]
        new = [value(name, int(size)) for name, size in fresh]
        nodes.append(ir.node(op, [made[r] for r in reads], outputs=new))
        made.update({v.name: v for v in new})
        sizes.update({v: int(size) for v, (_, size) in zip(new, fresh, strict=True)})
    return ir.Graph([made[n] for n in inputs.split()], [made[n] for n in outputs.split()], nodes=nodes), sizes


def test_a_value_lives_from_its_maker_to_its_last_reader():
    graph, sizes = make("x", "d", "a:4 = Op x", "b:8 = Op a", "c:2 = Op a b", "d:1 = Op c")
    found = liveness(graph, sizes, memory)
    assert found.live == [4, 12, 14, 3]
    assert (found.peak, found.at) == (14, 2)
    assert [(v.name, n) for v, n in found.alive] == [("b", 8), ("a", 4), ("c", 2)]


def test_what_nobody_reads_and_what_is_the_callers():
    graph, sizes = make("x", "b c", "a:4 u:9 = Op x", "b:8 = Op a", "c:2 = Op x")
    assert liveness(graph, sizes, memory).live == [13, 21, 19]  # ONNX Runtime frees after the last reader: u has none, b stays
    del sizes[graph.outputs[0]]
    assert liveness(graph, sizes, memory).live == [13, 13, 11]


def test_a_view_keeps_what_it_views():
    graph, sizes = make("x", "d", "a:4 = Op x", "v:4 = View a", "b:1 = Op a", "c:8 = Op b", "d:1 = Op v c")
    assert liveness(graph, sizes, memory).live == [4, 4, 5, 13, 13]
    of_input, sizes = make("x", "b", "v:4 = View x", "b:1 = Op v")
    assert liveness(of_input, sizes, memory).live == [0, 1]
    output, sizes = make("x", "v", "a:4 = Op x", "v:4 = View a")  # an output is written elsewhere
    assert liveness(output, sizes, memory).live == [4, 8]


def test_work_in_place():
    graph, sizes = make("x", "c", "a:4 = Op x", "b:4 = Over a", "c:1 = Op b")
    assert liveness(graph, sizes, memory).live == [4, 4, 5]
    later, sizes = make("x", "c", "a:4 = Op x", "b:4 = Over a", "c:1 = Op b a")
    assert liveness(later, sizes, memory).live == [4, 8, 9]
    other, sizes = make("x", "c", "a:4 = Op x", "b:2 = Over a", "c:1 = Op b")
    assert liveness(other, sizes, memory).live == [4, 6, 3]
    of_input, sizes = make("x", "c", "b:100 = Over x", "c:1 = Op b")
    assert liveness(of_input, sizes, memory).live == [100, 101]
    through, sizes = make("x", "c", "a:4 = Op x", "v:4 = View a", "b:4 = Over v", "c:1 = Op b")
    assert liveness(through, sizes, memory).live == [4, 4, 4, 5]
    viewed, sizes = make("x", "c", "a:4 = Op x", "v:4 = View a", "b:4 = Over v", "c:1 = Op b a")
    assert liveness(viewed, sizes, memory).live == [4, 4, 8, 9]


def test_scratch_is_there_while_the_node_runs():
    graph, sizes = make("x", "b", "a:4 = Busy x", "b:1 = Op a")
    assert liveness(graph, sizes, memory).live == [11, 5]


def test_weight_gradients_come_as_soon_as_they_can():
    """The outputs are bound to arrays: each of their nodes frees what came back from the later layer."""
    graph, sizes = make(
        *("x", "w1 w2 w3"),
        *("a:4 = Op x", "b:4 = Op a", "c:4 = Op b", "dc:4 = Op c", "db:4 = Op dc", "da:4 = Op db"),
        *("w3:4 = Op dc b", "w2:4 = Op db a", "w1:4 = Op da x"),
    )
    for v in graph.outputs:
        del sizes[v]
    order = low_peak_order(graph, sizes, memory)
    assert [n.outputs[0].name for n in order] == ["a", "b", "c", "dc", "w3", "db", "w2", "da", "w1"]
    assert liveness(graph, sizes, memory).peak == 20
    assert liveness(graph, sizes, memory, order).peak == 16


def random_graph(rng: random.Random, count: int) -> tuple[ir.Graph, dict[ir.Value, int]]:
    lines, names = [], ["x"]
    for i in range(count):
        reads = rng.sample(names, min(len(names), rng.randint(1, 3)))
        op = rng.choice(["Op", "Op", "View", "Over", "Busy"])
        lines.append(f"n{i}:{rng.randint(1, 4)} = {op} {' '.join(reads)}")
        names.append(f"n{i}")
    return make("x", " ".join(rng.sample(names[1:], 2)), *lines)


def plain_peak(graph: ir.Graph, sizes: dict[ir.Value, int], order: list[ir.Node]) -> list[int]:
    """Live bytes, at every node found anew from what lies before and behind it."""
    buffer: dict[ir.Value, ir.Value] = {}

    def wanted(owner: ir.Value, start: int, but: ir.Node | None = None) -> bool:
        mine = [v for v in buffer if buffer[v] is owner]
        later = [v for node in order[start:] if node is not but for v in node.inputs]
        return any(v in later or v in graph.outputs for v in mine) or not owner.uses()

    live = []
    for i, node in enumerate(order):
        output, source = node.outputs[0], node.inputs[0]
        home = buffer.get(source, source)
        if output in graph.outputs:
            buffer[output] = output
        elif node.op_type == "View":
            buffer[output] = home
        else:
            fits = node.op_type == "Over" and home in sizes and source.shape == output.shape
            buffer[output] = home if fits and not wanted(home, i, node) and node.inputs.count(source) == 1 else output
        used = {buffer[v] for v in (*node.inputs, output) if v in buffer}
        owners = {b for b in buffer.values() if b in used or wanted(b, i + 1)}
        live.append(sum(sizes.get(b, 0) for b in owners) + memory(node).scratch)
    return live


@pytest.mark.parametrize("seed", range(40))
def test_live_bytes_are_those_of_a_plain_count(seed: int):
    graph, sizes = random_graph(random.Random(seed), 12)
    assert liveness(graph, sizes, memory).live == plain_peak(graph, sizes, list(graph))


@pytest.mark.parametrize("seed", range(40))
def test_an_order_is_valid_and_no_worse_than_the_graphs_own(seed: int):
    graph, sizes = random_graph(random.Random(seed), 60)
    nodes = list(graph)
    order = low_peak_order(graph, sizes, memory)
    assert sorted(map(id, order)) == sorted(map(id, nodes))
    at = {node: i for i, node in enumerate(order)}
    for node in nodes:
        assert all(at[v.producer()] < at[node] for v in node.inputs if v.producer() is not None)
    assert liveness(graph, sizes, memory, order).peak <= liveness(graph, sizes, memory).peak
    assert order == low_peak_order(graph, sizes, memory)


def all_orders(nodes: list[ir.Node]) -> list[list[ir.Node]]:
    def ready(done: list[ir.Node]) -> list[ir.Node]:
        return [n for n in nodes if n not in done and all(v.producer() is None or v.producer() in done for v in n.inputs)]

    orders: list[list[ir.Node]] = [[]]
    for _ in nodes:
        orders = [[*done, n] for done in orders for n in ready(done)]
    return orders


def test_small_graphs_come_close_to_the_best_order():
    """Over graphs of 8 nodes, of which every order is tried: by how much the peak is above the least possible."""
    excess = []
    for seed in range(30):
        graph, sizes = random_graph(random.Random(seed), 8)
        for node in reversed(list(graph)):  # as in compiled graphs no node is there for nothing
            if not any(v.uses() or v in graph.outputs for v in node.outputs):
                graph.remove(node, safe=True)
        best = min(liveness(graph, sizes, memory, order).peak for order in all_orders(list(graph)))
        excess.append(liveness(graph, sizes, memory, low_peak_order(graph, sizes, memory)).peak / best - 1)
    assert sum(e == 0 for e in excess) >= 24
    assert sum(excess) / len(excess) < 0.05
