"""Learning rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from ortc.errors import RecipeError
from ortc.recipe import LearningRate


def learning_rate(schedule: LearningRate, step: int, total: int | None) -> float:
    """The learning rate of one update.

    With b the base, f the final rate, W the warm-up steps, T the total, and x = (step - W) / (T - W) in [0, 1]:

    * warm-up, step < W:  b · step / W
    * constant:           b
    * linear:             b + (f - b) · x
    * cosine:             f + (b - f) · (1 + cos(π·x)) / 2   (Loshchilov & Hutter, arXiv 1608.03983, one period)
    * polynomial:         f + (b - f) · (1 - x)^power

    Args:
        schedule: the recipe's table.
        step: number of the update, from 1.
        total: number of the last update of the run; None if it is not known.

    Raises:
        RecipeError: if the schedule needs the total and there is none.
    """
    if step < schedule.warmup:
        return schedule.base * step / schedule.warmup
    if schedule.schedule == "constant":
        return schedule.base
    if total is None:
        raise RecipeError(f"the {schedule.schedule} schedule needs the number of steps of the run: give --steps")
    x = min(max((step - schedule.warmup) / max(total - schedule.warmup, 1), 0.0), 1.0)
    span = schedule.base - schedule.final
    if schedule.schedule == "linear":
        return schedule.base - span * x
    if schedule.schedule == "cosine":
        return schedule.final + span * (1 + math.cos(math.pi * x)) / 2
    return schedule.final + span * (1 - x) ** schedule.power
