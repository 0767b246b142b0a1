"""Every declared gradient rule, on every sample that stands beside it."""

from __future__ import annotations

import pytest
from gradcheck import check_sample

from ortc.rules import GRADIENTS, NO_GRADIENT, load_declarations

load_declarations("ortc.passes.gradients")

SAMPLES = [
    pytest.param(key, sample, id=f"{key[1]}-{index}")
    for key, rule in sorted(GRADIENTS.items())
    for index, sample in enumerate(rule.samples)
]


@pytest.mark.parametrize(("key", "sample"), SAMPLES)
def test_rule_agrees_with_finite_differences(key, sample):
    check_sample(key, sample)


def test_every_rule_has_samples():
    """But for ortc's own operators, which ONNX cannot run: their tests stand with their passes'."""
    assert [key for key, rule in GRADIENTS.items() if not rule.samples and key[0] != "ortc"] == []


def test_no_operator_is_declared_both_ways():
    assert not NO_GRADIENT & GRADIENTS.keys()
