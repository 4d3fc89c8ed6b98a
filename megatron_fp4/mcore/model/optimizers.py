"""The optimizers that Megatron chains, and torch's fused AdamW in them."""

from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.utils import local_multi_tensor_scale
from torch import Tensor

from megatron_fp4.arithmetic.fused_adamw import FusedAdamW


def stepping_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that `optimizer` chains, such as one for experts; without a chain, itself.

    They are the same on all ranks. A stub (`is_stub_optimizer`) is none of them. Megatron makes it
    in place of an optimizer for which no rank has a parameter that is trained. It has no torch
    optimizer, and if it is a DistributedOptimizer no buffers.
    """
    chained = isinstance(optimizer, ChainedOptimizer)
    optimizers = optimizer.chained_optimizers if chained else [optimizer]
    return [each for each in optimizers if not each.is_stub_optimizer]


def main_part_of(optimizer: MegatronOptimizer, weight: Tensor) -> tuple[Tensor, int] | None:
    """(part, start): this rank's part of the FP32 main weight of a weight, for `optimizer`.

    The part begins at element `start` of the weight, flattened. None if this rank updates no part
    by this optimizer. optimizer: one of `stepping_optimizers`. weight: of the model.
    """
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        found = optimizer.model_param_group_index_map.get(weight)
        if found is None:
            return None
        group, order = found
        start = optimizer._get_model_param_range_map(weight)["param"].start
        return groups[group]["params"][order], start
    main = getattr(weight, "main_param", weight)
    is_own = any(main is each for group in groups for each in group["params"])
    return (main, 0) if is_own else None


def clip_in_place() -> None:
    """Makes Megatron clip gradients in place, where it would make a new tensor for each."""
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def fuse(optimizer: MegatronOptimizer) -> None:
    """Puts a FusedAdamW in the place of each torch AdamW in `optimizer`, for weights on a GPU.

    Megatron looks the inner optimizer up at each use. An inner optimizer of another class stays.
    From then on gradients are clipped in place.
    """
    clip_in_place()
    for each in stepping_optimizers(optimizer):
        if type(each.optimizer) is torch.optim.AdamW:
            each.optimizer = FusedAdamW.in_place_of(each.optimizer)


def _scale(chunk_size: int, noop_flag: Any, lists: list[list[Tensor]], scale: float) -> None:
    """Replaces Megatron's `local_multi_tensor_scale`, which makes a new tensor for each product and
    copies it to where it belongs. This makes none where sources are targets, with the same results.
    """
    sources, targets = lists
    if targets and all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        local_multi_tensor_scale(chunk_size, noop_flag, lists, scale)
