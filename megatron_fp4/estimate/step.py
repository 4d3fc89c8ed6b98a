"""The time of a step: of each pipeline stage, and of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sumprod
from typing import NamedTuple

from megatron_fp4.arithmetic.messages import kind_of
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.layout import Layout, Parameters, Stage, parameters, stages
from megatron_fp4.estimate.memory import LayerPlans, optimizer_bytes
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import by_phases
from megatron_fp4.estimate.rates import Rates, by_torch, seconds, seconds_of
from megatron_fp4.estimate.traffic import (
    Sent,
    network_share,
    of_batch,
    of_held_weight,
    of_pipeline,
    of_step,
    ranks_of,
)
from megatron_fp4.estimate.work import Work, of_ends, of_layer
from megatron_fp4.recipe import Recipe


class Time(NamedTuple):
    """Seconds of a step, on the stage that takes longest.

    gemm, quantize, attention, other, optimizer: of the GPU; quantize includes conversion to FP8,
    and other the work of norms, rotation, activation functions and the loss, and the conversion of
    gradients that are sent in few bits, which memory bounds.
    communication: what is not hidden behind computation. bubble: waiting for other pipeline stages.
    host: what the GPU waits for the host to launch kernels.
    """

    gemm: float
    quantize: float
    attention: float
    other: float
    optimizer: float
    communication: float
    bubble: float
    host: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class StageWork:
    """The work of a stage: of a microbatch, and once a step."""

    stage: Stage
    micro: Work
    once: Amounts
    sent_once: list[Sent]


def work_of(model: Model, layout: Layout, recipe: Recipe, gpu: Gpu) -> list[StageWork]:
    """The work of each pipeline stage, on one of its ranks."""
    plans = LayerPlans(model, layout, recipe, gpu.target)
    layers = {
        kind: of_layer(model, layout, plans, kind, gpu)
        for kind in {model.has_experts(layer) for layer in range(model.layers)}
    }
    found = []
    for stage in stages(model, layout):
        micro = Work()
        for kind, count in Counter(stage.layers).items():
            micro.add(layers[kind], count)
        if layout.recompute:
            micro.backward.add(micro.forward)
        micro.add(of_ends(model, layout, stage.first, stage.last))
        micro.forward.sent += of_batch(model, layout, stage)
        micro.backward.sent += of_pipeline(model, layout, stage)
        once = Amounts(micro.once)
        held = parameters(model, layout, stage)
        for unit, amount in (
            ("parameter", float(held.total)),
            ("parameter updated", optimizer_bytes(held, layout, 1)),
        ):
            once[unit if layout.fused_kernels else by_torch(unit)] += amount
        if layout.gradients is not None:
            once[f"gradient in {kind_of(layout.gradients)}"] += encoded(held, layout)
        sent = of_step(model, layout, recipe, stage)
        for kind, count in Counter(stage.layers).items():
            held_w = (each for _, made, _ in plans.linears(kind) for each in of_held_weight(made))
            sent += [each.times(count) for each in held_w]
        found.append(StageWork(stage, micro, once, sent))
    return found


def encoded(held: Parameters, layout: Layout) -> float:
    """How many numbers a rank encodes in a step that sends gradients in few bits: its gradients,
    and without the distributed optimizer its part of their sums. A single rank encodes nothing.

    held: the parameters on the rank.
    """
    groups = (held.dense, layout.dp), (held.experts, layout.expert_dp)
    sums = 0.0 if layout.sharded else 1.0
    return sum(count * (1.0 + sums / ranks) for count, ranks in groups if ranks > 1)


def step_time(model: Model, layout: Layout, recipe: Recipe, gpu: Gpu, rates: Rates) -> Time:
    """The time of a step. rates: seconds of each unit of work.

    Of a recipe with phases it is the mean of the phases' times, weighted by their shares of
    training.
    """
    if recipe.phases:
        times = [step_time(model, own, each, gpu, rates) for each, own in by_phases(recipe, layout)]
        return Time(*(sumprod(recipe.shares, kind) for kind in zip(*times, strict=True)))
    works = work_of(model, layout, recipe, gpu)
    micro = [_microbatch(work, layout, gpu, rates) for work in works]
    taken = [sum(each.values()) for each in micro]
    slowest = taken.index(max(taken))
    parts = Amounts({kind: layout.microbatches * s for kind, s in micro[slowest].items()})
    parts["bubble"] = bubble(taken, layout.vpp)
    parts.add(_once(works[slowest], layout, gpu, rates))
    busy = sum(parts.values()) - parts["host"] - parts["bubble"]
    parts["host"] += rates.idle.of(layout) * busy
    return Time(**{kind: parts[kind] for kind in Time._fields})


def bubble(stages: list[float], vpp: int) -> float:
    """Seconds of a step in which the slowest stage waits for others: for the first microbatch to
    come to it, and the last to leave. stages: seconds of each for a microbatch. vpp: model chunks
    of a stage, which shorten the wait."""
    return (sum(stages) - max(stages)) / vpp


def _microbatch(work: StageWork, layout: Layout, gpu: Gpu, rates: Rates) -> Amounts:
    """Seconds of a stage for one microbatch, forward and backward, by kind. host: by how much the
    host takes longer to launch the kernels than the GPU to run them."""
    found = Amounts()
    host = 0.0
    for part in (work.micro.forward, work.micro.backward):
        found.add(seconds(part.gpu, gpu, rates.seconds))
        found["communication"] += sent_seconds(part.sent, layout, gpu, rates.seconds)
        host += seconds(part.host, gpu, rates.seconds).get("host", 0.0)
    if not layout.graphs:
        found["host"] += max(0.0, host - sum(found.values()))
    return found


def _once(work: StageWork, layout: Layout, gpu: Gpu, rates: Rates) -> Amounts:
    """Seconds once a step, by kind. Gradients are summed during the last backward pass, and weights
    gathered during the first forward pass; what these do not hide is counted, and at least the
    share that was measured, and the last bucket of gradients."""
    found = seconds(work.once, gpu, rates.seconds)
    for sent in work.sent_once:
        taken = sent_seconds([sent], layout, gpu, rates.seconds)
        if sent.group == "tensor":
            found["communication"] += taken
            continue
        gathers = sent.kind == "all-gather"
        part = work.micro.forward if gathers else work.micro.backward
        hides = sum(seconds(part.gpu, gpu, rates.seconds).values()) if layout.sharded else 0.0
        exposed = max(rates.exposed * taken, taken - hides)
        found["communication"] += exposed
    return found


def sent_seconds(
    sends: Iterable[Sent], layout: Layout, gpu: Gpu, rates: Mapping[str, float]
) -> float:
    """Seconds of collectives, over NVLink on a host and over the network between hosts.

    NVLink and the network work at the same time, so the slower of the two counts. Activations that
    cross to another host do so on every boundary of the slowest stage.
    """
    total = 0.0
    for sent in sends:
        size, inside = ranks_of(sent.group, layout)
        if size == 1:
            continue
        data = sent.group in ("data", "expert data")
        link = "byte of gradients over NVLink" if data else "byte over NVLink"
        share = network_share(sent.kind, sent.group, layout)
        if sent.group == "pipeline":
            share = 1.0 if share else 0.0
        taken = 0.0 if inside == 1 and share else sent.sent * seconds_of(link, gpu, rates)
        if share:
            network = seconds_of("byte over the network", gpu, rates)
            taken = max(taken, sent.sent * share * network)
        total += taken
    return total
