"""Learning rates against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from ortc.errors import RecipeError
from ortc.recipe import LearningRate
from ortc.runtime.lr import learning_rate


def rates(total: int | None = 12, **options: object) -> list[float]:
    schedule = LearningRate(base=0.8, **options)  # type: ignore[arg-type]
    return [learning_rate(schedule, step, total) for step in range(1, 13)]


def test_constant_needs_no_total():
    assert rates(None) == [0.8] * 12


def test_warm_up_rises_from_zero_to_the_base():
    assert rates(warmup=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_linear():
    got = rates(schedule="linear", warmup=2, final=0.3)
    assert got == pytest.approx([0.4, 0.8, *(0.8 - 0.05 * k for k in range(1, 11))])
    assert got[-1] == pytest.approx(0.3)


def test_cosine():
    got = rates(schedule="cosine", warmup=2, final=0.2)
    assert got[6] == pytest.approx(0.5)  # half way: step 7 of 2..12
    assert got[2] == pytest.approx(0.2 + 0.6 * (1 + math.cos(math.pi / 10)) / 2)
    assert got[-1] == pytest.approx(0.2)


def test_polynomial():
    got = rates(schedule="polynomial", power=2.0)
    assert got[5] == pytest.approx(0.8 * 0.25)
    assert got[-1] == 0


def test_a_polynomial_of_power_one_is_linear():
    options = {"warmup": 3, "final": 0.1}
    assert rates(schedule="polynomial", **options) == pytest.approx(rates(schedule="linear", **options))


def test_beyond_the_last_step_the_rate_stays():
    assert learning_rate(LearningRate(base=0.8, schedule="cosine", final=0.1), 40, 12) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run():
    assert learning_rate(LearningRate(base=1.0, schedule="linear", warmup=20), 10, 10) == 0.5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_without_a_total_it_says_what_to_give(schedule: str):
    with pytest.raises(RecipeError, match="--steps"):
        rates(None, schedule=schedule)
