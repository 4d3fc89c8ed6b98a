"""Which parts of the unsharded operands, weights and gradients this rank counts for the metrics."""

import re
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.mcore.model.attach import Fp4Layer
from megatron_fp4.metrics import weights
from megatron_fp4.plan.data import OperandPlan

# An operand of a microbatch with more elements than this is sampled: of its lines across the
# blocked axis, every n-th of the unsharded operand. The cost is then that of launching kernels.
MOST = 2**20


def merged_name(name: str) -> str:
    """The name of a linear, with * for the number of its expert."""
    return re.sub(r"(?<=local_experts\.)\d+", "*", name)


def is_first(layer: Fp4Layer) -> bool:
    """Whether this is the first of the data-parallel ranks that have this part of the weight."""
    assert layer.fp4 is not None
    expert = layer.fp4.is_expert
    rank = mpu.get_expert_data_parallel_rank() if expert else mpu.get_data_parallel_rank()
    return int(rank) == 0


def sample(layer: Fp4Layer) -> Tensor:
    """The rows of W on this rank that are in its sample; see `weights.sample_rows`."""
    assert layer.fp4 is not None
    site, device = layer.fp4.site, layer.weight.device
    ranks = site.sharding.ranks if site.sharding.w == 0 else 1
    sample = weights.sample_rows(site.name, len(layer.weight) * ranks)
    place = site.placements["w"].rows
    rows = torch.arange(len(layer.weight)) if place is None else place.cpu()
    return torch.isin(rows, torch.tensor(sample)).nonzero().flatten().to(device)


def gradient_part(weight: Tensor, owns: bool, optimizers: list[Any]) -> slice | None:
    """The part of the flattened gradient that this rank counts; None: no part.

    With the distributed optimizer a rank has the gradient of the part that it updates. owns:
    whether it is the first of the ranks that have the same part of the weight.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            continue
        if any(weight in buffer.param_index_map for buffer in optimizer.buffers):
            place = optimizer.model_param_group_index_map.get(weight)
            if place is None or optimizer.distributed_optimizer_instance_id:
                return None
            owned = optimizer._get_model_param_range_map(weight)["param"]
            return slice(owned.start, owned.end)
    return slice(None) if owns else None


def counts(site: Site, operand: OperandPlan) -> bool:
    """Whether this rank counts the operand: it holds a part of its own, or is the first rank."""
    if site.parallel is None or _is_sharded(site, operand):
        return True
    return dist.get_rank(site.parallel.group) == 0


def _is_sharded(site: Site, operand: OperandPlan) -> bool:
    return operand.is_part or site.sharding.axis(operand.letter) is not None


def sampled_rows(site: Site, call: Call, operand: OperandPlan, x: Tensor) -> Tensor | None:
    """The lines across the blocked axis that are counted, int64; None: all of them.

    x: what is quantized, [rows, columns] as the model holds it.
    """
    assert operand.quantizer is not None
    ranks = site.sharding.ranks if _is_sharded(site, operand) else 1
    stride = -(-x.numel() * ranks // MOST)
    if stride <= 1:
        return None
    place, height = site.placement(operand, call), operand.quantizer.block[0]
    count = x.shape[1 - operand.axis]
    if operand.axis == 1:
        lines = place.rows
    else:
        within = torch.arange(GROUP, device=x.device)
        groups = place.groups
        lines = None if groups is None else (groups[:, None] * GROUP + within).flatten()[:count]
    if lines is None:
        lines = torch.arange(count, device=x.device)
    return (lines // max(height, 1) % stride == 0).nonzero().flatten()
