"""Replicas: what they do together (gradients, statistics, the loss) and what they share out (the optimizer's state, ZeRO-1).

Ranks are threads, in the last test processes. Replicas add gradients in their order, sharded or not, so sharding changes
no bit; another number of replicas adds in another order, which rounds otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ortc import Trainer
from ortc.artifacts import compile
from ortc.errors import NotFiniteError, PlanError, RecipeError
from ortc.passes.optimizer import _owners
from ortc.plan import ParameterInfo, Plan
from ortc.recipe import parse_recipe
from ortc.runtime.batch import ALIGNMENT
from ortc.runtime.checkpoint import read_index
from ortc.runtime.stage import _buckets
from ortc.runtime.transport import thread_world
from ortc.runtime.worker import Worker

pytestmark = pytest.mark.ranks

MODELS = Path(__file__).parent / "data" / "models"
GPT, RESNET, MLP = (MODELS / f"{name}.onnx" for name in ("gpt2_eager.legacy", "resnet.legacy_train", "mlp.legacy"))

Batch = dict[str, np.ndarray]
ADAMW = {"name": "adamw", "max_norm": 0.5}


def text(samples: int, seed: int = 0) -> Batch:
    """For the GPT; a third of the targets do not count, more of them in the first samples."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 64, (2, samples, 7))
    labels = np.where(random.random((samples, 7)) < np.linspace(0.6, 0.1, samples)[:, None], -100, ids[1])
    return {"input_ids": ids[0], "attention_mask": np.ones((samples, 7), np.int64), "labels": labels}


def images(samples: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((samples, 3, 16, 16)).astype(np.float32), "labels": random.integers(0, 4, samples)}


def compiled(model: Path, folder: Path, pipeline: Mapping[str, Any], **recipe: Any) -> Plan:
    output = {"output": "logits"} if model is GPT else {}
    loss = [{"name": "cross_entropy", "options": {"ignore_index": -100}, **output}]
    table = {"loss": loss, "optimizer": ADAMW, "learning_rate": {"base": 0.01}, **recipe, "pipeline": dict(pipeline)}
    return compile(model, folder, parse_recipe(table))


def trained(folder: Path, batches: list[Batch], restore: str | Path = "latest", save: bool = False) -> dict[str, Any]:
    """Losses and norms of a step per batch, and then every rank's values and states."""
    with Trainer(folder, threads=1, restore=restore) as trainer:
        results = [trainer.step(batch) for batch in batches]
        workers = trainer._team.workers
        held = [(w.rank, w.replica, s) for w in workers for s in w.stages.values()]
        return {
            "losses": [r.loss for r in results],
            "norms": [r.gradient_norm for r in results],
            "values": {(replica, s.stage.index, n): a.copy() for _, replica, s in held for n, a in s.values.items()},
            "states": {k: a.copy() for _, _, s in held for k, a in s.states.items()},
            "bytes": {(rank, replica): sum(a.nbytes for a in s.states.values()) for rank, replica, s in held},
            "saved": trainer.save() if save else None,
        }


def same_bits(a: Mapping[Any, np.ndarray], b: Mapping[Any, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for key, array in a.items():
        assert array.tobytes() == b[key].tobytes(), key


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 replicas": {"replicas": 2, "micro_batches": 2},
    "3 replicas": {"replicas": 3, "micro_batches": 1},
    "2 stages, 2 replicas": {"stages": 2, "replicas": 2, "micro_batches": 2},
    "4 stages on 2 ranks, 2 replicas": {"stages": 4, "ranks": 2, "replicas": 2, "micro_batches": 2, "schedule": "interleaved"},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd:momentum"])
def test_shards_change_no_bit(layout: str, optimizer: str, tmp_path: Path):
    """The embedding is tied: it lives in the first and the last stage. Gradients are clipped, so the norm counts."""
    name, _, momentum = optimizer.partition(":")
    chosen = {"name": name, "max_norm": 0.5, "options": {"momentum": 0.9} if momentum else {}}
    batches = [text(6, seed) for seed in range(4)]
    found = []
    for zero in (0, 1):
        compiled(GPT, tmp_path / f"zero{zero}", {**LAYOUTS[layout], "zero": zero}, optimizer=chosen)
        found.append(trained(tmp_path / f"zero{zero}", batches))
    whole, sharded = found
    assert whole["losses"] == sharded["losses"]
    assert whole["norms"] == sharded["norms"]
    assert max(whole["norms"]) > 0.5
    same_bits(whole["values"], sharded["values"])
    same_bits(whole["states"], sharded["states"])
    first = {key[2]: array for key, array in reversed(sharded["values"].items())}
    for (_, _, parameter), array in sharded["values"].items():  # all replicas, and all stages of a tied weight
        assert array.tobytes() == first[parameter].tobytes()


def test_a_rank_keeps_only_its_shard(tmp_path: Path):
    pipeline = {"stages": 2, "replicas": 2, "micro_batches": 2}
    compiled(GPT, tmp_path / "whole", pipeline)
    plan = compiled(GPT, tmp_path / "sharded", {**pipeline, "zero": 1})
    infos = {p.name: p for p in plan.parameters}
    whole, sharded = (trained(tmp_path / f, [text(4)])["bytes"] for f in ("whole", "sharded"))
    for stage in plan.stages:
        phases = {name: graph for name, graph in stage.phases.items() if name.startswith("optimizer")}
        assert list(phases) == ["optimizer.0", "optimizer.1"]
        shards = [{p.of for p in graph.inputs if p.role == "parameter"} for graph in phases.values()]
        assert not shards[0] & shards[1]
        assert shards[0] | shards[1] == {n for n in stage.parameters if infos[n].trainable}
        for graph in phases.values():
            assert (tmp_path / "sharded" / graph.file).exists()
        rank = stage.index
        each = [sharded[rank, 0], sharded[rank, 1]]
        assert sum(each) == whole[rank, 0] == whole[rank, 1]
        assert max(each) < 0.6 * whole[rank, 0]


def test_gradients_are_whole(tmp_path: Path):
    """Each replica has summed its own only; who asks for gradients gets every one from where it is whole."""
    found = []
    for zero in (0, 1):
        compiled(GPT, tmp_path / str(zero), {"stages": 2, "replicas": 2, "micro_batches": 2, "zero": zero})
        with Trainer(tmp_path / str(zero), threads=1) as trainer:
            found.append(trainer.gradients(text(6))[1])
    same_bits(found[0], found[1])


def test_a_replica_may_have_nothing_to_update(tmp_path: Path):
    """Two parameters train, over three replicas."""
    few = {"parameters": {"train": ["*ln_f*"]}}
    plan = compiled(GPT, tmp_path / "sharded", {"replicas": 3, "micro_batches": 1, "zero": 1}, **few)
    compiled(GPT, tmp_path / "whole", {"replicas": 3, "micro_batches": 1}, **few)
    assert [phase for phase in plan.stages[0].phases if phase.startswith("optimizer")] == ["optimizer.0", "optimizer.1"]
    batches = [text(6, seed) for seed in range(2)]
    whole, sharded = (trained(tmp_path / name, batches) for name in ("whole", "sharded"))
    assert sharded["bytes"][0, 2] == 0
    same_bits(whole["values"], sharded["values"])


def test_owners_are_balanced_and_agree_over_stages():
    stages = [{"tied": 70, "a": 40, "b": 30}, {"c": 90, "tied": 70, "d": 10, "e": 10}]
    owners = _owners(stages, 2, {})
    loads = [[sum(size for n, size in stage.items() if owners[n] == r) for r in (0, 1)] for stage in stages]
    assert loads == [[70, 70], [90, 90]] or loads == [[70, 70], [90, 90]][::-1]
    assert owners["tied"] != owners["c"]


def test_arrays_side_by_side_are_aligned_and_apart():
    """Of two types, a scalar and an empty one among them; each shard is a stretch of the memory."""
    shapes = {
        "a": ("float32", [3, 5]),
        "b": ("float16", [7]),
        "c": ("float32", []),
        "d": ("float32", [0, 2]),
        "e": ("float32", [64]),
    }
    infos = {
        name: ParameterInfo(name=name, role="parameter", dtype=dtype, shape=shape, trainable=True, reason="")
        for name, (dtype, shape) in shapes.items()
    }
    buckets, arrays = _buckets([[infos["a"], infos["b"]], [], [infos[name] for name in "cde"]])
    assert [(b.memory.dtype.name, b.sizes) for b in buckets] == [("float32", [16, 0, 80]), ("float16", [32, 0, 0])]
    for name, array in arrays.items():
        assert (array.dtype.name, list(array.shape)) == shapes[name]
        assert array.flags.c_contiguous
        assert array.ctypes.data % ALIGNMENT == 0
        array[...] = ord(name)
    assert all((array == ord(name)).all() for name, array in arrays.items())
    shards = np.split(buckets[0].memory, np.cumsum(buckets[0].sizes)[:-1])
    assert [np.unique(s).tolist() for s in shards] == [[0, ord("a")], [], [0, ord("c"), ord("e")]]


def test_a_tensor_beyond_its_share_is_told(tmp_path: Path):
    plan = compiled(MLP, tmp_path / "o", {"replicas": 4, "zero": 1})
    assert any("stays whole: one of the 4 replicas keeps that much" in w for w in plan.warnings)
    batch = synthetic(plan)
    assert max(trained(tmp_path / "o", [batch])["bytes"].values()) > 0


def synthetic(plan: Plan) -> Batch:
    """Eight samples for the MLP."""
    [port] = [p for p in plan.stages[0].phases["train"].inputs if p.role == "data"]
    width = port.shape[1]  # type: ignore[index]
    return {"x": np.ones((8, width), np.float32), "labels": np.zeros(8, np.int64)}  # type: ignore[arg-type]


def test_zero_without_replicas_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match="there is one: add --data-parallel"):
        compiled(MLP, tmp_path / "o", {"zero": 1})


def test_another_number_of_replicas_than_shards_is_refused(tmp_path: Path):
    plan = compiled(MLP, tmp_path / "o", {"replicas": 2, "zero": 1})
    with pytest.raises(PlanError, match=r"in 2 shards.*1 replicas: start 2 ranks"):
        Worker(tmp_path / "o", plan, thread_world(1)[0], 1)


@pytest.mark.parametrize("sample", [0, 7])
def test_nan_on_one_replica_changes_nothing_anywhere(sample: int, tmp_path: Path):
    compiled(RESNET, tmp_path / "o", {"stages": 2, "replicas": 2, "micro_batches": 2, "zero": 1})
    with Trainer(tmp_path / "o", threads=1) as trainer:
        trainer.step(images(8))
        stages = [s for w in trainer._team.workers for s in w.stages.values()]
        before = [({n: a.copy() for n, a in s.values.items()}, {k: a.copy() for k, a in s.states.items()}) for s in stages]
        damaged = images(8, 1)
        damaged["x"][sample, 0, 0, 0] = np.nan
        with pytest.raises(NotFiniteError, match="not finite are the gradients of '"):
            trainer.step(damaged)
        for stage, (values, states) in zip(stages, before, strict=True):
            same_bits(stage.values, values)
            same_bits(stage.states, states)
        assert np.isfinite(trainer.step(images(8, 2)).loss)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

WAYS: dict[str, list[dict[str, Any]]] = {
    "sharded, then not, then again": [{"replicas": 2, "zero": 1}, {"replicas": 2}, {"replicas": 2, "zero": 1}],
    "2, 1, 4 replicas": [{"replicas": 2, "zero": 1}, {"micro_batches": 4}, {"replicas": 4, "zero": 1}],
    "stages and shards": [
        {"stages": 2, "replicas": 2, "zero": 1, "micro_batches": 2},
        {"replicas": 3, "zero": 1},
        {"stages": 4, "micro_batches": 4},
    ],
}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_checkpoint_goes_on_with_other_replicas_and_shards(way: str, tmp_path: Path):
    """Three steps with each division, against nine steps of the first: a float32 sum in another order is some 1e-7 off,
    which nine steps of AdamW magnify."""
    batches = [text(8, seed) for seed in range(9)]
    compiled(GPT, tmp_path / "straight", WAYS[way][0])
    straight = trained(tmp_path / "straight", batches)
    losses, saved, states = [], "none", {}
    for index, pipeline in enumerate(WAYS[way]):
        compiled(GPT, tmp_path / str(index), pipeline)
        part = trained(tmp_path / str(index), batches[3 * index : 3 * index + 3], restore=saved, save=True)
        losses += part["losses"]
        saved, states = part["saved"], part["states"]
        index_file = read_index(saved)
        assert {(n, slot) for n, slots in index_file["optimizer"].items() for slot in slots} == straight["states"].keys()
    if way.startswith("sharded"):
        assert losses == straight["losses"]
        same_bits(states, straight["states"])
    else:
        np.testing.assert_allclose(losses, straight["losses"], rtol=2e-5)
        for slot in ("exp_avg", "exp_avg_sq"):
            expected = {name: array for (name, s), array in straight["states"].items() if s == slot}
            off = max(np.abs(states[name, slot] - array).max() for name, array in expected.items())
            assert off < 1e-3 * max(np.abs(array).max() for array in expected.values())


def test_a_sharded_model_is_exported(tmp_path: Path):
    compiled(GPT, tmp_path / "o", {"stages": 2, "replicas": 2, "micro_batches": 1, "zero": 1})
    np.savez(tmp_path / "data.npz", **text(4))
    with Trainer(tmp_path / "o", threads=1) as trainer:
        trainer.step(text(4))
        trainer.save()
    with Trainer(tmp_path / "o", threads=1) as trainer:
        exported = trainer.export(tmp_path / "m.onnx", tmp_path / "data.npz")
    assert exported.step == 1
    assert exported.loss == pytest.approx(exported.evaluation_loss, rel=1e-5)


# ---- what replicas do together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("samples", [8, 7, 3, 1])
def test_replicas_are_more_micro_batches(samples: int, zero: int, tmp_path: Path):
    """Two replicas of two micro-batches are one of four, however unequal: of a single sample, one replica has none. Targets
    that do not count lie unevenly. Float32 sums in another order are some 1e-7 off, and four steps add up. The optimizer is
    SGD, since Adam would make a step of the rounding itself where a gradient is zero, as of the keys' bias."""
    sgd = {"name": "sgd", "options": {"momentum": 0.9}, "max_norm": 0.5}
    compiled(GPT, tmp_path / "one", {"micro_batches": 4}, optimizer=sgd)
    compiled(GPT, tmp_path / "whole", {"micro_batches": 1}, optimizer=sgd)
    compiled(GPT, tmp_path / "two", {"micro_batches": 2, "replicas": 2, "zero": zero}, optimizer=sgd)
    batches = [text(samples, seed) for seed in range(4)]
    one, whole, two = (trained(tmp_path / name, batches) for name in ("one", "whole", "two"))
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=2e-6)
    np.testing.assert_allclose(two["losses"], whole["losses"], rtol=2e-6)
    np.testing.assert_allclose(two["norms"], one["norms"], rtol=1e-5)
    for (_, stage, name), array in two["values"].items():
        np.testing.assert_allclose(array, one["values"][0, stage, name], rtol=1e-5, atol=1e-6)


def test_statistics_are_the_mean_of_the_replicas(tmp_path: Path):
    """Against a run for each replica's samples alone, from the same buffers."""
    compiled(RESNET, tmp_path / "two", {"micro_batches": 1, "replicas": 2})
    compiled(RESNET, tmp_path / "one", {"micro_batches": 1})
    batch = images(7)
    halves = [{n: a[:3] for n, a in batch.items()}, {n: a[3:] for n, a in batch.items()}]
    plan = compiled(RESNET, tmp_path / "plan", {})
    buffers = {p.name for p in plan.parameters if p.role == "buffer"}
    two = trained(tmp_path / "two", [batch])["values"]
    apart = [trained(tmp_path / "one", [half], restore="none")["values"] for half in halves]
    changed = 0
    for (replica, _, name), array in two.items():
        if name in buffers and array.dtype.kind == "f":
            mean = (apart[0][0, 0, name] + apart[1][0, 0, name]) / 2
            np.testing.assert_allclose(array, mean, rtol=1e-6, err_msg=f"{name} of {replica}")
            changed += not np.array_equal(apart[0][0, 0, name], apart[1][0, 0, name])
    assert changed > 2


def test_a_replica_without_samples_has_no_say_in_the_statistics(tmp_path: Path):
    compiled(RESNET, tmp_path / "two", {"micro_batches": 1, "replicas": 2, "zero": 1})
    compiled(RESNET, tmp_path / "one", {"micro_batches": 1})
    two, one = (trained(tmp_path / name, [images(1)]) for name in ("two", "one"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    for (_, stage, name), array in two["values"].items():
        np.testing.assert_allclose(array, one["values"][0, stage, name], rtol=1e-5, atol=1e-6, err_msg=name)


# ---- processes -------------------------------------------------------------------------------------------------------

MPIEXEC = Path(sys.executable).with_name("mpiexec")
TRAIN = """
import sys
import numpy as np
from ortc import Trainer

folder, data = sys.argv[1:]
arrays = np.load(data)
with Trainer(folder, threads=1) as trainer:
    for i in range(3):
        result = trainer.step({name: arrays[name][i] for name in arrays})
        if trainer.is_main:
            print(f"{result.loss!r} {result.gradient_norm!r}")
    trainer.save()
"""


@pytest.mark.skipif(find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="needs mpi4py and an MPI: ortc[mpi]")
def test_processes_and_threads_give_the_same_bits(tmp_path: Path):
    batches = [text(5, seed) for seed in range(3)]
    np.savez(tmp_path / "data.npz", **{name: np.stack([b[name] for b in batches]) for name in batches[0]})
    for name in ("processes", "threads"):
        compiled(GPT, tmp_path / name, {"stages": 2, "replicas": 2, "micro_batches": 2, "zero": 1})
    leave = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    program = [sys.executable, "-c", TRAIN, tmp_path / "processes", tmp_path / "data.npz"]
    job = subprocess.run(
        [MPIEXEC, "-n", "4", *program], env=os.environ | leave, capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stderr
    threads = trained(tmp_path / "threads", batches, save=True)
    expected = [f"{loss!r} {norm!r}" for loss, norm in zip(threads["losses"], threads["norms"], strict=True)]
    assert job.stdout.splitlines() == expected
    same_bits(tensors(tmp_path / "processes" / "checkpoint" / "step-3"), tensors(threads["saved"]))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
