"""Recompute changes no bit of a loss or a gradient, needs less memory, keeps a budget, and is not undone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradcheck import TARGETS

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import RecipeError
from ortc.graph import recompute
from ortc.graph.recompute import Node, Training, best, fit, follow, least, minimum_cut, order, repeated_layers
from ortc.passes import SESSIONS
from ortc.plan import Plan
from ortc.recipe import parse_recipe
from ortc.runtime.batch import synthetic_batch
from ortc.runtime.stage import import_onnxruntime

DATA = Path(__file__).parent / "data" / "models"
GPT = Path(__file__).parent.parent / "bench" / "data" / "gpt.onnx"
POLICIES = ("auto", "full", "layers", "gelu", "attention", "gelu,attention", "*")
MODELS = (
    GPT,
    DATA / "gpt2_eager.legacy.onnx",
    DATA / "resnet.legacy_train.onnx",
    DATA / "autoencoder.dynamo.onnx",
    DATA / "lstm.dynamo.onnx",
    DATA / "mlp_dropout.legacy_train.onnx",
)


def build(path: Path, folder: Path, **fields: Any) -> Plan:
    return compile(path, folder, parse_recipe({"target": TARGETS[-1].name, **fields}))


Result = tuple[float, dict[str, np.ndarray]]


def trained(folder: Path, samples: int = 4) -> Result:
    """The loss and all gradients of a batch, and after a step on it all values: parameters and running statistics."""
    with Trainer(folder) as trainer:
        batch = synthetic_batch(trainer.inputs.ports, samples)
        loss, gradients = trainer.gradients(batch)
        found = {f"{name}.grad": array.copy() for name, array in gradients.items()}
        trainer.step(batch)
        return loss, {**found, **{name: array.copy() for name, array in trainer.parameters.items()}}


def assert_same(a: Result, b: Result) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    different = [name for name in a[1] if not np.array_equal(a[1][name], b[1][name])]
    assert not different


def clones(path: Path) -> list[onnx.NodeProto]:
    model = onnx.load(path, load_external_data=False)
    return [n for n in model.graph.node if any(p.key == "ortc.recompute" for p in n.metadata_props)]


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_every_policy_gives_the_same_gradients(model: Path, tmp_path: Path) -> None:
    build(model, tmp_path / "none")
    expected = trained(tmp_path / "none")
    counts = []
    for k, policy in enumerate(POLICIES):
        plan = build(model, tmp_path / str(k), recompute={"nodes": policy})
        again = plan.stages[0].recomputed
        assert again is not None
        assert len(clones(tmp_path / str(k) / "stage-0" / "train.onnx")) == len(again.nodes)
        counts.append(len(again.nodes))
        assert_same(trained(tmp_path / str(k)), expected)
    assert max(counts) > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("policy", ["auto", "layers"])
def test_stages_and_micro_batches(schedule: str, policy: str, tmp_path: Path) -> None:
    pipeline = {"stages": 2, "micro_batches": 4, "schedule": schedule}
    plain = build(GPT, tmp_path / "none", pipeline=pipeline)
    plan = build(GPT, tmp_path / "again", pipeline=pipeline, recompute={"nodes": policy})
    assert stash_bytes(plan, 0) < stash_bytes(plain, 0)
    assert_same(trained(tmp_path / "again", 8), trained(tmp_path / "none", 8))


def stash_bytes(plan: Plan, stage: int) -> int:
    """Of two samples."""
    ports = [p for p in plan.stages[stage].phases["forward"].outputs if p.role == "stash"]
    items = {"float32": 4, "int64": 8, "bool": 1}
    return sum(
        items.get(p.dtype, 4) * int(np.prod([d if isinstance(d, int) else 2 for d in p.shape or []], dtype=int)) for p in ports
    )


def test_half_precision(tmp_path: Path) -> None:
    precision = "bf16"
    build(GPT, tmp_path / "none", precision={"type": precision})
    expected = trained(tmp_path / "none")
    for policy in ("auto", "layers", "gelu"):
        build(GPT, tmp_path / policy, precision={"type": precision}, recompute={"nodes": policy})
        assert_same(trained(tmp_path / policy), expected)


def test_micro_batches_of_one_stage(tmp_path: Path) -> None:
    build(GPT, tmp_path / "none", pipeline={"micro_batches": 2})
    build(GPT, tmp_path / "layers", pipeline={"micro_batches": 2}, recompute={"nodes": "layers"})
    assert_same(trained(tmp_path / "layers"), trained(tmp_path / "none"))


def test_nothing_without_asking(tmp_path: Path) -> None:
    plan = build(GPT, tmp_path / "none")
    assert plan.stages[0].recomputed is None
    assert not clones(tmp_path / "none" / "stage-0" / "train.onnx")


def test_onnx_runtime_keeps_clones_and_order(tmp_path: Path) -> None:
    """Its optimised graph has every clone, and runs none before a gradient has come to where it is read."""
    plan = build(GPT, tmp_path / "o", recompute={"nodes": "layers"})
    file = tmp_path / "o" / "stage-0" / "train.onnx"
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    disabled = SESSIONS.training.disabled_optimizers
    ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
    again = plan.stages[0].recomputed
    assert again is not None
    assert again.nodes
    kept = {n.name for n in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert {n.name for n in clones(file)} <= kept
    # Without the gradients that they wait for nothing of the clones can run.
    graph = onnx.load(file).graph
    made = {o: n for n in graph.node for o in n.output}
    backward = {o for o, n in made.items() if ".grad" in o and n.op_type not in ("Shape", "Size")}
    for clone in clones(file):
        waiting, seen, held = list(clone.input), set(), False
        while waiting and not held:
            name = waiting.pop()
            held = name in backward
            if name in made and name not in seen:
                seen.add(name)
                waiting.extend(made[name].input)
        assert held, clone.name


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_budget_is_kept_or_refused(tmp_path: Path) -> None:
    whole = build(GPT, tmp_path / "full", recompute={"nodes": "full"}).stages[0].recomputed
    assert whole is not None
    between = (whole.memory_before + whole.memory_after) // 2
    plan = build(GPT, tmp_path / "budget", recompute={"budget": between})
    again = plan.stages[0].recomputed
    assert again is not None
    assert again.memory_after <= between
    assert again.seconds < whole.seconds
    with pytest.raises(RecipeError, match=r"the least that was found is .* MiB"):
        build(GPT, tmp_path / "no", recompute={"budget": whole.memory_after // 2})
    with pytest.raises(RecipeError, match="recompute 'gelu' takes"):
        build(GPT, tmp_path / "no", recompute={"nodes": "gelu", "budget": whole.memory_after})
    with pytest.raises(RecipeError, match="stand alone"):
        build(GPT, tmp_path / "no", recompute={"nodes": "auto,gelu"})


def random_training(seed: int, length: int = 8) -> Training:
    """A forward of some nodes, and a backward that reads it from its end, as gradients do."""
    random = np.random.default_rng(seed)
    forward = [Node((), (0,), 0.0, again=False)]
    for i in range(1, length):
        reads = {i - 1, int(random.integers(0, i))}
        forward.append(Node(tuple(sorted(reads)), (i,), float(random.integers(1, 9)), kind="f"))
    backward = [Node((length - 1,), (length,), 1.0)]
    for i in reversed(range(1, length)):
        backward.append(Node((length + len(backward) - 1, *forward[i].reads), (length + len(backward),), 1.0))
    sizes = [int(random.integers(1, 9)) * 2**20 for _ in range(length + len(backward))]
    return Training(forward, backward, sizes)


def every_choice(t: Training) -> list[Any]:
    nodes = range(1, len(t.forward))
    return [follow(t, set(c)) for size in range(len(t.forward)) for c in combinations(nodes, size)]


@pytest.mark.parametrize("searched", [False, True], ids=["exact", "heuristic"])
def test_budgets_against_all_choices(searched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the best of all sets of nodes, on random graphs. Tiny graphs are solved so; of larger ones what is tried too:
    on the mean it takes at most 5 % more of a step, or of memory."""
    if searched:
        monkeypatch.setattr(recompute, "_TINY", 0)
    slack = 1.05 if searched else 1.0
    gaps, lowest, refused = [], [], 0
    for seed in range(8):
        t = random_training(seed)
        every = every_choice(t)
        nothing, least_peak = follow(t, ()), min(c.peak for c in every)
        lowest.append(least(t).peak / least_peak)
        for part in (0.3, 0.6):
            budget = least_peak + round(part * (nothing.peak - least_peak))
            optimum = min(c.seconds for c in every if c.peak <= budget)
            found = fit(t, budget)
            refused += found.peak > budget
            step = sum(node.seconds for node in [*t.forward, *t.backward])
            gaps.append(1 + (found.seconds - optimum) / step)
        at_rate = min(c.peak + 2**20 * c.seconds for c in every)
        chosen = best(t, 2**20)
        assert chosen.peak + 2**20 * chosen.seconds <= slack * at_rate
    assert np.mean(lowest) <= slack
    assert np.mean(gaps) <= slack
    assert refused <= (1 if searched else 0)


def test_minimum_cut_against_all_choices() -> None:
    for seed in range(6):
        t = random_training(seed, 7)
        for rate in (2**18, 2**20, 2**22):

            def cost(choice: Any, t: Training = t, rate: int = rate) -> float:
                return sum(t.sizes[v] for v in choice.stash) + rate * choice.seconds

            found = cost(follow(t, minimum_cut(t, rate)))
            assert found <= min(map(cost, every_choice(t))) * (1 + 1e-6)


def test_clones_run_once_and_before_their_readers() -> None:
    t = random_training(3, 12)
    chosen = set(range(1, 12))
    clones = set(follow(t, chosen).clones)
    ran: set[int] = set()
    for index, cloned in order(t, clones):
        if cloned:
            assert index not in ran
            assert all(t.maker[v] in ran for v in t.forward[index].reads if t.maker[v] in clones)
            ran.add(index)
        else:
            assert all(t.maker[v] in ran for v in t.backward[index].reads if t.maker.get(v) in clones)
    assert ran == clones


def test_layers_are_those_that_repeat() -> None:
    """Of a chain of three equal blocks, each keeps what the next one reads."""
    forward, value = [Node((), (0,), again=False)], 0
    for _ in range(3):
        forward.append(Node((value,), (value + 1,), 1.0, kind="wide"))
        forward.append(Node((value + 1,), (value + 2,), 1.0, kind="narrow"))
        value += 2
    sizes = [1 if v % 2 == 0 else 4 for v in range(value + 1)]
    backward = [Node((v,), (value + 1 + k,)) for k, v in enumerate(reversed(range(value + 1)))]
    t = Training(forward, backward, [2**20 * s for s in sizes] + [0] * len(backward))
    chosen = repeated_layers(t)
    assert 3 in chosen
    assert not {2, 4} & chosen


def test_an_output_that_nobody_reads_any_more_is_gone(tmp_path: Path) -> None:
    """The indices of a max-pool that runs again: ONNX Runtime would keep those of the first time to the end of the run."""
    plan = compile(DATA / "lenet_bn.legacy_train.onnx", tmp_path / "o", parse_recipe({"recompute": {"nodes": "*MaxPool*"}}))
    nodes = onnx.load(tmp_path / "o" / plan.stages[0].phases["train"].file).graph.node
    pools = {node.name: len(list(filter(None, node.output))) for node in nodes if node.op_type == "MaxPool"}
    assert sorted(pools.values()) == [1, 2]
    assert next(n for name, n in pools.items() if name.endswith(".again")) == 2
