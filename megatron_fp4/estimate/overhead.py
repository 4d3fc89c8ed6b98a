"""The time of a linear by its costs: of the products alone, and beside a linear in BF16.

It is a roofline of sums: bytes at the rate at which quantize kernels move them, multiply-adds and
random words at the rates of their units, one after the other. The rates are those of rates.py. On
an H200 they are measured. On any other GPU they are scaled by data sheets, and not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.costs import FP32, Cost, costs, moved
from megatron_fp4.estimate.gpus import GPUS, MEASURED, Gpu
from megatron_fp4.estimate.plans import BF16, check_target
from megatron_fp4.estimate.rates import RATES, seconds
from megatron_fp4.estimate.work import of_linear, operand_of, precision_here, product
from megatron_fp4.makers import PYTORCH
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import operand_bytes
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import UNSHARDED, Setting, Sharding

# The GPU of each generation, by the name that the design space has for it.
DEVICES = {"hopper": MEASURED, "blackwell": GPUS["b200"]}
# What `work.of_linear` leaves out, where a kernel makes the operand.
_NOT_IN_WORK = ("row scales", "gain of 1", "average")


@dataclass(frozen=True)
class Overhead:
    """Estimated seconds of one linear, forward and backward, on one rank.

    total: of all that is done in one call, W's operands that are held over a step included.
    products: of its three GEMMs alone. bf16: of the same linear in BF16. once: of the part of
    `total` that is done once a step.
    """

    total: float
    products: float
    bf16: float
    once: float

    @property
    def times_bf16(self) -> float:
        """The time as a multiple of BF16's."""
        return self.total / self.bf16

    @property
    def times_products(self) -> float:
        """The time as a multiple of the products' alone."""
        return self.total / self.products


def setting_of(
    gpu: Gpu, inputs: int, outputs: int, tokens: int, sharding: Sharding = UNSHARDED
) -> Setting:
    """The setting of a linear of a BF16 model with dW in float32, whose W is quantized in each
    call. inputs, outputs, tokens: on a rank."""
    dtype = torch.bfloat16
    return Setting(
        tokens, inputs, outputs, dtype, gpu.target, dtype, sharding, main_grad=torch.float32
    )


def plan_of(recipe: Recipe, setting: Setting, gpu: Gpu) -> LinearPlan:
    """The plan of a linear on a GPU, which need not be here. Raises ConfigError without Triton."""
    check_target(recipe, gpu.target)
    return compile_plan(recipe, replace(setting, target=gpu.target))


def with_kernels(recipe: Recipe, setting: Setting, gpu: Gpu) -> Overhead:
    """What the recipe needs, if each of its techniques had a kernel; see costs.py.

    The update of state beside the weight is not in it: the optimizer runs it.
    """
    plan, plain = plan_of(recipe, setting, gpu), plan_of(BF16, replace(setting, keeps_w=None), gpu)
    each = [cost for cost in costs(plan, gpu) if cost.technique != "state beside the weight"]
    return Overhead(
        _seconds(each, gpu),
        _seconds([cost for cost in each if cost.technique == "product"], gpu),
        _seconds(costs(plain, gpu), gpu),
        _seconds([cost for cost in each if cost.once], gpu),
    )


def as_it_runs(recipe: Recipe, setting: Setting, gpu: Gpu) -> Overhead:
    """The same with the kernels and multipliers of today. What no kernel makes or transforms, plain
    PyTorch does, and products that no multiplier runs in FP4 or FP8 run in BF16 or float32.

    PyTorch's time is that of one measured quantizer, whose operands were neither transformed nor
    rounded stochastically: with these it takes longer.
    """
    plan, plain = plan_of(recipe, setting, gpu), plan_of(BF16, replace(setting, keeps_w=None), gpu)
    work, found = of_linear(plan, gpu), Amounts()
    for amounts in (work.forward.gpu, work.backward.gpu, work.once):
        found.add(amounts)
    for cost in costs(plan, gpu):
        if not _is_in_work(plan, cost):
            found.add(cost.work)
    for amounts in (*_decoded(plan), *_finished(plan), *_estimated(plan)):
        found.add(amounts)
    products = Amounts()
    for gemm in plan.gemms:
        products.add(product(gemm, gpu, precision_here(gemm)))
    return Overhead(
        time_of(found, gpu), time_of(products, gpu), _seconds(costs(plain, gpu), gpu),
        time_of(work.once, gpu),
    )  # fmt: skip


def _is_in_work(plan: LinearPlan, cost: Cost) -> bool:
    """Whether `of_linear` counts a cost, or what runs in its place; also for what no call does.

    The rates of what PyTorch makes and of row scales contain all that these do, and the rate of
    clamping, which was fitted to `dge-occ`, contains the estimator.
    """
    if cost.technique == "estimator":
        return plan.splitting is not None or _estimates_in_pytorch(plan, cost.operand)
    if cost.technique == "sent":
        return False
    if cost.technique == "mean":
        return True
    operands = [operand for gemm in plan.gemms for operand in (gemm.a, gemm.b)]
    if any((o.gemm, o.letter) == (cost.gemm, cost.operand) for o in operands if not o.is_quantized):
        return cost.technique == "outliers"
    kernels = ("mxfp4 kernel", "block scale kernel")
    made = {
        (operand.gemm, operand.letter)
        for making in plan.makings
        for operand in making.operands
        if making.maker.name in kernels
    }
    return cost.technique not in _NOT_IN_WORK or (cost.gemm, cost.operand) not in made


def _decoded(plan: LinearPlan) -> Iterator[Amounts]:
    """The work of decoding codes, for products that run in BF16 or float32."""
    for gemm in plan.gemms:
        precision = precision_here(gemm)
        for operand in (gemm.a, gemm.b):
            if operand.is_quantized and precision in ("bf16", "fp32"):
                written = operand_of(precision) * operand.shape[0] * operand.shape[1]
                yield moved(operand_bytes(operand), written)["work"]


def _finished(plan: LinearPlan) -> Iterator[Amounts]:
    """The work of multiplying products in BF16 by their operands' outer scales: they are read in
    float32, and rounded or added."""
    for gemm in plan.gemms:
        quantizers = (operand.quantizer or operand.codes for operand in (gemm.a, gemm.b))
        if precision_here(gemm) == "bf16" and any(q and q.scales_product for q in quantizers):
            m, n, _ = gemm.product.shape
            out = gemm.product.out_dtype.itemsize * m * n
            yield moved(FP32 * m * n + out * gemm.product.adds, out)["work"]


def _estimated(plan: LinearPlan) -> Iterator[Amounts]:
    """The work of estimators that PyTorch applies."""
    for operand in (plan.fprop.a, plan.fprop.b):
        if _estimates_in_pytorch(plan, operand.letter):
            yield Amounts({"element by PyTorch": float(operand.shape[0] * operand.shape[1])})


def _estimates_in_pytorch(plan: LinearPlan, letter: str) -> bool:
    """Whether PyTorch applies the estimator of X or W, in as many passes as it quantizes in."""
    estimates = plan.estimates_w if letter == "w" else plan.estimates_x
    return estimates is not None and estimates.name == PYTORCH.name


def _seconds(found: Sequence[Cost], gpu: Gpu) -> float:
    return sum(time_of(cost.work, gpu) for cost in found)


def time_of(work: Amounts, gpu: Gpu) -> float:
    """The seconds of work on a GPU."""
    return sum(seconds(work, gpu, RATES.seconds).values())
