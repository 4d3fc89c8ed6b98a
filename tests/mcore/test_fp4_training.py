"""FP4 through Megatron's own loop: on one layout a rerun, a recomputation and a resumed run are the
same run, bit for bit."""

import functools
import re
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from megatron_fp4.arithmetic import formats
from testing.worlds.checkpoint_contents import weights
from testing.worlds.launch import Result, torchrun, train

SIZES = ("--ffn-hidden-size", "128", "--bf16")
TETRAJET = (*SIZES, "--fp4-recipe", "tetrajet")
TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
FOUR_MICROBATCHES = ("--global-batch-size", "8")
RECOMPUTE = tuple(
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
)
STUDIED = "benchmarks/study/candidates/fp8-ends-then-fp8.yaml"  # `auto` as a file
# TetraJet that draws in the forward pass too: recomputed with another microbatch's, the activations
# and so the losses would be others.
SR_EVERYWHERE = """
base: tetrajet
fprop: {a: mxfp4-ceil-sr, b: mxfp4-ceil-sr}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp4")
    (folder / "sr.yaml").write_text(SR_EVERYWHERE)
    return folder


# --- the same run, bit for bit -----------------------------------------------------------------


@functools.cache
def stochastic(folder: Path, *flags: str) -> Result:
    """Four steps of four microbatches, that draw in all three GEMMs."""
    recipe = ("--fp4-recipe", str(folder / "sr.yaml"))
    return train(2, *SIZES, *recipe, *FOUR_MICROBATCHES, *flags)


def test_recomputation_repeats_the_run(folder: Path) -> None:
    """Under 1F1B the first stage is a microbatch ahead when it recomputes."""
    kept, recomputed = stochastic(folder, *PP2), stochastic(folder, *PP2, *RECOMPUTE)
    assert len(kept.losses) == 4 and kept.losses[-1] < kept.losses[0]
    assert recomputed.losses == kept.losses
    assert recomputed.evaluations == kept.evaluations


@pytest.mark.slow
def test_a_recomputed_step_that_is_run_again_repeats_the_run(folder: Path) -> None:
    """Upstream distrusts every loss (errors injected into its check of spikes), runs each step
    again, and prints the loss of both runs; the second's gradients count."""
    spikes = "--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --error-injection-rate 1"
    twice = stochastic(folder, *TP2_SP, *RECOMPUTE, *spikes.split())
    compared = re.findall(r"First rerun: .* \((\S+) != (\S+)\)", twice.output)
    assert len(compared) >= 4 and all(first == second for first, second in compared)
    once = stochastic(folder, *TP2_SP)
    assert (twice.losses, twice.evaluations) == (once.losses, once.evaluations)


def test_another_seed_of_the_random_bits_is_another_run(folder: Path) -> None:
    """Random bits are drawn, which shows in the losses."""
    other = stochastic(folder, *PP2, "--fp4-seed", "7")
    assert other.losses != stochastic(folder, *PP2).losses


# --- checkpoints -------------------------------------------------------------------------------


@functools.cache
def saved(folder: Path) -> Result:
    """Saves after the second and the fourth step, evaluates in BF16 after each."""
    where = ("--save", str(folder / "whole"), "--save-interval", "2", "--eval-interval", "1")
    return train(2, *TETRAJET, *TP2_SP, *where, "--fp4-eval-forward", "bf16")


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(folder: Path) -> None:
    saved(folder)
    load = ("--load", str(folder / "whole"), "--ckpt-step", "2")
    train(2, *TETRAJET, *TP2_SP, *load, "--save", str(folder / "resumed"), "--save-interval", "2")
    whole, again = (weights(folder / run / "iter_0000004") for run in ("whole", "resumed"))
    assert whole.keys() == again.keys() and any("exp_avg" in name for name in whole)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    halfway = weights(folder / "whole" / "iter_0000002")
    assert any(not torch.equal(whole[name], halfway[name]) for name in whole)


def test_a_checkpoint_says_what_made_it(folder: Path) -> None:
    saved(folder)
    common = load_common_state_dict(str(folder / "whole" / "iter_0000004"))
    found = {key: value for key, value in vars(common["args"]).items() if key.startswith("fp4_")}
    assert found["fp4_recipe"] == "tetrajet" and found["fp4_seed"] == common["args"].seed
    assert found["fp4_numerics_version"] == formats.NUMERICS_VERSION


def test_bf16_runs_load_what_fp4_runs_saved_and_the_reverse(folder: Path) -> None:
    """Weights and optimizer are stock; evaluated in BF16 they are BF16's model exactly."""
    whole = saved(folder)
    evaluated = train(2, *SIZES, *TP2_SP, "--load", str(folder / "whole"), "--skip-train")
    assert evaluated.evaluations[-1] == whole.evaluations[-1]

    after_bf16 = in_bf16(folder)
    resumed = train(1, *TETRAJET, "--load", str(folder / "bf16"), "--ckpt-step", "2")
    assert "successfully loaded checkpoint" in resumed.output
    assert resumed.evaluations != after_bf16.evaluations
    assert resumed.evaluations == pytest.approx(after_bf16.evaluations, rel=0.01)


# --- other precisions --------------------------------------------------------------------------


@functools.cache
def in_bf16(folder: Path) -> Result:
    return train(1, *SIZES, "--save", str(folder / "bf16"), "--save-interval", "2")


def test_a_phase_trains_as_its_recipe_would(folder: Path) -> None:
    """The third of four steps is the first of the phase: until then it is the run without it, and
    from then on a run of the phase's recipe that goes on from the other's checkpoint."""
    path = folder / "phases.yaml"
    path.write_text("base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n")
    turned = train(2, *SIZES, "--fp4-recipe", str(path), *TP2_SP)
    whole = saved(folder)
    other = ("--load", str(folder / "whole"), "--ckpt-step", "2", "--fp4-load-anyway")
    fp8 = train(2, *SIZES, "--fp4-recipe", "fp8", *TP2_SP, *other)
    assert turned.losses == whole.losses[:2] + fp8.losses
    assert turned.losses[2:] != whole.losses[2:]


def test_auto_trains_as_the_file_of_the_study() -> None:
    """The losses of the study are of this file."""
    flags = (*SIZES, "--num-layers", "4", "--fp4-recipe")
    auto = train(1, *flags, "auto")
    assert auto.losses == train(1, *flags, STUDIED).losses
    assert auto.losses != train(1, *flags, "tetrajet").losses
    assert "recipe tetrajet-fp8" in auto.output and "--fp4-recipe auto" not in auto.output


def test_evaluation_in_bf16_leaves_the_training_alone(folder: Path) -> None:
    """`saved` evaluates in BF16 after every step, this run in FP4 and at the end."""
    trained = train(2, *TETRAJET, *TP2_SP)
    assert trained.losses == saved(folder).losses
    assert trained.evaluations[-1] != saved(folder).evaluations[-1]


# --- non-finite numbers ------------------------------------------------------------------------


def test_an_overflow_is_named_once_and_ends_the_run_as_upstream_does() -> None:
    """Activations of 1e40 overflow in the last norm's square, and its gradient is the first NaN."""
    result = torchrun(2, *TETRAJET, *TP2_SP, "--init-method-std", "1e20", fresh=True)
    told = [line for line in result.output.splitlines() if "NaN or Inf" in line]
    assert len(told) == 1 and "pipeline stage 0" in told[0]
    where = "operand dy of dgrad in decoder.layers.1.mlp.linear_fc2"
    assert f"iteration 1: the first NaN or Inf was in {where}" in told[0]
    assert result.output.count("Need to rerun step") == 1
    assert re.search(r"exitcode *: 16 ", result.output) and not result.has_traceback


def test_an_unchecked_run_goes_on_and_its_first_nan_is_named_once() -> None:
    unchecked = ("--init-method-std", "1e38", "--no-check-for-nan-in-loss-and-grad")
    result = train(1, *TETRAJET, *unchecked)
    told = [line for line in result.output.splitlines() if "NaN or Inf" in line]
    assert len(told) == 1
    assert "operand x of fprop in decoder.layers.0.self_attention.linear_qkv" in told[0]
    assert "iteration        4/       4" in result.output
