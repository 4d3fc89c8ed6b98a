"""MLPs whose linears compute the SwiGLU between them, in Megatron's training loop."""

import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

from megatron_fp4.arithmetic.swiglu import swiglu_gradient
from megatron_fp4.estimate.plans import BF16
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu
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
    """Forward is what it is without the flag; the gradients, and so later losses, are others."""
    found, plain = train(1, *RECIPE, FP8_INPUT), train(1, *RECIPE)
    assert SAID in found.output and KEPT in found.output and KEPT not in plain.output
    assert found.losses[0] == plain.losses[0] and found.losses[1:] != plain.losses[1:]
    assert found.losses == pytest.approx(plain.losses, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_megatron_s_fp8_input_store(dtype: torch.dtype) -> None:
    """Both convert the same codes of Y; Megatron's is computed in float32 here, so that ours is
    rounded once more, to `dtype`."""
    generator = torch.Generator().manual_seed(4)
    y = (torch.randn(64, 256, generator=generator) * 8).to(dtype)
    y[0, :3] = torch.tensor([464.0, 480.0, 2.0**-9])
    gradient = torch.randn(64, 128, generator=generator).to(dtype)
    leaf = y.float().requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        bias_swiglu_impl(leaf, None, True).backward(gradient.float())
    # torch makes NaN of 480, as does its `up` then; from 2.15 on it makes the largest number, 448.
    wide = y[0, 1].to(torch.float8_e4m3fn).isnan()
    assert leaf.grad is not None and leaf.grad[0].isnan().sum() == 2 * wide

    def agrees(found: torch.Tensor) -> bool:
        assert found.dtype == dtype and leaf.grad is not None
        step = torch.finfo(dtype).eps
        return torch.allclose(found.float(), leaf.grad, 2**-20 + step / 2, 1e-5, equal_nan=True)

    assert agrees(swiglu_gradient(gradient, y.to(torch.float8_e4m3fn)))
    assert not agrees(swiglu_gradient(gradient, y))  # the mistake: Y that was not rounded


def test_linears_around_it_get_the_gradients_of_megatron_s() -> None:
    """A pair of linears in float32 that quantize nothing, against Megatron's SwiGLU between two."""
    generator = torch.Generator().manual_seed(6)
    shapes = ((32, 64), (256, 64), (64, 128))
    x, first, second = (torch.randn(shape, generator=generator) for shape in shapes)
    slope = torch.randn(32, 64, generator=generator)

    def found(kept: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, first, second)]
        at, call = (Site("fc1", kept_y=kept), Site("fc2", kept_y=kept)), Call()
        between = linear_before_swiglu(leaves[0], leaves[1], BF16, at[0], call, None)
        linear_after_swiglu(between, leaves[2], BF16, at[1], call, None).backward(slope)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    leaves = [each.clone().requires_grad_() for each in (x, first, second)]
    with torch.compiler.set_stance("force_eager"):
        between = bias_swiglu_impl(leaves[0] @ leaves[1].t(), None, True)
        (between @ leaves[2].t()).backward(slope)
    wanted = [leaf.grad for leaf in leaves if leaf.grad is not None]
    same = [
        [torch.allclose(a, b, 1e-4, 1e-3) for a, b in zip(found(kept), wanted, strict=True)]
        for kept in (torch.float8_e4m3fn, None)
    ]
    # fc2's X, and so its gradient, is that of Y itself with and without rounding what is kept.
    assert same == [[True, True, True], [False, False, True]]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), (FP8_INPUT,)], ids=["bf16", "e4m3"])
def test_recomputation_repeats_it(kept: tuple[str, ...]) -> None:
    recomputed = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = (*RECIPE, *kept)
    assert train(1, *flags, *recomputed.split()).losses == train(1, *flags).losses


@pytest.mark.slow
def test_ranks_keep_their_own_y_in_e4m3() -> None:
    flags = (*RECIPE, FP8_INPUT, "--ffn-hidden-size", "256")
    sharded = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    one, two = train(1, *flags), train(2, *flags, *sharded)
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
    recipe = (*RECIPE, "--normalization", "LayerNorm")  # of which linears compute none
    found = train(1, *recipe, *flags)
    assert SAID not in found.output
    assert found.losses == train(1, *recipe, *OFF, *flags).losses


@pytest.mark.slow
def test_an_evaluation_in_bf16_computes_megatron_s() -> None:
    flags = (*RECIPE, "--fp4-eval-forward", "bf16")
    found = train(1, *flags)
    assert SAID in found.output and len(found.evaluations) == 2
