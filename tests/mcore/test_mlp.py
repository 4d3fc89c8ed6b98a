"""MLPs whose linears compute the SwiGLU between them, in Megatron's training loop."""

import pytest

from testing.worlds.launch import train

RECIPE = ("--bf16", "--fp4-recipe", "tetrajet")
OFF = ("--fp4-fused-kernels", "off")
SAID = "SwiGLU is computed by mlp.linear_fc2"
FP8_INPUT = "--activation-func-fp8-input-store"
KEPT = "SwiGLU's input is kept in float8_e4m3fn"


def test_linears_compute_it_and_train_as_with_megatron_s() -> None:
    """Megatron rounds twice on a CPU, so that losses agree to the precision of BF16."""
    joined, apart = train(1, *RECIPE), train(1, *RECIPE, *OFF)
    assert SAID in joined.output and SAID not in apart.output
    assert joined.losses != apart.losses  # else nothing was computed otherwise
    assert joined.losses == pytest.approx(apart.losses, rel=2e-3)
    # Negative control: a difference as large as that of another seed would be noticed.
    other = train(1, *RECIPE, *OFF, "--seed", "5")
    assert other.losses != pytest.approx(apart.losses, rel=2e-3)


def test_y_is_kept_in_e4m3() -> None:
    """With Megatron's SwiGLU too, which keeps the same bits; losses agree as above."""
    joined, apart = (train(1, *RECIPE, *flags, FP8_INPUT) for flags in ((), OFF))
    assert KEPT in joined.output and KEPT in apart.output and SAID in joined.output
    plain = train(1, *RECIPE)
    assert joined.losses[0] == plain.losses[0] and KEPT not in plain.output
    assert joined.losses[1:] != plain.losses[1:]  # else Y was not rounded
    assert joined.losses == pytest.approx(apart.losses, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), (FP8_INPUT,)], ids=["bf16", "e4m3"])
def test_recomputation_repeats_it(kept: tuple[str, ...]) -> None:
    recomputed = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = (*RECIPE, *kept)
    assert train(1, *flags, *recomputed.split()).losses == train(1, *flags).losses


@pytest.mark.slow
def test_ranks_keep_their_own_y_in_e4m3() -> None:
    sharded = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    one, two = train(1, *RECIPE, FP8_INPUT), train(2, *RECIPE, FP8_INPUT, *sharded)
    assert SAID in two.output and KEPT in two.output
    assert two.losses == pytest.approx(one.losses, rel=2e-3)


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
    found = train(1, *RECIPE, *flags)
    assert SAID not in found.output
    assert found.losses == train(1, *RECIPE, *OFF, *flags).losses


@pytest.mark.slow
def test_an_evaluation_in_bf16_computes_megatron_s() -> None:
    flags = (*RECIPE, "--fp4-eval-forward", "bf16")
    found = train(1, *flags)
    assert SAID in found.output and len(found.evaluations) == 2
