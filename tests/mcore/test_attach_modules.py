"""Which recipes the linears of a built model follow: --fp4-module-recipe, and layers of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.transformer.module import MegatronModule

from megatron_fp4 import get_recipe
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model import attach as attaching
from megatron_fp4.mcore.model.attach import attach
from megatron_fp4.recipes.assignment import recipes_of_layers
from testing.builders.attached import model, printed, run
from testing.worlds.launch import train

PP2 = ("--pipeline-model-parallel-size", "2")


def recipes_of(chunk: MegatronModule) -> dict[str, str | None]:
    """Global names of the linears, and the names of the recipes that they follow."""
    return {
        name: None if linear.fp4 is None else linear.fp4.recipe.name
        for name, linear, _ in attaching._linears(chunk)
    }


def test_globs_choose_recipes_by_global_names_and_the_last_match_counts(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = model()
    modules = [
        ("*.linear_fc2", get_recipe("mxfp4")),
        ("decoder.layers.[02].mlp.*", None),
        ("decoder.layers.3.self_attention.linear_qkv", get_recipe("dge-occ")),
    ]
    attach(run(get_recipe("tetrajet"), end=1, modules=modules), [chunk])
    found = recipes_of(chunk)
    for layer in range(4):
        prefix = f"decoder.layers.{layer}"
        assert found[f"{prefix}.mlp.linear_fc1"] == (None if layer in (0, 2, 3) else "tetrajet")
        assert found[f"{prefix}.mlp.linear_fc2"] == (None if layer in (0, 2) else "mxfp4")
        # The last layer is kept in BF16, and what a glob names counts more.
        qkv = "dge-occ" if layer == 3 else "tetrajet"
        assert found[f"{prefix}.self_attention.linear_qkv"] == qkv
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  recipe ")] == [
        "mxfp4", "dge-occ"
    ]  # below the launch's  # fmt: skip
    lines = {(line[0], line[1]): line[3] for line in printed(text)[1:]}
    assert lines["decoder.layers.*.mlp.linear_fc2", "1,3"] == "mxfp4"
    assert lines["decoder.layers.*.mlp.linear_fc2", "0,2"] == "high precision"
    assert lines["decoder.layers.*.self_attention.linear_qkv", "3"] == "dge-occ"


def test_a_glob_that_names_nothing_is_an_error_that_lists_names(one_rank: None) -> None:
    modules = [("layers.0.*", None)]
    with pytest.raises(ConfigError, match=r"layers.0.\* of .*: no linear .* decoder.layers.\*.mlp"):
        attach(run(get_recipe("tetrajet"), modules=modules), [model()])


def test_globs_see_the_whole_pipeline_s_numbers() -> None:
    """The second stage's first layer is layer 1 of the model, and 0 of its own stage."""
    flags = ("--bf16", "--fp4-recipe", "tetrajet", "--fp4-module-recipe", "decoder.layers.1.*=bf16")
    result = train(2, *PP2, *flags)
    quantized = [line.split() for line in result.output.splitlines() if " e2m1 " in line]
    assert quantized and all(line[1] == "0" for line in quantized)


def test_layers_of_a_recipe_are_those_of_the_whole_pipeline(tmp_path: Path) -> None:
    """As the flag that names them, to the bit; and the other layer is not."""
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nname: tetrajet\nlayers: [{last: 1, recipe: bf16}]\n")
    flag = ("--fp4-recipe", "tetrajet", "--fp4-module-recipe")
    losses = [
        train(2, *PP2, "--bf16", *words).losses
        for words in (
            ("--fp4-recipe", str(path)),
            (*flag, "decoder.layers.1.*=bf16"),
            (*flag, "decoder.layers.0.*=bf16"),
        )
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_model_whose_layers_all_follow_another_recipe_is_refused(one_rank: None) -> None:
    """`auto` of a decoder with two layers would train nothing in FP4."""
    given = get_recipe("auto")
    modules = recipes_of_layers(given, 2)
    with pytest.raises(ConfigError, match="no linear follows recipe tetrajet-fp8 itself: its"):
        attach(run(given, num_layers=2, modules=modules), [model(num_layers=2)])
    attach(run(given, num_layers=4, modules=recipes_of_layers(given, 4)), [model()])
