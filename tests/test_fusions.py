"""Fusions on real exports and on near misses, the choice of GELU's form, and passes on their own."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from gradcheck import TARGETS

from ortc.artifacts import compile, compile_graphs, load_rules
from ortc.errors import ModelError, RecipeError
from ortc.passes import standard
from ortc.passes.fusion import Fusion
from ortc.passes.inference import infer_shapes
from ortc.passes.normalise import prepare
from ortc.recipe import parse_recipe
from ortc.rewrite import REWRITES, apply_rewrites
from ortc.runtime.trainer import Trainer
from ortc.source import load_model
from ortc.standalone import rewrite_model

load_rules()

DATA = Path(__file__).parent / "data"
MODELS = DATA / "models"
DROPOUT = DATA / "attention_dropout.legacy_train.onnx"
FUSIONS = [step.name for step in standard() if isinstance(step, Fusion)]
TARGET = TARGETS[-1].name

# Real exports of both of PyTorch's exporters: what is found in them, everything on.
FOUND = {
    "bert.dynamo": {"gelu": 2, "bias-gelu": 2, "attention-scores": 2, "attention": 2},
    "bert.legacy": {"gelu": 2, "bias-gelu": 2, "attention-scores": 2, "attention": 2},
    "encoder.dynamo": {"gelu": 2, "bias-gelu": 2, "attention": 2},
    "gated.dynamo": {"rms-norm": 3, "silu": 2, "attention-scores": 2, "attention": 1},
    "gated.legacy": {"rms-norm": 3, "silu": 2, "attention-scores": 2, "attention": 1},
    "gpt2_eager.legacy": {"gelu": 2, "layer-norm": 5, "attention-scores": 2, "attention": 2},
    "gpt2_sdpa.dynamo": {"gelu": 2, "attention-scores": 2, "attention": 2},
    "norms.legacy": {"silu": 1},
    "tied.legacy": {"gelu": 1, "layer-norm": 1, "bias-gelu": 1},
    "tied.legacy_train": {"bias-gelu": 1},
    "vit.dynamo": {"bias-gelu": 2, "attention-scores": 2, "attention": 2},
    "resnet.legacy": {},
    "lstm.dynamo": {},
}


def switches(**more):
    return {"target": TARGET, "passes": more}


def found(path: Path, recipe: dict) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for r in compile_graphs(load_model(path), parse_recipe(recipe)).rewrites:
        counts[r.by] += r.count
    return dict(counts)


@pytest.mark.parametrize("name", FOUND)
def test_fires_on_real_exports(name):
    assert found(MODELS / f"{name}.onnx", switches(on=FUSIONS)) == FOUND[name]


def test_the_table_decides_and_the_recipe_overrides_it():
    assert found(MODELS / "bert.dynamo.onnx", switches()) == {"gelu": 2, "attention-scores": 2}
    assert found(MODELS / "bert.dynamo.onnx", switches(on=["attention"], off=["gelu"])) == {
        "attention-scores": 2,
        "attention": 2,
    }


def test_dropout_of_attention_and_of_a_softmax_is_found_in_a_real_export():
    want = {"attention-scores": 1, "attention": 1, "softmax-dropout": 1}
    assert found(DROPOUT, switches(on=FUSIONS)) == want


@pytest.mark.parametrize("fusion", FUSIONS)
def test_each_can_be_switched_off_by_name(fusion):
    name = next((n for n, counts in FOUND.items() if fusion in counts), None)
    path = DROPOUT if name is None else MODELS / f"{name}.onnx"
    assert fusion in found(path, switches(on=FUSIONS))
    assert fusion not in found(path, switches(off=[fusion]))


# ---- near misses -------------------------------------------------------------------------------------------------------

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
X, ROWS = "float[N,8] x", "float[N,S,T] s, float[N,T,4] v"
EXACT = "e = Erf(d)\n a = Add(e, one)\n m = Mul(x, a)\n y = Mul(m, half)"
NORM = "v = Add(q, eps)\n r = Sqrt(v)\n n = Div(c, r)\n w = Mul(n, scale)\n y = Add(w, bias)"
LN_HEAD = "float[N,4,8] x, float[8] scale, float[8] bias"
NUMBERS = {
    **{"one": "float one = {1}", "half": "float half = {0.5}", "root": "float root = {1.4142135}", "two": "float two = {2}"},
    **{"eps": "float eps = {1e-5}", "last": "int64[1] last = {-1}", "first": "int64[1] first = {1}"},
    **{"quick": "float quick = {1.702}", "cubic": "float cubic = {0.044715}", "slope": "float slope = {0.7978845608}"},
    **{"three": "float three = {3}", "low": "float low = {-100}", "zero": "float zero = {0}"},
}
# Pass -> what is like it and is not: (inputs, outputs, nodes, the numbers that differ).
MISSES: dict[str, list[tuple[str, str, str, dict[str, str]]]] = {
    "gelu": [
        (X, "y", f"d = Div(x, root)\n {EXACT}", {"root": "float root = {1.5}"}),
        (X, "y", f"d = Div(x, root)\n {EXACT}", {"one": "float one = {2}"}),
        (X, "y", f"d = Div(x, root)\n {EXACT}", {"half": "float half = {0.25}"}),
        (f"{X}, float[N,8] z", "y", f"d = Div(z, root)\n {EXACT}", {}),
        (X, "y, e", f"d = Div(x, root)\n {EXACT}", {}),
        (X, "y, z", f"d = Div(x, root)\n {EXACT}\n z = Neg(a)", {}),
        (X, "y", f"d = Mul(x, root)\n {EXACT}", {}),
        (f"{X}, float root", "y", f"d = Div(x, root)\n {EXACT}", {"root": ""}),
        (
            X,
            "y",
            "p = Pow(x, three)\n k = Mul(p, cubic)\n s = Add(x, k)\n u = Mul(s, slope)\n e = Tanh(u)\n a = Add(e, one)\n"
            " m = Mul(x, a)\n y = Mul(m, half)",
            {"cubic": "float cubic = {0.05}"},
        ),
        (
            X,
            "y",
            "p = Pow(x, three)\n k = Mul(p, cubic)\n s = Add(x, k)\n u = Mul(s, slope)\n e = Tanh(u)\n a = Add(e, one)\n"
            " m = Mul(x, a)\n y = Mul(m, half)",
            {"three": "float three = {2}"},
        ),
    ],
    "gelu to exact": [(X, "y", "s = Mul(x, quick)\n g = Sigmoid(s)\n y = Mul(x, g)", {"quick": "float quick = {1.6}"})],
    "silu": [
        (f"{X}, float[N,8] z", "y", "s = Sigmoid(z)\n y = Mul(x, s)", {}),
        (X, "y, s", "s = Sigmoid(x)\n y = Mul(x, s)", {}),
        (f"{X}, float[8] z", "y", "b = Mul(x, z)\n s = Sigmoid(b)\n y = Mul(x, s)", {}),
    ],
    "layer-norm": [
        (LN_HEAD, "y", f"m = ReduceMean(x, first)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, first)\n {NORM}", {}),
        (LN_HEAD, "y", f"m = ReduceMean(x, last)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, first)\n {NORM}", {}),
        (LN_HEAD, "y", f"m = ReduceMean(x, last)\n c = Sub(x, m)\n p = Pow(c, three)\n q = ReduceMean(p, last)\n {NORM}", {}),
        (LN_HEAD, "y, q", f"m = ReduceMean(x, last)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, last)\n {NORM}", {}),
        (
            "float[N,4,8] x, float[4,1] scale, float[4,1] bias",
            "y",
            f"m = ReduceMean(x, last)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, last)\n {NORM}",
            {},
        ),
        (
            LN_HEAD,
            "y",
            "m = ReduceMean <keepdims = 0> (x, first)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, last)\n " + NORM,
            {},
        ),
    ],
    "rms-norm": [
        (
            "float[N,4,8] x, float[8] scale",
            "y",
            f"p = Mul(x, x)\n q = ReduceMean(p, {axis})\n v = Add(q, eps)\n r = Sqrt(v)\n n = Div({of}, r)\n y = Mul(n, scale)",
            {},
        )
        for axis, of in (("first", "x"), ("last", "p"))
    ],
    "bias-gelu": [
        (f"{X}, float[N,8] z", "y", "s = Add(x, z)\n y = Gelu(s)", {}),
        (f"{X}, float[8] z", "y, s", "s = Add(x, z)\n y = Gelu(s)", {}),
    ],
    "attention": [
        (ROWS, "y", "p = Softmax <axis = 1> (s)\n y = MatMul(p, v)", {}),
        (ROWS, "y, p", "p = Softmax(s)\n y = MatMul(p, v)", {}),
        ("float[N,4,T] v, float[N,T,S] s", "y", "p = Softmax(s)\n y = MatMul(v, p)", {}),
        (ROWS, "y", "p = Softmax(s)\n i = IsNaN(p)\n g = Where(i, one, p)\n y = MatMul(g, v)", {}),
    ],
    "attention-scores": [
        (f"{ROWS}, bool[S,T] b", "y", "w = Where(b, low, s)\n p = Softmax(w)\n y = MatMul(p, v)", {}),
        ("float[N,3,8] q, float[N,8,5] k", "y", "p = MatMul(q, k)\n y = Mul(p, half)", {}),
        ("float[N,3,8] q, float[N,8,T] k", "y, p", "p = MatMul(q, k)\n y = Mul(p, half)", {}),
    ],
    "softmax-dropout": [
        ("float[N,4] x, bool[N,4] b", "y", "p = Softmax(x)\n w = Where(b, two, one)\n y = Mul(p, w)", {}),
        ("float[N,4] x, bool[N,4] b, float[4] f", "y", "p = Softmax(x)\n w = Where(b, f, zero)\n y = Mul(p, w)", {}),
    ],
}


def written(inputs: str, outputs: str, nodes: str, changed: dict[str, str]) -> ir.Model:
    constants = ", ".join(text for text in {**NUMBERS, **changed}.values() if text)
    made = ", ".join(f"float[?] {name}" for name in outputs.split(", ")).replace("[?]", "")
    text = f"{HEAD}\ng ({inputs}) => ({made})\n<{constants}>\n{{\n {nodes}\n}}"
    proto = onnx.parser.parse_model(text)
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    return infer_shapes(prepare(ir.from_proto(proto)))


@pytest.mark.parametrize(
    ("of", "case"), [pytest.param(of, case, id=f"{of}-{i}") for of, cases in MISSES.items() for i, case in enumerate(cases)]
)
def test_does_not_fire_on_a_near_miss(of, case):
    graph = written(*case).graph
    before = [node.op_type for node in graph]
    assert apply_rewrites(graph, REWRITES[of], of) == []
    assert [node.op_type for node in graph] == before


def test_what_the_near_misses_miss_is_found():
    """So that they fail for their own reason, not for another."""
    exact = written(X, "y", f"d = Div(x, root)\n {EXACT}", {})
    assert len(apply_rewrites(exact.graph, REWRITES["gelu"], "gelu")) == 1
    nodes = f"m = ReduceMean(x, last)\n c = Sub(x, m)\n p = Pow(c, two)\n q = ReduceMean(p, last)\n {NORM}"
    assert len(apply_rewrites(written(LN_HEAD, "y", nodes, {}).graph, REWRITES["layer-norm"], "layer-norm")) == 1
    attention = written(ROWS, "y", "p = Softmax(s)\n y = MatMul(p, v)", {})
    assert len(apply_rewrites(attention.graph, REWRITES["attention"], "attention")) == 1


def test_a_tensor_where_the_user_cuts_stays():
    path = MODELS / "bert.legacy.onnx"
    inner = next(n.outputs[0].name for n in prepare(load_model(path)).graph if n.op_type == "Erf")
    recipe = {**switches(), "pipeline": {"stages": 2, "cuts": [inner]}}
    assert found(path, recipe)["gelu"] == 1


# ---- gradients ---------------------------------------------------------------------------------------------------------


def gradients(path: Path, folder: Path, recipe: dict, batch: dict) -> tuple[float, dict[str, np.ndarray]]:
    compile(path, folder, parse_recipe(recipe))
    with Trainer(folder) as trainer:
        return trainer.gradients(batch)


@pytest.mark.parametrize("name", ["bert.dynamo", "gpt2_eager.legacy", "gpt2_sdpa.dynamo", "tied.legacy_train", "dropout"])
def test_gradients_are_those_of_the_model_without_fusions(name, tmp_path):
    """Those with the fusions that are on by default are compared with PyTorch's by tests/test_models.py."""
    random = np.random.default_rng(3)
    if name == "dropout":
        path = DROPOUT
        batch = {"x": random.standard_normal((3, 5, 16)).astype(np.float32), "labels": random.integers(0, 4, (3, 5))}
    else:
        path = MODELS / f"{name}.onnx"
        with np.load(MODELS / f"{name}.ref.npz") as stored:
            batch = {key.removeprefix("in/"): stored[key] for key in stored.files if key.startswith("in/")}
            batch["labels"] = stored["target"]
    apart = gradients(path, tmp_path / "apart", switches(off=FUSIONS), batch)
    fused = gradients(path, tmp_path / "fused", switches(on=FUSIONS), batch)
    assert fused[0] == pytest.approx(apart[0], rel=1e-6)
    largest = max(float(np.abs(g).max()) for g in apart[1].values())
    for key, want in apart[1].items():
        assert np.abs(fused[1][key] - want).max() <= 2e-5 * max(float(np.abs(want).max()), 1e-3 * largest), key


# ---- the choice of a form of GELU --------------------------------------------------------------------------------------

FORMS = {
    "exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick": lambda x: x / (1 + np.exp(-1.702 * x)),
}
SPELT = {
    "exact": "d = Div(x, root)\n e = Erf(d)\n a = Add(e, one)\n m = Mul(x, a)\n g = Mul(m, half)",
    "tanh": "p = Pow(x, three)\n k = Mul(p, cubic)\n s = Add(x, k)\n u = Mul(s, slope)\n e = Tanh(u)\n a = Add(e, one)\n"
    " m = Mul(x, a)\n g = Mul(m, half)",
    "quick": "s = Mul(x, quick)\n e = Sigmoid(s)\n g = Mul(x, e)",
    "contrib": "g = com.microsoft.Gelu(x)",
    "contrib bias": "g = com.microsoft.BiasGelu(x, none)",
    "contrib quick": "g = com.microsoft.QuickGelu <alpha = 1.702> (x)",
    "contrib tanh": "g = com.microsoft.FastGelu(x)",
}


def gelu_model(spelling: str, path: Path, opset: int = 17) -> None:
    used = [text for name, text in NUMBERS.items() if f" {name})" in SPELT[spelling]]
    constants = ", ".join([*used, "float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}", "float[4] none = {0, 0, 0, 0}"])
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>
    g (float[N,4] x) => (float[N,3] y) <{constants}> {{ {SPELT[spelling]}
      y = MatMul(g, w) }}"""
    onnx.save(onnx.parser.parse_model(text), path)


@pytest.mark.parametrize("spelling", SPELT)
@pytest.mark.parametrize("choice", FORMS)
def test_what_is_trained_is_evaluated_and_exported(spelling, choice, tmp_path):
    gelu_model(spelling, tmp_path / "m.onnx")
    recipe = parse_recipe({"target": TARGET, "loss": [{"name": "mse"}], "gelu": choice})
    plan = compile(tmp_path / "m.onnx", tmp_path / "stages", recipe)
    x = np.linspace(-4, 4, 24).reshape(6, 4).astype(np.float32)
    want = FORMS[choice](x.astype(np.float64)) @ np.arange(1, 13).reshape(4, 3)
    batch = {"x": x, "labels": np.zeros((6, 3), np.float32)}
    with Trainer(tmp_path / "stages") as trainer:
        trained, found = trainer.gradients(batch)
        evaluated = trainer.evaluate(batch).loss
        trainer.export(tmp_path / "out.onnx")
    assert trained == pytest.approx(np.mean(want**2), rel=1e-5)
    assert evaluated == pytest.approx(np.mean(want**2), rel=1e-5)
    np.testing.assert_allclose(found["w"], FORMS[choice](x.astype(np.float64)).T @ (2 * want / want.size), rtol=1e-4)
    [y] = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-4)
    form = {"contrib": "exact", "contrib bias": "exact"}.get(spelling, spelling.removeprefix("contrib "))
    counted = {(r.rule, r.count) for r in plan.rewrites if r.by == f"gelu to {choice}"}
    assert counted == (set() if form == choice and (form == "quick" or "contrib" in spelling) else {(form, 1)})


def test_the_form_stays_the_models_own_unless_something_else_is_chosen(tmp_path):
    gelu_model("tanh", tmp_path / "m.onnx")
    compile(tmp_path / "m.onnx", tmp_path / "stages", parse_recipe({"target": TARGET, "loss": [{"name": "mse"}]}))
    x = np.linspace(-4, 4, 24).reshape(6, 4).astype(np.float32)
    with Trainer(tmp_path / "stages") as trainer:
        trainer.export(tmp_path / "out.onnx")
    ops = [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node]
    assert ops.count("Tanh") == 1
    [y] = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(y, FORMS["tanh"](x) @ np.arange(1, 13).reshape(4, 3), rtol=1e-5, atol=1e-4)


def test_a_choice_says_what_it_changed(ortc, tmp_path):
    arguments = ("compile", MODELS / "bert.legacy.onnx", "--target", TARGET)
    code, out, _ = ortc(*arguments, "-o", tmp_path / "a", "--gelu", "tanh")
    assert code == 0
    assert "gelu        2 exact became tanh, in training, evaluation and export" in out
    code, out, _ = ortc(*arguments, "-o", tmp_path / "b", "--gelu", "exact")
    assert "gelu        there was none to change to exact" in out
    code, out, _ = ortc(*arguments, "-o", tmp_path / "c")
    assert "  gelu  " not in out


def test_a_choice_that_the_export_cannot_follow_is_refused(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[N,4] x) => (float[N,2] y) <float[4] b = {0, 0, 0, 0}, float[2,2] w = {1, 2, 3, 4}> {
      h = com.microsoft.BiasSplitGelu(x, b)
      y = MatMul(h, w) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"cannot be changed in the model that is exported.*--gelu keep"):
        compile_graphs(load_model(tmp_path / "m.onnx"), parse_recipe({"gelu": "tanh", "loss": [{"name": "mse"}]}))


# ---- passes by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"passes": {"off": ["gellu"]}}, "passes.off: there is no pass 'gellu'; optional are gelu, "),
        ({"passes": {"off": ["gradients"]}}, "passes.off: the pass 'gradients' is required; optional are gelu, "),
        ({"passes": {"on": ["lower"]}}, "passes.on: the pass 'lower' is required"),
        ({"passes": {"on": ["silu"], "off": ["silu"]}}, "'silu' is off, and the recipe asks for it at another place"),
        ({"passes": {"off": ["gelu"]}, "gelu": "tanh"}, "'gelu' is off, and the recipe asks for it at another place"),
    ],
)
def test_switches_that_cannot_be(recipe, message):
    with pytest.raises(RecipeError) as error:
        compile_graphs(load_model(MODELS / "mlp.legacy.onnx"), parse_recipe({"target": TARGET, **recipe}))
    assert message in str(error.value)


def test_flags_are_the_recipe(ortc):
    flags = ("--without", "gelu", "--without", "silu", "--with", "bias-gelu", "--write-recipe")
    code, out, _ = ortc("compile", "m.onnx", "--gelu", "keep", *flags)
    assert code == 0
    assert 'off = [\n    "gelu",\n    "silu",\n]\non = [\n    "bias-gelu",\n]' in out


def outputs(path: Path, seed: int = 1) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(seed)
    feeds = {}
    for port in session.get_inputs():
        shape = [d if isinstance(d, int) else {"batch": 3}.get(d, 7) for d in port.shape]
        whole = "int" in port.type
        feeds[port.name] = random.integers(1, 2, shape) if whole else random.standard_normal(shape).astype(np.float32)
    return session.run(None, feeds)


@pytest.mark.parametrize("name", [n for n, counts in FOUND.items() if counts and "train" not in n])
def test_a_pass_that_runs_alone_leaves_a_model_that_computes_the_same(name, tmp_path):
    path = MODELS / f"{name}.onnx"
    for fusion in (f for f in FUSIONS if f in FOUND[name]):
        out = tmp_path / f"{fusion}.onnx"
        before = ["gelu"] if fusion == "bias-gelu" else []  # whose operator it looks for
        c = rewrite_model(path, out, [*before, fusion, "lower", "clean-up"], parse_recipe({"target": TARGET}))
        assert sum(r.count for r in c.rewrites if r.by == fusion) >= 1
        written = onnx.load(out)
        original = onnx.load(path)
        assert [i.name for i in written.graph.input] == [i.name for i in original.graph.input]
        assert [o.name for o in written.graph.output] == [o.name for o in original.graph.output]
        for got, want in zip(outputs(out), outputs(path), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["simplify", "decompose", "lower", "clean-up", "prepare", "upgrade"])
def test_other_passes_run_alone_too(name, tmp_path):
    path = MODELS / "bert.legacy.onnx"
    rewrite_model(path, tmp_path / "out.onnx", [name], parse_recipe({"target": TARGET}))
    for got, want in zip(outputs(tmp_path / "out.onnx"), outputs(path), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_the_same_bytes_each_time(tmp_path):
    for name in ("a", "b"):
        rewrite_model(MODELS / "gpt2_eager.legacy.onnx", tmp_path / f"{name}.onnx", FUSIONS, parse_recipe({"target": TARGET}))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_rewrite_on_the_command_line(ortc, tmp_path):
    out = tmp_path / "out.onnx"
    code, said, _ = ortc("rewrite", "--pass", "gelu,attention", MODELS / "gpt2_eager.legacy.onnx", "-o", out)
    assert code == 0
    assert "2 gelu, 2 attention" in said
    assert "operators of ortc's own; `--pass lower`" in said
    kinds = Counter(f"{n.domain}::{n.op_type}" for n in onnx.load(out).graph.node)
    assert (kinds["::Gelu"], kinds["ortc::Attend"]) == (2, 2)
    metadata = [{p.key: p.value for p in n.metadata_props} for n in onnx.load(out).graph.node if n.op_type == "Gelu"]
    assert [m["ortc.pass"] + " " + m["ortc.rule"] for m in metadata] == ["gelu tanh"] * 2


def test_rewrite_refuses_without_leaving_anything(ortc, tmp_path):
    model, out = MODELS / "mlp.legacy.onnx", tmp_path / "out.onnx"
    for arguments, message in (
        (("--pass", "gellu", "-o", out), "there is no pass 'gellu' that runs alone; there are prepare, "),
        (("--pass", "gelu,gradients", "-o", out), "there is no pass 'gradients' that runs alone"),
        (("-o", out), "say which passes"),
        (("--pass", "gelu"), "say which model and where"),
        (("--pass", "gelu", "-o", tmp_path / "no" / "out.onnx"), "cannot write in"),
    ):
        code, _, err = ortc("rewrite", model, *arguments)
        assert (code, list(tmp_path.iterdir())) == (2, []), arguments
        assert message in err
    out.write_bytes(b"kept")
    code, _, err = ortc("rewrite", model, "--pass", "gelu", "-o", out)
    assert (code, out.read_bytes()) == (2, b"kept")
    assert "--force" in err


def test_the_list_of_passes_shows_all_with_what_they_do(ortc):
    code, out, _ = ortc("rewrite", "--list", "--target", TARGET)
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    for step in standard():
        assert step.summary() in rows[step.name]
    assert " off " in rows["bias-gelu"]
    assert " always " in rows["gradients"]


def test_a_rewrite_that_matches_its_own_result_is_named():
    from ortc.rewrite import Rewrite

    again = Rewrite("again", lambda op, x: op.Neg(x), lambda op, x: op.Neg(x), None, 0.0, ())
    with pytest.raises(AssertionError, match="'again' matches its own result"):
        apply_rewrites(written(X, "y", "y = Neg(x)", {}).graph, [again], "endless")
