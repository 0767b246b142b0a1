"""Stages that are compiled apart, each with its own file and a description of the boundary, and joined: as the whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS
from test_joining import FIRST, INDEX, MODELS, SECOND, batch_of, crossing, save, surgeon

from ortc.artifacts import compile, compile_stages
from ortc.boundary import dump_boundary, load_boundary, parse_boundary, parse_connections
from ortc.diff import diff
from ortc.errors import ModelError, OrtcError, PlanError, RecipeError
from ortc.parts import compile_part, join_parts
from ortc.passes import standard
from ortc.passes.joining import Stages, describe
from ortc.recipe import Recipe, parse_recipe
from ortc.runtime.trainer import Trainer

FUSIONS = [step.name for step in standard() if step.optional]


def recipe(**fields) -> Recipe:
    return parse_recipe({"target": TARGETS[-1].name, "optimizer": {"name": "sgd"}, **fields})


def apart(paths: list[Path], folder: Path, chosen: Recipe, connections: tuple[str, ...] = ()) -> Path:
    """Each stage compiled in a folder where its file is the only one, then all joined."""
    text = folder / "boundary.toml"
    text.write_text(dump_boundary(describe(Stages(paths, parse_connections(connections)))))
    parts = []
    for rank, path in enumerate(paths):
        own = folder / f"machine{rank}"
        own.mkdir()
        shutil.copy(path, own)
        compile_part([own / path.name], own / "part", load_boundary(text), rank, chosen)
        parts.append(own / "part")
    join_parts(parts[::-1], folder / "joined")
    return folder / "joined"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt2_eager.legacy", "resnet.legacy", "tied.legacy", "bert.legacy"])
def test_apart_trains_as_the_whole(name, schedule, tmp_path):
    kept: set[str] = set()
    borders = []
    for part in (0.4, 0.75):
        border = [n for n in crossing(name, part) if n not in kept]
        borders.append(border)
        kept.update(border)
    paths = surgeon(name, borders, tmp_path)
    loss = {"ce": {"name": "cross_entropy"}, "bce": {"name": "bce_with_logits"}}[INDEX[name]["loss"]]
    fields = {"loss": [{**loss, "output": INDEX[name]["output"]}], "batch_norm": "frozen"}
    compile(MODELS / f"{name}.onnx", tmp_path / "whole", recipe(**fields))
    folder = apart(paths, tmp_path, recipe(**fields, pipeline={"micro_batches": 2, "schedule": schedule}))
    with Trainer(tmp_path / "whole") as whole, Trainer(folder) as joined:
        assert set(joined.parameters) == set(whole.parameters)  # a weight that two files hold is one
        losses = [(whole.step(batch_of(name)).loss, joined.step(batch_of(name)).loss) for _ in range(5)]
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
        joined.export(tmp_path / "trained.onnx", data=None)
    assert losses[-1][0] < losses[0][0]


def test_apart_is_what_together_is_bit_for_bit(tmp_path):
    """The graphs of stages that are compiled together, and of each alone, compute the same; their checkpoints fit both.

    But for fusions, which see across a cut when the stages are together, and round otherwise.
    """
    name = "tied.legacy"
    paths = surgeon(name, [crossing(name, 0.5)], tmp_path)
    fields = {"loss": [{"name": "cross_entropy", "output": INDEX[name]["output"]}], "pipeline": {"micro_batches": 2}}
    fields["passes"] = {"off": FUSIONS}
    plan = compile_stages(paths, tmp_path / "together", recipe(**fields))
    folder = apart(paths, tmp_path, recipe(**fields))
    assert json.loads((folder / "plan.json").read_text())["fingerprint"] == plan.fingerprint
    assert not diff(folder, folder)  # whose weights lie in a file for each part
    changes = diff(tmp_path / "together", folder).files.get("checkpoint/step-0", [])
    assert not changes, "the initial weights"
    with Trainer(tmp_path / "together") as together, Trainer(folder) as joined:
        for _ in range(3):
            assert together.step(batch_of(name)).loss == joined.step(batch_of(name)).loss
        together.save()
        saved = sorted((tmp_path / "together" / "checkpoint").glob("step-3"))[0]
    with Trainer(folder, restore=saved) as continued, Trainer(tmp_path / "together") as together:
        assert continued.step(batch_of(name)).loss == together.step(batch_of(name)).loss


DROPPING = (
    "a (float[N,2] x) => (float[N,2] h) <float[2,2] w = {1,2,3,4}, float r = {0.5}, bool t = {1}> "
    "{ d = MatMul(x, w) h, m = Dropout(d, r, t) }"
)


def test_dropout_drops_the_same_apart(tmp_path):
    second = SECOND.replace("y = MatMul(t, w)", "d = Dropout(t, r, f) y = MatMul(d, w)")
    second = second.replace("> {", ", float r = {0.25}, bool f = {1}> {")
    paths = [save(tmp_path / "a.onnx", DROPPING), save(tmp_path / "b.onnx", second)]
    chosen = recipe(loss=[{"name": "mse"}], pipeline={"micro_batches": 2})
    compile_stages(paths, tmp_path / "together", chosen)
    folder = apart(paths, tmp_path, chosen)
    batch = {"x": np.ones((8, 2), np.float32), "labels": np.ones((8, 2), np.float32)}
    with Trainer(tmp_path / "together") as together, Trainer(folder) as joined:
        losses = [(together.step(batch).loss, joined.step(batch).loss) for _ in range(3)]
    assert all(a == b for a, b in losses)
    assert len({a for a, _ in losses}) == 3


def test_a_rank_with_several_stages(tmp_path):
    """interleaved: a rank's part holds the models of all its stages."""
    texts = [
        f"s{k} (float[N,2] h{k}) => (float[N,2] h{k + 1}) <float[2,2] w{k} = {{1,{k},0,1}}> {{ t = Tanh(h{k}) "
        f"h{k + 1} = MatMul(t, w{k}) }}"
        for k in range(4)
    ]
    paths = [save(tmp_path / f"s{k}.onnx", text) for k, text in enumerate(texts)]
    pipeline = {"schedule": "interleaved", "ranks": 2, "micro_batches": 4}
    chosen = recipe(loss=[{"name": "mse"}], pipeline=pipeline)
    boundary = describe(Stages(paths))
    for rank in (0, 1):
        plan = compile_part(paths[rank::2], tmp_path / f"part{rank}", boundary, rank, chosen)
        assert [piece.stage.index for piece in plan.pieces] == [rank, rank + 2]
    join_parts([tmp_path / "part0", tmp_path / "part1"], tmp_path / "joined")
    compile_stages(paths, tmp_path / "together", chosen)
    batch = {"h0": np.arange(16, dtype=np.float32).reshape(8, 2) / 16, "labels": np.ones((8, 2), np.float32)}
    with Trainer(tmp_path / "together") as together, Trainer(tmp_path / "joined") as joined:
        assert [together.step(batch).loss for _ in range(3)] == [joined.step(batch).loss for _ in range(3)]
    with pytest.raises(RecipeError, match="rank 0 holds the stages 0, 2: give 2 models"):
        compile_part(paths[:1], tmp_path / "part", boundary, 0, chosen)


SAME_NAMES = "a (float[N,2] input) => (float[N,2] output) <float[2,2] w = {1,2,3,4}> { output = MatMul(input, w) }"


def test_names_that_are_the_same_in_every_file_are_connected(tmp_path):
    """Each stage of many tools calls its input `input` and its output `output`."""
    texts = [SAME_NAMES, SAME_NAMES.replace("{1,2,3,4}", "{0,1,1,0}"), SAME_NAMES.replace("{1,2,3,4}", "{1,1,0,1}")]
    paths = [save(tmp_path / f"s{k}.onnx", text) for k, text in enumerate(texts)]
    wanted = ("0:output=1:input", "1:output=2:input")
    chosen = recipe(loss=[{"name": "mse"}], pipeline={"micro_batches": 1})
    plan = compile_stages(paths, tmp_path / "together", chosen, connections=parse_connections(wanted))
    assert [p.name for p in plan.parameters] == ["w", "stage1/w", "stage2/w"]
    assert "3 weights" not in plan.warnings[0]
    assert "2 weights have the name of another file's" in plan.warnings[0]
    folder = apart(paths, tmp_path, chosen, wanted)
    batch = {"input": np.ones((4, 2), np.float32), "labels": np.ones((4, 2), np.float32)}
    expected = np.square(np.ones((4, 2)) @ [[1, 2], [3, 4]] @ [[0, 1], [1, 0]] @ [[1, 1], [0, 1]] - 1).mean()
    with Trainer(tmp_path / "together") as together, Trainer(folder) as joined:
        assert together.step(batch).loss == pytest.approx(expected, rel=1e-6)
        assert joined.step(batch).loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("connections", "says"),
    [
        (["0:h=1:z"], "stage 1 has an input 'z'; it has h"),
        (["q=h"], "no file has no output 'q'|no file has an output|has no output 'q'"),
        (["h"], "is not .STAGE:.OUTPUT"),
    ],
)
def test_a_wrong_connection_is_told(connections, says, tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    with pytest.raises(RecipeError, match=says):
        compile_stages(paths, tmp_path / "f", recipe(), connections=parse_connections(connections))


HAND = {"stages": 2, "values": [{"name": "h", "dtype": "float32", "from": 0, "to": [1]}]}


def test_a_boundary_written_by_hand(tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND.replace(" w ", " v ").replace(", w)", ", v)"))]
    boundary = parse_boundary(HAND)
    for rank, path in enumerate(paths):
        compile_part([path], tmp_path / f"p{rank}", boundary, rank, recipe(loss=[{"name": "mse"}]))
    plan = join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "joined")
    assert [s.parameters for s in plan.stages] == [["w"], ["v"]]
    with Trainer(tmp_path / "joined") as trainer:
        losses = [
            trainer.step({"x": np.ones((8, 2), np.float32) / 9, "labels": np.ones((8, 2), np.float32)}).loss for _ in range(9)
        ]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"values": [{**HAND["values"][0], "to": [0]}]}, "'h' goes from stage 0 to 0"),
        ({"values": HAND["values"] * 2}, "'h' is listed twice"),
        ({"stages": 3}, "nothing goes from stage 1"),
        ({"values": [{**HAND["values"][0], "frm": 0}]}, r"values\[0\].frm: Extra inputs"),
        ({"weights": [{"name": "w", "stages": [1, 0]}]}, "the stages of 'w' must ascend"),
    ],
)
def test_an_impossible_boundary_is_refused(change, says):
    with pytest.raises(RecipeError, match=says):
        parse_boundary({**HAND, **change})


@pytest.mark.parametrize(
    ("rank", "change", "says"),
    [
        (
            0,
            {"values": [{**HAND["values"][0], "name": "hh"}]},
            r"has no output 'hh', which the boundary says it has; did you mean 'h'",
        ),
        (1, {"values": [{**HAND["values"][0], "name": "q"}]}, r"has no input 'q', which the boundary says it has; it has h"),
        (0, {"values": [{**HAND["values"][0], "dtype": "float64"}]}, "'h' is float32, the boundary says float64"),
        (1, {"values": [{**HAND["values"][0], "shape": ["N", 3]}]}, r"shape \['N', 2\], the boundary says \['N', 3\]"),
        (0, {"weights": [{"name": "v", "stages": [0, 1]}]}, "has no weight 'v'"),
        (1, {"weights": [{"name": "w", "stages": [0, 1], "sha256": "0" * 64}]}, "the tied weight 'w' are not those"),
        (0, {"opset": 13}, "is of opset 21, the boundary says 13"),
        (2, {}, "there are ranks 0 to 1, not 2"),
    ],
)
def test_a_file_that_is_not_what_the_boundary_says(rank, change, says, tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    with pytest.raises(OrtcError, match=says):
        compile_part([paths[min(rank, 1)]], tmp_path / "part", parse_boundary({**HAND, **change}), rank, recipe())
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def two_parts(folder: Path, **second) -> list[Path]:
    paths = [save(folder / "a.onnx", FIRST), save(folder / "b.onnx", second.pop("model", SECOND))]
    boundary = parse_boundary({**HAND, "weights": [{"name": "w", "stages": [0, 1], "tied": False}]})
    compile_part([paths[0]], folder / "p0", boundary, 0, recipe(loss=[{"name": "mse"}]))
    compile_part(
        [paths[1]], folder / "p1", second.pop("boundary", boundary), 1, recipe(**{"loss": [{"name": "mse"}], **second})
    )
    return [folder / "p0", folder / "p1"]


def test_parts_that_do_not_fit_are_told(tmp_path):
    other = parse_boundary({**HAND, "weights": []})
    cases = [
        ({"boundary": other}, "was compiled for another boundary"),
        ({"learning_rate": {"base": 0.5}}, "learning_rate.base is 0.5 in the first and 0.001 in the second"),
    ]
    for number, (change, says) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(PlanError, match=says):
            join_parts(two_parts(folder, **change), folder / "joined")
        assert not (folder / "joined").exists()


def test_a_part_that_is_missing_or_damaged_is_told(tmp_path):
    one, two = two_parts(tmp_path)
    with pytest.raises(PlanError, match="no part holds 1"):
        join_parts([one], tmp_path / "joined")
    with pytest.raises(PlanError, match="both hold stage 0"):
        join_parts([one, one, two], tmp_path / "joined")
    with pytest.raises(PlanError, match=r"has no part.json: is it a folder of `ortc compile --rank`"):
        join_parts([tmp_path, two], tmp_path / "joined")
    with pytest.raises(PlanError, match=r"is one rank's part of a model: `ortc join`"):
        Trainer(one)
    graph = two / "stage-1" / "forward.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(PlanError, match=r"forward.onnx is not the file that was compiled"):
        join_parts([one, two], tmp_path / "joined")
    graph.unlink()
    with pytest.raises(PlanError, match=r"forward.onnx is missing"):
        join_parts([one, two], tmp_path / "joined")
    text = json.loads((two / "part.json").read_text())
    text["pieces"][0]["weights"]["file"] = "../../outside"
    (two / "part.json").write_text(json.dumps(text))
    with pytest.raises(PlanError, match="the path must stay inside the folder"):
        join_parts([one, two], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_weights_of_one_name_that_the_boundary_does_not_know(tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    for rank, path in enumerate(paths):
        compile_part([path], tmp_path / f"p{rank}", parse_boundary(HAND), rank, recipe(loss=[{"name": "mse"}]))
    with pytest.raises(PlanError, match=r"both have a weight 'w': say in the boundary whether it is one"):
        join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "joined")


def test_what_the_recipe_names_must_be_in_some_part(tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    boundary = describe(Stages(paths))
    for rank, path in enumerate(paths):
        compile_part([path], tmp_path / f"p{rank}", boundary, rank, recipe(parameters={"freeze": ["nowhere", "stage1/*"]}))
    with pytest.raises(RecipeError, match=r"parameters.freeze: nothing in the model is called 'nowhere'"):
        join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "joined")


def test_a_value_that_wants_no_gradient_and_one_that_is_not_used(tmp_path):
    """An integer crosses, a float without gradient, one that the reader leaves alone: none hangs, and the weights train."""
    first = (
        "a (float[N,2] x, int64[N] i) => (float[N,2] h, int64[N] j, float[N,2] c, float[N,2] u) <float[2,2] w = {1,2,3,4}> "
        "{ h = MatMul(x, w) j = Neg(i) c = Exp(h) u = Tanh(h) }"
    )
    second = (
        "b (float[N,2] h, int64[N] j, float[N,2] c, float[N,2] u) => (float[N,2] y) "
        "{ f = Cast<to = 1>(j) a = Constant<value_ints = [1]>() e = Unsqueeze(f, a) s = Add(h, e) y = Add(s, c) }"
    )
    paths = [save(tmp_path / "a.onnx", first), save(tmp_path / "b.onnx", second)]
    text = describe(Stages(paths)).model_dump(by_alias=True)
    text["values"] = [{**v, "gradient": v["name"] != "c"} for v in text["values"]]
    for rank, path in enumerate(paths):
        compile_part(
            [path],
            tmp_path / f"p{rank}",
            parse_boundary(text),
            rank,
            recipe(loss=[{"name": "mse"}], learning_rate={"base": 1.0}),
        )
    join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "joined")
    x, i = np.array([[0.1, 0.2], [0.3, -0.1]], np.float32), np.array([1, 2])
    w, labels = np.array([[1, 2], [3, 4]], np.float64), np.zeros((2, 2), np.float32)
    with Trainer(tmp_path / "joined") as trainer:
        loss = trainer.step({"x": x, "i": i, "labels": labels}).loss
        after = trainer.parameters["w"].copy()
    h = x @ w
    y = h - i[:, None] + np.exp(h)
    assert loss == pytest.approx(np.square(y).mean(), rel=1e-5)
    np.testing.assert_allclose(after, w - x.T @ (2 * y / y.size), rtol=1e-5)  # c is held fixed, as the boundary says


def test_the_commands(ortc, tmp_path):
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    code, out, _ = ortc("boundary", *paths, "-o", tmp_path / "b.toml")
    assert code == 0
    assert "h from stage 0 to 1" in out
    assert load_boundary(tmp_path / "b.toml") == describe(Stages(paths))
    target = ("--target", TARGETS[-1].name, "--loss", "mse")
    for rank, path in enumerate(paths):
        code, out, err = ortc(
            "compile", path, "-o", tmp_path / f"p{rank}", "--rank", rank, "--boundary", tmp_path / "b.toml", *target
        )
        assert code == 0, err
        assert f"stage {rank} of 2" in out
    code, out, _ = ortc("join", tmp_path / "p0", tmp_path / "p1", "-o", tmp_path / "stages")
    assert code == 0
    assert "inputs      x (stage 0), labels (stage 1)" in out
    ones = np.ones((32, 2), np.float32)
    np.savez(tmp_path / "data.npz", x=ones, labels=ones)
    code, _, err = ortc("run", tmp_path / "stages", "--data", tmp_path / "data.npz", "--quiet")
    assert code == 0, err
    code, _, err = ortc("compile", paths[0], "-o", tmp_path / "x", "--rank", 0)
    assert code == 2
    assert "--rank and --boundary go together" in err
    code, _, err = ortc("boundary", *paths, "-o", tmp_path / "b.toml")
    assert code == 2
    assert "exists already" in err


def test_external_data_stays_where_it_is(tmp_path):
    """Weights go from file to file."""
    whole = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {FIRST}')
    whole.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([[1, 2], [3, 4]], np.float32), "w"))
    onnx.save(whole, tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
    paths = [tmp_path / "a.onnx", save(tmp_path / "b.onnx", SECOND)]
    assert (tmp_path / "a.bin").exists()
    boundary = describe(Stages(paths))
    for rank, path in enumerate(paths):
        compile_part([path], tmp_path / f"p{rank}", boundary, rank, recipe(loss=[{"name": "mse"}]))
    join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "joined")
    with Trainer(tmp_path / "joined") as trainer:
        np.testing.assert_array_equal(trainer.parameters["w"], [[1, 2], [3, 4]])
        np.testing.assert_array_equal(trainer.parameters["stage1/w"], [[1, 2], [3, 5]])


def test_a_weight_that_a_stage_hands_on(tmp_path):
    """Together it is one weight of two stages; apart it cannot cross, and the message says what to do."""
    first = "a (float[N,2] x) => (float[N,2] h, float[2,2] w) <float[2,2] w = {1,2,3,4}> { h = MatMul(x, w) }"
    second = "b (float[N,2] h, float[2,2] w) => (float[N,2] y) { t = Tanh(h) y = MatMul(t, w) }"
    paths = [save(tmp_path / "a.onnx", first), save(tmp_path / "b.onnx", second)]
    plan = compile_stages(paths, tmp_path / "together", recipe(loss=[{"name": "mse"}]))
    assert [s.parameters for s in plan.stages] == [["w"], ["w"]]
    with pytest.raises(ModelError, match=r"a.onnx gives its weight 'w' to a later stage as it is: let each file"):
        describe(Stages(paths))


def test_shards_of_a_tied_weight_agree_apart(tmp_path):
    """ZeRO-1: the same replica updates a tied weight in all its stages, though each dealt its weights out alone."""
    name = "tied.legacy"
    paths = surgeon(name, [crossing(name, 0.5)], tmp_path)
    pipeline = {"micro_batches": 2, "replicas": 2, "zero": 1}
    fields = {"loss": [{"name": "cross_entropy", "output": INDEX[name]["output"]}], "pipeline": pipeline}
    compile_stages(paths, tmp_path / "together", recipe(**fields))
    folder = apart(paths, tmp_path, recipe(**fields))
    with Trainer(tmp_path / "together") as together, Trainer(folder) as joined:
        losses = [(together.step(batch_of(name)).loss, joined.step(batch_of(name)).loss) for _ in range(3)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-6)
    assert losses[-1][0] < losses[0][0]


def test_adapters_apart(tmp_path):
    """In one stage only, in the other there is no such weight: trained and exported, merged and apart, as together."""
    name = "gpt2_eager.legacy"
    paths = surgeon(name, [crossing(name, 0.5)], tmp_path)
    target = next(f"*{n.name.split('/')[-1]}" for n in onnx.load(paths[1]).graph.initializer if len(n.dims) == 2)
    fields = {"loss": [{"name": "cross_entropy", "output": INDEX[name]["output"]}], "pipeline": {"micro_batches": 2}}
    fields |= {"lora": {"rank": 2, "targets": [target]}, "passes": {"off": FUSIONS}}
    plan = compile_stages(paths, tmp_path / "together", recipe(**fields))
    assert {s.index for s in plan.stages for n in s.parameters if "lora" in n} == {1}
    folder = apart(paths, tmp_path, recipe(**fields))
    with Trainer(tmp_path / "together") as together, Trainer(folder) as joined:
        assert joined.plan.adapters == plan.adapters
        losses = [(together.step(batch_of(name)).loss, joined.step(batch_of(name)).loss) for _ in range(3)]
        assert all(a == b for a, b in losses)
        for which, trainer in (("together", together), ("joined", joined)):
            trainer.export(tmp_path / f"{which}.onnx")
            trainer.export(tmp_path / f"{which}-base.onnx", adapters=tmp_path / f"{which}.onnx_adapter")
    assert (tmp_path / "joined.onnx_adapter").read_bytes() == (tmp_path / "together.onnx_adapter").read_bytes()
    assert losses[-1][0] < losses[0][0]


def test_adapters_that_apart_cannot_have(tmp_path):
    """Of a weight that two stages share; and a name that no stage has is told by `ortc join`."""
    name = "tied.legacy"
    paths = surgeon(name, [crossing(name, 0.5)], tmp_path)
    boundary = describe(Stages(paths))
    [tied] = [w.name for w in boundary.weights if w.tied]
    fields = {"loss": [{"name": "cross_entropy", "output": INDEX[name]["output"]}]}
    with pytest.raises(RecipeError, match=r"is a weight of several stages.*--stage-models"):
        compile_part(paths[:1], tmp_path / "t", boundary, 0, recipe(**fields, lora={"targets": [tied]}))
    for rank, path in enumerate(paths):
        compile_part([path], tmp_path / f"p{rank}", boundary, rank, recipe(**fields, lora={"targets": ["nowhere"]}))
    with pytest.raises(RecipeError, match=r"lora.targets: 'nowhere' names no weight"):
        join_parts([tmp_path / "p0", tmp_path / "p1"], tmp_path / "nothing")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_apart(precision, tmp_path):
    """What the boundary describes stays float32; inside each stage products are half."""
    paths = [save(tmp_path / "a.onnx", FIRST), save(tmp_path / "b.onnx", SECOND)]
    chosen = recipe(loss=[{"name": "mse"}], precision={"type": precision})
    folder = apart(paths, tmp_path, chosen)
    compile_stages(paths, tmp_path / "exact", recipe(loss=[{"name": "mse"}]))
    batch = {"x": np.linspace(0, 0.1, 16, dtype=np.float32).reshape(8, 2), "labels": np.ones((8, 2), np.float32)}
    with Trainer(tmp_path / "exact") as exact, Trainer(folder) as joined:
        losses = [(exact.step(batch).loss, joined.step(batch).loss) for _ in range(3)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-2)
    assert any(a != b for a, b in losses)
