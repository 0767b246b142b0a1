"""The published JSON schemas are those of the code, and what ortc writes is valid by them.

To write them again: ``python tests/test_schemas.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from ortc.artifacts import compile
from ortc.demo import MODEL, RECIPE
from ortc.plan import dump_plan, load_plan, plan_schema
from ortc.recipe import load_recipe, recipe_schema

DOCS = Path(__file__).parents[1] / "docs"
SCHEMAS = {"plan": plan_schema, "recipe": recipe_schema}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The demo's plan, as JSON data."""
    folder = tmp_path_factory.mktemp("demo") / "stages"
    compile(MODEL, folder, load_recipe(RECIPE))
    return json.loads((folder / "plan.json").read_text(encoding="utf-8")), folder


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_published_schema_is_current(name):
    published = json.loads((DOCS / f"{name}.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(SCHEMAS[name]()), f"docs/{name}.schema.json is old: python {Path(__file__).name}"


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
    ],
)
def test_a_wrong_plan_is_not_valid(plan, change, field):
    data = json.loads(json.dumps(plan[0]))
    change(data)
    with pytest.raises(jsonschema.ValidationError) as error:
        jsonschema.validate(data, json.loads(plan_schema()))
    assert field in f"{list(error.value.path)} {error.value.message}"


if __name__ == "__main__":
    for schema, text in SCHEMAS.items():
        (DOCS / f"{schema}.schema.json").write_text(text(), encoding="utf-8", newline="\n")
