"""The boundary: what crosses between stages that are compiled apart, each where its own file is.

One TOML file, the same for all stages, made by ``ortc boundary`` from the stages' models or written by hand::

    version = 1
    stages = 2

    [[values]]
    name = "h"             # what the value is called between stages
    dtype = "float32"
    shape = ["batch", 64]  # a string is a symbolic dimension; without it nothing is checked
    from = 0               # the stage that makes it
    to = [1]               # the stages that read it

    [[weights]]
    name = "wte.weight"    # a weight that several stages hold
    stages = [0, 1]
    tied = true            # it is one; false: each keeps its own, from the second on as stage<k>/<name>
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ortc.errors import RecipeError
from ortc.recipe import describe_location, read_toml

BOUNDARY_VERSION: Final = 1


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Crossing(_Table):
    """A value that a stage makes and later ones read."""

    name: str
    dtype: str = Field(description="numpy's name of the element type, e.g. float32 (bfloat16 as such)")
    shape: list[int | str] | None = Field(
        None, description="a string is a symbolic dimension, ? one of which nothing is known; without: the rank is not known"
    )
    source: int = Field(alias="from", ge=0, description="the stage that makes it")
    readers: list[int] = Field(alias="to", min_length=1, description="the stages that read it")
    gradient: bool = Field(True, description="of a float: whether the readers give a gradient back")
    output: str | None = Field(None, description="its name in the file that makes it, if that is another")
    inputs: dict[int, str] = Field(default_factory=dict, description="stage -> its name in that file, if that is another")

    @property
    def differentiable(self) -> bool:
        """Whether a gradient comes back."""
        return self.gradient and "float" in self.dtype


class Shared(_Table):
    """A weight whose name the files of several stages have."""

    name: str
    stages: list[int] = Field(min_length=2)
    tied: bool = Field(True, description="one weight, its gradients summed; false: each stage has its own")
    sha256: str | None = Field(None, description="of a tied weight's elements: each stage checks its own against it")
    transposed: dict[int, str] = Field(
        default_factory=dict, description="stage -> the weight's name in that file, where it is written transposed"
    )


class Boundary(_Table):
    """Everything that a stage must know of the others."""

    version: Literal[1] = BOUNDARY_VERSION
    stages: int = Field(ge=2)
    opset: int | None = Field(None, description="to which the stages' models are brought for the export; without: their own")
    values: list[Crossing] = Field(min_length=1)
    weights: list[Shared] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_possible(self) -> Boundary:
        for what, names in (("values", [v.name for v in self.values]), ("weights", [w.name for w in self.weights])):
            twice = [a for a, b in itertools.pairwise(sorted(names)) if a == b]
            if twice:
                raise ValueError(f"{what}: {twice[0]!r} is listed twice")
        for value in self.values:
            backwards = [s for s in value.readers if not value.source < s < self.stages]
            if backwards:
                raise ValueError(
                    f"values: {value.name!r} goes from stage {value.source} to {backwards[0]}: it may go to later ones, up to "
                    f"{self.stages - 1}"
                )
            if set(value.inputs) - set(value.readers):
                raise ValueError(f"values: {value.name!r} has a name for a stage that does not read it")
        for weight in self.weights:
            if not all(0 <= s < self.stages for s in weight.stages) or weight.stages != sorted(set(weight.stages)):
                raise ValueError(f"weights: the stages of {weight.name!r} must ascend from 0 to {self.stages - 1} at most")
        for stage in range(self.stages - 1):
            if not any(v.source == stage for v in self.values):
                raise ValueError(f"values: nothing goes from stage {stage} to a later one")
        return self

    def identity(self) -> str:
        """A hash: stages that fit together were compiled for the same boundary."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """One stage of those that a boundary divides a model into."""

    boundary: Boundary
    stage: int

    @property
    def is_last(self) -> bool:
        """Whether the loss is here."""
        return self.stage == self.boundary.stages - 1

    @property
    def arriving(self) -> list[Crossing]:
        """What it reads of other stages."""
        return [v for v in self.boundary.values if self.stage in v.readers]

    @property
    def leaving(self) -> list[Crossing]:
        """What it makes for other stages."""
        return [v for v in self.boundary.values if v.source == self.stage]

    @property
    def tied(self) -> list[Shared]:
        """The weights that it holds with others."""
        return [w for w in self.boundary.weights if w.tied and self.stage in w.stages]

    def renamed(self) -> Iterator[tuple[str, str]]:
        """The weights that it holds apart from others of that name: (name in the file, name in the whole)."""
        for weight in self.boundary.weights:
            if not weight.tied and self.stage in weight.stages[1:]:
                yield weight.name, f"{stage_prefix(self.stage)}{weight.name}"


def stage_prefix(stage: int) -> str:
    """What the names of a stage's nodes begin with."""
    return f"stage{stage}/"


def load_boundary(path: str | Path) -> Boundary:
    """Read a boundary file.

    Raises:
        RecipeError: if the file is missing, is not TOML, or a field is wrong.
    """
    return parse_boundary(read_toml(path, "boundary"), str(path))


def parse_boundary(data: dict[str, Any], source: str = "boundary") -> Boundary:
    """Validate plain data as a boundary.

    Raises:
        RecipeError: naming each field that is wrong.
    """
    try:
        return Boundary.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {describe_location(e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise RecipeError("\n".join(line.replace(": top level: ", ": ") for line in lines)) from None


def dump_boundary(boundary: Boundary) -> str:
    """The boundary as TOML text that :func:`load_boundary` reads back equal."""
    import tomli_w

    data = boundary.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    for row in [*data["values"], *data.get("weights", [])]:
        for field in {"inputs", "transposed"} & row.keys():  # TOML's keys are text
            row[field] = {str(stage): name for stage, name in row[field].items()}
    return tomli_w.dumps({"version": boundary.version, **data})


@dataclass(frozen=True)
class Connection:
    """A value that has one name where it is made and another where it is read; a stage of None is any."""

    output: str
    input: str
    source: int | None = None
    reader: int | None = None


def parse_connections(texts: Sequence[str]) -> list[Connection]:
    """``[STAGE:]OUT=[STAGE:]IN``, several times.

    Raises:
        RecipeError: naming the one that is neither.
    """
    found = []
    for text in texts:
        made, equals, read = text.partition("=")
        ends = [_qualified(end) for end in (made, read)]
        if not equals or not all(name for _, name in ends):
            raise RecipeError(f"--connect: {text!r} is not [STAGE:]OUTPUT=[STAGE:]INPUT")
        (source, output), (reader, input) = ends
        found.append(Connection(output, input, source, reader))
    return found


def _qualified(text: str) -> tuple[int | None, str]:
    stage, colon, name = text.strip().partition(":")
    return (int(stage), name) if colon and stage.isdecimal() else (None, text.strip())
