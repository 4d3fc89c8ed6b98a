"""What the public functions take, and the one line in which they refuse the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from megatron_fp4 import ConfigError, Linear, linear, quantize
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import small_recipe

SIZE = 64
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
X, W, BIAS = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.randn(SIZE)


def product(x: Any = X, weight: Any = W, bias: Any = None, **options: Any) -> Tensor:
    return linear(x, weight, bias, **{"recipe": "tetrajet", "name": "fc", **options})


def codes(x: Any = X, quantizer: Any = "mxfp4-sr", **options: Any) -> Any:
    return quantize(x, quantizer, **options)


def layer(**options: Any) -> Linear:
    return Linear(SIZE, SIZE, recipe="tetrajet", name="fc", **options)


def fake(make: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return make()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", uniform_recipes())
def test_every_floating_dtype_trains_in_itself(name: str, dtype: torch.dtype) -> None:
    module = Linear(SIZE, SIZE, recipe=small_recipe(name), dtype=dtype)
    y = module(X.to(dtype))
    y.sum().backward()
    assert y.dtype == dtype and module.weight.grad is not None
    assert module.weight.grad.dtype == dtype and module.weight.grad.any()
    assert quantize(X.to(dtype), "mxfp4").dequantize().any()


OTHERS = [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Integers once gave integer zeros."""
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=f"fc: x is {name}; convert it to float16"):
        product(X.to(dtype), W.to(dtype))
    with pytest.raises(ConfigError, match=f"fc: bias is {name}"):
        product(bias=BIAS.to(dtype))
    with pytest.raises(ConfigError, match=f"quantize: x is {name}; convert it"):
        quantize(X.to(dtype), "mxfp4")


@pytest.mark.parametrize(
    ("operands", "told"),
    [
        ((X, W.bfloat16()), "x is float32 and weight bfloat16"),
        ((X.bfloat16(), W), "x is bfloat16 and weight float32"),
        ((X, W, BIAS.half()), "x is float32 and bias float16"),
    ],
)
def test_dtypes_that_differ_are_refused_as_by_nn_linear(operands: Any, told: str) -> None:
    with pytest.raises(RuntimeError):
        nn.functional.linear(*operands)
    with pytest.raises(ConfigError, match=f"fc: {told}"):
        product(*operands)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: product(X[:, :32]), r"x is \[..., 64\] under this weight, not \[64, 32\]"),
        (lambda: product(torch.tensor(1.0)), r"x is \[..., 64\] under this weight, not \[\]"),
        (lambda: product(X, W[0]), r"weight is \[out, in\], not \[64\]"),
        (lambda: product(X[:, :0], W[:, :0]), r"weight is \[64, 0\]; give it rows and columns"),
        (lambda: product(X, W[:0]), r"weight is \[0, 64\]; give it rows and columns"),
        (lambda: product(X, W, BIAS[:32]), r"bias is \[64\] under this weight, not \[32\]"),
        (lambda: product(X, W, BIAS[None]), r"bias is \[64\] under this weight, not \[1, 64\]"),
        (lambda: product(X.to("meta")), "x is on meta and weight on cpu"),
        (lambda: product(X, W, BIAS.to("meta")), "x is on cpu and bias on meta"),
        (lambda: product(X.tolist()), "x is a list; give a torch.Tensor"),
        (lambda: product(X.numpy()), "x is a ndarray; give a torch.Tensor"),
        (lambda: product(X.to_sparse()), "x is a sparse_coo tensor"),
        (lambda: product(X, W.to_sparse()), "weight is a sparse_coo tensor"),
        (lambda: product(torch.nested.nested_tensor([X])), "x is a nested tensor"),
        (lambda: product(torch.quantize_per_tensor(X, 1, 0, torch.qint8)), "x is qint8"),
        (lambda: fake(lambda: layer()(torch.randn(64, 64))), "x is a FakeTensor"),
        (lambda: torch.export.export(layer().eval(), (X,)), "x is a FakeTensor"),
        (lambda: torch.jit.trace(layer(), X), "x is being traced by torch.jit"),
        (lambda: torch.jit.script(layer()), "fc: torch.jit.script cannot compile it"),
        (lambda: torch.func.vmap(layer())(X), "x is inside a torch.func transform"),
        (lambda: torch.func.jacrev(layer())(X), "x is inside a torch.func transform"),
        (lambda: product(seed=1.5), "a seed is an integer .*, not 1.5"),
        (lambda: product(step="1"), "a step is an integer .*, not '1'"),
        (lambda: codes(seed="3"), "a seed is an integer .*, not '3'"),
        (lambda: codes(seed=1, axis=1.5), "has no axis 1.5"),
        (lambda: codes(torch.tensor(1.0), seed=1), "a tensor of 0 axes"),
        (lambda: codes(quantizer=None), "unknown quantizer None; known: mxfp4"),
        (lambda: codes(X.to_sparse()), "quantize: x is a sparse_coo tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert layer()(X).isfinite().all()  # and leaves nothing behind


def test_a_second_derivative_is_refused_by_torch() -> None:
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("name", uniform_recipes())
def test_meta_tensors_give_shapes(name: str) -> None:
    module = Linear(SIZE, 2 * SIZE, recipe=small_recipe(name), device="meta")
    y = module(torch.randn(2, SIZE, SIZE, device="meta"))
    y.sum().backward()
    assert y.is_meta and y.shape == (2, SIZE, 2 * SIZE) and module.weight.grad is not None


class Tagged(Tensor):
    """A subclass that keeps its data where every tensor does."""


def test_a_subclass_with_plain_data_is_a_plain_tensor() -> None:
    assert torch.equal(product(X.as_subclass(Tagged)).as_subclass(Tensor), product())


@pytest.mark.parametrize("name", uniform_recipes())
def test_what_inference_mode_leaves_behind_can_be_trained_with(name: str) -> None:
    module, x = Linear(SIZE, SIZE, recipe=small_recipe(name)), X.clone().requires_grad_()
    with torch.inference_mode():
        module.eval()(x)
    module.train()(x).sum().backward()
    assert x.grad is not None and module.weight.grad is not None
