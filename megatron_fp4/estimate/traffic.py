"""Bytes that a rank sends in a step, by what they are for.

Bytes are those of ring algorithms, as benchmarks/traffic.py counts them: of a tensor of S bytes,
each of N ranks sends (N - 1) / N S to all-gather or reduce-scatter it, and twice that to all-reduce
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_fp4.arithmetic.messages import FORMS
from megatron_fp4.estimate.layout import Layout, Stage, linears, parameters
from megatron_fp4.estimate.model import LayerLinear, Model, norm_parameters
from megatron_fp4.estimate.plans import comes_as_codes, longest
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import GemmPlan, LinearPlan
from megatron_fp4.plan.memory import operand_bytes, outlier_bytes
from megatron_fp4.recipe import Recipe

Group = Literal["tensor", "data", "expert data", "expert", "pipeline"]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "broadcast"]


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in one group of ranks: the bytes that a rank sends, how often."""

    kind: Kind
    group: Group
    sent: float
    calls: float = 1

    def times(self, factor: float) -> Sent:
        """What is sent if these collectives run `factor` times."""
        return replace(self, sent=self.sent * factor, calls=self.calls * factor)


def gather(part: float, ranks: int, group: Group = "tensor") -> Sent:
    """An all-gather. part: bytes of a rank's part."""
    return Sent("all-gather", group, part * (ranks - 1))


def scatter(size: float, ranks: int, group: Group = "tensor") -> Sent:
    """A reduce-scatter. size: bytes of the whole tensor."""
    return Sent("reduce-scatter", group, size * (ranks - 1) / ranks)


def reduce(size: float, ranks: int, group: Group = "tensor") -> Sent:
    """An all-reduce. size: bytes of the tensor."""
    return Sent("all-reduce", group, 2 * size * (ranks - 1) / ranks)


# --- a linear -------------------------------------------------------------------------------------


def of_forward(plan: LinearPlan) -> list[Sent]:
    """What one linear sends in the forward pass of a microbatch."""
    setting, found = plan.setting, []
    ranks = setting.sharding.ranks
    if ranks == 1:
        return []
    if plan.fprop.a.gathered:
        found.append(gather(_part_bytes(plan.fprop.a), ranks))
        if plan.compensation is not None:
            found.append(gather(outlier_bytes(plan), ranks))
    found += _maxima([plan.fprop.a, *_w_of_a_call(plan.fprop)], ranks)
    if plan.splitting is not None and plan.splitting.takes_total:
        found.append(reduce(8 * setting.inputs, ranks))
    if plan.subtracts_mean and setting.sharding.scattered == "x":
        found.append(reduce(8 * setting.inputs, ranks))
    rows, _ = setting.shape("dy", is_part=False)
    y = rows * setting.outputs * setting.dtype.itemsize
    if setting.sharding.scattered == "dy":
        found.append(scatter(y, ranks))
    elif setting.sharding.x is not None:
        found.append(reduce(y, ranks))  # by Megatron's layer, not by the linear
    return found


def of_backward(plan: LinearPlan) -> list[Sent]:
    """What one linear sends in the backward pass of a microbatch."""
    setting, dgrad, wgrad = plan.setting, plan.dgrad, plan.wgrad
    ranks = setting.sharding.ranks
    if ranks == 1 or dgrad is None or wgrad is None:
        return []
    found = []
    if wgrad.b.gathered:
        found.append(gather(_kept_x(plan), ranks))
        if plan.residual_in_dw:
            found.append(gather(outlier_bytes(plan), ranks))
    if dgrad.a.gathered == "before":
        rows, columns = setting.shape("dy", is_part=True)
        found.append(gather(rows * columns * setting.dtype.itemsize, ranks))
    elif dgrad.a.gathered == "after":
        found += [gather(_part_bytes(gemm.a), ranks) for gemm in (dgrad, wgrad)]
    found += _maxima([dgrad.a, wgrad.a, wgrad.b, *_w_of_a_call(dgrad)], ranks)
    rows, _ = setting.shape("x", is_part=False)
    dx = rows * setting.inputs * setting.dtype.itemsize
    if setting.sharding.scattered == "x":
        found.append(scatter(dx, ranks))
    elif setting.sharding.sums_dx:
        found.append(reduce(dx, ranks))
    if plan.mean_in_dw and setting.sharding.scattered == "dy" and wgrad.a.gathered == "after":
        found.append(reduce(4 * setting.outputs, ranks))
    return found + _sums_of_estimators(plan, ranks)


def _sums_of_estimators(plan: LinearPlan, ranks: int) -> list[Sent]:
    """The all-reduces of estimators whose blocks ranks share: for each block the maximum, and two
    sums unless the maximum gets its own term alone, in float32. Where ranks share an outer scale:
    for each the maximum in float32, and two sums in float64."""
    found = []
    recipe, x, w = plan.recipe, plan.fprop.a, plan.fprop.b
    for estimates, estimator, operand in (
        (plan.estimates_w, recipe.estimator, w),
        (plan.estimates_x, recipe.x_estimator, x),
    ):
        if estimates is None or estimator is None or operand.quantizer is None:
            continue
        rows, quantizer = operand.shape[0], operand.quantizer
        if estimates.takes_ranks:
            blocks = rows if quantizer.block[0] else 1
            found += [reduce(4 * blocks, ranks)]
            found += [reduce(8 * blocks, ranks)] * (estimator.maximum != "absmax")
        if estimates.takes_outer_ranks:
            scales = rows if quantizer.row_max else 1
            found += [reduce(4 * scales, ranks), reduce(16 * scales, ranks)]
    return found


def _kept_x(plan: LinearPlan) -> int:
    """Bytes of what is gathered of X in backward, of this rank's tokens."""
    assert plan.wgrad is not None
    if plan.wgrad.b.gathered == "after":
        return _part_bytes(plan.wgrad.b)
    if plan.saves_x == "operand" and plan.wgrad.b.source != "model":
        return _part_bytes(plan.fprop.a)
    rows, columns = plan.setting.shape("x", is_part=True)
    return rows * columns * plan.setting.dtype.itemsize


def of_held_weight(plan: LinearPlan) -> list[Sent]:
    """What the ranks of one linear send once a step to quantize W: the maxima from which shared
    scales follow. This is where W's operands are held over the step, not made in each call."""
    gemms = [gemm for gemm in (plan.fprop, plan.dgrad) if gemm is not None and gemm.holds_b]
    return [sent for gemm in gemms for sent in _maxima([gemm.b], plan.setting.sharding.ranks)]


def _w_of_a_call(gemm: GemmPlan) -> list[OperandPlan]:
    """W's operand if it is made in each call, else []."""
    return [] if gemm.holds_b else [gemm.b]


def _part_bytes(operand: OperandPlan) -> int:
    """Bytes of a rank's part of an operand that is gathered. Scales that the ranks share are the
    same on all of them, and not sent."""
    return operand_bytes(operand) - 4 * _shared_scales(operand)


def _maxima(operands: list[OperandPlan], ranks: int) -> list[Sent]:
    """The all-reduce of the maxima on which the ranks agree, one float32 for each scale."""
    scales = sum(map(_shared_scales, operands))
    return [reduce(4 * scales, ranks)] if scales else []


def _shared_scales(operand: OperandPlan) -> int:
    """The number of float32 scales of an operand that ranks share: one a row, or of the tensor."""
    if not operand.agrees or operand.quantizer is None:
        return 0
    of_rows = not operand.quantizer.tensor_max and any(operand.quantizer.block)
    return operand.shape[1 - operand.axis] if of_rows else 1


# --- the rest of a microbatch ---------------------------------------------------------------------


def of_embedding(model: Model, layout: Layout) -> list[Sent]:
    """What the embedding sends for a microbatch, forward and backward."""
    if layout.tp == 1:
        return []
    size = 2 * layout.micro_batch * model.sequence * model.hidden
    if layout.sp:
        return [scatter(size, layout.tp), gather(size / layout.tp, layout.tp)]
    return [reduce(size, layout.tp)]


def of_head(model: Model, layout: Layout) -> list[Sent]:
    """What the head and the loss send for a microbatch, forward and backward.

    The loss all-reduces for each token the largest logit, the logit of the label and the sum of
    exponentials, in float32.
    """
    if layout.tp == 1:
        return []
    tokens, ranks = layout.micro_batch * model.sequence, layout.tp
    size = 2 * tokens * model.hidden
    loss = [reduce(4 * tokens, ranks)] * 3
    if not layout.sp:
        return [reduce(size, ranks), *loss]
    return [gather(size / ranks, ranks)] * 2 + [scatter(size, ranks), *loss]


def of_batch(model: Model, layout: Layout, stage: Stage) -> list[Sent]:
    """The batch of a microbatch, which the first tensor-parallel rank reads and broadcasts: the
    first stage's tokens and positions as int64, and the last stage's labels as int64 and loss mask
    as float32. The mean over the ranks."""
    each = (8 + 8 if stage.first else 0) + (8 + 4 if stage.last else 0)
    if layout.tp == 1 or not each:
        return []
    size = layout.micro_batch * model.sequence * each
    return [Sent("broadcast", "tensor", size * (layout.tp - 1) / layout.tp)]


def of_experts(model: Model, layout: Layout) -> list[Sent]:
    """What one layer of experts sends in the forward pass, and as much in the backward pass: the
    tokens to their experts and back."""
    if layout.ep == 1:
        return []
    tokens = layout.micro_batch * model.sequence // (layout.tp if layout.sp else 1)
    size = 2 * tokens * model.top_k * model.hidden
    sent = size * (layout.ep - 1) / layout.ep
    return [Sent("all-to-all", "expert", sent)] * 2


def of_pipeline(model: Model, layout: Layout, stage: Stage) -> list[Sent]:
    """The activations and gradients that a stage sends to its neighbours for a microbatch."""
    if layout.pp == 1:
        return []
    size = 2 * layout.micro_batch * model.sequence * model.hidden
    size //= layout.tp if layout.sp else 1
    # Of its chunks, all but the last of the model send forward, and all but the first backward.
    chunks = 2 * layout.vpp - (1 if stage.first else 0) - (1 if stage.last else 0)
    return [Sent("send", "pipeline", size * chunks, chunks)]


# --- once a step ----------------------------------------------------------------------------------


def of_step(model: Model, layout: Layout, recipe: Recipe, stage: Stage) -> list[Sent]:
    """What a rank sends once a step: sums of gradients, and the updated weights.

    Gradients are summed in float32, or BF16 (`Layout.bf16_gradients`). A distributed optimizer
    reduce-scatters them and all-gathers the weights in BF16, or those of linears as codes and
    scales (`Layout.sent_w`). Gradients in fewer bits (`Layout.gradients`) go to the ranks that sum
    them by an all-to-all, and without a distributed optimizer the sums, in as many bits, to all
    ranks by an all-gather. Scales of blocks that are not full are not counted.
    """
    held, own, found = parameters(model, layout, stage), linears(model, layout, stage), []
    each = layout.main_grad.itemsize
    groups: list[tuple[Group, int, int, int]] = [
        ("data", layout.dp, held.dense, own.dense),
        ("expert data", layout.expert_dp, held.experts, own.experts),
    ]
    for group, ranks, count, of_linears in groups:
        if ranks == 1 or not count:
            continue
        if layout.gradients is not None:
            size = FORMS[layout.gradients].bits / 8 * count
            found.append(Sent("all-to-all", group, size * (ranks - 1) / ranks))
            if not layout.sharded:
                found.append(gather(size / ranks, ranks, group))
        elif layout.sharded:
            found.append(scatter(each * count, ranks, group))
        else:
            found.append(reduce(each * count, ranks, group))
        if layout.sharded:
            weights = 2 * count
            w = longest(recipe).fprop.b
            if w is not None and comes_as_codes(recipe, layout):
                weights += w.nbytes(1, of_linears) - 2 * of_linears
            found.append(gather(weights / ranks, ranks, group))
    if layout.sp:  # the gradients of norms, each rank's of its own tokens
        norms = 2 * len(stage.layers) + stage.last
        found.append(reduce(each * norms * norm_parameters(model), layout.tp))
    return found


def sends_of(linear: LayerLinear, plan: LinearPlan) -> tuple[list[Sent], list[Sent]]:
    """(forward, backward) of one linear; an expert's linear sends nothing itself."""
    return ([], []) if linear.expert else (of_forward(plan), of_backward(plan))


# --- links ----------------------------------------------------------------------------------------


def ranks_of(group: Group, layout: Layout) -> tuple[int, int]:
    """(ranks of a group, ranks of it on one host).

    Megatron numbers ranks by tensor, then data, then pipeline parallelism; expert parallelism takes
    successive ranks of a pipeline stage.
    """
    size, stride = {
        "tensor": (layout.tp, 1),
        "data": (layout.dp, layout.tp),
        "expert": (layout.ep, 1),
        "expert data": (layout.expert_dp, layout.ep),
        "pipeline": (layout.pp, layout.tp * layout.dp),
    }[group]
    return size, max(1, min(size, layout.node // stride))


def network_share(kind: Kind, group: Group, layout: Layout) -> float:
    """The share of a rank's bytes that leave its host, as a mean over the host's ranks.

    A ring through a host with n of the ranks leaves it once in n hops. All-to-all sends as many
    bytes to each rank. Pipeline ranks send to their neighbours.
    """
    size, inside = ranks_of(group, layout)
    if size == inside:
        return 0.0
    if kind == "all-to-all":
        return (size - inside) / (size - 1)
    return 1 / inside
