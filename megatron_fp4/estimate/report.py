"""Estimates as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.fits import GIB
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import LayerPlans
from megatron_fp4.estimate.plans import BF16
from megatron_fp4.estimate.search import Estimate, Job
from megatron_fp4.estimate.step import work_of
from megatron_fp4.estimate.traffic import network_share

_HEAD = ("", "TP", "SP", "PP", "VPP", "DP", "EP", "micro-batch", "recompute", "graphs")
_ASSUMED = ("--bf16", "--attention-dropout 0", "--hidden-dropout 0")  # Megatron's default is 0.1


def text(job: Job, found: list[Estimate], most: int) -> str:
    """The best layouts as a table, and the best one in detail."""
    model = job.model
    head = [*_HEAD, "GiB a rank", "ms a step", "tokens/s", "a GPU"]
    rows = [head]
    for number, each in enumerate(found[:most], 1):
        layout, speed = each.layout, each.tokens_per_second(model.sequence)
        rows.append([
            str(number), str(layout.tp), _yes(layout.sp), str(layout.pp), str(layout.vpp),
            str(layout.dp), str(layout.ep), str(layout.micro_batch), _yes(layout.recompute),
            _yes(layout.graphs), f"{each.memory.total / GIB:.1f}", f"{each.time.total * 1e3:.0f}",
            f"{speed:.0f}", f"{speed / job.gpus:.0f}",
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    more = len(found) - most
    lines += [f"and {more} slower layouts that run"] if more > 0 else []
    return "\n".join([*lines, "", "layout 1", *_detail(job, found[0])]) + "\n"


def _yes(answer: bool) -> str:
    return "yes" if answer else "-"


def _detail(job: Job, best: Estimate) -> list[str]:
    memory = [f"{name} {size / GIB:.1f}" for name, size in best.memory._asdict().items() if size]
    time = [f"{name} {s * 1e3:.0f}" for name, s in best.time._asdict().items() if s >= 5e-5]
    lines = [f"  memory of a rank, GiB: {', '.join(memory)}"]
    lines.append(f"  time of a step, ms: {', '.join(time)}")
    lines += _saved(job, best.layout)
    for kind, links in sent(job, best.layout).items():
        each = [f"{size / 1e9:.2f} over {link}" for link, size in links.items() if size]
        lines.append(f"  sent by a rank in a step, GB: {kind}: {', '.join(each)}")
    lines += [f"  extrapolated: {note}" for note in best.extrapolated]
    if not best.extrapolated:
        lines.append("  all of this was measured on H200s (docs/choose-layout.md has the errors)")
    return [*lines, f"  flags: {' '.join(flags(job, best.layout))}"]


def _saved(job: Job, layout: Layout) -> list[str]:
    """What a layer saves, by tensor, as a table; of a model with experts also the other layers."""
    lines = []
    for kind, tensors in saved_by_layer(job, layout).items():
        lines.append(f"  saved by {kind} for the backward pass of a microbatch, MB (in BF16):")
        total = {name: sum(sizes[name] for sizes in tensors.values()) for name in ("own", "bf16")}
        for tensor, sizes in [*tensors.items(), ("all", total)]:
            own, plain = (f"{sizes[name] / 1e6:,.1f}" for name in ("own", "bf16"))
            lines.append(f"    {tensor:<26}{own:>10}{f'({plain})':>12}")
    return lines


def saved_by_layer(job: Job, layout: Layout) -> dict[str, dict[str, dict[str, float]]]:
    """The bytes of each tensor that a layer saves for the backward pass of a microbatch.

    By the kind of layer, "a layer" or "a layer with experts", as far as the model has them; then by
    the name of the tensor; then with the job's recipe ("own") and in BF16 ("bf16").
    """
    model, target = job.model, job.gpu.target
    own, plain = (LayerPlans(model, layout, recipe, target) for recipe in (job.recipe, BF16))
    found = {}
    for kind in sorted({model.has_experts(layer) for layer in range(model.layers)}):
        sizes = own.saved_tensors(kind), plain.saved_tensors(kind)
        found["a layer with experts" if kind else "a layer"] = {
            name: {"own": sizes[0].get(name, 0.0), "bf16": sizes[1].get(name, 0.0)}
            for name in sizes[0] | sizes[1]
        }
    return found


def flags(job: Job, layout: Layout) -> list[str]:
    """Megatron's flags for a layout, with the recipe's and those that every estimate assumes."""
    recipe = [] if job.recipe.name == "bf16" else [f"--fp4-recipe {job.given or job.recipe.name}"]
    if job.keeps_w != "packed" and recipe and not layout.graphs:
        recipe.append(f"--fp4-weight-cache {job.keeps_w or 'off'}")
    recipe += ["--activation-func-fp8-input-store"] * job.model.fp8_input
    return [*recipe, *_ASSUMED, *layout.flags(job.model.experts > 0)]


def sent(job: Job, layout: Layout) -> dict[str, Amounts]:
    """The bytes that a rank sends in a step, by collective and group, over each link. Of pipeline
    stages, that which sends most."""
    every = []
    for work in work_of(job.model, layout, job.recipe, job.gpu):
        mine: dict[str, Amounts] = {}
        micro = [*work.micro.forward.sent, *work.micro.backward.sent]
        for one in [*(each.times(layout.microbatches) for each in micro), *work.sent_once]:
            if one.sent:
                share = network_share(one.kind, one.group, layout)
                links = mine.setdefault(f"{one.group} {one.kind}", Amounts())
                links.add({"NVLink": one.sent * (1 - share), "network": one.sent * share})
        every.append(mine)
    return max(every, key=lambda mine: sum(sum(links.values()) for links in mine.values()))


def as_json(job: Job, found: list[Estimate], most: int) -> dict[str, Any]:
    """The best layouts as JSON: bytes, seconds and flags."""
    return {
        "gpu": job.gpu.name,
        "gpus": job.gpus,
        "recipe": job.recipe.name,
        "model": asdict(job.model),
        "layouts": [_as_json(job, each) for each in found[:most]],
    }


def _as_json(job: Job, each: Estimate) -> dict[str, Any]:
    return {
        "layout": asdict(each.layout) | {"dp": each.layout.dp},
        "memory": each.memory._asdict() | {"total": each.memory.total},
        "seconds": each.time._asdict() | {"total": each.time.total},
        "saved": saved_by_layer(job, each.layout),
        "sent": sent(job, each.layout),
        "tokens/s": each.tokens_per_second(job.model.sequence),
        "extrapolated": list(each.extrapolated),
        "flags": " ".join(flags(job, each.layout)),
    }
