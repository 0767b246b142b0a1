"""Writes the files of docs/ that are made of the code: the JSON schemas and recipe.md. ``python docs/make.py``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ortc import passes
from ortc.artifacts import load_rules
from ortc.plan import plan_schema
from ortc.recipe import recipe_schema
from ortc.rules import LOSSES, OPTIMIZERS, Declared
from ortc.target import load_target, target_names

FOLDER = Path(__file__).parent

# Field of the recipe -> the flag of `ortc compile` that sets it, and a value other than the default.
FLAGS = {
    "target": ("--target", "onnxruntime"),
    "loss": ("--loss", "mse:reduction=sum"),
    "wrt": ("--wrt", "x"),
    "batch_norm": ("--batch-norm", "frozen"),
    "gelu": ("--gelu", "tanh"),
    "artifacts": ("--artifacts", "ort"),
    "seed": ("--seed", "7"),
    "parameters.train": ("--train", "a*"),
    "parameters.freeze": ("--freeze", "b*"),
    "lora": ("--lora", "rank=4"),
    "optimizer.name": ("--optimizer", "lion"),
    "optimizer.options": ("--optimizer", "adamw:beta2=0.95"),
    "optimizer.max_norm": ("--clip-norm", "1.0"),
    "optimizer.max_value": ("--clip-value", "0.5"),
    "optimizer.ema": ("--ema", "0.999"),
    "optimizer.fuse": ("--fuse-update", None),
    "learning_rate.base": ("--lr", "0.1"),
    "learning_rate.schedule": ("--schedule", "cosine"),
    "learning_rate.warmup": ("--warmup", "10"),
    "passes.off": ("--without", "order"),
    "passes.on": ("--with", "attention"),
    "precision.type": ("--precision", "bf16"),
    "precision.loss_scale.mode": ("--loss-scale", "dynamic"),
    "recompute.nodes": ("--recompute", "full"),
    "recompute.budget": ("--memory-budget", "4GiB"),
    "stash.packed": ("--stash", "packed"),
    "stash.dtype": ("--stash-dtype", "bf16"),
    "optimizer.moments": ("--moments", "bf16"),
    "pipeline.stages": ("--stages", "2"),
    "pipeline.ranks": ("--ranks", "2"),
    "pipeline.micro_batches": ("--micro-batches", "4"),
    "pipeline.schedule": ("--pipeline", "gpipe"),
    "pipeline.replicas": ("--data-parallel", "2"),
    "pipeline.zero": ("--zero", "1"),
    "pipeline.cuts": ("--cut", "h"),
    "pipeline.assign": ("--assign", "layer*=0"),
    "pipeline.memory_limit": ("--memory-limit", "4GiB"),
    "pipeline.sizes": ("--size", "batch=8"),
}

HEAD = """\
# The recipe

<!-- python docs/make.py writes this page. -->

What a compilation is told, as a TOML file (`ortc compile MODEL.onnx --recipe ortc.toml -o DIR`), as flags, or in Python
(`ortc.recipe.Recipe`). Everything has a default. A flag wins over the file; `--write-recipe` prints what is in force then. The
recipe is part of `plan.json`, so an output folder says how it was made. The JSON schema, for editors that check and complete
TOML: [recipe.schema.json](recipe.schema.json). Of these flags `--lr`, `--schedule`, `--warmup` and `--seed` are `ortc run`'s
too, where they count for that run.

## An example

[example.toml](example.toml), which a test compiles:

"""

LOSS_TEXT = """\
## Losses

Names of `[[loss]]`, with their `options` (`--loss NAME:key=value,…`). Beside these `none`, with the output of the model that is
the loss itself, an ONNX file, and (as a flag only) `FILE.py:FUNCTION` of onnxscript.

"""

OPTIMIZER_TEXT = """\
## Optimizers

Names of `[optimizer]`, with their `options` (`--optimizer NAME:key=value,…`). The formulas stand in
[passes/optimizer.py](../passes/optimizer.py).

"""


def recipe_page() -> str:
    """``recipe.md``: every table and field of the recipe, the losses and optimizers with their options, targets and passes."""
    load_rules()
    schema = json.loads(recipe_schema())
    example = (FOLDER / "example.toml").read_text(encoding="utf-8")
    parts = [f"{HEAD}```toml\n{example}```\n\n## The fields\n"]
    parts += list(_tables("", schema, schema["$defs"]))
    parts.append(LOSS_TEXT + _declared(LOSSES))
    parts.append(OPTIMIZER_TEXT + _declared(OPTIMIZERS))
    targets = [(f"`{name}`", load_target(name).summary) for name in target_names()]
    parts.append("## Targets\n\n" + _rows(("name", "what it is"), targets))
    optional = [(f"`{step.name}`", step.summary()) for step in passes.standard() if step.optional]
    text = "Those that `[passes]` may name. A fusion is on where the target's table says that it pays.\n\n"
    parts.append("## Optional passes\n\n" + text + _rows(("name", "what it does"), optional))
    return "\n".join(parts)


def _tables(path: str, table: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    """A table of the recipe, then those in it."""
    rows, inner = [], []
    for name, field in table["properties"].items():
        where = f"{path}{name}"
        kind, of = _kind(field, defs)
        if of is not None:
            inner.append((where, kind, defs[of]))
        flag = f"`{FLAGS[where][0]}`" if where in FLAGS else ""
        default = "must be given" if name in table.get("required", ()) else _default(field)
        link = kind if of is None else f"[{kind}](#{_anchor(where)})"
        rows.append((f"`{name}`", link, default, flag, field["description"]))
    if path:
        yield f"### {path.removesuffix('.')}\n\n{table['description']}\n"
    yield _rows(("field", "type", "default", "flag", "meaning"), rows)
    for where, _, definition in inner:
        yield from _tables(f"{where}.", definition, defs)


def _kind(field: Mapping[str, Any], defs: Mapping[str, Any]) -> tuple[str, str | None]:
    """The type of a field in words, and the table that it is made of."""
    choices = [c for c in field.get("anyOf", [field]) if c.get("type") != "null"]
    (only,) = choices
    if "$ref" in only:
        return "table", only["$ref"].rpartition("/")[2]
    if "const" in only:
        return f"`{json.dumps(only['const'])}`", None
    if "enum" in only:
        return ", ".join(f"`{json.dumps(v)}`" for v in only["enum"]), None
    if only["type"] == "array":
        kind, of = _kind(only["items"], defs)
        return ("tables" if of else f"list of {kind}"), of
    if only["type"] == "object":
        inner = only.get("additionalProperties")
        return (f"name = {_kind(inner, defs)[0]}, …" if isinstance(inner, dict) else "name = value, …"), None
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}[only["type"]]
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(only[key])}" for key, sign in bounds.items() if key in only]
    return " ".join([words, ", ".join(limits)]).strip(), None


def _number(value: float) -> str:
    return "2³¹" if value == 2**31 else f"{value:g}"


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:  # a list or a table, with nothing in it
        return ""
    return "none" if field["default"] is None else f"`{json.dumps(field['default'])}`"


def _anchor(where: str) -> str:
    """As GitHub makes it of a heading."""
    return where.replace(".", "")


def _declared(table: Mapping[str, Declared]) -> str:
    rows = []
    for name, declared in table.items():
        options = ", ".join(f"`{option}` = {_value(default)}" for option, default in declared.options.items())
        rows.append((f"`{name}`", declared.summary, options))
    return _rows(("name", "what it is", "options and their defaults"), rows)


def _value(default: Any) -> str:
    if default is None:
        return "none"
    return f"`{default!r}`" if default == math.inf else f"`{json.dumps(default)}`"


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, ("---",) * len(head), *rows]]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


FILES: dict[str, Callable[[], str]] = {
    "plan.schema.json": plan_schema,
    "recipe.schema.json": recipe_schema,
    "recipe.md": recipe_page,
}

if __name__ == "__main__":
    for file, made in FILES.items():
        (FOLDER / file).write_text(made(), encoding="utf-8", newline="\n")
