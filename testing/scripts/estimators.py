"""Checks on two ranks that estimators give a sharded linear the gradients of the whole one.

torchrun --nproc-per-node 2 testing/scripts/estimators.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer
from megatron_fp4.arithmetic.estimators import ONE_RANK, Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.estimate.traffic import of_backward
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.linear import quantized_linear
from megatron_fp4.makers import estimator as maker
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.setting import Setting, Sharding, column_parallel, row_parallel
from megatron_fp4.target import target_of
from testing.oracles import normal, relative_error
from testing.patching import patched

TOKENS, IN, OUT = 64, 128, 64
SHARDINGS = {
    "column": column_parallel(2, sums_dx=True),
    "column, sequence": column_parallel(2, sequence_parallel=True),
    "row": row_parallel(2),
    "row, sequence": row_parallel(2, sequence_parallel=True),
}
VECTOR, NVFP4 = get_quantizer("vector"), get_quantizer("nvfp4")
QUANTIZERS = {
    "blocks": Quantizer(rule="ceil"),
    "tensor scale": NVFP4,  # which ranks share, while no block is spread over ranks
    "rows": VECTOR,
    "tensor": replace(VECTOR, block=(0, 0)),
}
# The scales of these span what a sharding spreads over ranks: features in a row-parallel linear for
# rows, and for the tensor W's rows and, under sequence parallelism, X's tokens too.
SPREAD = {
    ("rows", "row"), ("rows", "row, sequence"), ("tensor", "column"),
    ("tensor", "column, sequence"), ("tensor", "row"), ("tensor", "row, sequence"),
}  # fmt: skip
ESTIMATORS = (
    Estimator(form="sigmoid", maximum="vjp"),
    Estimator(form="spline", maximum="softmax"),
    Estimator(maximum="absmax"),
)
# Quantizers with an outer scale, and the shardings that spread it over ranks.
OUTER = {
    "tensor scale": (NVFP4, set(SHARDINGS)),
    "row scales": (replace(NVFP4, tensor_max=0.0, row_max=448.0), {"row", "row, sequence"}),
}
THROUGH_OUTER = (
    Estimator(form="straight-through", outer_scale="vjp"),
    Estimator(form="sigmoid", maximum="softmax", outer_scale="vjp"),
)


def main() -> None:
    gloo.use_one_worker()
    dist.init_process_group("gloo")
    for name, quantizer in QUANTIZERS.items():
        for e in ESTIMATORS:
            for backward in ("raw", "forward"):
                recipe = recipe_of(quantizer, e, backward)
                for sharding, each in SHARDINGS.items():
                    found = differs(recipe, each)
                    assert found < 1e-12, (name, e, backward, sharding, found)
    for e in ESTIMATORS:
        recipe = recipe_of(QUANTIZERS["blocks"], e, "raw")
        turned = replace(recipe, fprop=replace(recipe.fprop, hadamard=Hadamard(32)))
        for sharding, each in SHARDINGS.items():
            assert differs(turned, each) < 1e-12, (e, sharding)
    # The known mistake: each rank sums its part of a block alone.
    for name, sharding in sorted(SPREAD):
        recipe = recipe_of(QUANTIZERS[name], ESTIMATORS[0], "raw")
        with patched(Backward, "_ranks", lambda self: ONE_RANK):
            assert differs(recipe, SHARDINGS[sharding]) > 1e-6, (name, sharding)
    # Another: blocks of one rank are summed over the ranks because these share a tensor scale.
    recipe = replace(recipe_of(NVFP4, ESTIMATORS[0], "raw"), name="summed")  # of another plan
    with patched(maker, "_is_spread", lambda operand, setting: True):
        assert differs(recipe, SHARDINGS["row"]) > 1e-6
    check_outer_scales()
    check_what_is_sent()
    dist.destroy_process_group()


def check_outer_scales() -> None:
    for name, (quantizer, spread) in OUTER.items():
        for e in THROUGH_OUTER:
            for sharding, each in SHARDINGS.items():
                recipe = recipe_of(quantizer, e, "raw")
                found = differs(recipe, each)
                assert found < 1e-12, (name, e, sharding, found)
                # The known mistake: each rank sums what it has of the tensor or row alone.
                with patched(Backward, "_ranks", lambda self: ONE_RANK):
                    found = differs(recipe, each)
                    assert (found > 1e-6) == (sharding in spread), (name, e, sharding, found)


def recipe_of(quantizer: Quantizer, e: Estimator, backward: Any) -> Recipe:
    both = GemmRecipe(quantizer, quantizer)
    return Recipe("estimated", fprop=both, backward=backward, estimator=e, x_estimator=e)


def differs(recipe: Recipe, sharding: Sharding) -> float:
    """How much the gradients differ from those of one process, on the rank where they do most."""
    shapes = (TOKENS, IN), (OUT, IN), (TOKENS, OUT)
    x, w, dy = (normal(shape, i, torch.float64) for i, shape in enumerate(shapes))
    x[:, 3] *= 9
    w[5] *= 7
    whole_dx, whole_dw = gradients(recipe, Site(), x, w, dy)
    assert dist.group.WORLD is not None
    site = Site(parallel=TensorParallel(dist.group.WORLD, sharding))
    rank = dist.get_rank()
    tokens = {letter: sharding.scattered == letter for letter in ("x", "dy")}

    def part(matrix: Tensor, letter: str) -> Tensor:
        axis = 0 if tokens.get(letter) else sharding.axis(letter)
        return matrix if axis is None else matrix.chunk(2, axis)[rank].contiguous()

    dx, dw = gradients(recipe, site, part(x, "x"), part(w, "w"), part(dy, "dy"))
    errors = (relative_error(dx, part(whole_dx, "x")), relative_error(dw, part(whole_dw, "w")))
    most = torch.tensor(max(errors))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def check_what_is_sent() -> None:
    """Checks that the all-reduces of a row-parallel linear's backward pass are those that
    `choose_layout` counts."""
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    x, w, dy = normal((TOKENS, IN // 2), 1), normal((OUT, IN // 2), 2), normal((TOKENS, OUT), 3)
    x, w = x.requires_grad_(), w.requires_grad_()
    assert dist.group.WORLD is not None
    sharding = SHARDINGS["row"]
    site = Site(parallel=TensorParallel(dist.group.WORLD, sharding))
    lengths = {e: (4 if e.maximum == "absmax" else 12) * (TOKENS + OUT) for e in ESTIMATORS}
    cases = [(VECTOR, e, length) for e, length in lengths.items()]
    # A maximum in float32, and two sums in float64.
    cases += [(NVFP4, THROUGH_OUTER[0], 2 * (4 + 16))]
    cases += [(OUTER["row scales"][0], THROUGH_OUTER[0], (4 + 16) * (TOKENS + OUT))]
    for quantizer, e, length in cases:
        recipe = recipe_of(quantizer, e, "raw")
        y = quantized_linear(x, w, None, recipe, site)
        sent.clear()
        with patched(dist, "all_reduce", counting):
            y.backward(dy)
        setting = Setting(
            TOKENS, IN // 2, OUT, torch.float32, target_of(x.device), torch.float32, sharding
        )
        counted = sum(one.sent for one in of_backward(compile_plan(recipe, setting)))
        assert counted == sum(sent) == length, e


def gradients(
    recipe: Recipe, site: Site, x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    quantized_linear(*leaves, None, recipe, site).backward(dy)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return leaves[0].grad, leaves[1].grad


if __name__ == "__main__":
    main()
