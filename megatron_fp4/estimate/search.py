"""All layouts of a number of GPUs, in the order of their estimated speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.extrapolation import extrapolated
from megatron_fp4.estimate.fits import GIB, peak, refusals, room
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import Memory
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import check_target
from megatron_fp4.estimate.rates import RATES
from megatron_fp4.estimate.step import Time, step_time
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import KeepsW

_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Fixed:
    """What the user asks for; None leaves it open. See Layout."""

    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    micro_batch: int | None = None
    recompute: bool | None = None
    graphs: bool | None = None


@dataclass(frozen=True)
class Job:
    """What is to be trained: a model with a recipe, on how many GPUs, in what batches.

    given: what follows --fp4-recipe in a launch, such as the path of a file, and flags of options;
        "": the recipe's name.
    node: GPUs of a host. fused_dw, fused_kernels, keeps_w, moments, gradients, bf16_gradients,
        gathers_codes: see Layout.
    """

    model: Model
    recipe: Recipe
    gpu: Gpu
    gpus: int
    node: int
    batch: int
    fused_dw: bool = True
    fused_kernels: bool = True
    moments: Moments = FLOAT32
    keeps_w: KeepsW | None = "packed"
    gradients: str | None = None
    bf16_gradients: bool = False
    gathers_codes: bool = False
    given: str = ""


@dataclass(frozen=True)
class Estimate:
    """A layout with its memory, on the rank that takes most, and the time of a step.

    extrapolated: what of it was never measured.
    """

    layout: Layout
    memory: Memory
    time: Time
    extrapolated: tuple[str, ...]

    def tokens_per_second(self, sequence: int) -> float:
        """Tokens a second of all GPUs."""
        return self.layout.batch * sequence / self.time.total


def search(job: Job, fixed: Fixed) -> list[Estimate]:
    """All layouts that run, the fastest first.

    Raises ConfigError if none does; the message has the most frequent reason.
    """
    check_target(job.recipe, job.gpu.target)
    if job.gpus > job.node and job.gpus % job.node:
        raise ConfigError(
            f"--gpus {job.gpus} is not a multiple of --gpus-per-node {job.node}: change one"
        )
    found, reasons, smallest = [], Counter[str](), float("inf")
    for layout in layouts(job, fixed):
        problem = next(refusals(job.model, layout, job.recipe), None)
        if problem is not None:
            reasons[problem] += _is_asked_for(layout, fixed)
            continue
        needs = peak(job.model, layout, job.recipe, job.gpu)
        if needs.total > room(job.gpu):
            smallest = min(smallest, needs.total)
            continue
        taken = step_time(job.model, layout, job.recipe, job.gpu, RATES)
        notes = extrapolated(job.model, layout, job.recipe, job.gpu)
        found.append(Estimate(layout, needs, taken, notes))
    if not found:
        raise ConfigError(_nothing(job, reasons, smallest))
    return sorted(found, key=lambda each: each.time.total)


def _nothing(job: Job, reasons: Counter[str], smallest: float) -> str:
    if smallest < float("inf"):
        return (
            f"no layout fits: the smallest takes {smallest / GIB:.0f} GiB on a rank, and a "
            f"{job.gpu.name} has room for {room(job.gpu) / GIB:.0f} GiB; use more GPUs, or fix less"
        )
    if not reasons:
        return (
            "no layout is left: SP needs TP 2 or more, VPP needs PP 2 or more, and CUDA graphs do "
            "not go with recomputation; fix less"
        )
    [(problem, _)] = reasons.most_common(1)
    return f"no layout runs: {problem}; change it, or fix less"


def _is_asked_for(layout: Layout, fixed: Fixed) -> bool:
    """Whether the user gave what keeps a layout from dividing the GPUs, if it does not divide them.
    Of all layouts many do not, and that is not why none runs."""
    chosen = (layout.tp if fixed.tp is None else 1) * (layout.pp if fixed.pp is None else 1)
    return chosen == 1 or layout.gpus % (layout.tp * layout.pp) == 0


def layouts(job: Job, fixed: Fixed) -> Iterator[Layout]:
    """All layouts to consider: powers of two for TP, every pipeline that divides the layers."""
    model = job.model
    everything = product(
        _choices(fixed.tp, [tp for tp in (1, 2, 4, 8, 16, 32) if tp <= min(job.node, job.gpus)]),
        _choices(fixed.sp, [False, True]),
        _choices(fixed.pp, _divisors(model.layers, job.gpus)),
        _choices(fixed.vpp, _divisors(model.layers, model.layers)),
        _choices(fixed.ep, _divisors(model.experts, job.gpus) if model.experts else [1]),
        _choices(fixed.micro_batch, [m for m in _MICRO_BATCHES if m <= job.batch]),
        _choices(fixed.recompute, [False, True]),
        _choices(fixed.graphs, [False, True]),
    )
    for tp, sp, pp, vpp, ep, micro_batch, recompute, graphs in everything:
        idle = (sp and tp == 1) or (vpp > 1 and pp == 1) or (graphs and recompute)
        if idle or (model.layers % (pp * vpp) and vpp > 1 and fixed.vpp is None):
            continue  # the same as another layout, or no layout
        whole = job.gpus % (tp * pp) == 0
        yield Layout(
            job.gpus, job.node, tp, sp, pp, vpp, ep, micro_batch, job.batch, recompute,
            sharded=whole and job.gpus // (tp * pp) > 1,
            graphs=graphs,
            fused_dw=job.fused_dw,
            fused_kernels=job.fused_kernels,
            moments=job.moments,
            keeps_w=job.keeps_w,
            gradients=job.gradients,
            bf16_gradients=job.bf16_gradients,
            gathers_codes=job.gathers_codes,
        )  # fmt: skip


def _choices[A](fixed: A | None, otherwise: list[A]) -> list[A]:
    return otherwise if fixed is None else [fixed]


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
