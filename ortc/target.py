"""Targets: the runtime that the artifacts are for, as declared in ``passes/targets/*.toml``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata, resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ortc.errors import RecipeError


class Target(BaseModel):
    """What a runtime can load and run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    summary: str
    opset: int = Field(description="the highest opset of the ONNX standard that it loads")
    ir_version: int = Field(description="the highest IR version that it loads")
    in_place: bool = Field(
        False, description="whether the loop that runs the graphs gives gradients memory that is zero before a step"
    )
    kernels: dict[str, list[str]] = Field(
        default_factory=dict, description="operators with a lowering that stay as they are, by domain::name, and their types"
    )
    ranks: dict[str, int] = Field(
        default_factory=dict,
        description="of some of these kernels, the highest rank of the first input that they are quicker for",
    )

    fusions: dict[str, bool] = Field(
        default_factory=dict, description="fusion -> whether it makes training quicker; bench/fusions.py measures them"
    )

    narrow: dict[str, list[str]] = Field(
        default_factory=dict,
        description="element types that few operators have kernels for, and those; all others compute in float32 between casts",
    )

    lacks: dict[str, list[str]] = Field(
        default_factory=dict, description="of other element types, the operators that it has no right kernel for"
    )

    def misses(self, op_type: str, dtype: str) -> bool:
        """Whether the target has no kernel for this operator and element type."""
        return op_type in self.lacks.get(dtype, ()) or (dtype in self.narrow and op_type not in self.narrow[dtype])

    def keeps(self, domain: str, op_type: str, dtype: str, rank: int = 0) -> bool:
        """Whether the target's own kernel is taken for this operator, element type and rank of its first input."""
        name = f"{domain}::{op_type}" if domain else op_type
        return dtype in self.kernels.get(name, ()) and rank <= self.ranks.get(name, rank)


def target_names() -> list[str]:
    """The declared targets."""
    folder = resources.files("ortc.passes.targets")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


# As their distributions are called. All of them are imported as onnxruntime.
_TRAINING_BUILDS = ("onnxruntime-training-cpu", "onnxruntime-training")
_STOCK_BUILDS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")


@cache
def default_target() -> str:
    """The target of the installed build of ONNX Runtime; the one with training kernels if there is none."""
    return "onnxruntime" if _installed(_STOCK_BUILDS) and not _installed(_TRAINING_BUILDS) else "ort-training"


def _installed(names: Iterable[str]) -> bool:
    return any(list(metadata.distributions(name=name)) for name in names)


@cache
def load_target(name: str) -> Target:
    """Read a target's declaration.

    Raises:
        RecipeError: if there is none of that name.
    """
    if name not in target_names():
        raise RecipeError(f"target: there is no target {name!r}; there are {', '.join(target_names())}")
    return Target.model_validate(packaged_toml("ortc.passes.targets", f"{name}.toml"))


def packaged_toml(package: str, file: str) -> dict[str, Any]:
    """A TOML file that is shipped in a package."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]

    return tomllib.loads((resources.files(package) / file).read_text(encoding="utf-8"))
