"""megatron_fp4.Linear: steps, recomputation, what is saved for backward, errors."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import ConfigError, Linear, Recipe, get_recipe, linear, list_recipes, replay
from megatron_fp4.call import Call
from megatron_fp4.linear import quantized_linear
from megatron_fp4.philox import Key
from tests.oracles import normal

TOKENS, SIZE = 128, 64
ALL = list_recipes()


def layer(recipe: str = "tetrajet", **options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=recipe, seed=5, **options)


def x_and_dy(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal((TOKENS, SIZE), seed), normal((TOKENS, SIZE), seed + 100)


def gradients(module: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def test_it_is_an_nn_linear() -> None:
    module = layer()
    assert isinstance(module, nn.Linear) and "recipe=tetrajet" in repr(module)
    x, _ = x_and_dy()
    expected = linear(x, module.weight, module.bias, recipe="tetrajet", seed=5, step=0)
    assert torch.equal(module(x), expected)
    assert list(module.state_dict()) == ["weight", "bias", "_extra_state"]


def test_each_training_step_has_its_own_number() -> None:
    module, (x, dy) = layer(), x_and_dy()
    found = []
    for step in range(3):
        assert module.steps == step
        module(x).backward(dy)
        found.append(gradients(module)[0])
        weight = module.weight.detach().clone().requires_grad_()
        linear(x, weight, recipe="tetrajet", seed=5, step=step).backward(dy)
        assert torch.equal(found[-1], weight.grad)  # type: ignore[arg-type]
    assert not torch.equal(found[0], found[1])
    module.steps = 1  # resume
    module(x).backward(dy)
    assert torch.equal(gradients(module)[0], found[1])


def test_a_graph_that_would_repeat_noise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "_is_captured", lambda self: True)
    x, _ = x_and_dy()
    with pytest.raises(ConfigError, match="a CUDA graph would repeat step 0"):
        layer("tetrajet")(x)
    layer("tetrajet").eval()(x)
    layer("mxfp4")(x)  # draws nothing
    counted = layer("tetrajet")
    counted.steps = torch.tensor(0)
    counted(x)


@pytest.mark.parametrize("recipe", ALL)
def test_steps_may_be_counted_in_memory(recipe: str) -> None:
    """As CUDA graphs count."""
    plain, counted, (x, dy) = layer(recipe), layer(recipe), x_and_dy()
    counted.steps = torch.tensor(0)
    for step in range(3):
        outputs = [module(x) for module in (plain, counted)]
        assert plain.steps == int(counted.steps) == step + 1
        for y in outputs:  # when the count has gone on
            y.backward(dy)
        assert torch.equal(*outputs)
        assert all(map(torch.equal, gradients(plain), gradients(counted)))


@pytest.mark.parametrize("recipe", ALL)
def test_a_step_in_memory_may_go_on_before_backward(recipe: str) -> None:
    step, (x, dy) = torch.tensor(4), x_and_dy()
    weights = [normal((SIZE, SIZE), 5).requires_grad_() for _ in range(2)]
    steps: list[int | Tensor] = [4, step]
    outputs = [linear(x, w, recipe=recipe, step=s) for w, s in zip(weights, steps, strict=True)]
    step += 1
    for y in outputs:
        y.backward(dy)
    assert torch.equal(*outputs)
    assert torch.equal(*(w.grad for w in weights))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [torch.tensor(1, dtype=torch.int32), torch.tensor([1])])
def test_a_step_in_memory_is_int64(step: Tensor) -> None:
    x, _ = x_and_dy()
    with pytest.raises(ConfigError, match="an int64 tensor"):
        linear(x, normal((SIZE, SIZE), 5), recipe="tetrajet", step=step)
    with pytest.raises(ConfigError, match="its step is on meta and x on cpu"):
        linear(x, normal((SIZE, SIZE), 5), recipe="tetrajet", step=torch.tensor(1, device="meta"))


def test_a_layer_can_be_pickled() -> None:
    module, (x, _) = layer(), x_and_dy()
    module(x)
    again = pickle.loads(pickle.dumps(module))
    assert again.steps == 1 and torch.equal(again(x), module(x))


def test_evaluation_does_not_count() -> None:
    module, (x, _) = layer().eval(), x_and_dy()
    module(x)
    with torch.no_grad():
        module(x)
    assert module.steps == 0


@pytest.mark.parametrize("recipe", ALL)
def test_evaluation_takes_any_number_of_tokens(recipe: str) -> None:
    """wgrad's blocks run along tokens; without gradients there are none."""
    module, (x, _) = layer(recipe).eval(), x_and_dy()
    with torch.no_grad():
        expected = linear(x, module.weight, module.bias, recipe=recipe)[:7]
        torch.testing.assert_close(module(x[:7]), expected, rtol=1e-5, atol=1e-5)


# --- recomputation --------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linears with something between them."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first, self.second = layer(recipe, name="first"), layer(recipe, name="second")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def train(block: Block, forward: Callable[[Tensor], Tensor], overlap: bool) -> list[Tensor]:
    """Gradients of two microbatches and both inputs'; overlap: both forward passes come first."""
    batches = [x_and_dy(1), x_and_dy(2)]
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    if overlap:
        outputs = [forward(x) for x in inputs]
        for y, (_, dy) in zip(outputs, batches, strict=True):
            y.backward(dy)
    else:
        for x, (_, dy) in zip(inputs, batches, strict=True):
            forward(x).backward(dy)
    return gradients(block) + [x.grad for x in inputs]  # type: ignore[misc]


@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "two-in-flight"])
@pytest.mark.parametrize("recipe", ALL)
def test_recomputation_repeats_exactly(recipe: str, overlap: bool) -> None:
    plain, recomputed = Block(recipe), Block(recipe)
    expected = train(plain, plain, overlap)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), overlap)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert recomputed.first.steps == plain.first.steps == 2
    # Next steps go on from there.
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            train(recomputed, recomputed, False), train(plain, plain, False), strict=True
        )
    )


@pytest.mark.parametrize("recipe", ALL)
def test_a_look_without_gradients_is_no_recomputation_s_first_pass(recipe: str) -> None:
    """A probe in training mode is never run again; what is recomputed later gets its own noise."""
    plain, recomputed = Block(recipe), Block(recipe)
    for block in (plain, recomputed):
        with torch.no_grad():
            block(x_and_dy()[0])
    expected = train(plain, plain, False)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_torch_compile_leaves_the_linears_out_of_its_graphs() -> None:
    """Two of them, of other shapes; the result is the one without."""
    for recipe in ALL:
        net = nn.Sequential(
            Linear(64, 128, recipe=recipe, name="a"), nn.GELU(), Linear(128, 64, recipe=recipe)
        )
        x, dy = x_and_dy()
        results = []
        for module in (net, torch.compile(net, backend="eager")):
            for layer in (net[0], net[2]):
                assert isinstance(layer, Linear)
                layer.steps = 0
            module(x).backward(dy)
            results.append(gradients(net))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_recomputation_with_other_noise_is_told_apart() -> None:
    """Negative control: the same check where the recomputed pass counts as a step of its own."""
    plain, recomputed = Block("tetrajet"), Block("tetrajet")

    for module in (recomputed.first, recomputed.second):
        module._replay.take = lambda fresh: fresh()  # type: ignore
    expected = train(plain, plain, False)
    found = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=True), False)
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def apart(block: Block, forward: Callable[[Tensor], Tensor], order: int) -> list[Tensor]:
    """Gradients of two microbatches, each through the block twice, backward in either order, or
    (0) of their sum."""
    inputs = [x_and_dy(i)[0].requires_grad_() for i in (1, 2)]
    losses = [forward(x).square().sum() for x in inputs]
    for loss in losses[::order] if order else [losses[0] + losses[1]]:
        loss.backward()
    return gradients(block) + [x.grad for x in inputs]  # type: ignore[misc]


def repeats(order: int, **options: Any) -> bool:
    """Whether gradients of a recipe that keeps for backward what it drew in forward are those of a
    run that recomputes nothing."""
    plain, block = Block("mxfp4-rht-sr"), Block("mxfp4-rht-sr")
    expected = apart(plain, lambda x: plain(plain(x)), order)
    found = apart(block, lambda x: checkpoint(lambda t: block(block(t)), x, **options), order)
    return equal(found, expected, sums_alike=order != 0)


def equal(found: list[Tensor], expected: list[Tensor], sums_alike: bool) -> bool:
    """Bit for bit; but where checkpoints add up dW's parts in another order, to that rounding."""
    same = torch.equal if sums_alike else partial(torch.allclose, rtol=1e-4, atol=1e-5)
    return all(same(a, b) for a, b in zip(found, expected, strict=True))


ORDERS = pytest.mark.parametrize(
    "order", [1, -1, 0], ids=["first-in-first-out", "last-in-first-out", "one-sum"]
)


@ORDERS
def test_checkpoints_with_reentry_repeat_exactly(order: int) -> None:
    assert repeats(order, use_reentrant=True)


@ORDERS
def test_checkpoints_without_reentry_repeat_exactly(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repeats(order, use_reentrant=False)
    torchs_own = replay._Hook.__base__  # negative control
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_hook", torchs_own)
    with pytest.warns(UserWarning, match="belongs to no checkpoint"):
        assert not repeats(order, use_reentrant=False)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_within_a_checkpoint_repeat_exactly(outer: bool, inner: bool) -> None:
    plain, block = Block("mxfp4-rht-sr"), Block("mxfp4-rht-sr")

    def forward(x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=inner), use_reentrant=inner)

    expected = apart(plain, lambda x: plain(plain(x)), -1)
    found = apart(block, lambda x: checkpoint(forward, x, use_reentrant=outer), -1)
    assert equal(found, expected, sums_alike=not inner)


def test_what_a_checkpoint_took_goes_with_it() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(thing, replay.Checkpoint) for thing in gc.get_objects())

    block, before = Block("tetrajet"), kept()
    for reentrant in (True, False):
        y = checkpoint(block, x_and_dy()[0].requires_grad_(), use_reentrant=reentrant)
        assert kept() == before + 1
        y.sum().backward()
        del y
    assert kept() == before


def test_a_recomputation_that_does_more_is_told() -> None:
    block, calls = Block("tetrajet"), iter([1, 2])

    def uneven(x: Tensor) -> Tensor:
        for _ in range(next(calls)):
            x = block(x)
        return x

    y = checkpoint(uneven, x_and_dy()[0].requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="more often than its first pass"):
        y.sum().backward()


def test_the_recipe_of_a_layer_can_be_changed() -> None:
    module, (x, _) = layer("tetrajet"), x_and_dy()
    module.recipe = "mxfp4"  # type: ignore[assignment]
    assert torch.equal(module(x), layer("mxfp4")(x)) and module.recipe == get_recipe("mxfp4")
    with pytest.raises(ConfigError, match="unknown recipe"):
        module.recipe = "mxfp5"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="not a multiple of 64"):
        Linear(96, 96, recipe="mxfp4").recipe = "mxfp4-rht-sr"  # type: ignore[assignment]
    assert module.recipe == get_recipe("mxfp4")


# --- memory ---------------------------------------------------------------------------------------


def saved_bytes(recipe: Recipe, call: Call, frozen: bool = False) -> float:
    """Bytes an element of X saved for backward beside the weight and what is made of it."""
    x, w = (t.bfloat16() for t in (x_and_dy()[0], normal((SIZE, SIZE), 7)))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != w.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        quantized_linear(x.requires_grad_(), w.requires_grad_(not frozen), None, recipe, call)
    return sum(kept.values()) / x.numel()


def kept() -> Call:
    """W's operands belong to a step, and are none of what a call saves."""
    return Call(weights={})


@pytest.mark.parametrize("name", ["tetrajet", "mxfp4", "mxfp4-rht-sr"])
def test_x_is_saved_as_codes_and_scales_alone(name: str) -> None:
    """4 bits an element, and 8 for each block of 32: .266 of BF16's bytes."""
    assert saved_bytes(get_recipe(name), kept()) == 1 / 2 + 1 / 32


def test_outliers_are_saved_as_values_and_places() -> None:
    """Codes, a scale a token, and 2 (int(.01 x 63) + 2) outliers of 2 + 2 bytes a token."""
    assert saved_bytes(get_recipe("dge-occ"), kept()) == 1 / 2 + 4 / SIZE + 2 * 2 * 4 / SIZE


def test_x_is_saved_in_full_where_asked() -> None:
    """Negative control, and the option: a recipe whose backward quantizes X itself."""
    assert saved_bytes(get_recipe("mxfp4"), Call(weights={}, packs_x=False)) == 2
    assert saved_bytes(get_recipe("mxfp4"), Call(packs_x=False)) == 2  # W itself is kept


def test_a_call_of_its_own_saves_what_it_made_of_w() -> None:
    found = saved_bytes(get_recipe("tetrajet"), Call())
    assert found == (1 / 2 + 1 / 32) * (TOKENS + SIZE) / TOKENS


@pytest.mark.parametrize("name", ALL)
def test_under_a_frozen_weight_nothing_of_x_is_saved(name: str) -> None:
    assert saved_bytes(get_recipe(name), kept(), frozen=True) == 0


@pytest.mark.parametrize("name", ALL)
def test_packing_x_early_changes_no_bit(name: str) -> None:
    (x, dy), w = x_and_dy(), normal((SIZE, SIZE), 7)
    found = []
    for packs in (True, False):
        a, b = (t.clone().requires_grad_() for t in (x, w))
        call = Call(key=Key(5, 3), packs_x=packs)
        quantized_linear(a, b, None, get_recipe(name), call).backward(dy)
        assert a.grad is not None and b.grad is not None
        found.append((a.grad, b.grad))
    assert all(torch.equal(early, late) for early, late in zip(*found, strict=True))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Linear(48, 64, recipe="tetrajet", name="fc"), ["fc", "48", "32"]),
        (lambda: Linear(64, 48, recipe="mxfp4-rht-sr"), ["48", "64"]),
        (lambda: Linear(64, 64, recipe="fp4"), ["fp4", "tetrajet"]),
        (lambda: Linear(64, 64, recipe=None), [  # type: ignore[arg-type]
            "a recipe goes by a name", "None"]),
        (lambda: Linear(64, 64, recipe="tetrajet", seed=2**64), ["seed", "2**64 - 1"]),
        (lambda: layer()(torch.zeros(33, SIZE)), ["33 tokens", "wgrad"]),
        (lambda: linear(torch.zeros(2, 3, SIZE), torch.zeros(SIZE, SIZE, requires_grad=True),
                        recipe="mxfp4"), ["6 tokens"]),
    ],
    ids=["inputs", "outputs", "recipe", "no-recipe", "seed", "tokens", "tokens-of-linear"],
)  # fmt: skip
def test_errors(build: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_nan_shows_in_the_loss() -> None:
    module, (x, _) = layer(), x_and_dy()
    x[3, 5] = float("nan")
    y = module(x)
    assert y[3].isnan().all() and not y[4:].isnan().any()
