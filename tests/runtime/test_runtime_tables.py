"""Tables as data: Parquet, and datasets as Hugging Face's ``datasets`` saved one (tests/data/make_dataset.py)."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from ortc.errors import DataError
from ortc.runtime.batch import BatchCheck
from ortc.runtime.data import Arrays, epoch_order, open_data, prefetched
from ortc.runtime.parts import parts_of, read_whole, share_of
from ortc.runtime.run import run
from ortc.runtime.trainer import Trainer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SAVED = Path(__file__).parent.parent / "data" / "dataset"


@pytest.fixture
def inputs(tmp_path: Path) -> BatchCheck:
    tiny.make_folder(tmp_path / "f")
    with Trainer(tmp_path / "f") as trainer:
        return trainer.inputs


def table(data: dict[str, np.ndarray], fixed: bool = True) -> pa.Table:
    x = data["x"].tolist()
    kind = pa.list_(pa.float32(), 4) if fixed else pa.list_(pa.float32())
    return pa.table({"x": pa.array(x, kind), "labels": pa.array(data["labels"]), "note": ["text"] * len(x)})


def epoch(data: Arrays) -> dict[str, np.ndarray]:
    batches = list(data.batches(0, seed=None, batch_size=7, drop_last=False))
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


@pytest.mark.parametrize("fixed", [True, False])
def test_parquet(tmp_path: Path, inputs: BatchCheck, fixed: bool):
    data = tiny.data(50)
    pq.write_table(table(data, fixed), tmp_path / "d.parquet", row_group_size=13)
    opened = open_data(tmp_path / "d.parquet", inputs)
    assert opened.samples == 50
    for name, array in epoch(opened).items():
        np.testing.assert_array_equal(array, data[name])
    shuffled = next(opened.batches(2, seed=5, batch_size=9, drop_last=False))
    np.testing.assert_array_equal(shuffled["labels"], data["labels"][epoch_order(50, 5, 2)[:9]])


def test_a_folder_of_parquet(tmp_path: Path, inputs: BatchCheck):
    data = tiny.data(50)
    (tmp_path / "d").mkdir()
    for i, part in enumerate((slice(0, 20), slice(20, 50))):
        pq.write_table(table({k: v[part] for k, v in data.items()}), tmp_path / "d" / f"{i}.parquet")
    np.testing.assert_array_equal(epoch(open_data(tmp_path / "d", inputs))["x"], data["x"])
    np.savez(tmp_path / "d" / "e.npz", **data)
    with pytest.raises(DataError, match="one or the other"):
        open_data(tmp_path / "d", inputs)


def test_nested_lists_and_other_types(tmp_path: Path, inputs: BatchCheck):
    data = {"x": np.arange(24).reshape(2, 3, 4), "labels": np.array([True, False])}
    columns = {name: pa.array(array.tolist()) for name, array in data.items()}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    found = open_data(tmp_path / "d.parquet", inputs)
    assert found.shards[0]["x"].shape == (2, 3, 4)
    np.testing.assert_array_equal(found.shards[0]["x"], data["x"])
    assert found.shards[0]["labels"].dtype == np.bool_


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([[1.0, 2], [3.0]], "column 'x' holds lists of 1 to 2 elements: pad them"),
        ([[1.0, 2], None], "column 'x' has missing values"),
        ([[1.0, None], [2.0, 3]], "column 'x' has missing values"),
        (["a", "b"], "the data lacks the input 'x'"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, inputs: BatchCheck, x: list, said: str):
    pq.write_table(pa.table({"x": x, "labels": [0, 1]}), tmp_path / "d.parquet")
    with pytest.raises(DataError) as error:
        open_data(tmp_path / "d.parquet", inputs)
    assert said in str(error.value)


def test_what_is_no_parquet(tmp_path: Path, inputs: BatchCheck):
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"cannot read .*d\.parquet"):
        open_data(tmp_path / "d.parquet", inputs)


def test_a_saved_dataset(inputs: BatchCheck):
    data = tiny.data(50)
    opened = open_data(SAVED / "train", inputs)
    assert len(opened.shards) > 1
    assert opened.samples == 50
    found = epoch(opened)
    np.testing.assert_array_equal(found["x"], data["x"])
    np.testing.assert_array_equal(found["labels"], data["labels"])


def test_a_dataset_of_splits_names_them(inputs: BatchCheck):
    with pytest.raises(DataError, match=r"holds the splits test, train: name one, such as .*test"):
        open_data(SAVED, inputs)


def test_a_dataset_that_was_changed(tmp_path: Path, inputs: BatchCheck):
    shutil.copytree(SAVED / "train", tmp_path / "d")
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    for text, said in (
        (json.dumps({**state, "_data_files": [{"filename": "../secret.arrow"}]}), "outside of the folder"),
        ("{}", "cannot read .*state.json"),
        (json.dumps({**state, "_data_files": [{"filename": "gone.arrow"}]}), "cannot read .*gone.arrow"),
    ):
        (tmp_path / "d" / "state.json").write_text(text)
        with pytest.raises(DataError, match=said):
            open_data(tmp_path / "d", inputs)


def test_without_pyarrow(tmp_path: Path, inputs: BatchCheck, monkeypatch):
    pq.write_table(table(tiny.data(5)), tmp_path / "d.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'ortc\[data\]'"):
        open_data(tmp_path / "d.parquet", inputs)


def test_a_run_on_tables_is_the_run_on_arrays(tmp_path: Path):
    data = tiny.data(50)
    np.savez(tmp_path / "d.npz", **data)
    pq.write_table(table(data).rename_columns(["points", "class", "note"]), tmp_path / "d.parquet")
    metrics = []
    for source, rename in (("d.npz", {}), ("d.parquet", {"points": "x", "class": "labels"})):
        folder = tmp_path / source.replace(".", "-")
        tiny.make_folder(folder)
        run(folder, data=tmp_path / source, epochs=2, batch_size=8, threads=1, quiet=True, rename=rename)
        metrics.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert metrics[0] == metrics[1]


def test_names_that_are_not_there(tmp_path: Path, inputs: BatchCheck):
    np.savez(tmp_path / "d.npz", **tiny.data(5))
    with pytest.raises(DataError, match="there is no 'points'; it has 'x', 'labels'"):
        open_data(tmp_path / "d.npz", inputs, {"points": "x"})
    with pytest.raises(DataError, match="two would have the same name"):
        open_data(tmp_path / "d.npz", inputs, {"labels": "x"})


# In advance


def test_items_are_made_in_advance_and_in_order():
    made: list[int] = []

    def items():
        for i in range(8):
            made.append(i)
            yield i

    taken = prefetched(items(), ahead=2)
    assert next(taken) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3], "one is taken, two wait, one is in the hand"
    assert list(taken) == list(range(1, 8))


def test_an_error_comes_in_its_place():
    def items():
        yield 1
        raise DataError("broken")

    taken = prefetched(items())
    assert next(taken) == 1
    with pytest.raises(DataError, match="broken"):
        next(taken)


def test_who_stops_taking_stops_the_making():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    before = threading.active_count()
    taken = prefetched(items())
    next(taken)
    taken.close()
    assert threading.active_count() == before
    assert closed.wait(5)


# A replica's own samples


@pytest.mark.parametrize(("samples", "count", "replicas"), [(16, 4, 2), (10, 6, 3), (3, 8, 2), (1, 2, 2), (7, 2, 2)])
def test_shares_are_those_of_the_micro_batches(inputs: BatchCheck, samples: int, count: int, replicas: int):
    batch = tiny.data(samples)
    batch["x"][:, 0] = np.arange(samples)
    parts = parts_of(batch, count, inputs, [], False)
    edges = np.linspace(0, len(parts), replicas + 1).astype(int)
    for r in range(replicas):
        rows = [int(v) for part in parts[edges[r] : edges[r + 1]] for v in part.batch["x"][:, 0]]
        assert rows == list(range(samples))[share_of(samples, count, r, replicas)]


def test_other_replicas_samples_are_not_read(inputs: BatchCheck):
    data = tiny.data(20)
    arrays = Arrays([{k: v[:12] for k, v in data.items()}, {k: v[12:] for k, v in data.items()}], "a test")
    arrays.share, arrays.whole = (lambda n: share_of(n, 4, 1, 2)), read_whole(inputs)
    [batch] = arrays.batches(0, seed=None, batch_size=20, drop_last=False)
    np.testing.assert_array_equal(batch["labels"], data["labels"])
    np.testing.assert_array_equal(batch["x"][10:], data["x"][10:])
    assert not batch["x"][:10].any()
