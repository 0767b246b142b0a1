"""Every backend node case of ONNX as a gradient test; ``python tests/backend.py`` prints what is skipped, and why."""

from __future__ import annotations

import backend
import pytest

CASES: dict[str, list[str]] = {}
for name, case in backend.cases().items():
    CASES.setdefault(backend.operator(case), []).append(name)

MOST = 32


@pytest.mark.filterwarnings("ignore")  # of ONNX's reference, at NaN and infinity
@pytest.mark.parametrize("operator", sorted(CASES))
def test_gradients_are_central_differences(operator):
    # The report tries all; here those with many (Attention has over 200) are sampled.
    names = CASES[operator][:: 1 + len(CASES[operator]) // MOST]
    found = {name: backend.outcome(backend.cases()[name]) for name in names}
    assert backend.faults(operator, found) == []
