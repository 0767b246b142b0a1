"""Every backend node case of ONNX as a gradient test; ``python tests/backend.py`` prints what is skipped, and why."""

from __future__ import annotations

from collections import Counter
from functools import cache

import backend
import pytest
from backend import PASSED, REFUSED, WRONG, Outcome

from ortc.rules import GRADIENTS, NO_GRADIENT, OUT_OF_REACH

OPERATORS = sorted({backend.operator(c) for c in backend.cases().values()})


@cache
def outcomes(operator: str) -> dict[str, Outcome]:
    return {name: backend.outcome(c) for name, c in backend.cases().items() if backend.operator(c) == operator}


@pytest.mark.filterwarnings("ignore")  # of ONNX's reference, at NaN and infinity
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_central_differences(operator):
    found = outcomes(operator)
    assert {name: o.text for name, o in found.items() if o.kind == WRONG} == {}
    # What is refused is declared so as a whole, or says which form it is.
    for name, o in found.items():
        if o.kind == REFUSED:
            assert ("", operator) in OUT_OF_REACH or backend.says_which_form(o.text), f"{name}: {o.text}"


@pytest.mark.filterwarnings("ignore")
def test_every_operator_with_a_rule_has_a_case_that_passes_or_a_reason():
    """Operators whose cases are all skipped are those whose reference rounds, or that ONNX Runtime cannot run."""
    skipped = {}
    for operator in OPERATORS:
        kinds = Counter(o.kind for o in outcomes(operator).values())
        if ("", operator) in GRADIENTS and ("", operator) not in NO_GRADIENT and not kinds[PASSED]:
            skipped[operator] = set(kinds)
    allowed = {backend.NO_REFERENCE, backend.NO_FLOAT, backend.STOPS, backend.OTHER_FORWARD, backend.RANDOMNESS, backend.TYPES}
    assert all(kinds <= allowed for kinds in skipped.values()), skipped
