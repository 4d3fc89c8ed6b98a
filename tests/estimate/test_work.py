"""The work of a layer: what its linears compute, draw and convert, and what other kernels do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import LayerPlans
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.estimate.work import Work, of_layer
from megatron_fp4.mcore.data.vocabulary import padded_size
from megatron_fp4.setting import KeepsW

MODEL = Model(1, 4096, 14336, 32, 8, 128, 32000, 4096)
LAYOUT = Layout(1, micro_batch=2, batch=16)
TOKENS = 8192
WEIGHTS = 4096 * (6144 + 4096 + 28672 + 14336)
OUTPUTS = TOKENS * (6144 + 4096 + 28672 + 4096)  # elements of dY of the four linears


def layer(recipe: str, layout: Layout = LAYOUT, model: Model = MODEL) -> Work:
    plans = LayerPlans(model, layout, recipe_named(recipe), MEASURED.target)
    return of_layer(model, layout, plans, False, MEASURED)


def gpu(work: Work) -> Amounts:
    found = Amounts(work.forward.gpu)
    found.add(work.backward.gpu)
    return found


def test_linears_compute_swiglu_and_norms_as_they_quantize() -> None:
    fused, off = layer("tetrajet"), layer("tetrajet", replace(LAYOUT, fused_kernels=False))
    assert gpu(fused)["activation element"] == 0
    assert gpu(fused)["element of SwiGLU's gradient"] == TOKENS * 28672
    assert gpu(fused)["element normed"] == 2 * TOKENS * 4096
    # X of fc2 is made from twice its elements in BF16.
    more = fused.forward.gpu["byte quantized"] - off.forward.gpu["byte quantized"]
    assert more == 2 * TOKENS * 14336
    # Negative control: kernels of their own.
    for unit in ("element normed", "element of SwiGLU's gradient", "activation element"):
        assert gpu(off)[unit] == 0
    assert gpu(off)["activation element, by torch"] == TOKENS * 14336


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "dge-occ"])
def test_a_kernel_computes_the_swiglu_that_no_maker_does(recipe: str) -> None:
    """Each element of its result once forward and once backward."""
    assert gpu(layer(recipe))["activation element"] == TOKENS * 14336
    plain = gpu(layer(recipe, model=replace(MODEL, gated=False)))
    assert plain["activation element"] == 0 < plain["activation element, by torch"]


def test_one_draw_serves_both_operands_of_dy() -> None:
    """Those of W and X are rounded to nearest in `tetrajet`'s forward, and dY in two directions."""
    work = layer("tetrajet").backward.gpu
    x = TOKENS * (4096 + 4096 + 4096 + 14336)
    assert work["element drawn"] == pytest.approx(OUTPUTS + x)
    assert work["element rounded stochastically"] == pytest.approx(2 * OUTPUTS + x)


@pytest.mark.parametrize(
    ("keeps_w", "each", "once"),
    [("packed", 2, 0), ("decoded", 0, 2), ("fprop", 1, 0), (None, 0, 0)],
)
def test_held_codes_are_converted_in_each_microbatch(
    keeps_w: KeepsW | None, each: int, once: int
) -> None:
    """W's operands of fprop and dgrad, but where their converted form is held too."""
    work = layer("tetrajet", replace(LAYOUT, keeps_w=keeps_w))
    assert gpu(work)["element converted"] == each * WEIGHTS
    assert sum(work.once[f"element {how}"] for how in ("converted", "corrected")) == once * WEIGHTS


def test_collectives_of_quantized_linears_are_those_in_cpp() -> None:
    layout = Layout(2, tp=2, sp=True, micro_batch=2, batch=16)
    for recipe, own, other in (
        ("tetrajet", "collective in C++", "collective"),
        ("bf16", "collective", "collective in C++"),
    ):
        work = layer(recipe, layout)
        for part in (work.forward, work.backward):
            assert part.host[own] == sum(sent.calls for sent in part.sent) > 0
            assert part.host[other] == 0


@pytest.mark.parametrize("vocabulary", [32000, 50257, 49152])
@pytest.mark.parametrize("tp", [1, 2, 6, 8])
def test_the_head_is_as_large_as_in_a_launch(vocabulary: int, tp: int) -> None:
    model = replace(MODEL, vocabulary=vocabulary)
    assert model.padded_vocabulary(tp) == padded_size(vocabulary, 128, tp)
