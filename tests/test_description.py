"""The words of a recipe come from what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp4 import (
    GemmRecipe,
    Quantizer,
    Recipe,
    get_recipe,
    linear,
    list_recipes,
)
from megatron_fp4.__main__ import info
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.description import describe, paper_of, titled
from megatron_fp4.recipe import Layers, Phase

BLOCKS = "for blocks of 32"
CEIL = f"E2M1, E8M0 scales (ceil) {BLOCKS}"


def from_file(folder: Path, text: str, name: str = "mine") -> Recipe:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return get_recipe(str(path))


def test_layers_in_words(tmp_path: Path) -> None:
    entries = "{last: 2, recipe: bf16}, {first: 1, recipe: fp8}, {modules: a.*, recipe: fp8}"
    recipe = from_file(tmp_path, f"base: tetrajet\nlayers: [{entries}]\n")
    assert describe(recipe)[-3:] == [
        "  the last 2 layers: recipe bf16",
        "  the first layer: recipe fp8",
        "  linears a.*: recipe fp8",
    ]
    x = torch.ones(32, 32)
    with pytest.warns(UserWarning, match="does not know its layer, and uses the recipe of the"):
        found = linear(x, x, recipe=recipe)
    assert torch.equal(found, linear(x, x, recipe="tetrajet"))


def test_tetrajet_in_words() -> None:
    assert describe(get_recipe("tetrajet")) == [
        "recipe tetrajet (arXiv 2502.20853, section 3)",
        f"  fprop: X and W in {CEIL}, nearest",
        f"  dgrad: dY and W (as fprop quantized it) in {CEIL}, stochastic",
        f"  wgrad: dY and X (as fprop quantized it) in {CEIL}, stochastic",
        "  gradient of the bias: the sum of dgrad's quantized dY",
    ]


def test_dge_occ_in_words() -> None:
    words = describe(get_recipe("dge-occ"))
    dy = "dY in E5M2, FP32 scale of the row, nearest"
    assert words[1:4] == [
        "  fprop: X and W in E2M1, FP32 scale of the row, nearest",
        f"  dgrad: {dy}; W (as fprop quantized it)",
        f"  wgrad: {dy}; X (as fprop quantized it)",
    ]
    assert "clamped to the 0.01 and 0.99 quantiles" in words[4] and "also in wgrad" in words[4]
    assert words[5] == "  gradient of W: times DGE's factor (k 5, clip 3)"


def test_ue5m3_in_words() -> None:
    words = describe(get_recipe("ue5m3"))
    scales = "tensor scale for 32768) for blocks of 16"
    turned = "after a Hadamard transform in groups of 64 with random signs"
    assert words[:3] == [
        "recipe ue5m3 (arXiv 2509.17791)",
        f"  fprop: X and W in E2M1, UE5M3 scales (nearest, {scales}, nearest",
        f"  dgrad: dY and W (as fprop quantized it) in E2M1, UE5M3 scales (up, {scales}, "
        f"stochastic; {turned}",
    ]


def test_quartet_2_in_words() -> None:
    words = describe(get_recipe("quartet-2"))
    gain = "times 0.9881, then to a gain of 1 in groups of 128, stochastic"
    assert words[1:3] == [
        "  fprop: X and W in E2M1, E4M3 scales (four-over-six, tensor scale for 256) for blocks of "
        "16, nearest",
        "  dgrad: dY and W (as fprop quantized it) in E2M1, E4M3 scales (nearest, tensor scale for "
        f"256, {gain}) for blocks of 16, nearest; after a Hadamard transform in groups of 128 with "
        "random signs",
    ]


def test_a_file_with_another_wgrad_is_described_by_that(tmp_path: Path) -> None:
    """It printed tetrajet's words and paper."""
    words = describe(from_file(tmp_path, "base: tetrajet\nwgrad: {a: nvfp4, b: nvfp4-sr}\n"))
    assert words[0] == "recipe mine"
    scales = "E4M3 scales (nearest, tensor scale for 448) for blocks of 16"
    assert words[3] == (
        f"  wgrad: dY in E2M1, {scales}, nearest; X (as fprop quantized it) in E2M1, {scales}, "
        "stochastic"
    )
    assert words[1:3] == describe(get_recipe("tetrajet"))[1:3]


SR = Quantizer(rounding="stochastic", prescale=0.75)
BASE = Recipe("base", fprop=GemmRecipe(SR, None, correction=4 / 3))


@pytest.mark.parametrize(
    ("gemm", "words"),
    [
        (GemmRecipe(), "high precision"),
        (GemmRecipe(Quantizer(), None), f"X in E2M1, E8M0 scales (floor) {BLOCKS}, nearest; W"),
        (GemmRecipe(None, Quantizer()), f"X; W in E2M1, E8M0 scales (floor) {BLOCKS}, nearest"),
        (BASE.fprop, f"X in E2M1, E8M0 scales (floor) {BLOCKS}, stochastic, values times 0.75; W; "
         "the product times 1.333"),
        (GemmRecipe(Quantizer(block=(16, 16)), None),
         "X in E2M1, E8M0 scales (floor) for blocks of 16 x 16, nearest; W"),
        (GemmRecipe(None, Quantizer("e4m3", "fp32", (0, 0), "absmax")),
         "X; W in E4M3, FP32 scale of the tensor, nearest"),
        (GemmRecipe(Quantizer(), None, Hadamard(32, "none")),
         f"X in E2M1, E8M0 scales (floor) {BLOCKS}, nearest; W; after a Hadamard transform in "
         "groups of 32 with no signs"),
        (GemmRecipe(Quantizer(), None, Hadamard(16, "fixed")),
         f"X in E2M1, E8M0 scales (floor) {BLOCKS}, nearest; W; after a Hadamard transform in "
         "groups of 16 with fixed signs"),
        (GemmRecipe(Quantizer(scale="ue5m3", block=(1, 16), rule="up", inflate=17 / 16), None),
         "X in E2M1, UE5M3 scales (up, times 1.062) for blocks of 16, nearest; W"),
    ],
)  # fmt: skip
def test_every_word_of_an_operand_shows(gemm: GemmRecipe, words: str) -> None:
    assert describe(replace(BASE, fprop=gemm))[1] == f"  fprop: {words}"


NULL = "estimator: null\nweight_average: null\nramping: null\n"  # what needs a quantizer of W


@pytest.mark.parametrize("name", list_recipes())
def test_the_paper_is_the_registered_recipe_s_alone(name: str, tmp_path: Path) -> None:
    recipe = get_recipe(name)
    assert paper_of(recipe) == recipe.paper
    assert paper_of(recipe.without(("wgrad",))) == ""
    assert paper_of(replace(recipe, name="mine")) == ""
    assert paper_of(from_file(tmp_path, f"base: {name}\nfprop: {{}}\n{NULL}")) == ""
    assert paper_of(from_file(tmp_path, f"base: {name}\npaper: my own\n")) == "my own"


def test_info_describes_every_recipe() -> None:
    text = info()
    assert "\n  auto is tetrajet-fp8\n" in text
    for name in list_recipes():
        assert "\n".join(f"  {line}" for line in describe(get_recipe(name))) in text


def test_each_recipe_that_linears_follow_has_one_title() -> None:
    own = get_recipe("auto")
    assert [(title, each.name) for title, each in titled(own)] == [
        ("", "tetrajet-fp8"),
        ("\nafter 0.8 of training; the first layer; the last layer\n", "fp8"),
    ]
    late = replace(get_recipe("mxfp4"), phases=(Phase(0.5, get_recipe("fp8")),))
    layers = (Layers(late, last=2), Layers(get_recipe("fp8"), modules="*fc1"))
    assert [title.strip() for title, _ in titled(replace(own, phases=(), layers=layers))] == [
        "", "the last 2 layers", "the last 2 layers after 0.5 of training; linears *fc1"
    ]  # fmt: skip
