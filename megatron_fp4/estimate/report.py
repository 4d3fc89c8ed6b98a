"""Estimates as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.fits import GIB
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.saved import saved_by_layer, saved_table
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
    saved = saved_table(job.model, best.layout, job.recipe, job.gpu.target)
    lines += [f"  {line}" for line in saved]
    for kind, links in sent(job, best.layout).items():
        each = [f"{size / 1e9:.2f} over {link}" for link, size in links.items() if size]
        lines.append(f"  sent by a rank in a step, GB: {kind}: {', '.join(each)}")
    lines += [f"  extrapolated: {note}" for note in best.extrapolated]
    if not best.extrapolated:
        lines.append("  all of this was measured on H200s (docs/choose-layout.md has the errors)")
    return [*lines, f"  flags: {' '.join(flags(job, best.layout))}"]


def flags(job: Job, layout: Layout) -> list[str]:
    """Megatron's flags for a layout, with the recipe's and those that every estimate assumes."""
    recipe = [] if job.recipe.name == "bf16" else [f"--fp4-recipe {job.given or job.recipe.name}"]
    has_default = job.keeps_w == "packed" or (layout.graphs and job.keeps_w != "remade")
    if recipe and not has_default:
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
        "saved": saved_by_layer(job.model, each.layout, job.recipe, job.gpu.target),
        "sent": sent(job, each.layout),
        "tokens/s": each.tokens_per_second(job.model.sequence),
        "extrapolated": list(each.extrapolated),
        "flags": " ".join(flags(job, each.layout)),
    }
