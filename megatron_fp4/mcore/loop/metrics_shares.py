"""Which parts of the unsharded operands, weights and gradients this rank counts for the metrics."""

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.mcore.model.attach import Fp4Layer
from megatron_fp4.metrics import weights
from megatron_fp4.metrics.lines import lines_of, rows_of
from megatron_fp4.operands import Computed, Matrix

# An operand of a microbatch with more elements than this is sampled: of its lines across the
# blocked axis, every n-th of the unsharded operand. The cost is then that of launching kernels.
MOST = 2**16


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
    whether it is the first of the ranks that have the same part of the weight. optimizers: of
    Megatron's (`stepping_optimizers`).
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


class Samples:
    """Finds the lines that are counted of each operand.

    They are found once for all operands of which they are the same, since this waits for the GPU.
    """

    def __init__(self) -> None:
        # By where the placement of the lines lies in memory: this placement, if there is one, and
        # the lines.
        self._of_tokens: dict[tuple[Any, ...], tuple[Tensor | None, Tensor]] = {}
        self._of_features: dict[tuple[Any, ...], tuple[Tensor | None, Tensor]] = {}

    def clear(self) -> None:
        """Forgets the lines of X and dY, whose tokens differ from step to step."""
        self._of_tokens.clear()

    def lines(self, site: Site, call: Call, operand: OperandPlan, x: Matrix) -> Tensor | None:
        """The lines across the blocked axis that are counted, int64; None: all of them.

        x: what the operand is made of, [rows, columns] as the model holds it.
        """
        assert operand.quantizer is not None
        ranks = site.sharding.ranks if _is_sharded(site, operand) else 1
        stride = -(-math.prod(x.shape) * ranks // MOST)
        if stride <= 1:
            return None
        place, height = site.placement(operand, call), max(operand.quantizer.block[0], 1)
        count = x.shape[1 - operand.axis]
        source = place.rows if operand.axis == 1 else place.groups
        of_tokens = operand.axis == 1 and operand.letter != "w"
        found = self._of_tokens if of_tokens else self._of_features
        memory = () if source is None else (source.data_ptr(), source.stride())
        key = memory, count, height, stride, operand.axis
        if key not in found:
            lines = torch.arange(count, device=x.device) if source is None else source
            if operand.axis == 0 and source is not None:
                within = torch.arange(GROUP, device=x.device)
                lines = (source[:, None] * GROUP + within).flatten()[:count]
            found[key] = source, (lines // height % stride == 0).nonzero().flatten()
        return found[key][1]


def counted(
    matrix: Matrix,
    operand: OperandPlan,
    given: Given,
    quantized: QuantizedTensor,
    lines: Tensor | None,
) -> tuple[Tensor, QuantizedTensor]:
    """(what was quantized, what it became) at the lines that are counted.

    matrix, operand, given: from which `quantized` was made. lines: of `Samples.lines`; None: all.
    """
    if lines is not None:
        matrix = lines_of(matrix, operand.axis, lines)
        operand, quantized = _in_rows(operand), rows_of(quantized, lines)
    elif isinstance(matrix, Computed):
        matrix = matrix.computed()
    return before_quantizer(matrix, operand, given), quantized


@cache
def _in_rows(operand: OperandPlan) -> OperandPlan:
    """The same plan for a matrix of which each row is one of the operand's lines."""
    return replace(operand, axis=1)
