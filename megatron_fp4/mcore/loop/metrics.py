"""Metrics of all FP4 linears of a run (--fp4-metrics-interval).

Each rank counts and sums over what it holds of operands, weights and gradients. What several ranks
hold is counted by the first of them alone. One all-reduce over all ranks then gives the sums of the
unsharded model: the same numbers in every layout, up to the order of the sums. The experts of a
layer are counted together, as "local_experts.*".

The scales of dY alone depend on the layout: Megatron divides the loss by the number of microbatches
of a rank, and data-parallel ranks have fewer of them.
"""

import argparse
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.training import training
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.mcore.loop.metrics_log import MetricsLog, Record, folder
from megatron_fp4.mcore.model.attach import Fp4Layer
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.metrics import gradients, operands, weights
from megatron_fp4.operands import Made, Operand
from megatron_fp4.plan.data import OperandPlan
from megatron_fp4.recipe import OPERANDS

# An operand of a microbatch with more elements than this is sampled: of its lines across the
# blocked axis, every n-th of the unsharded operand. The cost is then that of launching kernels.
MOST = 2**20
WINDOW = 200  # steps at most over which changes of weights are summed
_PLACES = [(gemm, letter) for gemm, letters in OPERANDS.items() for letter in letters]


def interval(args: argparse.Namespace) -> int:
    """The number of steps from one report to the next; 0: none."""
    return 0 if folder(args) is None else int(args.fp4_metrics_interval)


def advice(args: argparse.Namespace) -> str | None:
    """A line for a launch whose --fp4-metrics-interval has no effect; None for others."""
    if not args.fp4_metrics_interval or folder(args) is not None:
        return None
    return "megatron-fp4: --fp4-metrics-interval writes nothing: add --save or --tensorboard-dir"


@dataclass(eq=False)
class _Followed:
    """A linear on this rank.

    layer: the module. row: its place among the layers of the tables.
    owns: whether this rank counts its part of W, which data-parallel ranks have too.
    rows: int64, the rows of W on this rank that are followed from step to step.
    w, quantized: these rows of W and of Q(W) as fprop multiplied it, in the step `step`.
    """

    layer: Fp4Layer
    row: int
    owns: bool
    rows: Tensor
    w: Tensor | None = None
    quantized: Tensor | None = None
    step: int = -1


class Metrics:
    """Collects the metrics of a run; every rank has one."""

    def __init__(self, run: Run, steps: int) -> None:
        """steps: from one report to the next."""
        self._run, self._steps = run, steps
        self._log = MetricsLog(run)
        self._names: list[str] = []
        self._layers: dict[str, _Followed] = {}
        self._seen: set[Any] = set()  # the operands of the step that were counted
        self._changes = weights.Changes()
        run.watch = self._watch

    def install(self) -> None:
        """Hooks into Megatron's log, which all ranks call in every step."""
        training.training_log = self._after_steps(training.training_log)
        training.print_rank_last = self._log.following(training.print_rank_last)

    def follow_model(self, model: list[MegatronModule]) -> None:
        """Takes the linears of the built model. Call it when recipes are attached to them."""
        self._names = list(dict.fromkeys(map(_merged, self._run.linears)))
        for chunk in model:
            for layer in chunk.modules():
                if isinstance(layer, Fp4Layer) and layer.fp4 is not None:
                    name = layer.fp4.site.name
                    row = self._names.index(_merged(name))
                    self._layers[name] = _Followed(layer, row, _is_first(layer), _sample(layer))
        self._clear()

    def follow_optimizer(self, optimizer: MegatronOptimizer) -> None:
        """Reads the gradients before each step of the optimizer that is reported."""
        chained = isinstance(optimizer, ChainedOptimizer)
        parts = optimizer.chained_optimizers if chained else [optimizer]
        upstream = optimizer.step

        @functools.wraps(upstream)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._is_due(self._now()):
                self._read_gradients(parts, optimizer.get_loss_scale())
            return upstream(*args, **kwargs)

        optimizer.step = step

    # --- during a step ----------------------------------------------------------------------------

    def _now(self) -> int:
        """The number of the current step, from 1, as Megatron's log counts."""
        step = self._run.now().step
        assert isinstance(step, int)  # refusals/cuda_graphs.py refuses metrics in graphs
        return step + 1

    def _is_due(self, step: int) -> bool:
        return step % self._steps == 0

    def _clear(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layers, of = len(self._names), {"dtype": torch.float64, "device": device}
        self._operands = torch.zeros(layers, len(_PLACES), operands.WIDTH, **of)  # type: ignore[call-overload]
        self._confidences = torch.zeros(layers, weights.CONFIDENCE_WIDTH, **of)  # type: ignore[call-overload]
        self._gradients = torch.zeros(layers, gradients.WIDTH, **of)  # type: ignore[call-overload]
        self._seen.clear()

    def _watch(
        self,
        site: Site,
        call: Call,
        operand: OperandPlan,
        matrix: Operand,
        given: Given,
        made: Made,
    ) -> None:
        """Sees each operand when it was made; `execution.call.Watch`."""
        if not self._run.is_training:
            return
        followed, step, is_w = self._layers[site.name], self._now(), operand.letter == "w"
        if is_w and not followed.owns:
            return
        if is_w and operand.gemm == "fprop" and followed.step != step:
            assert isinstance(matrix, Tensor)
            _take_rows(followed, matrix, made.operand)
            followed.step = step
        quantized = made.operand
        if not self._is_due(step) or operand.quantizer is None:
            return
        # A step may be run again, and a forward pass may be recomputed.
        key = (
            site.name,
            operand.gemm,
            operand.letter,
            0 if is_w else (call.microbatch, call.repeat),
        )
        if key in self._seen or not _counts(site, operand):
            return
        self._seen.add(key)
        assert isinstance(quantized, QuantizedTensor)
        x = before_quantizer(matrix, operand, given)
        rows = sampled_rows(site, call, operand, x)
        if rows is not None:
            x, quantized = x.movedim(operand.axis, -1)[rows], operands.rows_of(quantized, rows)
        shared = operand.agrees and operand.quantizer.outer
        sums = operands.operand_sums(x, quantized, 1 / site.sharding.ranks if shared else 1.0)
        place = _PLACES.index((operand.gemm, operand.letter))
        self._operands[followed.row, place] += sums
        if is_w and operand.gemm == "fprop" and operand.quantizer.element == "e2m1":
            self._confidences[followed.row] += weights.confidence_sums(x, quantized)

    def _read_gradients(self, optimizers: list[Any], scale: Tensor) -> None:
        """Reads this rank's parts of the gradients that the optimizers get, before clipping.

        scale: the factor of the loss, by which gradients are divided.
        """
        for followed in self._layers.values():
            weight = followed.layer.weight
            gradient = getattr(weight, "main_grad", weight.grad)
            part = _part(weight, followed.owns, optimizers)
            if gradient is not None and part is not None:
                sums = gradients.gradient_sums(gradient.detach().flatten()[part])
                sums[0] /= scale.double().squeeze().square()
                self._gradients[followed.row] += sums

    # --- at the end of a step ---------------------------------------------------------------------

    def _after_steps(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        # `upstream` is T/training.py:training_log, whose fourth argument is the number of the step.
        @functools.wraps(upstream)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = upstream(*args, **kwargs)
            self._end_step(args[3])
            return result

        return training_log

    def _end_step(self, step: int) -> None:
        self._log.begin()
        left = -step % self._steps
        if left == WINDOW:
            self._changes = weights.Changes()
        followed = [each for each in self._layers.values() if each.owns]
        if left <= WINDOW and followed and all(each.w is not None for each in followed):
            self._changes.update(
                [each.w for each in followed if each.w is not None],
                [each.quantized for each in followed if each.quantized is not None],
            )
        if not left:
            self._log.write(self._report(step, followed))
            self._clear()

    def _report(self, step: int, followed: list[_Followed]) -> list[Record]:
        """The records of a step, on all ranks."""
        changes, oscillation = self._summed_changes(followed)
        tables = [self._operands, self._confidences, self._gradients, changes, oscillation]
        flat = torch.cat([table.flatten() for table in tables])
        dist.all_reduce(flat)
        sizes = [table.numel() for table in tables]
        summed = [
            part.view(table.shape).tolist()
            for part, table in zip(flat.cpu().split(sizes), tables, strict=True)
        ]
        found = zip(self._names, *summed, strict=True)
        return [record for layer in found for record in _records(step, *layer)]

    def _summed_changes(self, followed: list[_Followed]) -> tuple[Tensor, Tensor]:
        """(changes, oscillation) of this rank, for all layers of the model; see `Changes.take`.

        The changes are of min(WINDOW, steps) steps on every rank, the first of them zeros where
        fewer were seen.
        """
        layers, steps = len(self._names), min(WINDOW, self._steps)
        changes = self._operands.new_zeros(layers, steps, weights.CHANGE_WIDTH)
        oscillation = self._operands.new_zeros(layers, weights.OSCILLATION_WIDTH)
        if followed and self._changes.follows:
            rows = torch.tensor([each.row for each in followed], device=changes.device)
            of_steps, of_elements = self._changes.take()
            seen = of_steps.shape[1]
            changes[:, steps - seen :].index_add_(0, rows, of_steps)
            oscillation.index_add_(0, rows, of_elements)
        return changes, oscillation


def _records(
    step: int,
    name: str,
    of_operands: list[list[float]],
    confidence: list[float],
    gradient: list[float],
    changes: list[list[float]],
    oscillation: list[float],
) -> Iterator[Record]:
    """The records of one layer from its sums over all ranks."""
    underflow = None
    for (gemm, letter), sums in zip(_PLACES, of_operands, strict=True):
        if sums[0]:
            metrics = operands.operand_metrics(sums)
            place = {"layer": name, "gemm": gemm, "operand": letter}
            yield {"kind": "operand", "step": step, **place, "metrics": metrics}
            if (gemm, letter) == ("wgrad", "dy"):
                underflow = metrics["underflow"]
    steps = [each for each in changes if any(each)]  # the others were not seen
    changed = weights.change_metrics(steps) | weights.confidence_metrics(confidence)
    if steps and confidence[0]:
        changed |= weights.oscillation_metrics(oscillation)
    elif steps:
        del changed["r_quantized"]  # fprop multiplies W itself
    if changed:
        yield {"kind": "weight", "step": step, "layer": name, "metrics": changed}
    if gradient[1]:
        metrics = gradients.gradient_metrics(gradient, underflow)
        yield {"kind": "gradient", "step": step, "layer": name, "metrics": metrics}


# --- who holds what -------------------------------------------------------------------------------


def _merged(name: str) -> str:
    """The name of a linear, with * for the number of its expert."""
    return re.sub(r"(?<=local_experts\.)\d+", "*", name)


def _is_first(layer: Fp4Layer) -> bool:
    """Whether this is the first of the data-parallel ranks that have this part of the weight."""
    assert layer.fp4 is not None
    expert = layer.fp4.is_expert
    rank = mpu.get_expert_data_parallel_rank() if expert else mpu.get_data_parallel_rank()
    return int(rank) == 0


def _sample(layer: Fp4Layer) -> Tensor:
    """The rows of W on this rank that are in its sample; see `weights.sample_rows`."""
    assert layer.fp4 is not None
    site, device = layer.fp4.site, layer.weight.device
    ranks = site.sharding.ranks if site.sharding.w == 0 else 1
    sample = weights.sample_rows(site.name, len(layer.weight) * ranks)
    place = site.placements["w"].rows
    rows = torch.arange(len(layer.weight)) if place is None else place.cpu()
    return torch.isin(rows, torch.tensor(sample)).nonzero().flatten().to(device)


def _take_rows(followed: _Followed, w: Tensor, quantized: Operand) -> None:
    """Keeps the rows of the sample as they are in this step."""
    followed.w = w.detach()[followed.rows]
    if isinstance(quantized, QuantizedTensor):
        followed.quantized = operands.rows_of(quantized, followed.rows).dequantize()
    else:
        followed.quantized = followed.w


def _part(weight: Tensor, owns: bool, optimizers: list[Any]) -> slice | None:
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


def _counts(site: Site, operand: OperandPlan) -> bool:
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
