"""Loss scaling: gradients too small for float16 are lifted, and steps in which they overflow are left out.

Dynamic as published (Micikevicius et al., arXiv 1710.03740, with the constants of NVIDIA's and PyTorch's implementations):
start at 2^16, halve after an overflow, double after 2,000 steps without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ortc.errors import NotFiniteError
from ortc.recipe import Precision

_LEAST = 2.0**-24  # the smallest number of float16: no loss scale below it would help


@dataclass(frozen=True)
class Scaling:
    """Where loss scaling is.

    Attributes:
        scale: what the gradients of the next step are multiplied with.
        good: steps without an overflow since the scale last changed.
        skipped: steps of the run that were left out.
    """

    scale: float = 1.0
    good: int = 0
    skipped: int = 0

    @staticmethod
    def first(precision: Precision) -> Scaling:
        """At the beginning of a run."""
        return Scaling(1.0 if precision.scaling == "none" else precision.loss_scale.initial)

    @staticmethod
    def restored(saved: dict[str, Any] | None, precision: Precision) -> Scaling:
        """As a checkpoint has it; from the beginning if it has none, or if the recipe now says otherwise."""
        first = Scaling.first(precision)
        if saved is None:
            return first
        kept = Scaling(float(saved["scale"]), int(saved["good"]), int(saved["skipped"]))
        return kept if precision.scaling == "dynamic" else replace(first, skipped=kept.skipped)

    def saved(self) -> dict[str, Any]:
        """What :meth:`restored` reads."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def after(self, finite: bool, precision: Precision) -> Scaling:
        """After a step whose gradients were all finite, or not.

        Raises:
            NotFiniteError: if no smaller scale is left.
        """
        rule = precision.loss_scale
        if not finite:
            if self.scale * rule.backoff < _LEAST:
                raise NotFiniteError(f"the loss scale fell to {self.scale:g}, and the gradients are still not finite")
            return Scaling(self.scale * rule.backoff, 0, self.skipped + 1)
        if precision.scaling == "dynamic" and self.good + 1 >= rule.interval:
            return Scaling(self.scale * rule.growth, 0, self.skipped)
        return replace(self, good=self.good + 1)
