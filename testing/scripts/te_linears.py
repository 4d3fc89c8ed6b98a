"""Compares sharded linears of Transformer Engine with one unsharded linear of this package.

Run by torchrun, with sequence parallelism. Transformer Engine follows RECIPE by megatron_fp4.te.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp4 import get_recipe, linear
from megatron_fp4.te import Factory
from testing.builders import te_stand_in
from testing.oracles import normal, relative_error

IN, OUT, TOKENS = 128, 256, 128
RECIPE = get_recipe("tetrajet", backward_rounding="nearest")
ON_GPUS = torch.cuda.is_available()
SUMMED = 4e-3  # a sum over ranks adds terms that were rounded to BF16, and is rounded again


def part(whole: Tensor, axis: int) -> Tensor:
    return whole.chunk(dist.get_world_size(), axis)[dist.get_rank()].contiguous()


def check(mode: str, device: str) -> None:
    """Checks Y, dX and dW of a linear that is sharded over the ranks.

    mode: "column": Y and dW must equal this rank's part of the unsharded linear's, and dX, a sum
    over ranks, must be within SUMMED. "row": the same for dX and dW, and Y is the sum.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import CustomRecipe

    shapes = ((TOKENS, IN), (OUT, IN), (TOKENS, OUT))
    x, w, dy = (normal(s, seed, torch.bfloat16).to(device) for seed, s in enumerate(shapes))
    whole, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(whole, weight, recipe=RECIPE)
    y.backward(dy)
    assert whole.grad is not None and weight.grad is not None
    layer = te.Linear(
        *(IN, OUT),
        bias=False,
        params_dtype=torch.bfloat16,
        device=device,
        sequence_parallel=True,
        parallel_mode=mode,
        tp_size=dist.get_world_size(),
        tp_group=dist.group.WORLD,
    )
    given, sharded, made = (0, 0, 1) if mode == "column" else (1, 1, 0)  # axes of X, W, and Y
    layer.weight.data.copy_(part(w, sharded))
    mine = part(x, given).requires_grad_()
    with te.autocast(enabled=True, recipe=CustomRecipe(Factory(RECIPE))):
        found = layer(mine)
    found.backward(part(dy, made))
    assert mine.grad is not None
    pairs = [(found, part(y, made)), (mine.grad, part(whole.grad, given))]
    exact, summed = pairs if mode == "column" else reversed(pairs)
    assert torch.equal(*exact)
    assert torch.equal(layer.weight.grad, part(weight.grad, sharded))
    assert relative_error(summed[0], summed[1].double()) < SUMMED
    plain = part(w, sharded) if mode == "column" else None
    assert plain is None or not torch.equal(found, x @ plain.t())  # the control: it was quantized


def main() -> None:
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    device = f"cuda:{dist.get_rank()}" if ON_GPUS else "cpu"
    if ON_GPUS:
        torch.cuda.set_device(dist.get_rank())
    with contextlib.nullcontext() if ON_GPUS else te_stand_in.on_a_cpu():
        for mode in ("column", "row"):
            check(mode, device)
    if dist.get_rank() == 0:
        print("both modes agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
