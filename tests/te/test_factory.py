"""Which recipes and roles the hook takes, and what is made of them; a stand-in for Transformer
Engine has the classes and the GEMM that the hook is about."""

from __future__ import annotations

import pickle
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_fp4.te
from megatron_fp4 import ConfigError, GemmRecipe, Quantizer, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.recipe import GEMMS, Layers, Phase
from megatron_fp4.te import Factory, operand_of
from testing.builders import te_stand_in
from testing.oracles import normal

Role = namedtuple("Role", "module_type tensor_type name", defaults=("linear", "input", ""))
NEAREST = get_recipe("tetrajet", backward_rounding="nearest")
RECIPES = {
    "mxfp4": get_recipe("mxfp4"),
    "tetrajet-nearest": NEAREST,
    "wgrad-alone": Recipe("wgrad-alone", wgrad=GemmRecipe(Quantizer(), Quantizer())),
    "forward-alone": Recipe(
        "forward-alone", fprop=GemmRecipe(Quantizer(), Quantizer()), backward="forward"
    ),
    "square-blocks": Recipe(
        "square-blocks",
        fprop=GemmRecipe(Quantizer(), Quantizer(block=(32, 32))),
        dgrad=GemmRecipe(Quantizer(), Quantizer(block=(32, 32))),
        backward="forward",
    ),
}


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with te_stand_in.stand_in():
        yield


# --- recipes and roles ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp4", "tetrajet"])
def test_a_recipe_by_its_name(name: str) -> None:
    factory = getattr(megatron_fp4.te, name)
    assert factory == Factory(get_recipe(name))
    assert pickle.loads(pickle.dumps(factory)) == factory  # checkpoints may hold it


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("mxfp4_rht_sr", "signs that they share"),
        ("dge_occ", "DGE"),
        ("tetrajet_ema", "keeps an average of W"),
    ],
)
def test_a_recipe_that_the_hook_cannot_express_is_refused_in_one_line(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match="use --fp4-recipe") as caught:
        getattr(megatron_fp4.te, name)
    assert word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (get_recipe("tetrajet"), None),
        (Recipe("late", phases=(Phase(0.5, Recipe("bf16")),)), "course of training"),
        (Recipe("some", layers=(Layers(Recipe("bf16"), last=1),)), "some layers"),
        (Recipe("hot", fprop=GemmRecipe(Quantizer()), outliers=HotChannels()), "outliers"),
        (Recipe("mean", fprop=GemmRecipe(Quantizer()), x_mean="subtracted"), "mean of X"),
        (
            Recipe("nv", fprop=GemmRecipe(Quantizer(scale="e4m3", rule="nearest", tensor_max=448))),
            "x of fprop",
        ),
        (
            Recipe("rows", wgrad=GemmRecipe(Quantizer(scale="fp32", block=(1, 0), rule="absmax"))),
            "dy of wgrad",
        ),
    ],
)
def test_words_that_the_hook_has_no_room_for(recipe: Recipe, word: str | None) -> None:
    if word is None:
        Factory(recipe)
        return
    with pytest.raises(ConfigError, match=word):
        Factory(recipe)


def test_an_unknown_name_lists_the_recipes() -> None:
    with pytest.raises(AttributeError, match="mxfp4_rht_sr, nvfp4_nvidia, quartet_2, tetrajet"):
        megatron_fp4.te.tetrajett  # noqa: B018


@pytest.mark.parametrize(
    ("role", "operand"),
    [
        (Role(tensor_type="input"), "x"),
        (Role(tensor_type="weight"), "w"),
        (Role(tensor_type="grad_output"), "dy"),
        (Role(tensor_type="output"), None),
        (Role(module_type="dpa", tensor_type="qkv"), None),
        (Role(module_type="", tensor_type=""), None),
        (None, None),
    ],
)
def test_roles(role: Any, operand: str | None) -> None:
    assert operand_of(role) == operand
    made = megatron_fp4.te.tetrajet(role)
    assert made is not None
    assert getattr(made, "operand", None) == operand
    assert isinstance(made, te_stand_in.Identity) == (operand is None)


@pytest.mark.parametrize(
    ("role", "word"), [("linear_input", "2.16"), (Role("grouped_linear"), "--moe-grouped-gemm")]
)
def test_roles_that_are_refused(role: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        megatron_fp4.te.mxfp4(role)


def test_overlapped_communication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.module import base

    megatron_fp4.te.mxfp4(Role())  # the control
    monkeypatch.setattr(base, "_ub_communicators", {"qkv_fprop": object()})
    with pytest.raises(ConfigError, match="--tp-comm-overlap"):
        megatron_fp4.te.mxfp4(Role())


def test_without_transformer_engine_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.cpp_extensions import gemm

    monkeypatch.delattr(gemm, "custom_gemm")
    with pytest.raises(ConfigError, match="needs Transformer Engine 2.16 or newer"):
        megatron_fp4.te.mxfp4(Role())


# --- what is multiplied ---------------------------------------------------------------------------


class Pass:
    """One forward and backward pass as Transformer Engine's Linear makes it: what it asks of the
    quantizers, saves, drops, and brings to the GEMM."""

    def __init__(self, recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> None:
        from transformer_engine.pytorch.cpp_extensions import gemm

        self.gemm, self.x, self.dy, self.w = gemm, x, dy, w
        names = ("input", "weight", "grad_output")
        self.quantizers = [Factory(recipe)(Role(tensor_type=name)) for name in names]
        self.weight = self.quantizers[1].quantize(w, dtype=x.dtype)

    def multiply(self, a: Any, b: Any, **kwargs: Any) -> Tensor:
        return self.gemm.custom_gemm(a, b, None, torch.bfloat16, **kwargs)[0]

    def run(self, **wgrad: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(y, dx, dw)"""
        x = self.quantizers[0](self.x)
        self.weight.update_usage(rowwise_usage=True)
        y = self.multiply(self.weight, x)
        x.update_usage(rowwise_usage=False, columnwise_usage=True)
        (x_tensors, x), (w_tensors, w) = (q.prepare_for_saving() for q in (x, self.weight))
        rest = w.restore_from_saved(x.restore_from_saved([*x_tensors, *w_tensors, torch.ones(1)]))
        assert len(rest) == 1
        dy = self.quantizers[2](self.dy.reshape(-1, self.dy.shape[-1]))
        w.update_usage(columnwise_usage=True)
        dx = self.multiply(w, dy, layout="NN", grad=True)
        dw = self.multiply(x, dy, layout="NT", grad=True, **wgrad)
        x.clear()
        return y, dx.view(self.x.shape), dw


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 32, 64), (96, 64), (2, 32, 96))
    x, w, dy = (normal(shape, seed, torch.bfloat16) for seed, shape in enumerate(shapes))
    return x, w, dy


def expected(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(x, w, recipe=recipe)
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("name", RECIPES)
def test_the_products_are_those_of_this_package_s_linear(name: str) -> None:
    made = Pass(RECIPES[name], *tensors())
    for _ in range(2):  # a weight that is kept serves two passes
        for found, right in zip(made.run(), expected(RECIPES[name], *tensors()), strict=True):
            assert found.dtype == right.dtype and torch.equal(found, right)
    other = expected(RECIPES["mxfp4"], *tensors())[2]  # the control
    assert name == "mxfp4" or name == "wgrad-alone" or not torch.equal(made.run()[2], other)


def test_main_grad_is_added_to_without_being_rounded() -> None:
    x, w, dy = tensors()
    made, wide = Pass(NEAREST, x, w, dy), torch.full(w.shape, 3.0)
    dw = made.run(out=wide, accumulate=True)[2]
    assert dw is wide
    x, weight = x.clone(), w.clone().requires_grad_()
    weight.main_grad = torch.full(w.shape, 3.0)  # type: ignore[attr-defined]
    from megatron_fp4.execution.call import Site
    from megatron_fp4.linear import quantized_linear

    quantized_linear(x, weight, None, NEAREST, Site(fuses=True)).backward(dy)
    assert torch.equal(wide, weight.main_grad)  # type: ignore[attr-defined]
    rounded = 3.0 + expected(NEAREST, *tensors())[2].float()
    assert not torch.equal(wide, rounded)  # the control
    made.run(out=wide, accumulate=False)
    assert torch.equal(wide.bfloat16(), expected(NEAREST, *tensors())[2])  # written over


def test_a_weight_made_anew_has_both_copies() -> None:
    made = Pass(NEAREST, *tensors())
    made.quantizers[1].set_usage(columnwise=False)
    kept = made.quantizers[1].quantize(made.w)
    with pytest.raises(RuntimeError, match="w was not quantized along columns"):
        kept.update_usage(columnwise_usage=True)
    made.quantizers[1].update_quantized(2 * made.w, kept)
    made.weight = kept
    found, right = made.run(), expected(NEAREST, made.x, 2 * made.w, made.dy)
    assert all(torch.equal(f, r) for f, r in zip(found, right, strict=True))


def test_random_bits_are_of_one_call_and_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fp4.te import quantizers

    def draws(rank: int, first: int) -> list[Tensor]:
        """dW's operand of X, quantized twice."""
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(quantizers, "_calls", iter(range(first, first + 9)))
        quantizer = megatron_fp4.te.tetrajet(Role())
        return [quantizer(x).columns.codes for _ in range(2)]

    torch.manual_seed(7)
    x = tensors()[0]
    first, second = draws(0, 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draws(1, 0)[0])
    assert torch.equal(first, draws(0, 0)[0]) and torch.equal(second, draws(0, 1)[0])  # control
    torch.manual_seed(8)
    assert not torch.equal(first, draws(0, 0)[0])


@pytest.mark.parametrize(
    ("asked", "word"),
    [({"bias": torch.zeros(96)}, "--disable-bias-linear"), ({"gelu": True}, "GELU")],
)
def test_what_the_gemm_cannot_do_is_refused(asked: dict[str, Any], word: str) -> None:
    made = Pass(NEAREST, *tensors())
    with pytest.raises(ConfigError, match=word):
        made.multiply(made.weight, made.quantizers[0](made.x), **asked)


def test_who_multiplies_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    made = Pass(RECIPES["mxfp4"], *tensors())
    made.run()
    made.run()
    lines = capsys.readouterr().out.splitlines()
    starts = [f"megatron-fp4: recipe mxfp4: {gemm} on bf16; not " for gemm in GEMMS]
    assert len(lines) == 3
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert all("not hopper: " in line for line in lines)


def test_a_gemm_that_was_not_replaced_is_an_error() -> None:
    """Transformer Engine's own would drop the output that it is given."""
    made = Pass(NEAREST, *tensors())
    with pytest.raises(ConfigError, match="would lose main_grad"):
        te_stand_in.custom_gemm(made.weight, made.quantizers[0](made.x), None)
