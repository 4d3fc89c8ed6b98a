"""megatron_fp4.Linear: steps, what is saved for backward, errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_fp4
from megatron_fp4 import ConfigError, Linear, Recipe, get_recipe, linear
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import quantized_linear
from testing.builders.small_linear import ALL, SIZE, TOKENS, gradients, layer, x_and_dy
from testing.builders.small_recipes import small_recipe
from testing.oracles import normal


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


def test_a_graph_that_would_repeat_random_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
    chosen = small_recipe(recipe)
    outputs = [linear(x, w, recipe=chosen, step=s) for w, s in zip(weights, steps, strict=True)]
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
        x[0, 0] = 2 * x.abs().max()  # a scale of the whole tensor is then that of its first rows
        expected = linear(x, module.weight, module.bias, recipe=module.recipe)[:7]
        torch.testing.assert_close(module(x[:7]), expected, rtol=1e-5, atol=1e-5)


def test_torch_compile_leaves_the_linears_out_of_its_graphs() -> None:
    """Two of them, of other shapes, with a graph between them; the result is the one without."""
    graphs = list[torch.fx.GraphModule]()

    def taken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for recipe in map(small_recipe, ALL):
        fc1, fc2 = Linear(64, 128, recipe=recipe, name="a"), Linear(128, 64, recipe=recipe)

        def mlp(x: Tensor, fc1: Linear = fc1, fc2: Linear = fc2) -> Tensor:
            return fc2(nn.functional.gelu(fc1(x)))  # type: ignore[no-any-return]

        torch._dynamo.reset()
        graphs.clear()
        x, dy = x_and_dy()
        results = []
        for run in (mlp, torch.compile(mlp, backend=taken)):
            fc1.steps = fc2.steps = 0
            run(x).backward(dy)
            results.append(gradients(fc1) + gradients(fc2))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert len(graphs) == 1


def test_torch_compile_breaks_its_graph_once_at_a_call_of_the_function() -> None:
    """It once traced the checks, and broke in them too."""
    (x, _), w = x_and_dy(), normal((SIZE, SIZE), 7)

    def mlp(x: Tensor) -> Tensor:
        y = nn.functional.gelu(linear(x, w, recipe="tetrajet", name="fc1"))
        return linear(y, w, recipe="tetrajet", name="fc2")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(torch.compile(mlp, backend="eager")(x), mlp(x))
    assert len(torch._dynamo.utils.counters["graph_break"]) == 1


@pytest.mark.parametrize("takes_layer", [True, False], ids=["layer", "function"])
def test_torch_compile_takes_no_fullgraph(takes_layer: bool) -> None:
    """README says that it raises."""
    torch._dynamo.reset()  # what another test compiled of this code would be taken again
    module, (x, _) = layer(), x_and_dy()

    def product(x: Tensor) -> Tensor:
        return linear(x, module.weight, recipe="tetrajet")

    run = torch.compile(module if takes_layer else product, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(x)


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


def saved_bytes(
    recipe: Recipe, held: HeldWeight | None = None, *, packs_x: bool = True, frozen: bool = False
) -> float:
    """Bytes an element of X saved for backward beside the weight and what is made of it."""
    x, w = (t.bfloat16() for t in (x_and_dy()[0], normal((SIZE, SIZE), 7)))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != w.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaves = x.requires_grad_(), w.requires_grad_(not frozen)
        site = Site(keeps_w=None if held is None else "packed", packs_x=packs_x)
        quantized_linear(*leaves, None, recipe, site, held=held)
    return sum(kept.values()) / x.numel()


def kept() -> HeldWeight:
    """W's operands belong to a step, and are none of what a call saves."""
    return HeldWeight()


@pytest.mark.parametrize("name", ["tetrajet", "mxfp4", "mxfp4-rht-sr"])
def test_x_is_saved_as_codes_and_scales_alone(name: str) -> None:
    """4 bits an element, and 8 for each block of 32: .266 of BF16's bytes."""
    assert saved_bytes(get_recipe(name), kept()) == 1 / 2 + 1 / 32


def test_outliers_are_saved_as_values_and_places() -> None:
    """Codes, a scale a token, and 2 (int(.01 x 63) + 2) outliers of 2 + 2 bytes a token."""
    assert saved_bytes(get_recipe("dge-occ"), kept()) == 1 / 2 + 4 / SIZE + 2 * 2 * 4 / SIZE


def test_x_is_saved_in_full_where_asked() -> None:
    """Negative control, and the option: a recipe whose backward quantizes X itself."""
    assert saved_bytes(get_recipe("mxfp4"), kept(), packs_x=False) == 2
    assert saved_bytes(get_recipe("mxfp4"), packs_x=False) == 2  # W itself is kept


def test_a_call_of_its_own_saves_what_it_made_of_w() -> None:
    found = saved_bytes(get_recipe("tetrajet"))
    assert found == (1 / 2 + 1 / 32) * (TOKENS + SIZE) / TOKENS


@pytest.mark.parametrize("name", ALL)
def test_under_a_frozen_weight_nothing_of_x_is_saved(name: str) -> None:
    assert saved_bytes(small_recipe(name), kept(), frozen=True) == 0


@pytest.mark.parametrize("name", ALL)
def test_packing_x_early_changes_no_bit(name: str) -> None:
    (x, dy), w = x_and_dy(), normal((SIZE, SIZE), 7)
    found = []
    for packs in (True, False):
        a, b = (t.clone().requires_grad_() for t in (x, w))
        site, call = Site(packs_x=packs), Call(Key(5, 3))
        quantized_linear(a, b, None, small_recipe(name), site, call).backward(dy)
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
        (lambda: Linear(64, 64, recipe="bf16"), ["'bf16'", "torch.nn.Linear"]),
        (lambda: Linear(64, 64, recipe=None), [  # type: ignore[arg-type]
            "a recipe goes by a name", "None"]),
        (lambda: Linear(64, 64, recipe="tetrajet", seed=2**64), ["seed", "2**64 - 1"]),
        (lambda: layer()(torch.zeros(33, SIZE)), ["33 tokens", "wgrad", "no_grad"]),
        (lambda: linear(torch.zeros(2, 3, SIZE), torch.zeros(SIZE, SIZE, requires_grad=True),
                        recipe="mxfp4"), ["6 tokens"]),
    ],
    ids=["inputs", "outputs", "recipe", "bf16", "no-recipe", "seed", "tokens", "tokens-of-linear"],
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


@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_what_follows_may_change_y_in_place(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    fc1, fc2 = (Linear(64, 64, recipe="mxfp4", name=name) for name in ("fc1", "fc2"))
    found = []
    for inplace in (True, False):
        fc1.zero_grad()
        fc1.steps = fc2.steps = 0
        nn.Sequential(fc1, nn.ReLU(inplace), fc2)(x).square().sum().backward()
        found.append(fc1.weight.grad.clone())  # type: ignore[union-attr]
    assert torch.equal(*found)


def test_a_count_of_steps_is_kept_where_tensors_are_made_without_memory() -> None:
    layer = Linear(64, 32, recipe="mxfp4", name="fc")
    layer.steps = 5
    with torch.device("meta"):
        assert int(layer.state_dict()["_extra_state"]) == 5


def test_a_script_beside_the_package_is_a_caller() -> None:
    """Its name may begin as the package's."""
    name = str(Path(megatron_fp4.__file__).parent) + "_train.py"
    script = compile("from megatron_fp4.caller import warn_caller\nwarn_caller('w')", name, "exec")
    with pytest.warns(UserWarning) as told:
        exec(script, {})
    assert [warning.filename for warning in told] == [name]


def test_a_warning_names_the_caller_s_line(recwarn: pytest.WarningsRecorder) -> None:
    first, second = (Linear(64, 64, recipe="mxfp4-rht-sr", name="twice") for _ in range(2))
    x = torch.randn(64, 64)
    for each in (first, second):
        each(x)
    [told] = [warning for warning in recwarn if "draw the same random bits" in str(warning.message)]
    assert told.filename == __file__


def test_attention_of_pytorch_multiplies_by_out_proj_in_high_precision() -> None:
    """README says so. The control: the same layer, where it is called."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    x, old = torch.randn(2, 32, 64), attention.out_proj
    plain = attention(x, x, x)[0]
    new = Linear(64, 64, recipe="tetrajet", name="out_proj")
    new.load_state_dict(old.state_dict())
    attention.out_proj = new  # type: ignore[assignment]
    assert torch.allclose(attention(x, x, x)[0], plain, atol=1e-5)
    assert not torch.allclose(new(x), old(x), atol=1e-3)
