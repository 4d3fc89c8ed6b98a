"""W that comes as the codes of fprop (`Site.sent_w`): the linear never reads W itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import Quantizer, get_recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import WeightCache
from megatron_fp4.linear import quantized_linear
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.memory import held_bytes, saved_bytes, sent_bytes
from megatron_fp4.plan.owned_codes import reader_of_w, times_of, times_of_launch
from megatron_fp4.recipe import GEMMS, GemmRecipe, Phase, Recipe
from megatron_fp4.setting import KeepsW, Setting, holds
from megatron_fp4.target import target_of
from testing.oracles import normal

TOKENS, IN, OUT = 64, 64, 96
TETRAJET = get_recipe("tetrajet")
SIXTEEN = Quantizer(rule="ceil", block=(1, 16))
BLOCKS_OF_16 = replace(TETRAJET, name="sixteen", fprop=GemmRecipe(SIXTEEN, SIXTEEN))
AS_FPROP = replace(TETRAJET, name="as fprop", dgrad=GemmRecipe(TETRAJET.dgrad.a))
HIGH_DGRAD = replace(AS_FPROP, name="high", dgrad=GemmRecipe(), bias_gradient="raw")
RECIPES = [TETRAJET, get_recipe("tetrajet-ema"), BLOCKS_OF_16, AS_FPROP, HIGH_DGRAD]
KEEPS: list[KeepsW | None] = [None, "packed", "decoded", "fprop", "remade"]


def quantized(w: Tensor, recipe: Recipe, average: Tensor) -> QuantizedTensor:
    assert recipe.fprop.b is not None
    return quantize_matrix(w, recipe.fprop.b, axis=1, average=average)


def weights(step: int) -> tuple[Tensor, Tensor]:
    """(W, its average) in a step."""
    w = normal((OUT, IN), step).bfloat16()
    return w, w.float() + 0.3 * normal((OUT, IN), step + 50)


def trained(recipe: Recipe, keeps: KeepsW | None, sends: bool, recomputes: bool) -> list[Tensor]:
    """Y and all gradients of two microbatches in each of three steps."""
    cache, found = WeightCache(), list[Tensor]()
    w, average = weights(0)
    sent = quantized(w, recipe, average) if sends else None
    site = Site("fc1", keeps_w=keeps, average=average, sent_w=sent)
    weight = torch.nn.Parameter(torch.full_like(w, torch.nan) if sends else w.clone())
    for step in range(3):
        w, new_average = weights(step)
        average.copy_(new_average)
        if sent is None:
            weight.data.copy_(w)
        else:
            new = quantized(w, recipe, new_average)
            sent.codes.copy_(new.codes)
            sent.scales.copy_(new.scales)
        for microbatch in range(2):
            held = cache.at(step) if holds(keeps) else None
            call = Call(Key(3, step), microbatch)
            x = normal((TOKENS, IN), 10 * step + microbatch).bfloat16().requires_grad_()

            def run(x: Tensor, call: Call = call, held: Any = held) -> Tensor:
                return quantized_linear(x, weight, None, recipe, site, call, held)

            y = checkpoint(run, x, use_reentrant=True) if recomputes else run(x)
            y.backward(normal((TOKENS, OUT), 100 + microbatch).bfloat16())
            found += [y.detach(), x.grad, weight.grad]  # type: ignore[list-item]
            weight.grad = None
    return found


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("keeps", KEEPS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_bits_are_those_of_a_linear_that_quantizes_w(
    recipe: Recipe, keeps: KeepsW | None
) -> None:
    wanted = trained(recipe, keeps, sends=False, recomputes=False)
    assert equal(trained(recipe, keeps, sends=True, recomputes=False), wanted)
    assert equal(trained(recipe, keeps, sends=True, recomputes=True), wanted)
    assert not any(each.isnan().any() for each in wanted)  # the parameter of the others was NaN


def test_the_codes_of_the_step_before_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(TETRAJET, "packed", sends=False, recomputes=False)
    monkeypatch.setattr(Tensor, "copy_", lambda into, _: into)  # the buffers are not written
    assert not equal(trained(TETRAJET, "packed", sends=True, recomputes=False), wanted)


def test_an_evaluation_reads_the_codes() -> None:
    w, average = weights(1)
    x = normal((TOKENS, IN), 3).bfloat16()
    sent = quantized(w, TETRAJET, average)
    with torch.no_grad():
        wanted = quantized_linear(x, w, None, TETRAJET, Site(), Call())
        found = quantized_linear(x, w * torch.nan, None, TETRAJET, Site(sent_w=sent), Call())
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("keeps", KEEPS, ids=str)
def test_bytes(keeps: KeepsW | None) -> None:
    w, average = weights(1)
    sent, saved, held = quantized(w, TETRAJET, average), list[Tensor](), WeightCache().at(0)
    site = Site(keeps_w=keeps, sent_w=sent)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = normal((TOKENS, IN), 3).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = quantized_linear(
            x, w.requires_grad_(), None, TETRAJET, site, Call(), held if holds(keeps) else None
        )
    y.backward(torch.ones_like(y))
    setting = Setting(
        TOKENS, IN, OUT, torch.bfloat16, target_of(torch.device("cpu")), torch.bfloat16,
        keeps_w=keeps, sent_w=True,
    )  # fmt: skip
    plan = compile_plan(TETRAJET, setting)
    assert saved_bytes(plan) == sum(each.nbytes for each in saved)
    assert sent_bytes(plan) == sent.codes.nbytes + sent.scales.nbytes
    own = {each.data_ptr() for each in (sent.codes, sent.scales)}
    kept = [each for gemm in held.made for each in held.tensors(gemm)]
    assert held_bytes(plan) == sum(each.nbytes for each in kept if each.data_ptr() not in own)


def test_a_nan_in_the_codes_is_seen() -> None:
    w, average = weights(1)
    seen: dict[tuple[str, str], Tensor] = {}

    def observe(gemm: str, letter: str, tally: Tensor) -> None:
        seen[gemm, letter] = tally

    x = normal((TOKENS, IN), 3).bfloat16()
    for scale in (127, 0xFF):
        sent = quantized(w, TETRAJET, average)
        sent.scales[0, 0] = scale
        quantized_linear(x, w, None, TETRAJET, Site(sent_w=sent, observe=observe), Call())
        assert seen["fprop", "w"].tolist() == [0, int(scale == 0xFF)]


STOCHASTIC = Quantizer(rounding="stochastic")
E1M2 = Quantizer(element="e1m2")


def then(late: Recipe) -> Recipe:
    return replace(TETRAJET, phases=(Phase(0.5, late),))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        *((recipe, None) for recipe in RECIPES),
        (TETRAJET.without(GEMMS), "fprop multiplies W in high precision"),
        (get_recipe("mxfp4"), "backward reads the unquantized W"),
        (get_recipe("tetrajet", double_quantization=False), "backward reads the unquantized W"),
        (get_recipe("mxfp4-rht-sr"), "fprop multiplies W in high precision"),
        (get_recipe("dge-occ"), "not E2M1 with an E8M0 scale"),
        (replace(TETRAJET, fprop=GemmRecipe(E1M2, E1M2)), "not E2M1 with an E8M0 scale"),
        (get_recipe("tetrajet-ramping"), "calibrations of Q-Ramping"),
        (replace(TETRAJET, fprop=GemmRecipe(STOCHASTIC, STOCHASTIC)), "stochastically"),
        (replace(TETRAJET, fprop=replace(TETRAJET.fprop, hadamard=Hadamard(32))), "transforms W"),
        (replace(TETRAJET, estimator=get_recipe("dge-occ").estimator), "estimator reads"),
        (replace(TETRAJET, outliers=OutlierClamp(0.9)), "outliers of X"),
        (replace(TETRAJET, outliers=OutlierClamp(0.9, compensate=False)), None),
        (replace(TETRAJET, outliers=HotChannels()), "outliers of X"),
        (replace(TETRAJET, x_mean="subtracted"), "mean of X"),
    ],
)  # fmt: skip
def test_recipes_that_read_w(recipe: Recipe, says: str | None) -> None:
    reader = reader_of_w(recipe)
    assert reader is None if says is None else says in (reader or "")


@pytest.mark.parametrize(
    ("recipe", "times"),
    [
        (TETRAJET, [(0.0, True)]),
        (get_recipe("mxfp4"), [(0.0, False)]),
        (then(TETRAJET.without(("dgrad", "wgrad"))), [(0.0, True)]),
        (then(TETRAJET.without(GEMMS)), [(0.0, True), (0.5, False)]),
        (then(get_recipe("mxfp4")), [(0.0, True), (0.5, False)]),
        (then(get_recipe("tetrajet", rule="floor")), [(0.0, True), (0.5, False)]),  # other codes
        (replace(get_recipe("fp8"), phases=(Phase(0.5, TETRAJET),)), [(0.0, False), (0.5, True)]),
        (
            replace(
                then(get_recipe("fp8")),
                phases=(*then(get_recipe("fp8")).phases, Phase(0.75, TETRAJET)),
            ),
            [(0.0, True), (0.5, False), (0.75, True)],
        ),
        (get_recipe("auto"), [(0.0, True), (0.8, False)]),
    ],
)
def test_when_w_comes_as_codes(recipe: Recipe, times: list[tuple[float, bool]]) -> None:
    assert times_of(recipe) == tuple(times)
    assert times_of_launch([recipe, get_recipe("mxfp4")]) == tuple(times)


def test_the_launch_s_recipe_says_when_unless_it_quantizes_nothing() -> None:
    plain = TETRAJET.without(GEMMS)
    assert times_of_launch([plain, get_recipe("mxfp4"), then(get_recipe("fp8"))]) == (
        (0.0, True),
        (0.5, False),
    )
    assert times_of_launch([get_recipe("mxfp4"), TETRAJET]) == ((0.0, False),)
    assert times_of_launch([plain]) == ((0.0, False),)
