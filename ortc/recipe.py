"""The recipe: what the user asks for.

One pydantic model is the source of the TOML file, of the command line's flags and of the documentation.
Options of a loss or an optimizer are not listed here: they are the keyword parameters of its declaration in
``passes/``, and are validated against it when the recipe is compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ortc.errors import RecipeError
from ortc.target import default_target

RECIPE_VERSION: Final = 1


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class LossTerm(_Table):
    """One term of the loss; the total is the weighted sum of all terms."""

    name: str = Field(description="a declared loss (cross_entropy, mse, …), `none`, or a file: MODEL.onnx or PY:FUNCTION")
    output: str | None = Field(None, description="the model output that the loss reads; default: the first that fits")
    labels: str | None = Field(None, description="name of the target input; default: `labels`")
    weight: float = Field(1.0, description="factor of this term in the total")
    options: dict[str, Any] = Field(default_factory=dict, description="the loss's own options, e.g. ignore_index")


class Group(_Table):
    """Parameters with their own learning rate or weight decay. The first group that matches wins."""

    match: list[str] = Field(description="globs over parameter names")
    lr_scale: float = Field(1.0, ge=0, description="factor on the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="replaces the optimizer's weight decay")


class Optimizer(_Table):
    """The optimizer and its options."""

    name: str = Field("adamw", description="a declared optimizer: adamw, adam, sgd, lamb, adafactor, lion, rmsprop, adagrad")
    options: dict[str, Any] = Field(default_factory=dict, description="the optimizer's own options, e.g. beta1")
    moments: Literal["fp32", "bf16"] = Field(
        "fp32", description="the type in which first moments (exp_avg, momentum) are stored; second ones are in float32"
    )
    max_norm: float | None = Field(None, gt=0, description="clip the gradients so that their norm together is at most this")
    max_value: float | None = Field(None, gt=0, description="clip each element of the gradients to ± this, after max_norm")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="keep an average of the weights, decaying so much a step, which is evaluated and exported",
    )
    fuse: bool = Field(
        False,
        description="update each parameter within the training graph, as soon as its gradient exists, so that the gradients "
        "never all live at once; of one stage, replica and micro-batch, without max_norm and a scale of the loss. A step "
        "cannot be taken back then: one whose loss is not finite ends the run",
    )
    decay_all: bool = Field(False, description="also decay biases and norms (parameters with fewer than two dimensions)")


class LearningRate(_Table):
    """The learning rate over the steps of a run."""

    base: float = Field(1e-3, ge=0, description="learning rate after the warm-up")
    schedule: Literal["constant", "linear", "cosine", "polynomial"] = Field(
        "constant", description="how it goes from there to `final` at the last step of the run"
    )
    warmup: int = Field(0, ge=0, description="steps of linear warm-up from 0")
    final: float = Field(0.0, ge=0, description="learning rate at the last step (not for constant)")
    power: float = Field(1.0, gt=0, description="exponent of the polynomial schedule")


class Parameters(_Table):
    """Which weights train."""

    train: list[str] = Field(default_factory=list, description="globs; empty: every weight that can train")
    freeze: list[str] = Field(default_factory=list, description="globs; wins over `train`")


class Lora(_Table):
    """Low-rank adapters (arXiv 2106.09685): they train, the weights beside them do not unless `parameters.train` names them."""

    rank: int = Field(8, ge=1, description="inner size of the factors")
    alpha: float = Field(16.0, gt=0, description="the factors' product counts alpha / rank times")
    targets: list[str] = Field(
        default_factory=lambda: ["*"], min_length=1, description="globs over weights, or over the nodes that read them"
    )


class LossScale(_Table):
    """What the loss is multiplied with, so that small gradients are no zeros in float16 (arXiv 1710.03740)."""

    mode: Literal["auto", "none", "static", "dynamic"] = Field("auto", description="auto: dynamic for fp16, else none")
    initial: float = Field(65536.0, gt=0, description="the first, or the static one")
    growth: float = Field(2.0, gt=1, description="factor after a number of good steps")
    backoff: float = Field(0.5, gt=0, lt=1, description="factor after an overflow")
    interval: int = Field(2000, ge=1, description="good steps before it grows")


class Precision(_Table):
    """Mixed precision: which type products have, and exceptions from the table of operators."""

    type: Literal["fp32", "fp16", "bf16"] = Field("fp32", description="the type of products; weights stay in float32")
    operators: dict[str, str] = Field(default_factory=dict, description="operator -> low, full, follow or widest")
    nodes: dict[str, str] = Field(default_factory=dict, description="node-name glob -> the same; the first that matches wins")
    loss_scale: LossScale = Field(default_factory=LossScale, description="for float16")

    @property
    def scaling(self) -> str:
        """``none``, ``static`` or ``dynamic``."""
        mode = self.loss_scale.mode
        return mode if mode != "auto" else "dynamic" if self.type == "fp16" else "none"


class Recompute(_Table):
    """What the backward computes again instead of keeping it from the forward; gradients stay the same, bit for bit."""

    nodes: str = Field(
        "none",
        description="none, auto (what is cheap; with a budget the cheapest that fits), full (the least memory), or a list, "
        "joined by commas, of layers (whole layers that repeat), gelu, attention (scores, softmax, its dropout) and globs over "
        "node names",
    )
    budget: int | None = Field(
        None,
        ge=1,
        description="bytes that the tensors of a rank may take: parameters, gradients, optimizer states, activations at their "
        "peak; with `none` as with `auto`",
    )


class Stash(_Table):
    """How small the backward's values of the forward are kept (Gist, Jain et al., ISCA 2018)."""

    packed: bool = Field(
        False, description="masks as bits, a max-pool's indices as bytes; gradients stay the same, bit for bit"
    )
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = Field(
        "fp32",
        description="the type in which float32 activations are kept; others than fp32 round gradients (`ortc verify` says how "
        "much); int8 has a scale for each row",
    )


class Pipeline(_Table):
    """How a step is divided: into stages over ranks, and into micro-batches."""

    stages: int = Field(1, ge=1, description="parts of the model, one after the other")
    ranks: int | None = Field(
        None, ge=1, description="ranks that hold them; fewer than stages only for `interleaved` or your own schedule"
    )
    micro_batches: int | None = Field(
        None, ge=1, description="parts of a batch; default: 1 for one stage, else twice the stages"
    )
    schedule: str = Field(
        "1f1b", description="gpipe, 1f1b, interleaved, zb-h1, or the text of your own, a line of actions per rank"
    )
    replicas: int = Field(1, ge=1, description="data-parallel copies of all stages")
    zero: Literal[0, 1] = Field(
        0, description="1: the replicas share the optimizer's state out (ZeRO-1); each updates its own parameters for all"
    )
    cuts: list[str] = Field(
        default_factory=list, description="tensors that end stage 0, 1, …; several for one joined by commas"
    )
    assign: dict[str, int] = Field(default_factory=dict, description="node-name glob -> stage; the first that matches wins")
    memory_limit: int | None = Field(None, ge=1, description="bytes that a rank may take")
    sizes: dict[str, int] = Field(default_factory=dict, description="sizes of symbolic dimensions, for the predicted costs")

    @property
    def parts(self) -> int:
        """Micro-batches of one step, the default filled in."""
        return self.micro_batches or (1 if self.stages == 1 else 2 * self.stages)

    @property
    def divided(self) -> bool:
        """Whether there is more than one stage, micro-batch or replica."""
        return self.stages > 1 or self.parts > 1 or self.replicas > 1


class Passes(_Table):
    """Passes that are optional, by name (`ortc rewrite --list`)."""

    off: list[str] = Field(default_factory=list, description="passes that do not run")
    on: list[str] = Field(default_factory=list, description="fusions that run though the target's table has them off")


class Recipe(_Table):
    """Everything a compilation is told, with its defaults."""

    version: Literal[1] = Field(RECIPE_VERSION, description="of these fields")
    target: str = Field(
        default_factory=default_target,
        description="the runtime that the artifacts are for; default: `onnxruntime` where a stock build is installed, else "
        "`ort-training`",
    )
    loss: list[LossTerm] = Field(default_factory=list, description="empty: chosen from the model's outputs")
    parameters: Parameters = Field(default_factory=Parameters, description="which weights train")
    lora: Lora | None = Field(None, description="train adapters in place of the weights")
    wrt: list[str] = Field(default_factory=list, description="data inputs whose gradients are wanted too")
    batch_norm: Literal["batch", "frozen"] = Field(
        "batch", description="BatchNormalization in training: batch statistics, or the stored ones"
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="the optimizer and its options")
    groups: list[Group] = Field(default_factory=list, description="parameters that are treated otherwise")
    learning_rate: LearningRate = Field(default_factory=LearningRate, description="over the steps of a run")
    gelu: Literal["keep", "exact", "tanh", "quick"] = Field(
        "keep", description="the form of GELU that is trained, evaluated and exported: x·Φ(x), by tanh, x·sigmoid(1.702x)"
    )
    passes: Passes = Field(default_factory=Passes, description="which optional passes run")
    precision: Precision = Field(default_factory=Precision, description="mixed precision")
    recompute: Recompute = Field(default_factory=Recompute, description="less memory for more time")
    stash: Stash = Field(default_factory=Stash, description="how activations are kept for the backward")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="stages, micro-batches, replicas")
    artifacts: list[Literal["ort"]] = Field(
        default_factory=list,
        description="other layouts to write as well: ort, ONNX Runtime's own for its on-device training API",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of dropout, and of the data order in a run")


def unfused(recipe: Recipe) -> Recipe:
    """The recipe without ``optimizer.fuse``, for who looks at the gradients."""
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"fuse": False})})


def parse_recipe(data: dict[str, Any], source: str = "recipe") -> Recipe:
    """Validate plain data as a recipe.

    Raises:
        RecipeError: naming each field that is wrong.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {describe_location(e['loc'])}: {e['msg']}" for e in error.errors()]
        raise RecipeError("\n".join(lines)) from None


def describe_location(location: tuple[int | str, ...]) -> str:
    """``("loss", 0, "weight")`` as ``loss[0].weight``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "top level"


def load_recipe(path: str | Path) -> Recipe:
    """Read a TOML recipe file.

    Raises:
        RecipeError: if the file is missing, is not TOML, or a field is wrong.
    """
    recipe = parse_recipe(read_toml(path, "recipe"), str(path))
    for index, term in enumerate(recipe.loss):
        if ".py:" in term.name:
            raise RecipeError(
                f"{path}: loss[{index}].name: a recipe file may not name Python code; give it as --loss {term.name}"
            )
    return recipe


def parse_recipe_text(text: str, source: str = "recipe") -> Recipe:
    """Validate TOML text as a recipe.

    Raises:
        RecipeError: if it is not TOML, or a field is wrong.
    """
    return parse_recipe(parse_toml(text, source), source)


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ``what`` it is, for the message.

    Raises:
        RecipeError: if it cannot be read, or is not TOML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the {what} {path}: {error}") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of TOML text.

    Raises:
        RecipeError: if it is not TOML.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{source} is not valid TOML: {error}") from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML text that :func:`load_recipe` reads back equal."""
    import tomli_w

    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def recipe_schema() -> str:
    """The JSON schema of a recipe, as published in ``docs/recipe.schema.json``: editors check and complete TOML with it."""
    return json.dumps(Recipe.model_json_schema(), indent=1, ensure_ascii=False) + "\n"
