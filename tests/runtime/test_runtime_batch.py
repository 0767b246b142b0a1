"""A batch that does not fit is told before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from ortc.errors import DataError
from ortc.plan import LossInfo, Port
from ortc.runtime.batch import ALIGNMENT, BatchCheck, aligned, aligned_zeros, dimension, synthetic_batch

PORTS = [
    Port(name="labels.1", role="label", dtype="int64", shape=["n*s"], of="labels"),
    Port(name="ids", role="data", dtype="int64", shape=["n", "s"]),
    Port(name="x", role="data", dtype="float32", shape=["n", 3, None]),
]
LOSS = LossInfo(name="ce", output="y", labels="labels", weight=1, classes=10, ignore_index=-1, chosen="")


def batch(**changes) -> dict[str, np.ndarray]:
    arrays = {
        "x": np.zeros((2, 3, 7), np.float32),
        "ids": np.zeros((2, 4), np.int64),
        "labels": np.arange(8),
    }
    return {name: a for name, a in (arrays | changes).items() if a is not None}


@pytest.fixture
def check() -> BatchCheck:
    return BatchCheck(PORTS, [LOSS])


def test_a_batch_that_fits(check):
    fitted = check.fit(batch())
    assert {n: a.dtype.name for n, a in fitted.items()} == {"ids": "int64", "x": "float32", "labels": "int64"}
    assert check.samples(fitted) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "lacks the input 'x'; it has 'ids', 'labels'"),
        ({"labels": None}, "lacks the labels 'labels'"),
        ({"x": np.zeros((2, 3), np.float32)}, r"'x' has shape \[2, 3\], the model wants \[n, 3, \?\]: 3 dimensions"),
        ({"x": np.zeros((2, 4, 7), np.float32)}, "dimension 1 must be 3"),
        ({"x": np.zeros((3, 3, 7), np.float32)}, "'n' is 2 in 'ids'"),
        ({"x": np.zeros((2, 3, 0), np.float32)}, "empty"),
        ({"labels": np.arange(9)}, r"'n\*s' is 8"),
        ({"x": np.zeros((2, 3, 7), np.int64)}, r"'x' has type int64.*astype\('float32'\)"),
        ({"ids": np.zeros((2, 4))}, "'ids' has type float64, the model wants int64"),
        ({"ids": np.full((2, 4), 2**63, np.uint64)}, "values beyond int64"),
        ({"labels": np.array([0, 1, 2, 10, 0, 0, 0, 0])}, r"class 10 at \[3\].*0 to 9 \(or -1"),
        ({"labels": np.array([0, 1, 2, -2, 0, 0, 0, 0])}, "class -2"),
    ],
)
def test_a_batch_that_does_not_fit(check, changes, message: str):
    with pytest.raises(DataError, match=message):
        check.fit(batch(**changes))


def test_the_ignored_class_is_no_mistake(check):
    assert check.fit(batch(labels=np.full(8, -1)))["labels"].tolist() == [-1] * 8


def test_types_of_the_same_kind_are_converted(check):
    fitted = check.fit(batch(x=np.full((2, 3, 7), 0.5), ids=np.full((2, 4), 3, np.int32), labels=np.arange(8, dtype=np.uint8)))
    assert fitted["x"].dtype == np.float32
    assert fitted["x"][0, 0, 0] == 0.5
    assert fitted["ids"].dtype == fitted["labels"].dtype == np.int64
    assert fitted["labels"].tolist() == list(range(8))


def test_big_endian_and_strided_arrays_arrive_plain(check):
    x = np.arange(42, dtype=">f4").reshape(7, 3, 2).T
    fitted = check.fit(batch(x=x))["x"]
    assert fitted.dtype == np.float32
    assert fitted.flags.c_contiguous
    assert np.array_equal(fitted, x)


def test_unread_arrays_are_told_once(check, capsys):
    check.fit(batch(other=np.zeros(1)))
    check.fit(batch(other=np.zeros(1)))
    assert capsys.readouterr().err.count("does not read 'other'") == 1


def test_memory_is_aligned():
    for shape in [(), (1,), (3, 5)]:
        assert aligned_zeros(shape, "float32").ctypes.data % ALIGNMENT == 0
    shifted = aligned_zeros((33,), "float32")[1:]
    assert aligned(shifted).ctypes.data % ALIGNMENT == 0
    whole = aligned_zeros((33,), "float32")
    assert aligned(whole) is whole


def test_sizes_are_computed_from_names():
    sizes = {"n": 2, "s 1": 4, "s": 5}
    assert dimension("n*s + 1", sizes) == 11
    assert dimension("(s - n)//2", sizes) == 1
    assert dimension("s 1", sizes) == 4
    assert dimension("t", sizes) is None
    assert dimension("n*t", sizes) is None
    assert dimension("n**s", sizes) is None
    assert dimension("__import__('os')", sizes) is None


def test_a_made_up_batch_fits_and_is_the_same_each_time(check):
    made, again = synthetic_batch(check.ports), synthetic_batch(check.ports)
    fitted = check.fit(made)
    assert fitted["labels"].shape == (32,)
    assert fitted["ids"].min() == 1
    assert np.array_equal(made["x"], again["x"])


def test_a_fixed_batch_size_is_known():
    port = PORTS[1].model_copy(update={"shape": [4, 2]})
    assert BatchCheck([port], []).fixed_batch_size() == 4
    assert BatchCheck(PORTS, []).fixed_batch_size() is None
