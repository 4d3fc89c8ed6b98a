"""docs/recipe-files.md and docs/recipe.yaml have every key that a recipe file takes."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from megatron_fp4 import GemmRecipe, Phase, Quantizer, Recipe, get_recipe, list_quantizers
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.recipe import Layers

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {
    "The file": Recipe,
    "A GEMM": GemmRecipe,
    "A quantizer": Quantizer,
    "A Hadamard transform": Hadamard,
    "Estimators": Estimator,
    "The outlier clamp": OutlierClamp,
    "Hot channels": HotChannels,
    "The weight average": WeightAverage,
    "Ramping": Ramping,
}


def rows(section: str) -> dict[str, list[str]]:
    """The cells of the section's table by key."""
    page = (DOCS / "recipe-files.md").read_text()
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {key.strip(" `"): rest for key, *rest in lines}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_has_the_keys_the_defaults_and_the_choices(section: str) -> None:
    described, found = SECTIONS[section], rows(section)
    beside = {"base", "options"} if described is Recipe else set()
    assert set(found) == {field.name for field in fields(described)} | beside
    for field in fields(described):
        default, text = found[field.name]
        hint = get_type_hints(described)[field.name]
        for choice in get_args(hint) if get_origin(hint) is Literal else ():
            assert f"`{choice}`" in text, field.name
        if isinstance(field.default, (float, int, str)) and field.default != "":
            shown = str(field.default).lower() if field.default in (True, False) else field.default
            assert default.strip() == f"`{shown}`", field.name
        elif field.default is None:
            assert default.strip() == "none", field.name
        else:
            assert field.default is not MISSING or field.name == "name"


def test_a_phase_s_table_has_its_keys() -> None:
    assert set(rows("Phases")) == {field.name for field in fields(Phase)}


def test_the_table_of_layers_has_their_keys() -> None:
    assert set(rows("Layers")) == {field.name for field in fields(Layers)}


def test_the_page_names_the_quantizers() -> None:
    page = (DOCS / "recipe-files.md").read_text()
    [names] = re.findall(r"^A name \((.*?)\)", page, re.M)
    assert re.findall(r"`(.*?)`", names) == list(list_quantizers())


def test_the_sample_loads_and_has_every_key() -> None:
    content: dict[str, Any] = yaml.safe_load((DOCS / "recipe.yaml").read_text())
    given = {
        Recipe: set(content) - {"base", "options"},
        GemmRecipe: set(content["dgrad"]),
        Quantizer: set(content["fprop"]["b"]),
        Hadamard: set(content["dgrad"]["hadamard"]),
        Estimator: set(content["estimator"]),
        OutlierClamp: set(content["outliers"]),
        Phase: set(content["phases"][0]),
    }
    assert given == {kind: {field.name for field in fields(kind)} for kind in given}
    recipe = get_recipe(str(DOCS / "recipe.yaml"))
    assert recipe.name == "sample" and recipe.dgrad.correction == 16 / 9
