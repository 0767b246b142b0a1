"""The plan: ``plan.json``, the one file that describes everything in an output folder.

The compiler writes it, the runtime reads it, and nothing else passes between the two. Every graph's inputs and
outputs are listed with a role, so the runtime never guesses from names.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ortc.errors import PlanError
from ortc.recipe import Recipe, describe_location

PLAN_VERSION: Final = 1

# The state's slot that holds a parameter's exponential moving average.
AVERAGE: Final = "ema"
# In ONNX Runtime's on-device layout a frozen parameter of this name counts the runs of a graph with random numbers.
STEP_COUNTER: Final = "ortc.step"

Role = Literal[
    "data",  # fed by the user, from the batch
    "label",  # fed by the user, read by the loss
    "parameter",  # a weight, trained or frozen; `of` is its name in the model
    "buffer",  # a value that training updates without a gradient (running statistics); `of` is its name
    "state",  # an optimizer's state; `of` is the parameter, `slot` says which
    "gradient",  # of a parameter or of a data input; `of` is its name in the model
    "boundary",  # a value from one stage to others (`stages`); `of` is its name in the whole model
    "boundary_gradient",  # the gradient of such a value, back from the stage that read it
    "stash",  # what a forward phase keeps for the backward of the same micro-batch
    "scalar",  # fed by the runtime; `of` is one of seed, step, micro_batch, lr, gradient_scale, loss_weight.<term>
    "loss",  # the total loss, a scalar
    "output",  # an output of the user's model; `of` is its name there
]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Port(_Table):
    """One input or output of a graph."""

    name: str = Field(description="the tensor's name in the graph")
    role: Role
    dtype: str = Field(description="numpy's name of the element type, e.g. float32 (bfloat16 as such)")
    shape: list[int | str | None] | None = Field(
        description="a string is a symbolic dimension, null an unknown one; null instead of the list: the rank is unknown"
    )
    of: str | None = Field(None, description="what the port belongs to, see Role")
    slot: str | None = Field(None, description="which state of the parameter, e.g. exp_avg")
    initial: Literal["parameter"] | None = Field(
        None, description="of a state that is read: what it is before there is one, its parameter's value; null: zero"
    )
    stages: list[int] | None = Field(None, description="of a boundary: the stages at the other end")


def _inside(value: str) -> str:
    parts = value.replace("\\", "/").split("/")
    if ".." in parts or value.startswith(("/", "\\")) or ":" in parts[0] or "\0" in value:
        raise ValueError("the path must stay inside the folder")
    return value


class File(_Table):
    """A file of the folder."""

    file: Annotated[str, AfterValidator(_inside)] = Field(description="path relative to the plan, with forward slashes")
    sha256: str


class PhaseMemory(_Table):
    """What a session has alive, predicted for one micro-batch of the sizes that the compiler was told."""

    peak_bytes: int
    node: str = Field(description="which runs at the peak")
    largest: dict[str, int] = Field(description="bytes of the largest values there, the largest first")
    live: list[int] = Field(description="bytes over the nodes in their order; the most of each of so many equal stretches")


class GraphFile(File):
    """One ONNX file: a phase, or the template of the export."""

    inputs: list[Port]
    outputs: list[Port]
    memory: PhaseMemory | None = Field(None, description="of a phase: what its session needs beside what is bound to it")


class ParameterInfo(_Table):
    """A parameter or buffer of the model, under its own name there."""

    name: str
    role: Literal["parameter", "buffer"]
    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**62)]]
    trainable: bool
    reason: str = Field(description="why it trains, or why not")
    group: int | None = Field(None, description="index into recipe.groups, if one matched")
    copies: list[str] = Field(default_factory=list, description="names in the model of transposed copies, which follow it")


class AdapterInfo(_Table):
    """A low-rank adapter: its weight W counts as W + scale · L·R, L and R as matrices, in any shape."""

    weight: str = Field(description="the parameter beside which it is")
    left: str = Field(description="the parameter L; its second dimension is the rank")
    right: str = Field(description="the parameter R; its first dimension is the rank")
    scale: float


class StageCosts(_Table):
    """What the compiler predicts of a stage, for one micro-batch of the sizes that it was told."""

    nodes: int
    flops: float
    forward_seconds: float
    backward_input_seconds: float = Field(description="of the gradients that earlier stages wait for")
    backward_weight_seconds: float = Field(description="of the weights' gradients")
    sends: dict[int, int] = Field(description="bytes to each later stage")
    send_seconds: dict[int, float] = Field(description="how long those take")
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    kept_bytes: int = Field(0, description="kept for the backward, of one micro-batch")
    kept_for_weights_bytes: int = Field(0, description="and from the gradients of the inputs to those of the weights")
    stash_bytes: int = Field(description="what is kept by all micro-batches, at the most")
    in_flight: int = Field(description="how many those are under the recipe's schedule")
    boundary_bytes: int = Field(description="what arrives and leaves beside it, when that is the most")

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds

    @property
    def memory_bytes(self) -> int:
        """All that the stage's own tensors take."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes + self.stash_bytes + self.boundary_bytes


class Recomputed(_Table):
    """What a stage's backward computes again, and what the compiler predicts of it, for one micro-batch."""

    policy: str
    nodes: list[str] = Field(description="the nodes of the forward that run again, by the names of their originals")
    seconds: float = Field(description="how long they take")
    step_seconds: float = Field(description="forward and backward without them")
    memory_before: int = Field(description="bytes of the stage's tensors at the peak, without recompute")
    memory_after: int = Field(description="and with it")


class Stashed(_Table):
    """What a stage keeps for its backward in a smaller form (`stash`), of one micro-batch of the sizes that it was told."""

    values: int = Field(description="how many values have another form")
    bytes_before: int = Field(description="of all that the backward reads of the forward, without")
    bytes_after: int = Field(description="and with it")


class Stage(_Table):
    """What one pipeline rank holds."""

    index: int
    parameters: list[str] = Field(description="names of the parameters and buffers that this stage holds")
    phases: dict[str, GraphFile] = Field(
        description="train, eval, optimizer (none with optimizer.fuse: train updates the parameters); of several stages "
        "forward, backward (and its two parts backward_input, backward_weight), eval, optimizer (with zero, optimizer.0, "
        "optimizer.1, … of each replica that updates something)"
    )
    costs: StageCosts | None = Field(None, description="predicted, of several stages")
    recomputed: Recomputed | None = Field(None, description="where the recipe asks for it")
    stashed: Stashed | None = Field(None, description="where the recipe asks for it, and there is something")

    @property
    def fused(self) -> bool:
        """Whether ``train`` updates the parameters as well (``optimizer.fuse``)."""
        return "train" in self.phases and any(p.role == "parameter" for p in self.phases["train"].outputs)

    def optimizer(self, replica: int) -> str:
        """The name of the phase that a replica updates with; it need not be there."""
        if self.fused:
            return "train"
        return "optimizer" if "optimizer" in self.phases else f"optimizer.{replica}"


class LossInfo(_Table):
    """One term of the loss as compiled, with what the runtime needs to check a batch."""

    name: str
    output: str
    labels: str | None = Field(description="the target's graph input; null for `none`")
    weight: float
    axis: int | None = Field(None, description="which axis of the output is the classes'")
    classes: int | None = Field(None, description="number of classes; integer targets must lie in [0, classes)")
    ignore_index: int | None = Field(None, description="a target value that is skipped")
    class_weights: list[float] | None = Field(None, description="weights of the classes in the mean")
    reduction: Literal["mean", "sum", "samples"] = Field(
        "mean", description="over its targets; samples: the mean of parts of a batch counts their samples"
    )
    chosen: str = Field(description="why this loss: the recipe, or what was recognised")

    @field_validator("class_weights")
    @classmethod
    def _are_one_for_each_class(cls, weights: list[float] | None, info: ValidationInfo) -> list[float] | None:
        if weights is not None and info.data.get("classes") not in (None, len(weights)):
            raise ValueError("there must be one for each of the classes")
        return weights


class RewriteInfo(_Table):
    """How often a rewrite replaced what it looks for."""

    by: str = Field(description="the pass, or its part")
    rule: str = Field(description="the rewrite; of gelu the form that the model had")
    count: int


class PassRun(_Table):
    """What a pass of the compilation did."""

    name: str
    before: int = Field(description="nodes of the training graph before it, of all stages")
    after: int = Field(description="and after it")


class Session(_Table):
    """How ONNX Runtime opens a session, so that it computes what was compiled, in the order and the memory of that."""

    execution_order: Literal["default", "priority_based"] = Field(
        "default", description="priority_based: nodes run in the file's order (ExecutionOrder.PRIORITY_BASED)"
    )
    reuse_memory: bool = Field(True, description="whether buffers are reused and memory patterns made")
    deterministic: bool = Field(False, description="use_deterministic_compute")
    config_entries: dict[Literal["session.disable_quant_qdq"], Literal["0", "1"]] = Field(
        default_factory=dict, description="configuration entries of the session options"
    )
    disabled_optimizers: list[Annotated[str, Field(pattern=r"^\w+$")]] = Field(
        default_factory=list,
        description="of ONNX Runtime's graph optimizers; joined by semicolons also a configuration entry, "
        "optimization.disable_specified_optimizers",
    )


class Sessions(_Table):
    """How the sessions of an output folder are opened."""

    training: Session = Field(
        default_factory=Session, description="train, forward, backward and its parts: to the last bit as they are written"
    )
    others: Session = Field(default_factory=Session, description="eval, optimizer, criterion, the export")


class Plan(_Table):
    """Everything in the output folder."""

    version: Literal[1] = PLAN_VERSION
    ortc_version: str
    model: str = Field(description="file name of the user's model")
    fingerprint: str = Field(description="sha256 over the parameters' names, shapes and dtypes; checkpoints carry it")
    recipe: Recipe
    target: str
    opset: int
    parameters: list[ParameterInfo]
    losses: list[LossInfo]
    stages: list[Stage]
    sessions: Sessions
    export: GraphFile = Field(description="the inference model without its parameters; `ortc export` adds them")
    adapters: list[AdapterInfo] = Field(default_factory=list)
    adapter_export: GraphFile | None = Field(None, description="with adapters: the inference model that takes them as inputs")
    criterion: GraphFile = Field(description="the loss alone: from the model's outputs and the labels")
    artifacts: list[File] = Field(default_factory=list, description="files in other layouts, which the runtime does not read")
    checkpoint: Annotated[str, AfterValidator(_inside)] = Field(
        "checkpoint", description="folder of the checkpoints, relative to the plan; step-0 is the initial one"
    )
    rewrites: list[RewriteInfo] = Field(default_factory=list, description="what the fusions did")
    warnings: list[str] = Field(default_factory=list)
    history: list[PassRun] = Field(default_factory=list, description="the passes, in order; of stages joined later none")

    @field_validator("stages")
    @classmethod
    def _are_counted(cls, stages: list[Stage]) -> list[Stage]:
        if not stages or [stage.index for stage in stages] != list(range(len(stages))):
            raise ValueError("there must be stages, with the indices 0, 1, … in order")
        return stages

    def identity(self) -> str:
        """A hash of the whole plan: ranks that work together have the same."""
        return hashlib.sha256(dump_plan(self).encode()).hexdigest()

    @property
    def fused(self) -> bool:
        """Whether the training graph updates the parameters, so that there are no gradients to look at."""
        return any(stage.fused for stage in self.stages)

    def trainable(self) -> list[ParameterInfo]:
        """The parameters that train, in the model's order."""
        return [p for p in self.parameters if p.trainable]


def fingerprint(parameters: list[ParameterInfo]) -> str:
    """Identify a model by its parameters: two plans with the same fingerprint can share checkpoints."""
    rows = sorted([p.name, p.dtype, p.shape] for p in parameters)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def load_plan(folder: str | Path) -> Plan:
    """Read and validate ``plan.json`` of an output folder.

    Raises:
        PlanError: if the folder is not one of ortc's, or a field is wrong.
    """
    path = Path(folder) / "plan.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if (path.parent / "part.json").exists():
            raise PlanError(f"{folder} is one rank's part of a model: `ortc join` puts those of all ranks together") from None
        raise PlanError(f"{folder} has no plan.json: is it an output folder of `ortc compile`?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not valid JSON ({error}); compile the model again") from None
    if isinstance(data, dict) and data.get("version") != PLAN_VERSION:
        raise PlanError(
            f"{path} has plan version {data.get('version')!r}, this ortc reads {PLAN_VERSION}; compile the model again"
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        again = {"missing": "; compile the model again"}
        lines = [f"{path}: {describe_location(e['loc'])}: {e['msg']}{again.get(e['type'], '')}" for e in error.errors()]
        raise PlanError("\n".join(lines)) from None


def dump_plan(plan: Plan) -> str:
    """The plan as JSON text: sorted nowhere, indented, stable."""
    return plan.model_dump_json(indent=1) + "\n"


def plan_schema() -> str:
    """The JSON schema of ``plan.json``, as published in ``docs/plan.schema.json``."""
    return json.dumps(Plan.model_json_schema(), indent=1, ensure_ascii=False) + "\n"


# ---- checkpoints ---------------------------------------------------------------------------------------------------------


class _StrictTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_IndexFile = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.safetensors$")]  # of the checkpoint's own folder
_Count = Annotated[int, Field(ge=0, lt=2**62)]


class _IndexEntry(_StrictTable):
    dtype: str
    shape: list[_Count]
    file: _IndexFile
    offset: list[_Count]


class _Position(_StrictTable):
    epoch: _Count
    batch: _Count


class _Scaling(_StrictTable):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good: _Count
    skipped: _Count


class _Best(_StrictTable):
    metric: str
    better: Literal["min", "max"]
    value: float | None
    step: _Count
    stale: _Count


class _Settings(BaseModel):
    """Those that are read for what they say; the others are compared with those of the next run."""

    model_config = ConfigDict(extra="allow", strict=True)
    best: _Best | None = None


class _Index(_StrictTable):
    """``index.json`` as it must be, whoever wrote it: a checksum tells of damage, not of intent."""

    version: Literal[1]
    fingerprint: str
    step: _Count
    serial: _Count
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None
    position: _Position
    settings: _Settings
    scaling: _Scaling | None = None
    parameters: dict[str, _IndexEntry]
    optimizer: dict[str, dict[str, _IndexEntry]]
    files: dict[_IndexFile, str]


def index_problem(index: object) -> str | None:
    """What is wrong with a checkpoint's ``index.json``, without its checksum: the first field; None if all is well."""
    try:
        _Index.model_validate(index)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{describe_location(first['loc'])}: {first['msg']}"
    return None
