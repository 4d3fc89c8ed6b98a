"""--fp4-param-gather on the command line: who reads the flag, and what is refused with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp4.mcore.launch import fp4_arguments
from testing.builders.fp4_arguments import parse, refusal
from testing.worlds.checkpoints import SIZES, told
from testing.worlds.launch import torchrun

GATHER, OWNED = "--fp4-param-gather", "--use-distributed-optimizer"
ASKED = ("--fp4-recipe", "tetrajet", GATHER, OWNED, "--bf16")


def test_megatron_does_not_see_the_flag() -> None:
    """It would demand --fp4-format, and give the weights to Transformer Engine."""
    args = parse(*ASKED)
    assert args.fp4_gathers_codes and not args.fp4_param_gather
    assert fp4_arguments.recipe_of(args) is not None  # asked again when all arguments are known
    assert not parse("--fp4-recipe", "tetrajet").fp4_gathers_codes
    upstreams = parse("--fp4-format", "e2m1", "--transformer-impl", "transformer_engine", GATHER)
    assert upstreams.fp4_param_gather and not upstreams.fp4_gathers_codes


def test_no_metrics_of_w_by_default() -> None:
    assert parse(*ASKED, "--save", "somewhere").fp4_metrics_interval == 0
    assert parse("--fp4-recipe", "tetrajet", "--save", "somewhere").fp4_metrics_interval > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fp4-recipe mxfp4", "because backward reads the unquantized W: leave it out"),
        ("--fp4-recipe mxfp4-rht-sr", "because fprop multiplies W in high precision"),
        ("--fp4-recipe dge-occ", "because fprop's W is not E2M1 with an E8M0 scale"),
        ("--fp4-recipe tetrajet-ramping", "because the calibrations of Q-Ramping quantize W"),
        ("--qk-clip", "does not support --qk-clip: leave out one of the two"),
        ("--overlap-param-gather-with-optimizer-step", "does not support --overlap-param"),
        ("--num-distributed-optimizer-instances 2", "does not support --num-dist"),
        ("--save-params-interval 2", "does not support --save-params-interval"),
        ("--perform-rl-step", "does not support --perform-rl-step"),
        ("--fp4-metrics-interval 5", "does not support --fp4-metrics-interval"),
        ("--optimizer-cpu-offload", "does not support --optimizer-cpu-offload: leave out one"),
        ("--optimizer muon", "does not support --optimizer muon"),
    ],
)
def test_refusals(flags: str, says: str) -> None:
    assert says in refusal(*ASKED, *flags.split())


def test_refusals_of_what_is_missing() -> None:
    without = [flag for flag in ASKED if flag != OWNED]
    assert "add --use-distributed-optimizer" in refusal(*without)
    assert "add --bf16" in refusal(*ASKED[:-1])
    assert "--fp4-param-gather needs a recipe: add --fp4-recipe" in refusal(GATHER)
    parse(*ASKED, "--fp4-bf16-after", "0.5")


def test_only_the_launch_s_recipe_must_multiply_codes_alone() -> None:
    """W of layers and modules whose recipes read more of it is gathered in BF16."""
    auto = ("--fp4-recipe", "auto", *ASKED[2:], "--num-layers", "4")
    parse(*auto)
    parse(*auto, "--fp4-recipe-option", "fp8_after=1")
    parse(*ASKED, "--fp4-module-recipe", "*fc1=mxfp4")
    mxfp4 = ("--fp4-recipe", "mxfp4", *ASKED[2:], "--fp4-module-recipe")
    assert "recipe mxfp4 does not support" in refusal(*mxfp4, "*fc1=tetrajet")


def test_a_recipe_of_layers_alone_needs_one_with_codes(tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    for layer, says in (("tetrajet", None), ("fp8", "recipe fp8 does not support")):
        path.write_text(f"layers: [{{first: 2, recipe: {layer}}}]\n")
        flags = ("--fp4-recipe", str(path), *ASKED[2:], "--num-layers", "4")
        if says is None:
            parse(*flags)
        else:
            assert says in refusal(*flags)


def test_a_refusal_is_one_line_of_a_launch() -> None:
    flags = f"{SIZES} --fp4-recipe mxfp4 {OWNED} {GATHER}"
    assert "recipe mxfp4 does not support --fp4-param-gather" in told(torchrun(1, *flags.split()))
