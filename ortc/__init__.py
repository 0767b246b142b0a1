"""ortc: a declarative graph-rewriting compiler for training graphs.

``ortc.compile(model, folder, recipe)`` makes an output folder; ``ortc.Trainer(folder)`` trains with it.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "compile": "ortc.artifacts",
    "Recipe": "ortc.recipe",
    "load_recipe": "ortc.recipe",
    "Trainer": "ortc.runtime.trainer",
    "import_weights": "ortc.runtime.exchange",
    "export_weights": "ortc.runtime.exchange",
    "OrtcError": "ortc.errors",
}

__all__ = ["OrtcError", "Recipe", "Trainer", "compile", "export_weights", "import_weights", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ortc' has no attribute {name!r}")
