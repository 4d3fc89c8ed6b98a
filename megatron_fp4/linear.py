"""The linear layer.

`linear` is the public function, which checks its arguments. It and the Megatron layers call
`quantized_linear`, which does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.caller import warn_caller
from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.autograd import LinearFunction
from megatron_fp4.execution.call import ALONE, BEFORE, Beside, Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.inputs import autocasts, check_operands, check_tensor, computes_in
from megatron_fp4.operands import Activated
from megatron_fp4.plan.sizes import check_sizes
from megatron_fp4.recipe import GEMMS, Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replicas import own_replica, replica_placements

_ANY_SITE, _ANY_CALL = Site(), Call()


def in_python(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    call: Call,
    held: HeldWeight | None,
    beside: Beside = ALONE,
) -> Any:
    """Y of `quantized_linear`, by the executor in Python; (Y, result) where a SwiGLU follows, see
    `operands.Activated`."""
    grad = torch.is_grad_enabled()
    return LinearFunction.apply(x, weight, bias, recipe, site, call, held, grad, None, beside)


_execute: Callable[..., Any] = in_python


def execute_by(executor: Callable[..., Any]) -> None:
    """Makes `executor` run all linears of this process from now on.

    It takes the arguments of `in_python` and returns the same bits.
    """
    global _execute
    _execute = executor


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site = _ANY_SITE,
    call: Call = _ANY_CALL,
    held: HeldWeight | None = None,
) -> Tensor:
    """Y = X W^T + bias under `recipe`, differentiable in all three.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype. Under
        tensor parallelism these are the rank's shards.
    site: what all calls of this linear have in common. call: seed, step and microbatch.
    held: W's operands, which all calls of one step with the same W share; None shares nothing.
    Under torch.autocast x and weight are cast as nn.functional.linear casts them. torch.compile
    breaks its graph here and runs the linear eagerly. The arguments are not checked.
    """
    product = _out_of_graphs if torch.compiler.is_compiling() else _product
    return product(x, weight, bias, recipe, site, call, held, ALONE)  # type: ignore[no-any-return]


def linear_before_swiglu(
    x: Tensor, weight: Tensor, recipe: Recipe, site: Site, call: Call, held: HeldWeight | None
) -> Activated:
    """The SwiGLU of X W^T, for `linear_after_swiglu`, which computes it.

    The arguments are those of `quantized_linear`; W is [2 n, in]. The gradient of the SwiGLU is
    computed with that of this linear, so that dY need not be in memory.
    """
    product = _out_of_graphs if torch.compiler.is_compiling() else _product
    return Activated(*product(x, weight, None, recipe, site, call, held, BEFORE))


def linear_after_swiglu(
    activated: Activated,
    weight: Tensor,
    recipe: Recipe,
    site: Site,
    call: Call,
    held: HeldWeight | None,
) -> Tensor:
    """Y = X W^T, where X is the SwiGLU of `linear_before_swiglu`, computed as it is quantized.

    The other arguments are those of `quantized_linear`; W is [out, n].
    """
    product = _out_of_graphs if torch.compiler.is_compiling() else _product
    beside = Beside("after", activated.y)
    return product(activated.result, weight, None, recipe, site, call, held, beside)  # type: ignore[no-any-return]


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    call: Call,
    held: HeldWeight | None,
    beside: Beside,
) -> Any:
    if recipe.weight_average is not None and site.average is None:
        site = replace(site, average=weight.detach().float())  # as before the first update
    device = x.device.type
    if autocasts(device):
        x, weight = x.to(computes_in(x)), weight.to(computes_in(weight))
        with torch.autocast(device, enabled=False):
            return _product(x, weight, bias, recipe, site, call, held, beside)
    return _execute(x, weight, bias, recipe, site, call, held, beside)


# torch.compile must not trace the Python state behind a call: random streams, held weights and
# replays. torch.compiler.disable is not used, since it imports the compiler at import time.
_out_of_graphs = torch._disable_dynamo(_product)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str,
    seed: int = 0,
    step: int | Tensor = 0,
    name: str = "linear",
    replica: int | None = None,
    average: Tensor | None = None,
) -> Tensor:
    """Y = X W^T + bias with the three GEMMs (fprop, dgrad, wgrad) in the recipe's precision.

    x: [..., in]; weight: [out, in]; bias: [out] or None; plain tensors on one device and, outside
        torch.autocast, in one dtype: float16, bfloat16, float32 or float64. Returns [..., out] in
        that dtype.
    recipe: a Recipe or anything `get_recipe` takes.
    seed, step, name: the key of the random bits. Each linear of a model needs its own name, and
        each training step its own number. A step that is an int64 tensor [] on x's device is read
        again at each replay of a CUDA graph; an integer step is captured as a constant. Where
        activations are recomputed it must not change before the backward pass.
    replica: the index of this process among the data-parallel replicas, from 0. Replicas round X
        and dY with different random bits, so that their rounding errors average out. None: the
        rank in torch.distributed's default group, or 0 without one. Pass it where ranks of that
        group hold the same tokens.
    average: float32 [out, in], the moving average towards which the recipe rounds W (Q-EMA). None:
        the weight itself, as before the first update. Other recipes take none.
    torch.compile breaks its graph here: the linear runs between two compiled graphs, and under
    fullgraph=True the compiler raises. It compiles the call anew for each name, and warns beyond
    its limit of 8: `Linear` has no such limit.
    Raises ConfigError for unsupported tensors or shapes that do not fit, for an axis that is not a
    multiple of its block or Hadamard group, and for an invalid seed, step or replica.
    Warns of a recipe with `Recipe.ramping`, `Recipe.phases` or `Recipe.layers`; see
    `warn_of_training`.
    """
    if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true under torch.export as well
        return _linear_out_of_graphs(  # type: ignore[no-any-return]
            x, weight, bias,
            recipe=recipe, seed=seed, step=step, name=name, replica=replica, average=average,
        )  # fmt: skip
    if not isinstance(recipe, Recipe):
        recipe = get_recipe(recipe)
    if recipe.ramping is not None or not recipe.is_uniform:
        warn_of_training(recipe)
    check_operands(x, weight, bias, name)
    tokens, differentiates = math.prod(x.shape[:-1]), torch.is_grad_enabled()
    needed = True, differentiates and x.requires_grad, differentiates and weight.requires_grad
    gemms = tuple(itertools.compress(GEMMS, needed))
    check_sizes(recipe, tokens, weight.shape[1], weight.shape[0], name, gemms)
    if isinstance(step, Tensor):
        if step.device != x.device:
            raise ConfigError(f"{name}: its step is on {step.device} and x on {x.device}: move it")
        step = step.clone()  # backward reads it too, and by then the caller may have increased it
    replica = own_replica() if replica is None else replica
    call = Call(Key(seed, step), replica)
    site = _site(name, replica)
    if average is not None:
        _check_average(average, weight, recipe, name)
        site = replace(site, average=average)
    return _product(x, weight, bias, recipe, site, call, None, ALONE)  # type: ignore[no-any-return]


# torch.compile must not trace the checks, which would break its graph in two more places.
# torch.compiler.disable would import the compiler with this module.
_linear_out_of_graphs = torch._disable_dynamo(linear)


def warn_of_training(recipe: Recipe) -> None:
    """Warns of the parts of a recipe that a linear outside Megatron leaves out.

    These are ramping, which the optimizer would do, phases, for which the linear would have to know
    how far training is, and recipes of some layers, for which it would have to know its layer. Each
    warning names the line of the caller's code.
    """
    if recipe.ramping is not None:
        warn_caller(
            f"recipe {recipe.name} updates weights at periods of their own, which Megatron's "
            "optimizers do here and a linear cannot: it multiplies as without ramping",
        )
    if recipe.phases:
        warn_caller(
            f"recipe {recipe.name} has phases, but a linear outside Megatron does not know how far "
            "training is, and uses the first recipe: give it recipe.at(progress)",
        )
    if recipe.layers:
        warn_caller(
            f"recipe {recipe.name} has layers with recipes of their own, but a linear outside "
            "Megatron does not know its layer, and uses the recipe of the others: give it its own",
        )


def _check_average(average: Tensor, weight: Tensor, recipe: Recipe, name: str) -> None:
    """Raises ConfigError unless the recipe reads such an average of such a weight."""
    if recipe.weight_average is None:
        raise ConfigError(f"{name}: recipe {recipe.name} reads no average of W: leave it out")
    check_tensor(average, f"{name}: average")
    same = average.shape == weight.shape and average.device == weight.device
    if not same or average.dtype != torch.float32:
        raise ConfigError(
            f"{name}: an average is float32 {list(weight.shape)} on {weight.device}, not "
            f"{average.dtype} {list(average.shape)} on {average.device}"
        )


@lru_cache(4096)
def _site(name: str, replica: int) -> Site:
    return Site(name, replica_placements(replica))
