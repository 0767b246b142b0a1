"""What a step is predicted to cost, a person's own schedule, and what a step was measured to cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from timing import seconds

from ortc.artifacts import compile
from ortc.errors import RecipeError
from ortc.forecast import Pipeline, equal_cases, report
from ortc.plan import load_plan
from ortc.recipe import parse_recipe
from ortc.runtime.schedule import format_schedule, make_schedule, parse_schedule, with_transfers
from ortc.runtime.trainer import Trainer
from ortc.runtime.worker import Routes, schedule_of

pytestmark = pytest.mark.ranks

WIDTH, LAYERS, SAMPLES = 64, 4, 40
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def deep(layers: int = LAYERS) -> onnx.ModelProto:
    """A perceptron of equal layers."""
    random = np.random.default_rng(0)
    weights, nodes, x = {}, [], "x"
    for i in range(layers):
        weights[f"w{i}"] = (random.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32)
        nodes += [h.make_node("MatMul", [x, f"w{i}"], [f"p{i}"], name=f"{i}.product")]
        nodes += [h.make_node("Tanh", [f"p{i}"], [f"a{i}"], name=f"{i}.tanh")]
        x = f"a{i}"
    ports = [[h.make_tensor_value_info(name, T.FLOAT, ["batch", WIDTH])] for name in ("x", x)]
    tensors = [numpy_helper.from_array(v, k) for k, v in weights.items()]
    return h.make_model(h.make_graph(nodes, "deep", *ports, tensors), opset_imports=[h.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, and data for it."""
    home = tmp_path_factory.mktemp("home")
    (home / "deep.onnx").write_bytes(deep().SerializeToString())
    x = np.random.default_rng(1).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    np.savez(home / "data.npz", x=x, labels=np.tanh(x[:, ::-1]))
    return home


def stages_of(home: Path, name: str, **pipeline) -> Path:
    """An output folder, a stage a layer; made once."""
    folder = home / name
    if not folder.exists():
        recipe = {"loss": [{"name": "mse"}], "pipeline": {"sizes": {"batch": 64}, **pipeline}}
        compile(home / "deep.onnx", folder, parse_recipe(recipe))
    return folder


def cuts(stages: int) -> list[str]:
    return [f"a{i}" for i in range(stages - 1)]


@pytest.fixture(scope="module")
def four(home):
    return stages_of(home, "four", stages=4, micro_batches=4, cuts=cuts(4))


@pytest.fixture
def ortc(monkeypatch, tmp_path, ortc):
    """Runs a command in an empty folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return ortc


@pytest.fixture
def refused(ortc):
    """Runs a command that must end with one message for people; returns the message."""

    def run(*arguments):
        before = sorted(Path().rglob("*"))
        code, out, err = ortc(*arguments)
        assert code == 2, out + err
        assert "Traceback" not in err
        assert sorted(Path().rglob("*")) == before
        return re.sub(r"\s+", " ", err.replace("│", " "))

    return run


def table(text: str) -> dict[str, dict[str, str]]:
    """The rows of a table by their first cell; cells stand two blanks apart."""
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)}


# ---- equal stages ---------------------------------------------------------------------------------------------------------


def test_a_large_world_has_the_published_bubbles(ortc):
    """(p-1)(F+B) for GPipe and 1F1B; (p-1)(F+I-W) for ZB-H1; and what the papers say a rank holds."""
    code, out, _ = ortc("simulate", "--stages", 64, "--micro-batches", 256)
    assert code == 0
    rows = table(out)
    assert set(rows) == {"gpipe", "1f1b", "zb-h1"}
    work = 256 * 3
    for name, idle, held in (("gpipe", 63 * 3, "256"), ("1f1b", 63 * 3, "1 to 64"), ("zb-h1", 63 * 1, "64")):
        assert float(rows[name]["time"]) == work + idle
        assert float(rows[name]["ideal"]) == work
        assert rows[name]["bubble"] == f"{idle / (work + idle):.1%}"
        assert rows[name]["in flight"] == held
    assert "rank" not in out.replace("ranks", "").replace("of a rank", "")


def test_a_report_is_linear_in_the_micro_batches():
    small, large = (equal_cases(64, parts, [Pipeline("1f1b", "1f1b")]) for parts in (32, 256))
    assert seconds(lambda: report(large, in_seconds=False)) < 8 * 3 * seconds(lambda: report(small, in_seconds=False), 5)


def test_fewer_ranks_than_stages_compare_interleaving_with_larger_stages(ortc):
    """(p-1)(F+B)/v with v chunks a rank (Narayanan et al. 2021), F and B being all of a rank's stages."""
    rows = table(ortc("simulate", "--stages", 32, "--ranks", 8, "--micro-batches", 16)[1])
    work = 16 * 3 * 4
    assert float(rows["interleaved"]["time"]) == work + 7 * 12 / 4
    assert rows["interleaved"]["stages"] == "32"
    assert float(rows["1f1b"]["time"]) == work + 7 * 12
    assert rows["1f1b"]["stages"] == "8"


def test_times_and_bytes_are_those_given(ortc):
    flags = ["--stages", 4, "--micro-batches", 6, "--schedule", "1f1b", "--schedule", "zb-h1"]
    times = ["--forward", 2, "--backward", 5, "--weight", 2, "--transfer", 0.5]
    rows = table(ortc("simulate", *flags, *times, "--stash", "1MiB", "--static", "8MiB")[1])
    # The first micro-batch goes down and comes back over 3 edges each way; then each one takes F + B.
    assert float(rows["1f1b"]["time"]) > 6 * 7 + 3 * 7
    assert rows["1f1b"]["memory"] == "9 MiB to 12 MiB"
    assert float(rows["1f1b"]["ideal"]) == 42
    alone = table(ortc("simulate", *flags, *times[:-2])[1])
    assert float(alone["1f1b"]["time"]) == 6 * 7 + 3 * 7
    assert float(alone["zb-h1"]["time"]) == 6 * 7 + 3 * (2 + 3 - 2)
    assert "memory" not in alone["1f1b"]


def test_a_small_world_is_drawn(ortc):
    out = ortc("simulate", "--stages", 3, "--micro-batches", 3, "--pipeline", "1f1b")[1]
    assert out.splitlines() == [
        "  schedule  stages  ranks  micro-batches  time  ideal  bubble  in flight",
        "      1f1b       3      3              3    15      9   40.0%     1 to 3",
        "  one step, without reductions and optimizer; ideal: all ranks are always busy; in flight: micro-batches of a rank",
        "  rank  stages  busy   idle  in flight",
        "     0       0     9  40.0%          3",
        "     1       1     9  40.0%          2",
        "     2       2     9  40.0%          1",
        "rank 0  F0 F1 F2 ............B0--- ...B1--- ...B2---",
        "rank 1  ...F0 F1 ......B0--- F2 B1--- ...B2--- ......",
        "rank 2  ......F0 B0--- F1 B1--- F2 B2--- ............",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say how large the world is: --stages N --micro-batches M"),
        (["--stages", 4], "say how large the world is"),
        (["--stages", 0, "--micro-batches", 4], "--stages"),
        (["--stages", 4, "--micro-batches", 0], "--micro-batches"),
        (["--stages", 4, "--micro-batches", 4, "--forward", "-1"], "--forward"),
        (["--stages", 4, "--micro-batches", 4, "--forward", "nan"], "--forward"),
        (["--stages", 4, "--micro-batches", 4, "--backward", "inf"], "finite"),
        (["--stages", 4, "--micro-batches", 4, "--forward", 0, "--backward", 0], "not all 0"),
        (["--stages", 4, "--micro-batches", 4, "--weight", 3], "--weight 3 is a part of --backward 2"),
        (["--stages", 4, "--micro-batches", 4, "--stash", "much"], "'much' is no size"),
        (["--stages", 4, "--micro-batches", 4, "--stash", "-1MB"], "'-1MB' is no size"),
        (["--stages", 4, "--micro-batches", 4, "--stash", "infB"], "'infB' is no size"),
        (["--stages", 4, "--micro-batches", 4, "--pipeline", "2f2b"], "there is no schedule '2f2b', and no such file"),
        (["--stages", 4, "--micro-batches", 4, "--pipeline", "."], "cannot read the schedule ."),
        (["--stages", 4, "--micro-batches", 4, "--ranks", 3], "4 stages on 3 ranks do not divide"),
        (["--stages", 4, "--micro-batches", 4, "--ranks", 3, "--pipeline", "interleaved"], "do not divide"),
        (["--stages", 10**6, "--micro-batches", 10**6], "too many to simulate"),
        (["nowhere"], "nowhere has no plan.json"),
    ],
)
def test_nonsense_is_refused(arguments, says, refused):
    assert says in refused("simulate", *arguments)


# ---- a person's own schedule ------------------------------------------------------------------------------------------------

MIXED = """
# stage 1 splits the backward of its first micro-batch
0F0 0F1 0B0 0B1
1F0, 1I0, 1F1, 1W0, 1B1
"""


def test_an_own_schedule_is_simulated(ortc):
    Path("mine.txt").write_text(MIXED)
    rows = table(ortc("simulate", "--pipeline", "mine.txt", "--pipeline", "gpipe", "--micro-batches", 2, "--stages", 2)[1])
    assert float(rows["mine.txt"]["time"]) == 9  # rank 1: 0 F0 1 I0 2 … from 1 on: F I F W B = 6, then B of stage 0
    assert float(rows["gpipe"]["time"]) == 9
    assert (rows["mine.txt"]["stages"], rows["mine.txt"]["micro-batches"]) == ("2", "2")
    assert table(ortc("simulate", "--schedule", "mine.txt")[1])["mine.txt"]["time"] == "9"


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("0F0 0B0\n1F0 1X0\n", [], "mine.txt: '1X0' is no action"),
        ("# nothing\n", [], "mine.txt: the schedule has no action"),
        ("0F0 0B0\n1F0\n", [], "mine.txt: rank 1 never does 1B0"),
        ("0F0 0B0\n1B0 1F0\n", [], "mine.txt: rank 1, action 1 (1B0): a backward before its forward"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1\n", ["--micro-batches", 3], "it has 2 micro-batches, where there are 3"),
        ("0F0 0B0\n1F0 1B0\n", ["--ranks", 1], "it has lines for 2 ranks, where there are 1"),
        ("0F0 0B0\n1F0 1B0\n", ["--stages", 3], "no rank has actions of stage 2"),
        ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n1F0\n", [], "stage 1 is on rank 1"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n", [], "mine.txt comes to a deadlock"),
    ],
)
def test_a_wrong_schedule_is_refused_by_simulation_and_compilation(text, flags, says, refused, home):
    Path("mine.txt").write_text(text)
    assert says in refused("simulate", "--pipeline", "mine.txt", *flags)
    says = says.replace("mine.txt comes", "of your own comes").replace("mine.txt: rank", "of your own: rank")
    model = [home / "deep.onnx", "-o", "out", "--loss", "mse"]
    assert says in refused("compile", *model, "--pipeline", "mine.txt", *flags)


def test_fewer_micro_batches_are_the_first_of_an_own_schedule():
    text = format_schedule(make_schedule("zb-h1", 3, 5))
    for count in range(1, 6):
        fewer = make_schedule(text, 3, count)
        assert fewer.micro_batches == count
        assert parse_schedule(format_schedule(fewer), 3).actions == fewer.actions
    with pytest.raises(RecipeError, match="5 micro-batches, where there are 6"):
        make_schedule(text, 3, 6)


def losses(folder: Path, home: Path, steps: int = 4, batch: int = 7) -> list[float]:
    """Of training on batches of 7 and, after five of them, of 5 samples."""
    with np.load(home / "data.npz") as data, Trainer(folder, restore="none") as trainer:
        arrays = dict(data)
        return [trainer.step({k: v[i : i + batch] for k, v in arrays.items()}).loss for i in range(0, batch * steps, batch)]


def test_an_own_schedule_trains_as_others_do(ortc, home):
    Path("mine.txt").write_text(MIXED)
    model = [home / "deep.onnx", "--loss", "mse", "--cut", "a1", "--optimizer", "sgd"]
    assert ortc("compile", *model, "-o", "mine", "--pipeline", "mine.txt")[0] == 0
    assert ortc("compile", *model, "-o", "gpipe", "--pipeline", "gpipe", "--micro-batches", 2)[0] == 0
    plan = load_plan("mine")
    assert plan.recipe.pipeline.micro_batches == 2
    assert {"backward_input", "backward_weight"} <= plan.stages[1].phases.keys()
    assert schedule_of(plan, 2).actions == parse_schedule(MIXED, 2).actions
    # The same sums in the same order, so the same bits; also of a batch of one sample, which has one micro-batch.
    assert losses(Path("mine"), home) == losses(Path("gpipe"), home)
    assert losses(Path("mine"), home, batch=1) == losses(Path("gpipe"), home, batch=1)


def test_an_own_schedule_may_put_stages_as_it_likes(ortc, home):
    """Three stages on two ranks, which no named schedule can do."""
    Path("mine.txt").write_text("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1F0 1F1 1B0 1B1\n")
    model = [home / "deep.onnx", "--loss", "mse", "--cut", "a1", "--cut", "a2", "--optimizer", "sgd"]
    assert ortc("compile", *model, "-o", "mine", "--pipeline", "mine.txt")[0] == 0
    assert ortc("compile", *model, "-o", "gpipe", "--pipeline", "gpipe", "--micro-batches", 2)[0] == 0
    with Trainer("mine") as trainer:
        assert [sorted(worker.stages) for worker in trainer._team.workers] == [[0, 2], [1]]
    assert losses(Path("mine"), home) == losses(Path("gpipe"), home)


def test_an_own_schedule_stays_in_the_recipe(ortc, home):
    Path("mine.txt").write_text(MIXED)
    code, out, _ = ortc("compile", home / "deep.onnx", "--loss", "mse", "--pipeline", "mine.txt", "--write-recipe")
    assert code == 0
    Path("recipe.toml").write_text(out)
    assert ortc("compile", home / "deep.onnx", "--recipe", "recipe.toml", "--write-recipe")[1] == out
    assert "1W0" in out


# ---- an output folder ------------------------------------------------------------------------------------------------------


def test_a_folder_is_simulated_with_its_own_costs(ortc, four):
    """GPipe's times are computed here once more, from ``plan.json``."""
    costs = [stage["costs"] for stage in json.loads((four / "plan.json").read_text())["stages"]]
    forward = [c["forward_seconds"] for c in costs]
    backward = [c["backward_input_seconds"] + c["backward_weight_seconds"] for c in costs]
    travel = [c["send_seconds"][str(s + 1)] for s, c in enumerate(costs[:-1])]
    assert min(forward + backward[1:] + travel) > 0
    assert costs[1]["sends"] == {"2": 64 * WIDTH * 4}
    count = 5
    done = [[0.0] * count for _ in costs]
    for s in range(4):
        for m in range(count):
            free = done[s][m - 1] if m else 0.0
            done[s][m] = max(free, done[s - 1][m] + travel[s - 1] if s else 0.0) + forward[s]
    back = [[0.0] * count for _ in costs]
    for s in reversed(range(4)):
        for m in range(count):
            free = back[s][m - 1] if m else done[s][-1]
            back[s][m] = max(free, back[s + 1][m] + travel[s] if s < 3 else 0.0) + backward[s]
    step = 1e3 * max(row[-1] for row in back)

    rows = table(ortc("simulate", four, "--pipeline", "gpipe", "--micro-batches", count)[1].split("\n  rank")[0])
    assert rows["gpipe"]["time"] == f"{step:.4g} ms"
    assert rows["gpipe"]["ideal"] == f"{1e3 * count * sum(forward + backward) / 4:.4g} ms"
    of_plan = table(ortc("simulate", four)[1].split("\n  rank")[0])
    assert set(of_plan) == {"1f1b"}
    assert of_plan["1f1b"]["in flight"] == "1 to 4"


def test_the_parts_of_a_backward_are_told(four):
    """A product has one for either operand, as dear as the forward; a tanh has 0.3 of its forward, for its input."""
    costs = load_plan(four).stages[1].costs
    product = costs.backward_weight_seconds
    tanh = costs.forward_seconds - product
    assert product > 0
    assert costs.backward_input_seconds == pytest.approx(product + 0.3 * tanh)


def test_the_memory_of_a_folder_grows_with_the_micro_batches_in_flight(ortc, four):
    from ortc.inspection import format_bytes

    first = load_plan(four).stages[0].costs
    assert first.in_flight == 4
    static = first.memory_bytes - first.stash_bytes
    for count in (1, 8):
        out = ortc("simulate", four, "--pipeline", "gpipe", "--micro-batches", count)[1]
        ranks = table(out[out.index("\n  rank ") + 1 :])
        assert ranks["0"]["memory"] == format_bytes(static + count * first.stash_bytes / 4)


def test_a_folder_says_its_own_sizes(refused, four, home):
    assert "--stages is for a simulation without a folder" in refused("simulate", four, "--stages", 4)
    assert "--forward is for a simulation without a folder" in refused("simulate", four, "--forward", 4)
    assert "4 stages need 4 ranks, not 2" in refused("simulate", four, "--ranks", 2)
    one = stages_of(home, "one")
    assert "one stage" in refused("simulate", one)
    assert "one stage" in refused("inspect", one, "--timeline", "t.json")


def test_stages_without_predictions_have_a_schedule_all_the_same(ortc, refused, four):
    """As of a model that somebody else cut."""
    plan = json.loads((four / "plan.json").read_text())
    for stage in plan["stages"]:
        stage["costs"] = None
    Path("foreign").mkdir()
    Path("foreign/plan.json").write_text(json.dumps(plan))
    code, out, _ = ortc("inspect", "foreign", "--schedule", "s.txt")
    assert (code, "bubble" in out) == (0, False)
    assert parse_schedule(Path("s.txt").read_text(), 4).name == "custom"
    assert "predicts no costs" in refused("inspect", "foreign", "--timeline", "t.json")
    assert "predicts no costs" in refused("simulate", "foreign")


def test_inspect_shows_the_stages_and_writes_timeline_and_schedule(ortc, refused, four):
    code, out, _ = ortc("inspect", four, "--timeline", "t.json", "--schedule", "s.txt")
    assert code == 0
    rows = table(out[out.index("\nstages\n") + 8 : out.index("predicted, of")])
    assert [rows[str(s)]["sends"] for s in range(4)] == ["16 KiB to 1", "16 KiB to 2", "16 KiB to 3", "-"]
    assert [rows[str(s)]["parameters"] for s in range(4)] == ["4,096"] * 4
    assert len(re.findall(r"(?m)^rank \d  [.F]", out)) == 4

    plan = load_plan(four)
    assert parse_schedule(Path("s.txt").read_text(), 4).actions == schedule_of(plan, 4).actions
    assert "s.txt exists already" in refused("inspect", four, "--schedule", "s.txt")
    assert "of an output folder" in refused("inspect", four.parent / "deep.onnx", "--schedule", "other.txt")

    events = json.loads(Path("t.json").read_text())["traceEvents"]
    actions = [e for e in events if e["ph"] == "X"]
    assert sorted(e["name"] for e in actions) == sorted(f"{s}{k}{m}" for s in range(4) for k in "FB" for m in range(4))
    assert all(e["tid"] == e["args"]["stage"] for e in actions)
    busy = sum(e["dur"] for e in actions) / 1e6
    assert busy == pytest.approx(4 * sum(stage.costs.seconds for stage in plan.stages))


# ---- measured --------------------------------------------------------------------------------------------------------------


def spans(events: list[dict], pid: int) -> dict[str, tuple[float, float, int]]:
    return {e["name"]: (e["ts"], e["ts"] + e["dur"], e["tid"]) for e in events if e["ph"] == "X" and e["pid"] == pid}


def check_trace(path: Path, folder: Path, micro_batches: int) -> None:
    """Both processes; measured: every action of the schedule once, a rank's one after the other, values before their use."""
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "predicted", 1: "measured"}
    plan = load_plan(folder)
    schedule = schedule_of(plan, micro_batches)
    assert set(spans(events, 0)) == {str(a) for row in schedule.actions for a in row}
    rows = with_transfers(schedule, Routes(plan).edges)
    measured = spans(events, 1)
    assert sorted(measured) == sorted(str(a) for row in rows for a in row)
    for rank, row in enumerate(rows):
        times = [measured[str(action)] for action in row]
        assert {tid for _, _, tid in times} == {rank}
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(times))
    for m in range(micro_batches):
        for s in range(schedule.stages - 1):
            assert measured[f"{s}F{m}"][1] <= measured[f"{s + 1}F{m}"][0]
            assert measured[f"{s + 1}B{m}"][1] <= measured[f"{s}B{m}"][0]
    assert all(e["ts"] >= 0 for e in events)


def test_a_run_is_profiled(ortc, home, four):
    run = ["run", four, "--data", home / "data.npz", "--batch-size", 16, "--restore", "none", "--metrics", "m.jsonl"]
    code, out, _ = ortc(*run, "--epochs", 1, "--profile", "p.json")
    assert code == 0
    assert "p.json" in out
    assert out.startswith("4 ranks (4 stages) as threads of this process, sessions with ")
    check_trace(Path("p.json"), four, 4)

    *steps, last = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert last["step"] == 3
    assert [rank["rank"] for rank in last["ranks"]] == [0, 1, 2, 3]
    assert all(0 < rank["bubble"] < 1 for rank in last["ranks"])
    # The last batch has 8 samples: 2 in each of 4 micro-batches. Values go to the next stage, gradients to the one before;
    # the rest is the loss, the gradients' norm and the like, some numbers to each other rank.
    one_way = 8 * WIDTH * 4
    rest = [rank["sent_bytes"] - n * one_way for n, rank in zip((1, 2, 2, 1), last["ranks"], strict=True)]
    assert all(0 < bytes_ < 200 for bytes_ in rest)

    code, out, _ = ortc(*run, "--epochs", 1, "--quiet", "--profile", "p.json")
    assert (code, out) == (0, "")


def test_the_stash_is_measured_as_it_is_held(ortc, home, four):
    """Under GPipe the last rank holds all micro-batches, under 1F1B one; the ranks between as many as are after them."""
    gpipe = stages_of(home, "gpipe", stages=4, micro_batches=4, cuts=cuts(4), schedule="gpipe")
    peaks = {}
    for folder in (gpipe, four):
        flags = ["--data", home / "data.npz", "--batch-size", 40, "--restore", "none", "--metrics", "m.jsonl", "--quiet"]
        assert ortc("run", folder, *flags, "--steps", 1, "--profile", "p.json")[0] == 0
        last = json.loads(Path("m.jsonl").read_text().splitlines()[-1])
        peaks[folder.name] = [rank["peak_stash_bytes"] for rank in last["ranks"]]
        Path("m.jsonl").unlink()
    assert min(peaks["gpipe"]) > 0
    held = [4, 3, 2, 1]
    assert peaks["four"] == [n * h // 4 for n, h in zip(peaks["gpipe"], held, strict=True)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_stash_is_what_was_predicted(schedule, ortc, home):
    """Of the stages that the loss is not part of, with micro-batches of the size that the compiler was told."""
    options = {"stages": 4, "micro_batches": 4, "cuts": cuts(4), "schedule": schedule, "sizes": {"batch": 10}}
    folder = stages_of(home, f"stash-{schedule}", **options)
    flags = ["--data", home / "data.npz", "--batch-size", 40, "--restore", "none", "--metrics", "m.jsonl", "--quiet"]
    assert ortc("run", folder, *flags, "--steps", 1, "--profile", "p.json")[0] == 0
    measured = [rank["peak_stash_bytes"] for rank in json.loads(Path("m.jsonl").read_text().splitlines()[-1])["ranks"]]
    predicted = [stage.costs.stash_bytes for stage in load_plan(folder).stages]
    assert measured[:3] == predicted[:3]


def test_without_a_profile_nothing_is_recorded(ortc, home, four):
    run = ["run", four, "--data", home / "data.npz", "--batch-size", 40, "--restore", "none", "--metrics", "m.jsonl"]
    assert ortc(*run, "--steps", 1)[0] == 0
    assert [set(json.loads(line)) & {"ranks"} for line in Path("m.jsonl").read_text().splitlines()] == [set()]
    with Trainer(four, restore="none") as trainer:
        assert all(worker.recorder is None for worker in trainer._team.workers)


def test_replicas_are_profiled_each(ortc, home):
    folder = stages_of(home, "replicas", stages=2, micro_batches=2, replicas=2, schedule="zb-h1", cuts=["a1"])
    run = ["run", folder, "--data", home / "data.npz", "--batch-size", 40, "--restore", "none", "--steps", 1]
    code, out, _ = ortc(*run, "--profile", "p.json")
    assert code == 0
    assert out.startswith("4 ranks (2 stages × 2 replicas) as threads")
    events = json.loads(Path("p.json").read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["predicted", "measured", "measured, replica 1"]
    assert set(spans(events, 1)) == set(spans(events, 2)) > set(spans(events, 0)) >= {"0I0", "1W1"}


def test_one_rank_is_profiled_without_prediction(ortc, home):
    folder = stages_of(home, "one")
    run = ["run", folder, "--data", home / "data.npz", "--batch-size", 40, "--restore", "none", "--steps", 1]
    code, out, _ = ortc(*run, "--profile", "p.json")
    assert code == 0
    assert " ranks (" not in out
    events = json.loads(Path("p.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["measured"]
    assert "0F0" in spans(events, 0)


def test_a_profile_that_cannot_be_written_is_told_before_the_run(refused, home, four):
    run = ["run", four, "--data", home / "data.npz", "--restore", "none", "--metrics", "m.jsonl"]
    assert "cannot write no/where.json" in refused(*run, "--profile", "no/where.json")
    assert "cannot write ." in refused(*run, "--profile", ".")


@pytest.mark.skipif(find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="needs ortc[mpi]")
def test_a_run_is_profiled_under_mpi(home, four, tmp_path):
    flags = ["--data", home / "data.npz", "--batch-size", 16, "--restore", "none", "--epochs", 1]
    files = ["--metrics", tmp_path / "m.jsonl", "--profile", tmp_path / "p.json"]
    command = [MPIEXEC, "-n", 4, sys.executable, "-m", "ortc.cli", "run", four, *flags, *files]
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env=dict(os.environ), timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 ranks (4 stages) as processes under MPI") == 1
    check_trace(tmp_path / "p.json", four, 4)
    last = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert [rank["rank"] for rank in last["ranks"]] == [0, 1, 2, 3]
