"""Where batches come from, and in which order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortc.errors import DataError
from ortc.plan import Port
from ortc.runtime.batch import BatchCheck
from ortc.runtime.data import Arrays, Generated, epoch_order, first_batch, open_data

SAMPLES = 23


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return {"x": np.arange(SAMPLES * 2, dtype=np.float32).reshape(SAMPLES, 2), "y": np.arange(SAMPLES)}


@pytest.fixture
def inputs() -> BatchCheck:
    return BatchCheck(
        [
            Port(name="x", role="data", dtype="float32", shape=["n", 2]),
            Port(name="t", role="label", dtype="int64", shape=["n"], of="y"),
        ],
        [],
    )


def epoch(data: Arrays | Generated, number: int = 0, seed: int | None = 3, size: int = 5, **options) -> list[list[int]]:
    """The labels (which number the samples) of each batch; x must have come along."""
    batches = []
    for batch in data.batches(number, seed=seed, batch_size=size, **({"drop_last": False} | options)):
        assert np.array_equal(batch["x"][:, 0], batch["y"] * 2)
        batches.append(batch["y"].tolist())
    return batches


def stored(kind: str, folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The arrays on disk in one of the forms that are read."""
    if kind in ("npz", "compressed"):
        (np.savez if kind == "npz" else np.savez_compressed)(folder / "a.npz", **arrays)
        return folder / "a.npz"
    if kind == "shards":
        for i, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 20), slice(20, None))):
            np.savez(folder / f"{i}.npz", **{name: a[rows] for name, a in arrays.items()})
    else:
        for name, a in arrays.items():
            np.save(folder / f"{name}.npy", np.asfortranarray(a) if kind == "fortran" else a)
    return folder


@pytest.mark.parametrize("kind", ["npz", "compressed", "shards", "npy", "fortran"])
def test_every_form_gives_the_same_batches(kind: str, tmp_path: Path, arrays, inputs):
    data = open_data(stored(kind, tmp_path, arrays), inputs)
    assert data.samples == SAMPLES
    order = epoch_order(SAMPLES, 3, 0)
    assert epoch(data) == [order[i : i + 5].tolist() for i in range(0, SAMPLES, 5)]
    assert epoch(data, seed=None)[0] == [0, 1, 2, 3, 4]
    for shard in data.shards:
        assert all(isinstance(a, np.memmap) or a.size == 0 for a in shard.values()), "nothing is loaded"


def test_each_epoch_shows_every_sample_once_in_its_own_order():
    orders = [epoch_order(1000, seed, e) for seed in (0, 1) for e in (0, 1)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(1000))
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[0], epoch_order(1000, 0, 0))


def test_the_order_is_that_of_philox_on_every_machine():
    """What NumPy 1.26 and 2.4 give: a checkpoint must go on under another version."""
    assert epoch_order(10, 0, 0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(6, 12345, 7).tolist() == [0, 2, 1, 4, 3, 5]


def test_a_restored_epoch_goes_on_in_the_middle(tmp_path: Path, arrays, inputs):
    data = open_data(stored("npz", tmp_path, arrays), inputs)
    assert epoch(data, 1, start=2) == epoch(data, 1)[2:]


def test_the_last_partial_batch_is_kept_or_dropped(tmp_path: Path, arrays, inputs):
    data = open_data(stored("npz", tmp_path, arrays), inputs)
    assert [len(b) for b in epoch(data)] == [5, 5, 5, 5, 3]
    assert [len(b) for b in epoch(data, drop_last=True)] == [5, 5, 5, 5]
    assert (data.count(5, False), data.count(5, True), data.count(50, True)) == (5, 4, 0)


def test_a_function_yields_batches_and_is_told_seed_and_epoch(tmp_path: Path, monkeypatch, inputs):
    (tmp_path / "own_batches.py").write_text(
        "import numpy as np\n"
        "def batches(epoch, seed):\n"
        "    for i in range(4):\n"
        "        y = np.array([epoch * 100 + seed * 10 + i])\n"
        "        yield {'x': np.stack([y * 2, y], 1), 'y': y}\n"
        "def wrong():\n"
        "    yield [1]\n"
    )
    monkeypatch.chdir(tmp_path)
    data = open_data("own_batches:batches", inputs)
    assert epoch(data, 2) == [[230], [231], [232], [233]]
    assert epoch(data, 2, start=3) == [[233]]
    with pytest.raises(DataError, match="dicts of arrays, not list"):
        epoch(open_data("own_batches:wrong", inputs))
    with pytest.raises(DataError, match="no function 'missing'"):
        open_data("own_batches:missing", inputs)


def test_the_first_batch_is_in_stored_order(tmp_path: Path, arrays, inputs):
    batch = first_batch(stored("npy", tmp_path, arrays), inputs)
    assert batch["y"].tolist() == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "lacks the labels 'y'; it has 'x'"),
        ({"x": None}, "lacks the input 'x'; it has 'y'"),
        ({"y": np.arange(5)}, "'y' has 5 samples, 'x' has 23"),
        ({"y": np.array(5)}, "'y' is a single number"),
        ({"y": np.array([None] * SAMPLES)}, "not pickled objects"),
        ({"y": np.array(["a"] * SAMPLES)}, "only plain numbers"),
        ({"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, np.int64)}, "holds no samples"),
    ],
)
def test_unusable_arrays_are_told_by_name(change, message: str, tmp_path: Path, arrays, inputs):
    changed = {name: a for name, a in (arrays | change).items() if a is not None}
    np.savez(tmp_path / "a.npz", **changed)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "a.npz", inputs)


def test_files_that_are_no_data(tmp_path: Path, arrays, inputs):
    with pytest.raises(DataError, match=r"no data 'gone\.npz'"):
        open_data("gone.npz", inputs)
    with pytest.raises(DataError, match="holds neither"):
        open_data(tmp_path, inputs)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(DataError, match=r"not an \.npz file"):
        open_data(tmp_path / "a.npz", inputs)
    (tmp_path / "x.npy").write_bytes(b"no numpy file")
    with pytest.raises(DataError, match="one or the other"):
        open_data(tmp_path, inputs)
    (tmp_path / "a.npz").unlink()
    with pytest.raises(DataError, match="not a plain array"):
        open_data(tmp_path, inputs)
    np.save(tmp_path / "x.npy", arrays["x"])
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-40])
    with pytest.raises(DataError, match="cut off"):
        open_data(tmp_path, inputs)


def test_shards_that_differ_are_refused(tmp_path: Path, arrays, inputs):
    np.savez(tmp_path / "0.npz", **arrays)
    np.savez(tmp_path / "1.npz", **{**arrays, "x": arrays["x"].astype(np.float64)})
    with pytest.raises(DataError, match="'x' differs"):
        open_data(tmp_path, inputs)


def test_arrays_that_the_model_does_not_read_are_told_once(tmp_path: Path, arrays, inputs, capsys):
    np.savez(tmp_path / "a.npz", extra=np.arange(2), **arrays)
    data = open_data(tmp_path / "a.npz", inputs)
    open_data(tmp_path / "a.npz", inputs)
    assert capsys.readouterr().err.count("does not read 'extra'") == 1
    assert set(data.shards[0]) == {"x", "y"}
