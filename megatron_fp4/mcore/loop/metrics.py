"""Metrics of all FP4 linears of a run (--fp4-metrics-interval).

Each rank counts its parts of operands, weights and gradients. A part that several ranks hold is
counted by the first of them alone. One all-reduce over all ranks then gives the sums of the
unsharded model, which are the same numbers in every layout, up to the order of the sums. The
experts of a layer are counted together, as "local_experts.*".

Two numbers depend on the layout:

- The scales of dY. Megatron divides the loss by the number of a rank's microbatches. With more
  data-parallel ranks this number is smaller, and dY is larger.
- The share of elements that FP8 carriers rounded. A rank's carriers have a window for each row of
  its part, so a row that tensor parallelism shards has several. All ranks that hold a part count
  it, which does not change the share.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.training import training
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.mcore.arguments.steps import steps_of, trains
from megatron_fp4.mcore.launch.fp4_arguments import metrics_folder
from megatron_fp4.mcore.loop.metrics_log import FILE, MetricsLog
from megatron_fp4.mcore.loop.metrics_shares import (
    Samples,
    counted,
    counts,
    gradient_part,
    is_first,
    merged_name,
    sample,
)
from megatron_fp4.mcore.model.attach import Fp4Layer
from megatron_fp4.mcore.model.optimizers import stepping_optimizers
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.metrics import gradients, weights
from megatron_fp4.metrics.lines import decoded, rows_of
from megatron_fp4.metrics.records import PLACES, Record, layer_records
from megatron_fp4.metrics.tally import Tally
from megatron_fp4.metrics.weights import WINDOW
from megatron_fp4.operands import Carriers, Made, Matrix, Operand


def interval(args: argparse.Namespace) -> int:
    """The number of steps from one report to the next; 0: none."""
    if metrics_folder(args) is None or not trains(args):
        return 0
    return int(args.fp4_metrics_interval)


def announcement(args: argparse.Namespace, has_recipe: bool) -> str | None:
    """A line for the user: where metrics go, or that they go nowhere; None without an interval, and
    where the launch does not train."""
    if not (steps := args.fp4_metrics_interval) or not trains(args):
        return None
    if (folder := metrics_folder(args)) is None:
        return (
            "megatron-fp4: --fp4-metrics-interval writes nothing: add --save or --tensorboard-dir"
        )
    if not has_recipe:
        return (
            f"megatron-fp4: steps and evaluations go to {Path(folder, FILE)}; "
            "a recipe adds the metrics of linears"
        )
    ends = "; training ends before the first report" if (steps_of(args) or steps) < steps else ""
    return (
        f"megatron-fp4: metrics every {steps} steps to {Path(folder, FILE)}{ends}; "
        "--fp4-metrics-interval 0 leaves them out"
    )


@dataclass(eq=False)
class _Followed:
    """A linear on this rank.

    layer: the module. row: its place among the layers of the tables.
    owns: whether this rank counts its part of W, which data-parallel ranks have too.
    rows: int64, the rows of W on this rank that are followed from step to step.
    w, quantized: these rows of W, and of Q(W) as fprop multiplied it, in the step `step`.
    """

    layer: Fp4Layer
    row: int
    owns: bool
    rows: Tensor
    w: Tensor | None = None
    quantized: Operand | None = None
    step: int = -1


class Metrics:
    """Collects the metrics of a run; every rank has one."""

    def __init__(self, run: Run, every: int) -> None:
        """every: the number of steps from one report to the next."""
        self._run, self._every = run, every
        self._log = MetricsLog(run)
        self._names: list[str] = []
        self._layers: dict[str, _Followed] = {}
        self._seen: set[Any] = set()  # the operands of the step that were counted
        self._changes = weights.Changes(weights.reports_in_window(every))
        self._samples = Samples()
        run.watch = self

    def install(self) -> None:
        """Hooks into Megatron's log, which all ranks call in every step."""
        training.training_log = self._after_steps(training.training_log)
        training.print_rank_last = self._log.following(training.print_rank_last)

    def follow_model(self, model: list[MegatronModule]) -> None:
        """Takes the linears of the built model. Call it when recipes are attached to them."""
        self._names = list(dict.fromkeys(map(merged_name, self._run.linears)))
        for chunk in model:
            for layer in chunk.modules():
                if isinstance(layer, Fp4Layer) and layer.fp4 is not None:
                    name = layer.fp4.site.name
                    row = self._names.index(merged_name(name))
                    self._layers[name] = _Followed(layer, row, is_first(layer), sample(layer))
        self._clear()

    def follow_optimizer(self, optimizer: MegatronOptimizer) -> None:
        """Reads weights and gradients before the optimizer's step.

        The host is ahead of the GPU then, so that this takes no time of the GPU's. At the end of
        the step the GPU would wait for the host.
        """
        optimizers, upstream = stepping_optimizers(optimizer), optimizer.step

        @functools.wraps(upstream)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._run.is_training:
                self._follow_changes(self._now())
                if self._is_due(self._now()):
                    self._read_gradients(optimizers, optimizer.get_loss_scale())
            return upstream(*args, **kwargs)

        optimizer.step = step

    # --- during a step ----------------------------------------------------------------------------

    def _now(self) -> int:
        """The number of the current step, from 1, as Megatron's log counts."""
        step = self._run.now().step
        assert isinstance(step, int)  # refusals/cuda_graphs.py refuses metrics in graphs
        return step + 1

    def _is_due(self, step: int) -> bool:
        return not self._left(step)

    def _left(self, step: int) -> int:
        """The number of steps from `step` to the next that is reported."""
        return -step % self._every

    def _clear(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layers, of = len(self._names), {"dtype": torch.float64, "device": device}
        self._operands = Tally(layers * len(PLACES), device)
        self._confidences = torch.zeros(layers, weights.CONFIDENCE_WIDTH, **of)  # type: ignore[call-overload]
        self._gradients = torch.zeros(layers, gradients.WIDTH, **of)  # type: ignore[call-overload]
        self._seen.clear()
        self._samples.clear()

    def looks(self, holds_w: bool) -> bool:
        """Whether the pass must run in Python; see `execution.call.Watch.looks`.

        In a step that is reported all operands are seen. In the steps shortly before it only the
        rows of W that are followed are needed, which `held` takes from held operands.
        """
        if not self._run.is_training:
            return False
        left = self._left(self._now())
        return left == 0 or (not holds_w and left <= WINDOW)

    def made(
        self,
        site: Site,
        call: Call,
        operand: OperandPlan,
        matrix: Matrix,
        given: Given,
        made: Made,
    ) -> None:
        """Counts an operand; see `execution.call.Watch`."""
        if not self._run.is_training:
            return
        followed, step, is_w = self._layers[site.name], self._now(), operand.letter == "w"
        if is_w and not followed.owns:
            return
        if is_w and operand.gemm == "fprop" and self._lacks_rows(followed, step):
            assert isinstance(matrix, Tensor)
            _take_rows(followed, matrix, made.operand, step)
        quantized, quantizer = made.operand, operand.quantizer
        if not self._is_due(step) or quantizer is None:
            return
        # A step may be run again, and a forward pass may be recomputed.
        key = (
            site.name,
            operand.gemm,
            operand.letter,
            0 if is_w else (call.microbatch, call.repeat),
        )
        if key in self._seen or not counts(site, operand):
            return
        self._seen.add(key)
        assert isinstance(quantized, QuantizedTensor)
        lines = self._samples.lines(site, call, operand, matrix)
        x, quantized = counted(matrix, operand, given, quantized, lines)
        shared = operand.agrees and quantizer.spans_axis
        add = self._operands.add if lines is None else self._operands.add_rows
        add(_place(followed, operand), x, quantized, 1 / site.sharding.ranks if shared else 1.0)
        if is_w and operand.gemm == "fprop" and quantizer.format.packed:
            self._confidences[followed.row] += weights.confidence_sums(x, quantized)

    def held(self, site: Site, w: Tensor, held: HeldWeight) -> None:
        """Takes the rows of W that are followed; see `execution.call.Watch`."""
        if not self._run.is_training:
            return
        followed, step = self._layers[site.name], self._now()
        if followed.owns and self._lacks_rows(followed, step):
            held.to_python()
            made = held.made.get("fprop")
            _take_rows(followed, w, w if made is None else made.operand, step)

    def _lacks_rows(self, followed: _Followed, step: int) -> bool:
        """Whether the rows of a linear are followed in this step, and were not taken yet."""
        return self._left(step) <= WINDOW and followed.step != step

    def carried(self, site: Site, operand: OperandPlan, carriers: Carriers) -> None:
        """Counts the elements of an operand that FP8 carriers rounded; see `execution.call.Watch`.

        What several ranks hold is counted by each of them, and a forward pass that is recomputed is
        counted again: the share that is reported is the same.
        """
        if self._run.is_training and self._is_due(self._now()):
            place = _place(self._layers[site.name], operand)
            self._operands.add_carriers(place, carriers.tally[0], carriers.values.numel())

    def _follow_changes(self, step: int) -> None:
        """Takes the rows of W and Q(W) that forward passes of this step kept."""
        left, followed = self._left(step), self._owned()
        if left == WINDOW:
            self._changes = weights.Changes()
        if left <= WINDOW and followed and all(each.w is not None for each in followed):
            self._changes.update(
                [each.w for each in followed if each.w is not None],
                decoded([each.quantized for each in followed if each.quantized is not None]),
            )

    def _read_gradients(self, optimizers: list[Any], scale: Tensor) -> None:
        """Reads this rank's parts of the gradients that the optimizers get, before clipping.

        scale: the factor of the loss, by which gradients are divided.
        """
        for followed in self._layers.values():
            weight = followed.layer.weight
            gradient = getattr(weight, "main_grad", weight.grad)
            part = gradient_part(weight, followed.owns, optimizers)
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
        if self._is_due(step):
            self._log.write(self._report(step))
            self._clear()

    def _owned(self) -> list[_Followed]:
        return [each for each in self._layers.values() if each.owns]

    def _report(self, step: int) -> list[Record]:
        """The records of a step, on all ranks."""
        changes, oscillation = self._summed_changes(self._owned())
        of_operands = self._operands.take().view(len(self._names), len(PLACES), -1)
        tables = [of_operands, self._confidences, self._gradients, changes, oscillation]
        flat = torch.cat([table.flatten() for table in tables])
        dist.all_reduce(flat)
        sizes = [table.numel() for table in tables]
        summed = [
            part.view(table.shape).tolist()
            for part, table in zip(flat.cpu().split(sizes), tables, strict=True)
        ]
        found = zip(self._names, *summed, strict=True)
        return [record for layer in found for record in layer_records(step, *layer)]

    def _summed_changes(self, followed: list[_Followed]) -> tuple[Tensor, Tensor]:
        """(changes, oscillation) of this rank, for all layers of the model; see `Changes.take`.

        The changes are of as many steps on every rank, the first of them zeros where fewer were
        seen.
        """
        layers, steps = len(self._names), weights.window(self._every)
        changes = self._gradients.new_zeros(layers, steps, weights.CHANGE_WIDTH)
        oscillation = self._gradients.new_zeros(layers, weights.OSCILLATION_WIDTH)
        if followed and self._changes.follows:
            rows = torch.tensor([each.row for each in followed], device=changes.device)
            of_steps, of_elements = self._changes.take()
            seen = of_steps.shape[1]
            changes[:, steps - seen :].index_add_(0, rows, of_steps)
            oscillation.index_add_(0, rows, of_elements)
        return changes, oscillation


def _place(followed: _Followed, operand: OperandPlan) -> int:
    """The row of the sums of an operand in the table of all operands."""
    return followed.row * len(PLACES) + PLACES.index((operand.gemm, operand.letter))


def _take_rows(followed: _Followed, w: Tensor, quantized: Operand, step: int) -> None:
    """Keeps the rows of the sample as they are in this step."""
    followed.step = step
    followed.w = w.detach()[followed.rows]
    if isinstance(quantized, QuantizedTensor):
        followed.quantized = rows_of(quantized, followed.rows)
    else:
        followed.quantized = followed.w
