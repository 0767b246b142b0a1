"""The benchmark of a training step runs, says who is absent, and notices losses that part; the profile is read right."""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, save

BENCH = Path(__file__).parent.parent / "bench"
WIDTHS = (784, 256, 10)
BATCH = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The bench's `mlp`, narrower."""
    random, nodes, weights, value = np.random.default_rng(0), [], [], "x"
    for i, (a, b) in enumerate(pairwise(WIDTHS)):
        arrays = {f"w{i}": random.standard_normal((b, a)) / a, f"b{i}": np.zeros(b)}
        weights += [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
        nodes.append(helper.make_node("Gemm", [value, *arrays], [f"h{i}"], name=f"gemm{i}", transB=1))
        value = f"h{i}"
    port = helper.make_tensor_value_info
    ports = port("x", TensorProto.FLOAT, ["batch", WIDTHS[0]]), port(value, TensorProto.FLOAT, ["batch", WIDTHS[-1]])
    graph = helper.make_graph(nodes, "mlp", ports[:1], ports[1:], weights)
    folder = tmp_path_factory.mktemp("models")
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "mlp.onnx")
    return folder


@pytest.fixture
def bench(monkeypatch):
    """Modules of bench/ by name."""
    monkeypatch.syspath_prepend(BENCH)
    return __import__


def run(script, *arguments):
    command = [sys.executable, str(BENCH / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_step_is_timed_and_the_absent_are_named(models, tmp_path):
    lines = run("step_time.py", models, "mlp", "--rounds", 1, "--peers", tmp_path)
    for who in ("artifacts", "onnxsim", "torch", "inductor"):
        assert any(line.startswith(f"{who} is absent: there is no {tmp_path}") for line in lines)
    (row,) = (line.split() for line in lines if line.split()[:2] == ["mlp", "ortc"])
    took, least, _, first, mib, loss, *apart = map(float, row[2:])
    assert 0 < least <= took < 1000 * first
    assert mib > 20
    assert loss == pytest.approx(math.log(10), abs=0.1)  # weights near zero: all classes alike
    assert apart == [0, 0]
    assert lines[-1].startswith("ortc: ortc ")
    assert "onnxruntime" in lines[-1]


def test_losses_that_disagree_are_told(bench, capsys):
    step_time = bench("step_time")

    def contestant(name, *losses):
        made = object.__new__(step_time.Contestant)
        vars(made).update(name=name, times=[2.0, 1.0, 0.5], losses=list(losses), peak=2**20, ready=1.0)
        return made

    own = contestant("ortc", 2.0, 1.5, 1.2)
    assert step_time.report("mlp", [own, contestant("torch", 2.0, 1.5, 1.2 + 1e-6)], [])
    assert "disagree" not in capsys.readouterr().out
    assert not step_time.report("mlp", [own, contestant("torch", 2.0, 1.5, 1.21)], ["onnxsim: cannot take part"])
    told = capsys.readouterr().out
    assert "losses disagree" in told
    assert "onnxsim: cannot take part" in told


def test_the_time_of_a_step_adds_up(models):
    lines = run("explain.py", models, "mlp", "--rounds", 1, "--slowest", 2)
    head = next(i for i, line in enumerate(lines) if line.startswith("class"))
    end = next(i for i, line in enumerate(lines) if line.startswith("all"))
    rows = {line[:60].strip(): line[60:].split() for line in lines[head + 1 : end + 1]}
    whole = rows.pop("all")
    assert {"matrix products", "optimizer", "element-wise"} <= set(rows)
    assert sum(float(cells[0]) for cells in rows.values()) == pytest.approx(float(whole[0]), abs=0.05)
    assert whole[1] == "100.0%"
    # forward and the weights' gradients of both layers; the data's gradient of the second alone
    products = 2 * BATCH * (2 * (WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]) + WIDTHS[1] * WIDTHS[2])
    assert float(rows["matrix products"][3]) == round(products / 1e9, 3)
    assert len([line for line in lines[end:] if line.startswith("  ")]) == 2


def test_a_body_is_not_counted_twice(bench):
    def event(name, begin, length, operator, *shapes):
        told = [{"float": list(shape)} for shape in shapes]
        args = {"op_name": operator, "input_type_shape": told[:-1], "output_type_shape": told[-1:]}
        return {"cat": "Node", "name": f"{name}_kernel_time", "ts": begin, "dur": length, "args": args}

    a, b = ir.Value(name="a"), ir.Value(name="b")
    product = ir.Node("com.microsoft", "FusedMatMul", [a, b], [ir.AttrInt64("transA", 1)], name="product")
    product.outputs[0].name = "y"
    events = [
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 100},
        event("scan", 0, 60, "Scan", (2, 3), (2, 3)),
        event("body", 5, 20, "Mul", (3,), (3,)),
        event("body", 30, 20, "Mul", (3,), (3,)),
        event("product", 60, 10, "FusedMatMul", (5, 3), (5, 4), (3, 4)),
        {"cat": "Session", "name": "model_run", "ts": 200, "dur": 100},
        event("product", 210, 10, "FusedMatMul", (5, 3), (5, 4), (3, 4)),
    ]
    first, second = bench("explain").kernels(events, {"product": product}, None)
    assert [(k.what.split()[0], k.time) for k in first] == [("Scan", 20), ("Mul", 20), ("Mul", 20), ("FusedMatMul", 10)]
    assert [k.kind for k in first] == ["control flow, but for bodies", "element-wise", "element-wise", "matrix products"]
    assert [k.cost.flops for k in (first[0], first[3], *second)] == [0, 2 * 12 * 5, 2 * 12 * 5]
    assert first[3].cost.bytes == 4 * (15 + 20 + 12)
