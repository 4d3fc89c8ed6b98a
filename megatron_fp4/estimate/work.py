"""Amounts of work of a layer and of a step, by unit.

A unit is a key of `rates.RATES`, which has the seconds of one. Work is additive: the work of a
layer is the sum of its parts', and its seconds are the sum over the units.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import LayerPlans
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.traffic import Sent, of_embedding, of_experts, of_head, sends_of
from megatron_fp4.plan.data import GemmPlan, LinearPlan, Making, OperandPlan
from megatron_fp4.plan.memory import operand_bytes

# What multiplies on tensor cores, and in which format; the others multiply in BF16.
_FORMATS = {"hopper": "fp8", "sm100": "fp4", "blackwell": "fp4", "nvfp4": "fp4"}


@dataclass
class Pass:
    """Work of a forward or backward pass of a microbatch.

    gpu: on the GPU. host: of the host, to launch it. sent: collectives.
    """

    gpu: Amounts = field(default_factory=Amounts)
    host: Amounts = field(default_factory=Amounts)
    sent: list[Sent] = field(default_factory=list)

    def add(self, other: Pass, times: float = 1) -> None:
        """Adds the work of another pass, `times` times."""
        self.gpu.add(other.gpu, times)
        self.host.add(other.host, times)
        self.sent += [sent.times(times) for sent in other.sent]


@dataclass
class Work:
    """Work of a part of the model: forward and backward of a microbatch, and once a step."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)
    once: Amounts = field(default_factory=Amounts)

    def add(self, other: Work, times: float = 1) -> None:
        """Adds the work of another part, `times` times."""
        self.forward.add(other.forward, times)
        self.backward.add(other.backward, times)
        self.once.add(other.once, times)


# --- a linear -------------------------------------------------------------------------------------


def of_linear(plan: LinearPlan, gpu: Gpu) -> Work:
    """The work of one linear, without what it sends. W's operands that are held are made once."""
    work = Work()
    forward, backward, once = work.forward.gpu, work.backward.gpu, work.once
    for making in plan.forward:
        (once if _is_held(plan, making) else forward).add(quantize(making))
    for making in plan.backward + plan.late:
        (once if _is_held(plan, making) else backward).add(quantize(making))
    for gemm in plan.gemms:
        into = forward if gemm is plan.fprop else backward
        into.add(product(gemm, gpu))
        into.add(conversion(gemm))
    if plan.clamping is not None:
        forward.add(_outliers(plan))
    if plan.compensation is not None:
        forward.add(_bf16_product(plan.fprop.product.shape))
    if plan.residual_in_dw and plan.wgrad is not None:
        backward.add(_bf16_product(plan.wgrad.product.shape))
    host = "quantized linear" if any(g.product.quantizers for g in plan.gemms) else "BF16 linear"
    if plan.clamping is not None:
        host = "linear with outliers"
    work.forward.host.add({host: 1 / 3})
    work.backward.host.add({host: 2 / 3})
    return work


def _is_held(plan: LinearPlan, making: Making) -> bool:
    gemms = [gemm for gemm in (plan.fprop, plan.dgrad) if gemm is not None and gemm.holds_b]
    return any(gemm.b in making.operands for gemm in gemms)


def quantize(making: Making) -> Amounts:
    """The work of making operands from one matrix: bytes read and written, and elements rounded."""
    found = Amounts()
    operands = [operand for operand in making.operands if operand.quantizer is not None]
    if not operands:
        return found
    first = operands[0]
    elements = float(first.shape[0] * first.shape[1])
    if making.maker.name == "pytorch":
        return Amounts({"element by PyTorch": elements * len(operands)})
    if making.maker.name == "row scale kernel":
        return Amounts({"element with a row scale": elements * len(operands)})
    read = elements * first.dtype.itemsize
    if first.codes is not None:
        read = first.codes.nbytes(*first.shape)
        found["element decoded"] += elements
    found["byte quantized"] += read
    for number, operand in enumerate(operands):
        assert operand.quantizer is not None
        written = operand_bytes(operand) + (elements if operand.carrier is not None else 0)
        found["byte quantized"] += written
        found[f"element {_rounding(operand)}"] += elements
        found["element in a second direction"] += elements if number else 0
    return found


def _rounding(operand: OperandPlan) -> str:
    assert operand.quantizer is not None
    if operand.hadamard is not None:
        return "transformed"
    return "rounded stochastically" if operand.quantizer.stochastic else "rounded to nearest"


def product(gemm: GemmPlan, gpu: Gpu) -> Amounts:
    """The work of a GEMM. One that is bound by memory counts as the operations that tensor cores
    would do in the time of its bytes."""
    kind = _FORMATS.get(gemm.multiplier.name, "bf16")
    peak = {"fp8": gpu.fp8, "fp4": gpu.fp4, "bf16": gpu.bf16}[kind]
    m, n, k = gemm.product.shape
    width = {"fp8": 1.0, "fp4": 0.53, "bf16": 2.0}[kind]
    out = gemm.product.out_dtype.itemsize * (2 if gemm.product.adds else 1)
    moved = width * k * (m + n) + out * m * n
    operations = max(2.0 * m * n * k, moved / gpu.bandwidth * peak)
    return Amounts({f"{kind} operation": operations, "GEMM": 1})


def _bf16_product(shape: tuple[int, int, int]) -> dict[str, float]:
    m, n, k = shape
    return {"bf16 operation": 2.0 * m * n * k, "GEMM": 1}


def conversion(gemm: GemmPlan) -> Amounts:
    """The work of converting E2M1 codes to FP8 for Hopper, and of correcting the FP8 elements that
    the kernel that quantizes wrote."""
    found = Amounts()
    if gemm.multiplier.name != "hopper":
        return found
    m, n, k = gemm.product.shape
    for operand, rows in ((gemm.a, m), (gemm.b, n)):
        quantizer = operand.quantizer or operand.codes
        if quantizer is None or quantizer.element != "e2m1":
            continue
        unit = "element converted" if operand.carrier is None else "element corrected"
        found[unit] += float(rows * k)
    return found


def _outliers(plan: LinearPlan) -> dict[str, float]:
    rows, columns = plan.setting.shape("x", is_part=plan.setting.has_part("x"))
    return {"element clamped": float(rows * columns)}


# --- a layer --------------------------------------------------------------------------------------


def of_layer(model: Model, layout: Layout, plans: LayerPlans, has_experts: bool, gpu: Gpu) -> Work:
    """The work of one layer for a microbatch on a rank."""
    work = Work()
    for linear, plan, count in plans.linears(has_experts):
        one = of_linear(plan, gpu)
        one.forward.sent, one.backward.sent = sends_of(linear, plan)
        if not layout.fused_dw and plan.wgrad is not None and plan.wgrad.product.quantizers is None:
            one.backward.gpu["weight accumulated"] += plan.setting.inputs * plan.setting.outputs
        work.add(one, count)
        if linear.name.endswith("linear_fc1"):
            rows, columns = plan.setting.shape("dy", is_part=False)
            ffn = float(rows * columns) / (2 if model.gated else 1)
            _both(work, "activation element", ffn * count, 0.25)
    heads = model.heads / layout.tp
    width = (model.attention_width + 2 * model.key_width) / layout.tp
    operations = 2.0 * plans.tokens * model.sequence * heads * model.channels  # causal: half of 4
    _both(work, "attention operation", 3.5 * operations, 1 / 3.5)
    _both(work, "query, key or value", plans.tokens * width, 0.4)
    _both(work, "residual element", plans.own * model.hidden, 0.4)
    work.forward.host["layer"], work.backward.host["layer"] = 0.4, 0.6
    if has_experts:
        routed = plans.own * model.top_k * model.hidden
        _both(work, "residual element", 2 * routed, 0.5)  # to the experts and back
        for part in (work.forward, work.backward):
            part.sent += of_experts(model, layout)
    for part in (work.forward, work.backward):
        part.host["collective"] += sum(sent.calls for sent in part.sent)
    return work


def _both(work: Work, unit: str, amount: float, forward: float) -> None:
    """Adds an amount of the GPU's work to both passes. forward: the share of the forward pass."""
    work.forward.gpu[unit] += amount * forward
    work.backward.gpu[unit] += amount * (1 - forward)


def of_ends(model: Model, layout: Layout, first: bool, last: bool) -> Work:
    """The work of the embedding (`first`) and of the head and the loss (`last`)."""
    work = Work()
    tokens = float(layout.micro_batch * model.sequence)
    if first:
        sent = of_embedding(model, layout)
        work.forward.sent, work.backward.sent = sent[:1], sent[1:]
    if last:
        columns = model.padded_vocabulary(layout.tp) / layout.tp
        operations = 6 * tokens * columns * model.hidden
        _both(work, "bf16 operation", operations, 1 / 3)
        _both(work, "GEMM", 3, 1 / 3)
        _both(work, "logit", tokens * columns, 0.5)
        sent = of_head(model, layout)
        work.forward.sent += sent[:1]
        work.backward.sent += sent[1:]
    if not layout.fused_dw:
        count = float(model.padded_vocabulary(layout.tp) / layout.tp * model.hidden)
        work.backward.gpu["weight accumulated"] += count * last
    return work
