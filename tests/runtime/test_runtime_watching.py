"""What a run finds out and shows: metrics, the best checkpoint, TensorBoard, fetched values, values that are not finite."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny

from ortc.errors import CheckpointError, NotFiniteError, OrtcError, RecipeError
from ortc.plan import LossInfo
from ortc.runtime.engine import Engine, make_engine
from ortc.runtime.evaluation import BUILT_IN, Goal, make_metrics
from ortc.runtime.onnx_file import nodes_of, with_outputs
from ortc.runtime.run import run
from ortc.runtime.stage import import_onnxruntime
from ortc.runtime.tensors import histogram, magnitudes, show_magnitudes
from ortc.runtime.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make_folder(tmp_path / "f")
    np.savez(tmp_path / "d.npz", **tiny.data(48))
    np.savez(tmp_path / "e.npz", **tiny.data(21, seed=2))
    return tmp_path / "f"


def train(folder: Path, **options: Any) -> int:
    defaults = {"data": folder.parent / "d.npz", "batch_size": 8, "threads": 1, "quiet": True}
    return run(folder, **(defaults | options))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Metrics


def loss_info(name: str, **fields: Any) -> LossInfo:
    return LossInfo(name=name, output="y", labels="t", weight=1.0, chosen="a test", **fields)


CLASSES = loss_info("cross_entropy", classes=4, axis=1, ignore_index=-1)
LABELS = np.array([0, 1, 1, 3, -1, 0, 1, -1])  # class 2 is decided on once, and is never right
DECIDED = np.array([0, 1, 3, 3, 2, 1, 2, 0])


def logits() -> np.ndarray:
    scores = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    scores[np.arange(8), DECIDED] += 3
    return scores


def value(name: str, info: LossInfo, arrays: dict[str, np.ndarray], cuts: tuple[int, ...] = (3,)) -> float:
    """Of arrays that are cut into batches."""
    metric = BUILT_IN[name](info)
    batches = [
        dict(zip(arrays, parts, strict=True)) for parts in zip(*(np.split(a, cuts) for a in arrays.values()), strict=True)
    ]
    return metric.value(sum(metric.sums(batch, len(batch["y"])) for batch in batches))


def test_metrics_of_classes():
    arrays = {"y": logits(), "t": LABELS}
    assert value("accuracy", CLASSES, arrays) == pytest.approx(3 / 6)
    # By class: 0: TP 1, FN 1; 1: TP 1, FP 1, FN 2; 2: FP 1; 3: TP 1, FP 1. Macro over those that were seen.
    assert value("f1", CLASSES, arrays) == pytest.approx((2 / 3 + 2 / 5 + 0 + 2 / 3) / 4)
    kept = LABELS >= 0
    wide = arrays["y"][kept].astype(np.float64)
    mean = np.mean(np.log(np.exp(wide).sum(1)) - wide[np.arange(6), LABELS[kept]])
    assert value("perplexity", CLASSES, arrays) == pytest.approx(math.exp(mean))
    assert value("perplexity", CLASSES, {"y": arrays["y"] + 1000, "t": LABELS}) == pytest.approx(math.exp(mean), rel=1e-4)


def test_metrics_of_tokens_and_pixels():
    """The classes' axis is where the loss says."""
    last = CLASSES.model_copy(update={"axis": 2})
    tokens = {"y": logits().reshape(2, 4, 4), "t": LABELS.reshape(2, 4)}
    pixels = {"y": tokens["y"].transpose(0, 2, 1), "t": tokens["t"]}
    for name in BUILT_IN:
        expected = value(name, CLASSES, {"y": logits(), "t": LABELS})
        assert value(name, last, tokens, (1,)) == pytest.approx(expected)
        assert value(name, CLASSES, pixels, (1,)) == pytest.approx(expected)


def test_metrics_of_two_sides():
    binary = loss_info("bce_with_logits")
    arrays = {"y": np.array([[2.0], [-1], [0.5], [-3], [1]]), "t": np.array([[1.0], [1], [0], [0], [1]])}
    assert value("accuracy", binary, arrays) == pytest.approx(3 / 5)
    assert value("f1", binary, arrays) == pytest.approx(4 / 6)  # TP 2, FP 1, FN 1


def metric_file(
    path: Path, body: str, inputs: str = "float[n,3] logits, int64[n] labels", outputs: str = "float[] hits"
) -> Path:
    text = f'<ir_version: 10, opset_import: ["": 17]>\nm ({inputs}) => ({outputs}) {{ {body} }}'
    onnx.save(onnx.parser.parse_model(text), path)
    return path


HITS = """
   class = ArgMax <axis = 1, keepdims = 0> (logits)
   equal = Equal (class, labels)
   right = Cast <to = 1> (equal)
   hits = ReduceMean <keepdims = 0> (right)
"""


def test_a_metric_of_ones_own(folder: Path, tmp_path: Path):
    own = metric_file(tmp_path / "own.onnx", HITS, "float[n,3] logits, int64[n] labels", "float[] hits")
    train(folder, steps=6, eval_data=tmp_path / "e.npz", metric=["accuracy", str(own), "f1", "perplexity"])
    [found] = [line for line in lines(folder) if "eval_loss" in line]
    assert set(found) == {"step", "epoch", "eval_loss", "eval_accuracy", "eval_hits", "eval_f1", "eval_perplexity", "time"}
    assert found["eval_hits"] == pytest.approx(found["eval_accuracy"])
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]), rel=1e-4)
    assert 0 < found["eval_accuracy"] < 1


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["speed"], "there is no metric 'speed': take one of accuracy, perplexity, f1"),
        (["gone.onnx"], "there is no metric gone.onnx"),
        (["other.onnx"], "reads 'scores', which the model has not; it has x, labels, logits"),
    ],
)
def test_metrics_that_do_not_fit(folder: Path, tmp_path: Path, monkeypatch, names: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    metric_file(tmp_path / "other.onnx", "y = ReduceMean <keepdims = 0> (scores)", "float[n,3] scores", "float[] y")
    with pytest.raises(OrtcError) as error:
        train(folder, steps=1, eval_data=tmp_path / "e.npz", metric=names)
    assert said in str(error.value)


def test_metrics_want_an_evaluation(folder: Path):
    with pytest.raises(OrtcError, match="give --eval-data"):
        train(folder, steps=1, patience=2)


# The best checkpoint, and when to stop


def test_goals():
    metrics = [BUILT_IN["accuracy"](CLASSES), BUILT_IN["perplexity"](CLASSES)]
    assert Goal.parse("loss", metrics).better == Goal.parse("perplexity", metrics).better == "min"
    assert Goal.parse("accuracy", metrics) == Goal("accuracy", "max")
    assert Goal.parse("min:accuracy", metrics) == Goal("accuracy", "min")
    for wrong in ("f1", "most:accuracy"):
        with pytest.raises(RecipeError, match="loss, accuracy, perplexity"):
            Goal.parse(wrong, metrics)
    goal, best = Goal("accuracy", "max"), None
    for step, accuracy in enumerate((0.5, 0.7, 0.7, math.nan, 0.6, 0.8)):
        best = goal.judged(best, {"accuracy": accuracy}, step)
        told = {"accuracy": accuracy, "step": best["step"], "stale": best["stale"]}
        assert (told["step"], told["stale"]) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (5, 0)][step]
    assert Goal("loss", "min").judged(best, {"loss": 3.0}, 9)["value"] == 3.0, "another goal begins anew"


def test_the_best_checkpoint_is_kept(folder: Path, tmp_path: Path, capsys):
    """With a rate that leads away from the optimum after a while, and checkpoints that are soon forgotten."""
    options = {"eval_data": tmp_path / "e.npz", "eval_every": 2, "save_every": 1, "keep": 1, "lr": 2.0, "metric": ["accuracy"]}
    train(folder, steps=20, best="max:accuracy", quiet=False, **options)
    evaluations = {line["step"]: line["eval_accuracy"] for line in lines(folder) if "eval_loss" in line}
    best = max(evaluations, key=lambda step: (evaluations[step], -step))
    assert best < 20, "the test wants a run that gets worse"
    kept = sorted(p.name for p in (folder / "checkpoint").iterdir())
    assert kept == sorted({"step-0", f"step-{best}", "step-20"})
    assert f"step {best}: the best so far by accuracy" in capsys.readouterr().out
    with Trainer(folder, restore="best") as trainer:
        assert trainer.step_number == best
        part = trainer.evaluate(tiny.data(21, seed=2))
        right = (part.outputs["logits"].argmax(1) == tiny.data(21, seed=2)["labels"]).mean()
    assert right == pytest.approx(evaluations[best])
    train(folder, steps=24, **options)
    assert (folder / "checkpoint" / f"step-{best}").exists(), "also by a run that does not ask for it"


def test_no_best_checkpoint(folder: Path):
    with pytest.raises(CheckpointError, match="has no best checkpoint"), Trainer(folder, restore="best"):
        pass


def test_patience(folder: Path, tmp_path: Path, capsys):
    options = {"eval_data": tmp_path / "e.npz", "eval_every": 1, "patience": 3, "lr": 0.0, "quiet": False, "epochs": 9}
    assert train(folder, **options) == 0
    # At a rate of zero only running statistics move; the loss is given to the file as it was found.
    evaluations = [line["eval_loss"] for line in lines(folder) if "eval_loss" in line]
    best = min(range(len(evaluations)), key=evaluations.__getitem__)
    assert len(evaluations) == best + 1 + 3
    out = capsys.readouterr().out
    assert f"step {best + 4}: 3 evaluations without a better one; stopping" in out
    train(folder, **options)
    assert "nothing to do" in capsys.readouterr().out
    assert len([line for line in lines(folder) if "eval_loss" in line]) == len(evaluations)


def test_patience_goes_on_where_it_was(folder: Path, tmp_path: Path):
    options = {"eval_data": tmp_path / "e.npz", "eval_every": 1, "patience": 4, "lr": 3.0, "save_every": 1}
    train(folder, epochs=9, **options)
    whole = [line["step"] for line in lines(folder)]
    tiny.make_folder(tmp_path / "g")
    for steps in (2, 5, 100):
        run(tmp_path / "g", data=tmp_path / "d.npz", batch_size=8, threads=1, quiet=True, steps=steps, **options)
    assert [line["step"] for line in lines(tmp_path / "g")] == whole


# TensorBoard


def test_tensorboard_reads_it_back(folder: Path, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"eval_data": tmp_path / "e.npz", "metric": ["accuracy"], "tensorboard": tmp_path / "board"}
    train(folder, steps=6, histograms=["fc/1*"], histogram_every=3, **options)
    train(folder, steps=9, **options)  # a second file of the same run
    board = accumulator.EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0, "histograms": 0})
    board.Reload()
    metrics = lines(folder)
    for tag, name in (("train/loss", "loss"), ("train/lr", "lr"), ("train/gradient_norm", "gradient_norm")):
        read = [(e.step, e.value) for e in board.Scalars(tag)]
        assert read == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in metrics if "loss" in line]
    assert len(board.Scalars("train/samples_per_s")) == 9
    evaluations = [line for line in metrics if "eval_loss" in line]
    for name in ("loss", "accuracy"):
        read = [(e.step, e.value) for e in board.Scalars(f"evaluation/{name}")]
        assert read == [(line["step"], pytest.approx(line[f"eval_{name}"], rel=1e-6)) for line in evaluations]
    tags = board.Tags()
    assert sorted(tags["histograms"]) == ["gradients/fc/1.weight", "parameters/fc/1.weight"]
    shapes = {e.step: e.histogram_value for e in board.Histograms("parameters/fc/1.weight")}
    assert list(shapes) == [3, 6]
    with Trainer(folder, restore=folder / "checkpoint" / "step-6") as trainer:
        values = trainer.parameters["fc/1.weight"].astype(np.float64)
    assert shapes[6].num == values.size
    assert (shapes[6].min, shapes[6].max) == pytest.approx((values.min(), values.max()))
    assert (shapes[6].sum, shapes[6].sum_squares) == pytest.approx((values.sum(), (values**2).sum()))
    below = [(values <= limit * (1 + 1e-9)).sum() for limit in shapes[6].bucket_limit]
    np.testing.assert_allclose(np.cumsum(shapes[6].bucket), below, atol=1)
    norms = {e.step: e.value for e in board.Scalars("norm/parameters/fc/1.weight")}
    assert norms[6] == pytest.approx(np.linalg.norm(values), rel=1e-6)


def test_tensorboard_drops_what_is_repeated(folder: Path, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for restore in ("latest", "none"):
        train(folder, steps=4, tensorboard=tmp_path / "board", restore=restore)
    board = accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [e.step for e in board.Scalars("train/loss")] == [1, 2, 3, 4]


def test_without_tensorboard(folder: Path, tmp_path: Path, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(OrtcError, match=r"pip install 'ortc\[tensorboard\]'"):
        train(folder, steps=1, tensorboard=tmp_path / "board")
    with pytest.raises(OrtcError, match="give --tensorboard"):
        train(folder, steps=1, histograms=["*"])


def test_histograms_of_odd_tensors():
    assert histogram(np.full(5, 2.0, np.float32))["counts"][15] == 5
    told = histogram(np.array([1, np.nan, np.inf, -3], np.float32))
    assert (told["min"], told["max"], sum(told["counts"]), math.isnan(told["norm"])) == (-3, 1, 2, True)
    assert histogram(np.full(3, np.nan))["counts"] == []
    assert histogram(np.array([3.4e38, -3.4e38], np.float32))["counts"][0] == 1


# Lines


def test_json_lines(folder: Path, tmp_path: Path, capsys):
    train(folder, steps=3, quiet=False, json=True, eval_data=tmp_path / "e.npz")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in (*printed, *(written := lines(folder))):
        line.pop("time", None)
    assert printed == written
    assert len(printed) == 4


def test_a_line_every_so_often(folder: Path, capsys):
    train(folder, steps=6, quiet=False, log_every=2)
    shown = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert [line.split(",")[0] for line in shown] == ["step 2/6", "step 4/6", "step 6/6"]
    assert "samples/s, 0:00:0" in shown[1]
    assert shown[1].endswith(" left")


def test_what_of_the_data_is_used_is_told(folder: Path, capsys):
    train(folder, steps=2, quiet=False, batch_size=9, drop_last=True)
    assert (
        "data: 48 samples, 5 batches an epoch; 3 of them, others each time, are left out (--drop-last)"
        in capsys.readouterr().out
    )


def test_what_of_an_evaluation_is_used_is_told(tmp_path: Path, capsys):
    tiny.make_folder(tmp_path / "f", batch=8)
    np.savez(tmp_path / "d.npz", **tiny.data(48))
    np.savez(tmp_path / "e.npz", **tiny.data(21, seed=2))
    train(tmp_path / "f", steps=1, quiet=False, eval_data=tmp_path / "e.npz")
    assert "the last 5 of 21 samples in" in capsys.readouterr().out


# Values of the graph


def test_nodes_and_outputs_of_a_file(folder: Path):
    data = (folder / "stage-0" / "train.onnx").read_bytes()
    model = onnx.load_model_from_string(data)
    assert [(n.name, n.op_type, n.outputs) for n in nodes_of(data)] == [
        (n.name, n.op_type, tuple(o for o in n.output if o)) for n in model.graph.node
    ]
    more = onnx.load_model_from_string(with_outputs(data, ["r", "ärger"]))
    assert [o.name for o in more.graph.output] == [*(o.name for o in model.graph.output), "r", "ärger"]
    assert len(more.graph.node) == len(model.graph.node)


def test_fetched_values(folder: Path):
    batch = tiny.data(8)
    with Trainer(folder, threads=1, fetch=["xw", "dW2", "total"]) as trainer:
        weight = trainer.parameters["fc/1.weight"].copy()
        result = trainer.step(batch)
        _, gradients = trainer.gradients(batch)
    assert list(result.fetched) == ["xw", "dW2", "total"]
    np.testing.assert_allclose(result.fetched["xw"][0], batch["x"] @ weight, rtol=1e-5, atol=1e-6)
    assert result.fetched["total"][0] == pytest.approx(result.loss)
    assert result.fetched["dW2"][0].shape == gradients["fc/2.weight"].shape


def test_fetches_of_a_run(folder: Path):
    train(folder, steps=4, fetch=["p"], fetch_every=2)
    found = sorted(p.name for p in (folder / "fetched").iterdir())
    assert found == ["step-2.npz", "step-4.npz"]
    p = np.load(folder / "fetched" / "step-4.npz")["p"]
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    with pytest.raises(RecipeError, match=r"no value called 'ps'; there is 'p"):
        train(folder, steps=5, fetch=["ps"])


# Values that are not finite


def test_a_report_of_what_is_not_finite(folder: Path, tmp_path: Path, capsys):
    with Trainer(folder, threads=1) as trainer:
        trainer._team.workers[0].stages[0].values["fc/2.weight"][0, 1] = np.nan
        trainer.step_number = 3
        trainer.save()
    with pytest.raises(NotFiniteError, match=r"the first node that makes such a value is 'aw' \(MatMul\)"):
        train(folder, steps=5, quiet=False)
    told = json.loads((folder / "not-finite-step-4.json").read_text())
    assert (told["step"], told["loss"], told["first_node"]) == (4, "nan", {"name": "aw", "operator": "MatMul"})
    assert set(told["gradients"]) == set(tiny.SHAPES)
    for name, sizes in told["gradients"].items():
        assert sizes["nan"] > 0
        assert sizes["size"] == math.prod(tiny.SHAPES[name])
    err = capsys.readouterr().err
    assert "not-finite-step-4.json" in err
    assert "fc/1.weight" in err


def test_sizes_by_decade():
    told = magnitudes(np.array([0, 0.002, -0.003, 5, np.inf, -np.inf, np.nan, 1e-12], np.float32))
    assert told == {"size": 8, "nan": 1, "inf": 2, "zero": 1, "decades": {"-12": 1, "-3": 2, "0": 1}} or told["decades"] == {
        "-13": 1,  # the float32 next to 1e-12 may lie below it
        "-3": 2,
        "0": 1,
    }
    good = magnitudes(np.array([1e-2, 2e-2, 1.0]))
    shown = show_magnitudes({"good": good, "bad": magnitudes(np.array([np.nan, 1.0]))})
    assert shown[0] == "sizes of the gradients' elements, from 1e-2 to 1e1:"
    assert shown[1] == "  bad  [  █] of 2: 1 nan"
    assert shown[2] == "  good [█ ▄] of 3"


# How sessions run


def test_engines_are_checked_against_the_build():
    ort = import_onnxruntime()
    assert make_engine(ort).providers == (("CPUExecutionProvider", {}),)
    assert make_engine(ort, ["CPU"], ["enable_mem_pattern=false"]).options == {"enable_mem_pattern": "false"}
    with pytest.raises(RecipeError, match=r"no CUDAExecutionProvider: ONNX Runtime .* as installed has .*cpu"):
        make_engine(ort, ["cuda:device_id=1,gpu_mem_limit=1000", "cpu"])
    for wrong, said in (
        (["warp=9"], "no session option 'warp'; there are .*intra_op_num_threads"),
        (["intra_op_num_threads=many"], "invalid literal"),
        (["enable_mem_pattern=perhaps"], "must be true or false"),
        (["execution_mode=ORT_ODD"], "must be one of .*ORT_PARALLEL"),
        (["fast"], "is not KEY=VALUE"),
    ):
        with pytest.raises(RecipeError, match=said):
            make_engine(ort, options=wrong)
    for wrong, said in (
        (["quantum"], "no execution provider 'quantum'"),
        (["cuda,cpu:device_id=0"], "belong to one provider"),
        (["cpu:use_arena=0"], "CPU provider has no options; --session-option"),
    ):
        with pytest.raises(RecipeError, match=said):
            make_engine(ort, wrong)
    options = ort.SessionOptions()
    Engine(options={"intra_op_num_threads": "3", "execution_mode": "ORT_PARALLEL", "session.x": "7"}).apply(options, "")
    assert (options.intra_op_num_threads, options.execution_mode) == (3, ort.ExecutionMode.ORT_PARALLEL)
    assert options.get_session_config_entry("session.x") == "7"


def test_a_missing_provider_is_told_before_anything_loads(folder: Path):
    (folder / "plan.json").write_text("not even a plan")
    with pytest.raises(RecipeError, match="no CUDAExecutionProvider"):
        train(folder, steps=1, providers=["cuda"])


def test_the_trace_of_onnxruntime(folder: Path, tmp_path: Path):
    train(folder, steps=2, ort_profile=tmp_path / "trace.json", eval_data=tmp_path / "e.npz")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(rows.values()) == ["stage 0 eval", "stage 0 optimizer", "stage 0 train"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0"]
    kernels = [e for e in events if e.get("cat") == "Node" and rows[e["tid"]] == "stage 0 train"]
    assert sum(e["args"]["op_name"] == "OneHot" for e in kernels) == 2, "a step each"
    assert not any("kernel_time" in e["name"] or "fence" in e["name"] for e in events)
    runs = sorted((e["ts"], rows[e["tid"]]) for e in events if e["name"] == "model_run")
    assert [row for _, row in runs if "eval" not in row] == ["stage 0 train", "stage 0 optimizer"] * 2, "on one clock"


def test_help_is_quick():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ortc.cli", "run", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"numpy", "onnxruntime", "tensorboard", "pyarrow"}


def test_make_metrics_names_each_once(folder: Path):
    with Trainer(folder) as trainer:
        assert [m.name for m in make_metrics(trainer.plan, ["f1", "accuracy", "f1"], 1)] == ["f1", "accuracy"]
