"""The parts of Megatron's optimizers, and torch's fused AdamW in them."""

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_fp4.arithmetic.fused_adamw import FusedAdamW


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that `optimizer` chains, such as one for experts; without a chain, itself.

    They are the same on all ranks. One that has no parameters on this rank is a stub
    (`is_stub_optimizer`), which has no torch optimizer.
    """
    chained = isinstance(optimizer, ChainedOptimizer)
    return list(optimizer.chained_optimizers) if chained else [optimizer]


def stepping_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The parts of `optimizer` that have parameters on this rank, and so a torch optimizer."""
    return [part for part in parts_of(optimizer) if not part.is_stub_optimizer]


def fuse(optimizer: MegatronOptimizer) -> None:
    """Puts a FusedAdamW in the place of each torch AdamW in `optimizer`, for weights on a GPU.

    Megatron looks the inner optimizer up at each use. An inner optimizer of another class stays.
    """
    for part in stepping_parts(optimizer):
        if type(part.optimizer) is torch.optim.AdamW:
            part.optimizer = FusedAdamW.in_place_of(part.optimizer)
