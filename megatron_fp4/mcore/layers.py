"""Column- and row-parallel linears whose three GEMMs follow a recipe.

They replace the product inside Megatron's own layers and nothing else: parameters, initialisation,
checkpoints and the reduction of a row-parallel output are upstream's
(megatron/core/tensor_parallel/layers.py, `_forward_impl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_fp4.errors import ConfigError
from megatron_fp4.linear import Call, quantized_linear
from megatron_fp4.mcore.run import Run
from megatron_fp4.philox import GROUP, Placement
from megatron_fp4.quantizer import ReduceMax
from megatron_fp4.replay import Replay


@dataclass
class Fp4State:
    """What a linear needs beyond Megatron's own; `attach` fills it in once the model is built.

    name: the global module name. shards: for each operand that tensor parallelism shards, the
    axis. placements: where the local operands lie, token rows left out.
    """

    name: str
    run: Run
    shards: Mapping[str, int]
    placements: Mapping[str, Placement]
    reduce_max: ReduceMax | None
    replay: Replay = field(default_factory=Replay)

    def in_force(self, training: bool) -> bool:
        """Whether this forward pass follows the recipe; an evaluation may be asked for in BF16."""
        return training or self.run.evaluates_in_fp4

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        """x W^T + bias of a whole microbatch: x [sequence, batch, in] -> [sequence, batch, out]."""
        moment = self.replay.take(self.run.now, training)
        rows = self.run.token_rows(moment, x.shape[0], x.shape[1], x.device)
        placements = dict(self.placements)
        for operand in ("x", "dy"):
            columns = self.placements[operand]
            placements[operand] = Placement(rows, columns.groups, columns.groups_per_row)
        call = Call(
            name=self.name,
            key=self.run.key(moment),
            microbatch=moment.microbatch,
            placements=placements,
            sharded=self.shards,
            reduce_max=self.reduce_max,
            observe=partial(self.run.monitor.observe, self.name),
        )
        return quantized_linear(x, weight, bias, self.run.recipe_at(moment), call)


class Fp4ColumnParallelLinear(ColumnParallelLinear):
    """Y = X W^T with W's rows sharded. Under sequence parallelism X is gathered first."""

    fp4: Fp4State | None = None  # None: this layer stays in high precision

    def attach(self, name: str, run: Run) -> None:
        """Follow `run`'s recipe from now on. Raises ConfigError where it cannot."""
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        # SwiGLU's fc1 holds a part of the gate and a part of the up projection: two ranges.
        ranges = getattr(self.weight, "partition_stride", 1)
        length = self.output_size_per_partition // ranges
        _check(run, name, self.input_size, length)
        starts = [(part * ranks + rank) * length for part in range(ranges)]
        rows = torch.cat([torch.arange(start, start + length) for start in starts])
        rows = rows.to(self.weight.device)
        groups = rows[::GROUP] // GROUP
        self.fp4 = Fp4State(
            name,
            run,
            shards={"w": 0, "dy": 1},
            placements={
                "x": Placement(),
                "w": Placement(rows=rows),
                "dy": Placement(groups=groups, groups_per_row=self.output_size // GROUP),
            },
            reduce_max=_reduce_max(self.tp_group),
        )

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.fp4 is None or not self.fp4.in_force(self.training):
            return super()._forward_impl(input, weight, *args, **kwargs)
        if kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=kwargs["tp_group"]
            )
        elif kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=kwargs["tp_group"])
        return self.fp4.product(input, weight, kwargs["bias"], self.training)


class Fp4RowParallelLinear(RowParallelLinear):
    """Y = X W^T with W's columns sharded; upstream sums the partial outputs over the ranks."""

    fp4: Fp4State | None = None

    def attach(self, name: str, run: Run) -> None:
        """Follow `run`'s recipe from now on. Raises ConfigError where it cannot."""
        length = self.input_size_per_partition
        _check(run, name, length, self.output_size)
        start = self.tp_group.rank() * length // GROUP
        groups = torch.arange(start, start + length // GROUP, device=self.weight.device)
        columns = Placement(groups=groups, groups_per_row=self.input_size // GROUP)
        self.fp4 = Fp4State(
            name,
            run,
            shards={"x": 1, "w": 1},
            placements={"x": columns, "w": columns, "dy": Placement()},
            reduce_max=_reduce_max(self.tp_group),
        )

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.fp4 is None or not self.fp4.in_force(self.training):
            return super()._forward_impl(input, weight, *args, **kwargs)
        return self.fp4.product(input, weight, kwargs["bias"], self.training)


def _check(run: Run, name: str, inputs: int, outputs: int) -> None:
    """Blocks, Hadamard groups and groups of eight must tile the local matrices."""
    run.recipe.check_linear(run.args.micro_batch_size * run.args.seq_length, inputs, outputs, name)
    for size in (inputs, outputs):
        if size % GROUP:
            raise ConfigError(
                f"{name}: {size} features on a rank are not a multiple of {GROUP}, which share a "
                "random draw; choose a hidden size or tensor-parallel size that divides"
            )


def _reduce_max(group: torch.distributed.ProcessGroup) -> ReduceMax | None:
    if group.size() == 1:
        return None
    return partial(_all_reduce_max, group)


def _all_reduce_max(group: torch.distributed.ProcessGroup, amax: Tensor) -> None:
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
