"""MLPs whose linears compute the SwiGLU between them, in Megatron's training loop."""

import pytest

from testing.worlds.launch import train

RECIPE = ("--bf16", "--fp4-recipe", "tetrajet")
OFF = ("--fp4-fused-kernels", "off")
SAID = "SwiGLU is computed by mlp.linear_fc2"


def test_linears_compute_it_and_train_as_with_megatron_s() -> None:
    """Megatron rounds twice on a CPU, so that losses agree to the precision of BF16."""
    joined, apart = train(1, *RECIPE), train(1, *RECIPE, *OFF)
    assert SAID in joined.output and SAID not in apart.output
    assert joined.losses != apart.losses  # else nothing was computed otherwise
    assert joined.losses == pytest.approx(apart.losses, rel=2e-3)
    # Negative control: a difference as large as that of another seed would be noticed.
    other = train(1, *RECIPE, *OFF, "--seed", "5")
    assert other.losses != pytest.approx(apart.losses, rel=2e-3)


@pytest.mark.slow
def test_recomputation_repeats_it() -> None:
    recomputed = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert train(1, *RECIPE, *recomputed.split()).losses == train(1, *RECIPE).losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--glu-linear-offset", "1.0", "--no-bias-swiglu-fusion"),
        ("--fp4-module-recipe", "*linear_fc2=bf16"),
    ],
    ids=["shifted", "fc2 in BF16"],
)
def test_other_mlps_are_megatron_s(flags: tuple[str, ...]) -> None:
    recipe = (*RECIPE, "--normalization", "LayerNorm")  # of which linears compute none
    found = train(1, *recipe, *flags)
    assert SAID not in found.output
    assert found.losses == train(1, *recipe, *OFF, *flags).losses


@pytest.mark.slow
def test_an_evaluation_in_bf16_computes_megatron_s() -> None:
    flags = (*RECIPE, "--fp4-eval-forward", "bf16")
    found = train(1, *flags)
    assert SAID in found.output and len(found.evaluations) == 2
