"""Checks on two ranks that a sharded linear sums X over tokens as the whole one does, for its mean
and to choose its hot channels.

torchrun --nproc-per-node 2 testing/scripts/token_sums.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer
from megatron_fp4.arithmetic.hot_channels import HotChannels, Outliers
from megatron_fp4.arithmetic.token_mean import mean_of, token_sums
from megatron_fp4.estimate.traffic import of_backward, of_forward
from megatron_fp4.execution import forward
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.linear import quantized_linear
from megatron_fp4.makers.outliers import Splitting
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import GemmPlan, LinearPlan
from megatron_fp4.setting import Setting, Sharding, column_parallel, row_parallel
from megatron_fp4.target import target_of
from testing.oracles import normal, relative_error
from testing.patching import patched

TOKENS, IN, OUT = 128, 128, 64
COLUMN, ROW = "column, sequence", "row, sequence"
SHARDINGS = {
    "column": column_parallel(2, sums_dx=True),
    COLUMN: column_parallel(2, sequence_parallel=True),
    "row": row_parallel(2),
    ROW: row_parallel(2, sequence_parallel=True),
}
BLOCKS = Quantizer(rule="ceil")
BOTH = GemmRecipe(BLOCKS, BLOCKS)
VECTOR = get_quantizer("vector")
MEAN = Recipe("mean", fprop=BOTH, dgrad=BOTH, wgrad=BOTH, x_mean="subtracted")
HOT = replace(MEAN, name="hot", x_mean="kept", outliers=HotChannels(32, 2), backward="forward")
RECIPES = (
    MEAN,
    replace(MEAN, name="forward", backward="forward"),
    replace(MEAN, name="rows", fprop=GemmRecipe(VECTOR, VECTOR), backward="forward"),
    replace(MEAN, name="wgrad alone", fprop=GemmRecipe()),
    replace(MEAN, name="wgrad of a gathered dY", dgrad=GemmRecipe()),
    replace(MEAN, name="fprop alone", wgrad=GemmRecipe(), dgrad=GemmRecipe()),
    HOT,
    replace(HOT, name="hot, raw", backward="raw"),
    replace(HOT, name="hot, fprop alone", wgrad=GemmRecipe(), dgrad=GemmRecipe()),
)


def main() -> None:
    gloo.use_one_worker()
    dist.init_process_group("gloo")
    for recipe in RECIPES:
        for name, sharding in SHARDINGS.items():
            assert (found := differs(recipe, sharding)) < 1e-12, (recipe.name, name, found)
    for name, sharding in SHARDINGS.items():
        check_bits(sharding)
        # The known mistakes: the mean of the rank's own tokens, and the sum of its own dY.
        with patched(forward, "_mean", own_mean):
            found = differs(replace(MEAN, name=f"own mean, {name}"), sharding)
            assert (found > 1e-3) == (name == COLUMN), (name, found)
        with patched(Backward, "_with_mean", with_own_sum):
            found = differs(replace(MEAN, name=f"own sum, {name}"), sharding)
            assert (found > 1e-3) == (name == ROW), (name, found)
        # The known mistake: hot channels of the rank's own tokens.
        with patched(forward, "_split", own_split):
            found = differs(replace(HOT, name=f"own channels, {name}"), sharding)
            assert (found > 1e-3) == (name == COLUMN), (name, found)
        for recipe in (MEAN, HOT):
            check_what_is_sent(recipe, sharding)
    dist.destroy_process_group()


def own_mean(x: Tensor, plan: LinearPlan, site: Site) -> Tensor:
    return mean_of(token_sums(x), len(x), x.dtype)


def own_split(x: Tensor, splitting: Splitting, site: Site) -> tuple[Tensor, Outliers]:
    return splitting.split(x)


def with_own_sum(self: Backward, wgrad: GemmPlan, dw: Tensor, mean: Tensor) -> Tensor:
    return dw.addr_(self._dy(wgrad).sum(0, dtype=dw.dtype), mean.to(dw.dtype))


def problem(dtype: torch.dtype) -> list[Tensor]:
    """X with a strong mean, which is not that of a half of the tokens, and channels whose norms
    differ between its halves; W; dY."""
    shapes = (TOKENS, IN), (OUT, IN), (TOKENS, OUT)
    x, w, dy = (normal(shape, i, torch.float64) for i, shape in enumerate(shapes))
    x[TOKENS // 2 :] *= normal((IN,), 6, torch.float64).exp()
    x += 5 * normal((IN,), 7, torch.float64)
    x[: TOKENS // 2] += 2
    dy[: TOKENS // 2] += 1
    return [each.to(dtype) for each in (x, w, dy)]


def differs(recipe: Recipe, sharding: Sharding) -> float:
    """How much Y and the gradients differ from those of one process, on the rank where they do
    most."""
    x, w, dy = problem(torch.float64)
    whole = results(recipe, Site(), x, w, dy)
    site, rank = sharded(sharding), dist.get_rank()
    tokens = {letter: sharding.scattered == letter for letter in ("x", "dy")}

    def part(matrix: Tensor, letter: str) -> Tensor:
        axis = 0 if tokens.get(letter) else sharding.axis(letter)
        return matrix if axis is None else matrix.chunk(2, axis)[rank].contiguous()

    y, dx, dw = results(recipe, site, part(x, "x"), part(w, "w"), part(dy, "dy"))
    if sharding.x is not None and sharding.scattered is None:
        dist.all_reduce(y)  # by Megatron's layer
    errors = (
        relative_error(y, part(whole[0], "dy")),
        relative_error(dx, part(whole[1], "x")),
        relative_error(dw, part(whole[2], "w")),
    )
    most = torch.tensor(max(errors))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def check_bits(sharding: Sharding) -> None:
    """Checks that ranks compute the mean that one process computes, bit for bit."""
    x, _, _ = problem(torch.bfloat16)
    wanted = mean_of(token_sums(x), TOKENS, x.dtype)
    rank, axis = dist.get_rank(), 0 if sharding.scattered == "x" else sharding.x
    own = x if axis is None else x.chunk(2, axis)[rank]
    plan = plan_of(MEAN, sharding, torch.bfloat16)
    found = forward._mean(own, plan, sharded(sharding))
    assert torch.equal(found, wanted if axis != 1 else wanted.chunk(2)[rank])


def check_what_is_sent(recipe: Recipe, sharding: Sharding) -> None:
    """Checks that the linear all-reduces the bytes that `choose_layout` counts."""
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    plan = plan_of(recipe, sharding, torch.float32)
    shapes = (
        plan.setting.shape("x", is_part=sharding.scattered == "x"),
        (plan.setting.outputs, plan.setting.inputs),
        plan.setting.shape("dy", is_part=sharding.scattered == "dy"),
    )
    matrices = [normal(shape, i) for i, shape in enumerate(shapes)]
    with patched(dist, "all_reduce", counting):
        results(recipe, sharded(sharding), *matrices)
    counted = [one for one in (*of_forward(plan), *of_backward(plan)) if one.kind == "all-reduce"]
    if sharding.scattered is None and sharding.x is not None:
        counted.pop(0)  # of Y, by Megatron's layer
    assert sum(one.sent for one in counted) == sum(sent), (counted, sent)
    sums_dy = sharding.scattered == "dy" and recipe.x_mean == "subtracted"
    assert bool(sent) == (sharding.scattered == "x" or sums_dy or sharding.sums_dx)


def plan_of(recipe: Recipe, sharding: Sharding, dtype: torch.dtype) -> LinearPlan:
    """The plan for this rank's part of the problem."""
    tokens = TOKENS // (1 if sharding.scattered is None else 2)
    inputs, outputs = IN // (1 if sharding.x is None else 2), OUT // (2 if sharding.w == 0 else 1)
    target = target_of(torch.device("cpu"))
    return compile_plan(recipe, Setting(tokens, inputs, outputs, dtype, target, dtype, sharding))


def sharded(sharding: Sharding) -> Site:
    assert dist.group.WORLD is not None
    return Site(parallel=TensorParallel(dist.group.WORLD, sharding))


def results(recipe: Recipe, site: Site, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Y, dX and dW."""
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = quantized_linear(*leaves, None, recipe, site)
    y.backward(dy)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return [y.detach(), leaves[0].grad, leaves[1].grad]


if __name__ == "__main__":
    main()
