"""Every backend node case of ONNX as a gradient test; ``python tests/backend.py`` prints what is skipped, and why."""

from __future__ import annotations

import backend
import pytest
from backend import PASSED, REFUSED, WRONG

from ortc.rules import GRADIENTS, OUT_OF_REACH

CASES: dict[str, list[str]] = {}
for name, case in backend.cases().items():
    CASES.setdefault(backend.operator(case), []).append(name)

MOST = 32

# Why an operator with a gradient may have no case that passes.
REASONS = {
    *(backend.NO_REFERENCE, backend.NO_FLOAT, backend.STOPS, backend.OTHER_FORWARD, backend.RANDOMNESS, backend.TYPES),
}


@pytest.mark.filterwarnings("ignore")  # of ONNX's reference, at NaN and infinity
@pytest.mark.parametrize("operator", sorted(CASES))
def test_gradients_are_central_differences(operator):
    # The report tries all; here those with many (Attention has over 200) are sampled.
    names = CASES[operator][:: 1 + len(CASES[operator]) // MOST]
    found = {name: backend.outcome(backend.cases()[name]) for name in names}
    assert {name: o.text for name, o in found.items() if o.kind == WRONG} == {}
    # What is refused is declared so as a whole, or says which form it is.
    for name, o in found.items():
        if o.kind == REFUSED:
            assert ("", operator) in OUT_OF_REACH or backend.says_which_form(o.text), f"{name}: {o.text}"
    kinds = {o.kind for o in found.values()}
    if ("", operator) in GRADIENTS and PASSED not in kinds:
        assert kinds <= REASONS
