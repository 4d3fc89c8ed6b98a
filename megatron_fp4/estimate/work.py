"""Amounts of work of a layer and of a step, by unit.

A unit is a name of `rates.UNITS`; `rates.RATES` has the seconds of one. Work is additive: the work
of a layer is the sum of its parts', and its seconds are the sum over the units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import LayerPlans
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import joined
from megatron_fp4.estimate.rates import by_torch
from megatron_fp4.estimate.traffic import Sent, of_embedding, of_experts, of_head, sends_of
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import GemmPlan, LinearPlan, Making
from megatron_fp4.plan.memory import operand_bytes

Precision = Literal["fp4", "fp8", "bf16", "fp32"]
# What multiplies in which precision, on tensor cores but in float32; the others multiply in BF16.
_PRECISIONS: dict[str, Precision] = {
    "hopper": "fp8",
    "sm100": "fp4",
    "blackwell": "fp4",
    "nvfp4": "fp4",
    "reference": "fp32",
}
MANTISSA_SCALES = ("e4m3", "ue5m3")  # formats of block scales that have a mantissa
# What it takes to compare two E8M0 scales for an element, in roundings to nearest. The kernel of
# rule mse takes 15 along the rows, and 21 in each of both directions: quantize_kernels-mse.json of
# benchmarks/results.
SECOND_SCALE = 18
_OTHERS = {"mse": 1, "mse-fp8": 3}  # scales that are compared with one
# The share of a SwiGLU's bytes that are moved in forward: 3 of 8 for each element of its result.
_FORWARD = 3 / 8


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
    for makings, into in ((plan.forward, forward), (plan.backward + plan.late, backward)):
        for making in makings:
            (once if _is_held(plan, making) else into).add(quantize(making))
        into.add(_swiglus(plan, makings))
    for gemm in plan.gemms:
        into = forward if gemm is plan.fprop else backward
        into.add(product(gemm, gpu, precision_here(gemm)))
        into.add(conversion(gemm, "a"))
        (once if gemm.holds_form else into).add(conversion(gemm, "b"))
    if plan.compute_x is not None and plan.setting.swiglu == "after":
        forward.add(_swiglu(plan, "x"))
    if plan.splitting is not None:
        forward.add(_outliers(plan))
    if plan.compensation is not None:
        forward.add(outlier_product(plan, plan.fprop))
    if plan.residual_in_dw and plan.wgrad is not None:
        backward.add(outlier_product(plan, plan.wgrad))
    forward.add(_mean_forward(plan))
    backward.add(_mean_backward(plan))
    host = "quantized linear" if _is_quantized(plan) else "BF16 linear"
    if plan.splitting is not None:
        host = "linear with outliers"
    work.forward.host.add({host: 1 / 3})
    work.backward.host.add({host: 2 / 3})
    return work


def _is_quantized(plan: LinearPlan) -> bool:
    return any(gemm.product.quantizers for gemm in plan.gemms)


def _swiglus(plan: LinearPlan, makings: tuple[Making, ...]) -> Amounts:
    """The work of kernels that compute a SwiGLU, or its gradient, for makers that do not."""
    found = Amounts()
    apart = [making.matrix for making in makings if not making.computes_source]
    for letter in sorted({letter for letter, source in apart if source == "swiglu"}):
        found.add(_swiglu(plan, letter))
    return found


def _swiglu(plan: LinearPlan, letter: str) -> dict[str, float]:
    """The work of the kernel that computes X from a SwiGLU, or dY from the gradient of one."""
    rows, columns = plan.setting.shape(letter, is_part=False)
    if letter == "x":
        return {"activation element": _FORWARD * rows * columns}
    return {"activation element": (1 - _FORWARD) * rows * columns / 2}


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
    if making.maker.transforms_in_pytorch(first):
        # PyTorch transforms in as many passes as it quantizes in.
        found["element by PyTorch"] += elements
    if making.maker.name == "row scale kernel":
        return Amounts({"element with a row scale": elements * len(operands)})
    found.add(_reading(making, first, elements))
    for number, operand in enumerate(operands):
        assert operand.quantizer is not None
        written = operand_bytes(operand) + (elements if operand.carrier is not None else 0)
        found["byte quantized"] += written
        rounding = _rounding(operand, making.maker.transforms_in_pytorch(operand))
        found[f"element {rounding}"] += elements
        if rounding == "rounded stochastically" and not (number and operand.letter == "dy"):
            found["element drawn"] += elements  # both operands of dY have the same random bits
        found["element in a second direction"] += elements if number else 0
        found.add(scales(operand, elements))
        if operand.quantizer.tensor_max:  # a pass before finds the largest magnitude
            found["byte quantized"] += elements * first.dtype.itemsize
    return found


def scales(operand: OperandPlan, elements: float) -> Amounts:
    """The work of choosing an operand's block scales and dividing by them, beside that of one E8M0
    scale, which the rates of rounding contain.

    A mantissa scale is in E4M3 or UE5M3. Kernels for these divide by a scale where those for E8M0
    add to an exponent, and transform in float32.
    """
    quantizer, found = operand.quantizer, Amounts()
    assert quantizer is not None
    others, has_mantissa = _OTHERS.get(quantizer.rule, 0), quantizer.scale in MANTISSA_SCALES
    if has_mantissa:
        found["element with a mantissa scale"] = elements
    if has_mantissa and operand.group:
        found["element transformed, mantissa scale"] = elements
    if quantizer.rule == "four-over-six":
        found["element of four over six"] = elements
    elif others:
        found["element rounded to nearest"] = others * SECOND_SCALE * elements
    return found


def _reading(making: Making, first: OperandPlan, elements: float) -> Amounts:
    """The work of reading the matrix that a maker quantizes, and of computing it meanwhile."""
    if first.codes is not None:
        codes = first.codes.nbytes(*first.shape)
        return Amounts({"byte quantized": codes, "element decoded": elements})
    size = elements * first.dtype.itemsize
    if not making.computes_source:
        return Amounts({"byte quantized": size})
    if first.source == "normed":
        return Amounts({"byte quantized": size, "element normed": elements})
    if first.letter == "x":  # from the gate and the other half
        return Amounts({"byte quantized": 2 * size})
    # From Y and the gradient of SwiGLU's result, which is half as wide.
    return Amounts({"byte quantized": 1.5 * size, "element of SwiGLU's gradient": elements})


def _rounding(operand: OperandPlan, in_pytorch: bool) -> str:
    assert operand.quantizer is not None
    with_mantissa = operand.quantizer.scale in MANTISSA_SCALES  # see `scales`
    if operand.hadamard is not None and not in_pytorch and not with_mantissa:
        return "transformed"
    return "rounded stochastically" if operand.quantizer.stochastic else "rounded to nearest"


def operand_of(precision: Precision) -> float:
    """The bytes of an element of an operand as it is multiplied."""
    return {"fp4": 0.53, "fp8": 1.0, "bf16": 2.0, "fp32": 4.0}[precision]


def precision_here(gemm: GemmPlan) -> Precision:
    """The precision in which the plan's multiplier runs a GEMM."""
    return _PRECISIONS.get(gemm.multiplier.name, "bf16")


def product(gemm: GemmPlan, gpu: Gpu, precision: Precision) -> Amounts:
    """The work of a GEMM. One that is bound by memory counts as the operations that tensor cores
    would do in the time of its bytes."""
    peak = float(getattr(gpu, precision))
    m, n, k = gemm.product.shape
    out = gemm.product.out_dtype.itemsize * (2 if gemm.product.adds else 1)
    moved = operand_of(precision) * k * (m + n) + out * m * n
    operations = max(2.0 * m * n * k, moved / gpu.bandwidth * peak)
    return Amounts({f"{precision} operation": operations, "GEMM": 1})


def outlier_product(plan: LinearPlan, gemm: GemmPlan) -> dict[str, float]:
    """The work of the product of X's outliers that is added to fprop's or wgrad's."""
    m, n, k = gemm.product.shape
    assert plan.recipe.outliers is not None
    share = plan.recipe.outliers.multiplied(plan.setting.inputs) / plan.setting.inputs
    return {"bf16 operation": 2.0 * m * n * k * share, "GEMM": 1}


def conversion(gemm: GemmPlan, side: Literal["a", "b"]) -> dict[str, float]:
    """The work of converting E2M1 codes to FP8 for Hopper, or of correcting the FP8 elements that
    the kernel that quantizes wrote, for one operand of a GEMM. Of W's operands that are held as
    codes, each call converts the codes."""
    m, n, k = gemm.product.shape
    operand, rows = (gemm.a, m) if side == "a" else (gemm.b, n)
    quantizer = operand.quantizer or operand.codes
    if gemm.multiplier.name != "hopper" or quantizer is None or quantizer.element != "e2m1":
        return {}
    from_codes = operand.carrier is None or (side == "b" and gemm.holds_b and not gemm.holds_form)
    unit = "element converted" if from_codes else "element corrected"
    return {unit: float(rows * k)}


def _outliers(plan: LinearPlan) -> dict[str, float]:
    rows, columns = plan.setting.shape("x", is_part=plan.setting.has_part("x"))
    return {"element clamped": float(rows * columns)}


def _mean_forward(plan: LinearPlan) -> dict[str, float]:
    """The work of the mean of X: X is read, read again and written, and W read for Y."""
    if not plan.subtracts_mean:
        return {}
    rows, columns = plan.setting.shape("x", is_part=plan.setting.has_part("x"))
    elements = 3.0 * rows * columns
    if plan.mean_in_y is not None:
        elements += plan.setting.outputs * plan.setting.inputs
    return {"byte quantized": elements * plan.setting.dtype.itemsize}


def _mean_backward(plan: LinearPlan) -> dict[str, float]:
    """The work of the mean of X in dW: dY is read, and dW read and written in float32."""
    if not plan.mean_in_dw:
        return {}
    setting = plan.setting
    rows, columns = setting.shape("dy", is_part=setting.has_part("dy"))
    dw = 8.0 * setting.outputs * setting.inputs
    return {"byte quantized": rows * columns * setting.dtype.itemsize + dw}


# --- a layer --------------------------------------------------------------------------------------


def of_layer(model: Model, layout: Layout, plans: LayerPlans, has_experts: bool, gpu: Gpu) -> Work:
    """The work of one layer for a microbatch on a rank."""
    work = Work()
    fused = layout.fused_kernels
    for linear, made, count in plans.linears(has_experts):
        plan = joined(linear, made, model, layout)
        one = of_linear(plan, gpu)
        one.forward.sent, one.backward.sent = sends_of(linear, made)
        collective = "collective in C++" if _is_quantized(plan) else "collective"
        for part in (one.forward, one.backward):
            part.host[collective] += sum(sent.calls for sent in part.sent)
        if not layout.fused_dw and plan.wgrad is not None and plan.wgrad.product.quantizers is None:
            one.backward.gpu["weight accumulated"] += plan.setting.inputs * plan.setting.outputs
        work.add(one, count)
        if linear.name.endswith("linear_fc1") and not plan.setting.swiglu:
            rows, columns = plan.setting.shape("dy", is_part=False)
            ffn = float(rows * columns) / (2 if model.gated else 1)
            plain = model.has_plain_swiglu and not model.fp8_input and not linear.expert
            _both(work, _outside("activation element", fused and plain), ffn * count, _FORWARD)
    heads = model.heads / layout.tp
    width = (model.attention_width + 2 * model.key_width) / layout.tp
    operations = 2.0 * plans.tokens * model.sequence * heads * model.channels  # causal: half of 4
    _both(work, "attention operation", 3.5 * operations, 1 / 3.5)
    _both(work, _outside("query, key or value", fused and model.rope), plans.tokens * width, 0.4)
    residual = _outside("residual element", fused and model.has_rms_norm)
    _both(work, residual, plans.own * model.hidden, 0.4)
    work.forward.host["layer"], work.backward.host["layer"] = 0.4, 0.6
    if has_experts:
        routed = plans.own * model.top_k * model.hidden
        _both(work, residual, 2 * routed, 0.5)  # to the experts and back
        for part in (work.forward, work.backward):
            sent = of_experts(model, layout)
            part.sent += sent
            part.host["collective"] += sum(one.calls for one in sent)
    return work


def _outside(unit: str, fused: bool) -> str:
    """The unit of work outside the linears in fused kernels, or in torch's."""
    return unit if fused else by_torch(unit)


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
        _both(work, _outside("logit", layout.fused_kernels), tokens * columns, 0.5)
        sent = of_head(model, layout)
        work.forward.sent += sent[:1]
        work.backward.sent += sent[1:]
    if not layout.fused_dw:
        count = float(model.padded_vocabulary(layout.tp) / layout.tp * model.hidden)
        work.backward.gpu["weight accumulated"] += count * last
    return work
