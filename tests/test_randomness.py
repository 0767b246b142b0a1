"""Counter-based random numbers: their distribution, and what they depend on."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortc.artifacts import compile_graphs
from ortc.compiler import of, role
from ortc.recipe import parse_recipe

N = 200_000


def training_session(body: str, output: str = "float[n] y", imports: str = '"" : 21'):
    """The training graph of a model of ``float[n] x`` and ``float[n] w``, with ``y`` and ``z`` as they are in it."""
    text = f"<ir_version: 10, opset_import: [{imports}]> g (float[n] x) => ({output}) <float[1] w = {{1.0}}> {{ {body} }}"
    model = ir.from_onnx_text(text)
    train = compile_graphs(model, parse_recipe({"loss": [{"name": "mse", "output": "y"}], "wrt": ["x"]})).stages[0]["train"]
    graph = train.graph
    by_name = {v.name: v for node in graph for v in node.outputs}
    graph.outputs.extend(by_name[name] for name in ("y", "z") if name in by_name and by_name[name] not in graph.outputs)
    session = onnxruntime.InferenceSession(ir.to_proto(train).SerializeToString())
    roles = {v.name: (role(v), of(v)) for v in graph.inputs}
    names = [v.name for v in graph.outputs]

    def run(x: np.ndarray, **counters: int) -> dict[str, np.ndarray]:
        feeds = {}
        for name, (kind, key) in roles.items():
            feeds[name] = {
                "data": x,
                "label": np.zeros_like(x),
                "parameter": np.ones(1, np.float32),
                "scalar": np.array(counters.get(key, 0), np.int64),
            }[kind]
        return dict(zip(names, session.run(None, feeds), strict=True))

    return run


@pytest.fixture(scope="module")
def dropout():
    return training_session("h = Mul(x, w) r = Constant<value_float = 0.3>() y = Dropout(h, r)")


ONES = np.ones(N, np.float32)


def test_dropout_keeps_the_given_share_and_scales_it(dropout):
    y = dropout(ONES, seed=1, step=2)["y"]
    assert set(np.unique(y).tolist()) <= {0.0, np.float32(1 / 0.7).item()}
    # A binomial share of 200,000 has a standard deviation of 0.001; five of them.
    assert abs((y > 0).mean() - 0.7) < 0.005


def test_the_backward_uses_the_mask_of_the_forward(dropout):
    outputs = dropout(ONES, step=3)
    gradient = outputs["x.grad"]
    np.testing.assert_allclose(gradient, 2 / N * outputs["y"] * (outputs["y"] > 0) / 0.7, rtol=1e-5)


def test_the_mask_depends_on_each_counter_and_on_nothing_else(dropout):
    base = dropout(ONES, seed=5, step=6, micro_batch=7)["y"] > 0
    assert ((dropout(ONES, seed=5, step=6, micro_batch=7)["y"] > 0) == base).all()
    for counters in (
        {"seed": 6, "step": 6, "micro_batch": 7},
        {"seed": 5, "step": 7, "micro_batch": 7},
        {"seed": 5, "step": 6},
    ):
        other = dropout(ONES, **counters)["y"] > 0
        agreement = (other == base).mean()
        assert abs(agreement - (0.7**2 + 0.3**2)) < 0.007, counters


def test_neighbours_and_later_steps_are_uncorrelated(dropout):
    masks = np.stack([dropout(ONES, step=step)["y"] > 0 for step in range(4)]).astype(np.float64)
    centred = (masks - masks.mean()) / masks.std()
    for lag in (1, 2, 3, 64, 768, 4096):
        assert abs((centred[0, :-lag] * centred[0, lag:]).mean()) < 0.012
    for step in range(1, 4):
        for lag in (0, 1, 2, 17):
            assert abs((centred[0, : N - lag] * centred[step, lag:]).mean()) < 0.012


def test_two_dropouts_of_one_model_differ():
    run = training_session("h = Mul(x, w) z = Dropout(h) g = Mul(h, w) k = Dropout(g) y = Add(z, k)")
    outputs = run(ONES)
    first, second = outputs["z"] > 0, (outputs["y"] - outputs["z"]) > 0
    assert abs((first == second).mean() - 0.5) < 0.006


def test_normal_and_uniform_numbers_have_their_moments():
    run = training_session("h = Mul(x, w) z = RandomNormalLike<mean = 1.0, scale = 2.0>(x) y = Add(h, z)")
    z = run(np.zeros(N, np.float32), step=9)["z"].astype(np.float64)
    assert abs(z.mean() - 1) < 0.03
    assert abs(z.std() - 2) < 0.02
    assert abs((((z - 1) / 2) ** 3).mean()) < 0.04
    assert abs((((z - 1) / 2) ** 4).mean() - 3) < 0.1
    run = training_session("h = Mul(x, w) z = RandomUniformLike<low = -1.0, high = 3.0>(x) y = Add(h, z)")
    z = run(np.zeros(N, np.float32), step=9)["z"]
    assert -1 < z.min() < -0.999
    assert 2.999 < z.max() < 3
    assert np.abs(np.histogram(z, 20, (-1, 3))[0] / N - 0.05).max() < 0.003
