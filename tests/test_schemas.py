"""What docs/ has of the code (the JSON schemas, the recipe's page) is current, and what ortc writes is valid by it.

To write the files again: ``python docs/make.py``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from gradcheck import TARGETS
from typer.main import get_command

from ortc.artifacts import compile
from ortc.cli import app
from ortc.demo import MODEL, RECIPE
from ortc.errors import PlanError
from ortc.plan import dump_plan, load_plan, plan_schema
from ortc.recipe import Recipe, load_recipe, parse_recipe_text, recipe_schema

DOCS = Path(__file__).parents[1] / "docs"
SCHEMAS = {"plan": plan_schema, "recipe": recipe_schema}


def load_make() -> Any:
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The demo's plan, as JSON data."""
    folder = tmp_path_factory.mktemp("demo") / "stages"
    compile(MODEL, folder, load_recipe(RECIPE))
    return json.loads((folder / "plan.json").read_text(encoding="utf-8")), folder


def test_a_file_that_is_made_is_current():
    """In a process of its own: declarations of other tests are not in the page."""
    program = (
        "import runpy, sys, json; m = runpy.run_path(sys.argv[1]); print(json.dumps({f: t() for f, t in m['FILES'].items()}))"
    )
    words = [sys.executable, "-c", program, str(DOCS / "make.py")]
    for name, text in json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"docs/{name} is old: python docs/make.py"


def leaves(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a recipe that are no tables with fields of their own."""
    for name, value in table.items():
        where = f"{path}{name}"
        nested = isinstance(value, dict) and where not in make.FLAGS and value
        yield from leaves(value, f"{where}.") if nested else [(where, value)]


@pytest.mark.parametrize(("field", "flag"), make.FLAGS.items(), ids=[*make.FLAGS])
def test_a_flag_sets_the_field_that_the_page_names(ortc, field, flag):
    code, text, _ = ortc("compile", "none.onnx", *flag, "--write-recipe")
    assert code == 0
    other = {"target": "ort-training"} if field == "target" else {}  # what is installed may have the flag's as its default
    given, default = dict(leaves(parse_recipe_text(text).model_dump())), dict(leaves(Recipe(**other).model_dump()))
    changed = [name for name, value in given.items() if value != default[name]]
    # A cut says how many stages there are, too.
    assert [name for name in changed if (field, name) != ("pipeline.cuts", "pipeline.stages")] == [field]


def test_every_flag_of_the_recipe_is_in_the_page():
    """What other flags of `ortc compile` are about is no field: files, what is printed, stages that somebody else cut."""
    options = {o for p in get_command(app).commands["compile"].params for o in p.opts if o.startswith("--")}
    stages = {"--stage-models", "--connect", "--rank", "--boundary"}
    others = {"--output", "--recipe", "--rules", "--save-intermediate", "--force", "--write-recipe", "--quiet"}
    assert options == {flag for flag, _ in make.FLAGS.values()} | stages | others | {"--accumulate"}  # --micro-batches again


def test_the_example_compiles(tmp_path):
    """All that it says is in the plan, which a field without effect would not be."""
    recipe = load_recipe(DOCS / "example.toml").model_copy(update={"target": TARGETS[-1].name})
    plan = compile(MODEL, tmp_path / "out", recipe)
    assert plan.recipe == recipe
    assert len(plan.stages) == 2
    assert {p.name: p.group for p in plan.parameters}["logits.weight"] == 0
    assert not any(p.trainable for p in plan.parameters if p.name.startswith("conv1."))
    assert {p.slot for s in plan.stages for g in s.phases.values() for p in g.inputs} >= {"exp_avg", "ema"}
    assert "optimizer.1" in {phase for stage in plan.stages for phase in stage.phases}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_is_one(name):
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMAS[name]()))


def test_a_compiled_plan_is_valid_and_read_back_equal(plan):
    data, folder = plan
    jsonschema.validate(data, json.loads(plan_schema()))
    jsonschema.validate(data["recipe"], json.loads(recipe_schema()))
    assert dump_plan(load_plan(folder)) == (folder / "plan.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.pop("stages"), "stages"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d["export"]["inputs"][0].update(role="friend"), "role"),
        (lambda d: d.pop("sessions"), "sessions"),
        (lambda d: d["sessions"]["training"].update(config_entries={"session.load_model_format": "ORT"}), "config_entries"),
        (lambda d: d["sessions"]["others"].update(optimized_model_filepath="/tmp/x"), "optimized_model_filepath"),
        (lambda d: d["sessions"]["others"].update(disabled_optimizers=["A;B"]), "disabled_optimizers"),
    ],
)
def test_a_wrong_plan_is_not_valid(plan, change, field, tmp_path):
    data = json.loads(json.dumps(plan[0]))
    change(data)
    with pytest.raises(jsonschema.ValidationError) as error:
        jsonschema.validate(data, json.loads(plan_schema()))
    assert field in f"{list(error.value.path)} {error.value.message}"
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(PlanError, match=field):
        load_plan(folder)
