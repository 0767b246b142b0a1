"""What is told of a tensor that is too large to be shown: its norm and how its elements are distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_BINS = 30


def histogram(array: np.ndarray) -> dict[str, Any]:
    """The distribution of the finite elements, as JSON data.

    Returns:
        ``norm`` (Euclidean, of all elements), ``min``, ``max``, ``sum``, ``sum_squares``, and ``counts`` between ``edges``
        (equally wide, one more than counts); without finite elements the counts are empty.
    """
    values = array.astype(np.float64).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.sqrt(np.dot(values, values)))
    values = values[np.isfinite(values)]
    if values.size == 0:
        return {"norm": norm, "min": 0.0, "max": 0.0, "sum": 0.0, "sum_squares": 0.0, "counts": [], "edges": [0.0]}
    low, high = float(values.min()), float(values.max())
    span = (low, high) if np.isfinite(high - low) and high - low > abs(low) * 1e-12 else (low - 0.5, low + 0.5)
    counts, edges = np.histogram(values, _BINS, span)
    return {
        "norm": norm,
        "min": low,
        "max": high,
        "sum": float(values.sum()),
        "sum_squares": float(np.dot(values, values)),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }


def magnitudes(array: np.ndarray) -> dict[str, Any]:
    """How large the elements are, as JSON data: how many are ``nan``, ``inf`` and ``zero``, and ``decades``, the others by the
    power of ten below their size."""
    values = np.abs(array.astype(np.float64).reshape(-1))
    usual = values[np.isfinite(values) & (values > 0)]
    powers, counts = np.unique(np.floor(np.log10(usual)).astype(int), return_counts=True)
    return {
        "size": values.size,
        "nan": int(np.isnan(values).sum()),
        "inf": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
        "decades": {str(p): int(c) for p, c in zip(powers, counts, strict=True)},
    }


_BARS = " ▁▂▃▄▅▆▇█"


def show_magnitudes(tensors: Mapping[str, Mapping[str, Any]], most: int = 20) -> list[str]:
    """Lines for a person: those that are not finite first, each with its distribution over the decades that all cover."""
    decades = sorted({int(d) for told in tensors.values() for d in told["decades"]})
    span = range(decades[0], decades[-1] + 1) if decades else range(0)
    ordered = sorted(tensors, key=lambda name: not (tensors[name]["nan"] or tensors[name]["inf"]))
    width = max((len(name) for name in ordered[:most]), default=0)
    lines = [f"sizes of the gradients' elements, from 1e{span[0]} to 1e{span[-1] + 1}:"] if decades else []
    for name in ordered[:most]:
        told = tensors[name]
        counts = [told["decades"].get(str(d), 0) for d in span]
        highest = max(counts, default=0) or 1
        bars = "".join(_BARS[-(-8 * count // highest)] for count in counts)
        kinds = ", ".join(f"{told[k]} {k}" for k in ("nan", "inf", "zero") if told[k])
        lines.append(f"  {name:<{width}} [{bars}] of {told['size']}{f': {kinds}' if kinds else ''}")
    if len(ordered) > most:
        lines.append(f"  … and {len(ordered) - most} more")
    return lines
