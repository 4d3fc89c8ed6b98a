"""What each technique of a recipe takes in one linear: operations, bytes and random words.

This is this project's own model. It counts what a technique itself needs on a GPU if it had a
kernel there, so that recipes that are only simulated can be compared with others. A plan
(`plan.data.LinearPlan`) says what is made, read, saved and sent. overhead.py turns counts into
time, and has beside it the time of the linear as it runs today.

What is assumed:

- A kernel reads a matrix once for all operands that it makes of it, and writes codes and scales. A
  scale of a tensor or of rows takes a pass before, which reads the matrix and, where there is one,
  transforms it.
- A Hadamard transform takes g multiply-adds an element on BF16 tensor cores.
- A product runs in the narrowest precision in which the GPU's tensor cores take both operands
  exactly. FP4 tensor cores take E2M1 codes with all scales but UE5M3, for which they have no
  instruction. FP8 takes E2M1 codes with power-of-two scales, or with scales of whole rows or
  tensors, but not with E4M3 or UE5M3 scales of blocks, other than those of rule mse-fp8: these are
  multiplied in BF16. No tensor core takes float32 scales of blocks: the sum of each block is
  multiplied by them in float32.
- E1M2 elements are multiplied in BF16. No FP4 tensor core takes them. In FP8 they would be exact
  where E2M1 codes are, if a kernel converted them: this is not counted.
- Outliers are multiplied by dense products (docs/notes/outliers.md), hot channels by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.counted import check
from megatron_fp4.estimate.gpus import Gpu
from megatron_fp4.estimate.traffic import of_backward, of_forward
from megatron_fp4.estimate.work import Precision, operand_of, outlier_product, product, scales
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import GemmPlan, LinearPlan
from megatron_fp4.plan.memory import operand_bytes, outlier_bytes, saved_bytes
from megatron_fp4.recipe import Recipe

FP32, BF16 = torch.float32.itemsize, torch.bfloat16.itemsize


@dataclass(frozen=True)
class Cost:
    """What one technique takes in one call of a linear, on one rank.

    gemm: "fprop", "dgrad" or "wgrad"; "backward" for what both backward GEMMs share.
    operand: "x", "w" or "dy"; "" for what is not of one operand.
    technique: "product", "codes" (a matrix is read, codes and scales are written), "rounding",
        "random words", "Hadamard transform", "tensor scale", "row scales", "block scales" (the sums
        of blocks are multiplied by them), "scales" (what choosing them takes beside one
        E8M0 scale), "gain of 1" (products are summed, and scales rounded again), "average" (read to
        round towards it), "form" (the operand is written as the tensor cores read it), "outliers",
        "mean" (what the mean of X takes), "estimator", "state beside the weight", "saved" or
        "sent".
    read, written: bytes of the GPU's memory.
    multiply_adds: in `precision`, on tensor cores but in float32.
    words: random 16-bit words.
    saved: bytes kept for the backward pass. kept: bytes kept over the run beside the weight.
    sent: bytes that a tensor-parallel rank sends.
    once: whether it is done once a step, however many microbatches there are.
    work: the same as amounts by the units of rates.py.
    """

    gemm: str
    operand: str
    technique: str
    read: float = 0.0
    written: float = 0.0
    multiply_adds: float = 0.0
    precision: Precision | None = None
    words: float = 0.0
    saved: float = 0.0
    kept: float = 0.0
    sent: float = 0.0
    once: bool = False
    work: Amounts = field(default_factory=Amounts)


def costs(plan: LinearPlan, gpu: Gpu) -> list[Cost]:
    """The costs of all techniques of a plan, as if each had a kernel on `gpu`.

    Raises ConfigError for a recipe with a word that is not counted, and for a linear that computes
    a SwiGLU or a norm or gets W as codes.
    """
    check(plan)
    found = [*_products(plan, gpu), *_forms(plan, gpu)]
    held = {gemm.b for gemm in plan.gemms if gemm.holds_b}
    for operands in _together(plan):
        made = of_operands(operands, plan.recipe)
        found += (replace(cost, once=operands[0] in held) for cost in made)
    found += [*_outliers(plan), *_mean(plan), *_estimators(plan), *_state(plan), *_kept(plan)]
    return found


def moved(read: float, written: float, steps: dict[str, float] | None = None) -> dict[str, Any]:
    """The fields of a Cost of bytes that a kernel moves, and other work by unit."""
    work = Amounts(steps or {})
    work["byte quantized"] += read + written
    return {"read": read, "written": written, "work": work}


# --- products -------------------------------------------------------------------------------------


def precision_of(gemm: GemmPlan, gpu: Gpu) -> Precision:
    """The narrowest precision in which the GPU's tensor cores take both operands exactly."""
    order: tuple[Precision, ...] = ("fp4", "fp8", "bf16")
    return max((_narrowest(operand, gpu) for operand in (gemm.a, gemm.b)), key=order.index)


def _narrowest(operand: OperandPlan, gpu: Gpu) -> Precision:
    quantizer = operand.quantizer or operand.codes
    if quantizer is None or quantizer.element == "e1m2":
        return "bf16"
    if quantizer.element == "e2m1" and quantizer.scale != "ue5m3" and gpu.fp4:
        return "fp4"
    exact = quantizer.element != "e2m1" or quantizer.scale in ("e8m0", "fp32")
    exact |= quantizer.rule == "mse-fp8"
    return "fp8" if exact and gpu.fp8 else "bf16"


def _products(plan: LinearPlan, gpu: Gpu) -> Iterator[Cost]:
    for gemm in plan.gemms:
        precision = precision_of(gemm, gpu)
        m, n, k = gemm.product.shape
        out = float(gemm.product.out_dtype.itemsize * m * n)
        yield Cost(
            gemm.name, "", "product",
            read=operand_of(precision) * k * (m + n) + out * gemm.product.adds,
            written=out,
            multiply_adds=float(m * n * k),
            precision=precision,
            work=product(gemm, gpu, precision),
        )  # fmt: skip
        each = [operand.quantizer or operand.codes for operand in (gemm.a, gemm.b)]
        blocks = [q.block[1] for q in each if q is not None and not q.exact_in_bf16]
        if blocks:
            sums = float(m * n * k) / min(blocks)
            work = Amounts({"fp32 operation": 2 * sums})
            yield Cost(
                gemm.name, "", "block scales", multiply_adds=sums, precision="fp32", work=work
            )


def _forms(plan: LinearPlan, gpu: Gpu) -> Iterator[Cost]:
    """Operands as the tensor cores read them, where these are not the codes that a kernel makes:
    FP8 carriers, BF16, or transposed codes. The kernel that makes an operand writes its form beside
    the codes, unless these are sent, held or saved before they are multiplied."""
    for gemm in plan.gemms:
        precision, (m, n, k) = precision_of(gemm, gpu), gemm.product.shape
        for operand, rows, is_held in ((gemm.a, m, False), (gemm.b, n, gemm.holds_b)):
            quantizer = operand.quantizer
            if quantizer is None:
                yield from _unquantized(operand, plan.recipe, precision)
                continue
            if quantizer.element in _TAKES[precision]:
                continue
            saved = plan.saves_x == "packed" and (gemm.name, operand.letter) == ("wgrad", "x")
            apart = operand.is_part or is_held or saved
            steps = {}
            if (precision, quantizer.scale, apart) == ("fp8", "e8m0", False):
                steps["element corrected"] = float(rows * k)  # of rows that do not fit the guess
            read = quantizer.nbytes(rows, k) if apart else 0
            found = moved(read, rows * k * _WIDTH[precision], steps)
            once = is_held and gemm.holds_form
            yield Cost(gemm.name, operand.letter, "form", once=once, **found)


def _unquantized(operand: OperandPlan, recipe: Recipe, precision: Precision) -> Iterator[Cost]:
    """An operand that its GEMM does not quantize, but that is not what the model holds either: it
    is decoded from fprop's codes, transformed, or multiplied by scales of the other operand."""
    decoded, elements = _decoded(operand, recipe), _elements(operand)
    if operand.is_sent or not (decoded or operand.group or operand.folds):
        return
    written = elements * (_WIDTH[precision] if operand.codes is not None else BF16)
    name = "Hadamard transform" if operand.group else "form"
    where = operand.gemm, operand.letter
    yield _transform(where, name, operand, _source_bytes(operand, recipe), written)


# The elements of codes that tensor cores take as they are, and the bytes of an element otherwise.
_TAKES = {"fp4": ("e2m1",), "fp8": ("e4m3", "e5m2"), "bf16": ()}
_WIDTH = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0}


# --- operands -------------------------------------------------------------------------------------


def _together(plan: LinearPlan) -> Iterator[list[OperandPlan]]:
    """The operands that are quantized, in lists of those that one kernel makes from one read."""
    for makings in (plan.forward, plan.backward, plan.late):
        found: dict[Any, list[OperandPlan]] = {}
        for operand in [operand for making in makings for operand in making.operands]:
            if operand.quantizer is not None:
                form = operand.quantizer, operand.group, operand.is_part
                found.setdefault((operand.letter, operand.source, form), []).append(operand)
        yield from found.values()


def of_operands(operands: Sequence[OperandPlan], recipe: Recipe) -> Iterator[Cost]:
    """The costs of quantizing operands that are made from one read of a matrix."""
    first, elements = operands[0], _elements(operands[0])
    size = _source_bytes(first, recipe)
    for number, operand in enumerate(operands):
        quantizer, where = operand.quantizer, (operand.gemm, operand.letter)
        assert quantizer is not None
        steps = {"element in a second direction": elements} if number else {}
        if _decoded(first, recipe) is not None and not number:
            steps["element decoded"] = elements
        read = 0.0 if number else size
        yield Cost(*where, "codes", **moved(read, operand_bytes(operand), steps))
        # Both operands of dY have the same random bits.
        drawn = elements if not number or operand.letter != "dy" else 0.0
        yield from _rounding(where, quantizer, elements, drawn)
        if work := scales(operand, elements):
            yield Cost(*where, "scales", work=work)
        if operand.group:
            yield _transform(where, "Hadamard transform", operand)
        # One pass serves both directions, whose transforms differ.
        if quantizer.scales_product and (operand.group or not number):
            of_tensor = quantizer.tensor_max or quantizer.block[0] == WHOLE_AXIS
            name = "tensor scale" if of_tensor else "row scales"
            yield _transform(where, name, operand, size)


def _elements(operand: OperandPlan) -> float:
    return float(operand.shape[0] * operand.shape[1])


def _decoded(operand: OperandPlan, recipe: Recipe) -> Quantizer | None:
    """The quantizer of fprop's codes if the operand is made from these, else None."""
    if operand.source in ("codes", "decoded", "values", "elements"):
        return recipe.quantizer("fprop", operand.letter)
    return None


def _source_bytes(operand: OperandPlan, recipe: Recipe) -> float:
    """The bytes that a kernel reads to make an operand."""
    decoded = _decoded(operand, recipe)
    return BF16 * _elements(operand) if decoded is None else decoded.nbytes(*operand.shape)


def _rounding(
    where: tuple[str, str], quantizer: Quantizer, elements: float, drawn: float
) -> Iterator[Cost]:
    word = "stochastically" if quantizer.stochastic else "to nearest"
    yield Cost(*where, "rounding", work=Amounts({f"element rounded {word}": elements}))
    if quantizer.stochastic and drawn:
        yield Cost(*where, "random words", words=drawn, work=Amounts({"element drawn": drawn}))
    if quantizer.rounding == "ema":
        yield Cost(*where, "average", **moved(FP32 * elements, 0))
    if quantizer.unit_gain:  # two products an element, and a random word a scale
        words = elements / quantizer.block[1] if quantizer.draws else 0.0
        work = Amounts({"element rounded to nearest": elements, "element drawn": words})
        yield Cost(*where, "gain of 1", words=words, work=work)


def _transform(
    where: tuple[str, str],
    technique: str,
    operand: OperandPlan,
    read: float = 0.0,
    written: float = 0.0,
) -> Cost:
    """A pass that transforms an operand if it has a Hadamard transform. read, written: the bytes
    that are not moved for its codes in any case."""
    multiply_adds = operand.group * _elements(operand)
    precision: Precision | None = "bf16" if operand.group else None
    found = moved(read, written, {"bf16 operation": 2 * multiply_adds})
    return Cost(*where, technique, multiply_adds=multiply_adds, precision=precision, **found)


# --- beside the operands --------------------------------------------------------------------------


def _outliers(plan: LinearPlan) -> Iterator[Cost]:
    """X is read and written without its outliers, and these are multiplied in BF16."""
    outliers = plan.recipe.outliers
    if outliers is None:
        return
    rows, columns = plan.setting.shape("x", is_part=plan.setting.has_part("x"))
    size = float(rows * columns * BF16)
    apart = outlier_bytes(plan) if plan.compensation is not None else 0
    saved = outlier_bytes(plan) if plan.residual_in_dw else 0
    read = outliers.reads * size
    yield Cost("fprop", "x", "outliers", saved=saved, **moved(read, size + apart))
    multiplied = [plan.fprop] if plan.compensation is not None else []
    if plan.residual_in_dw and plan.wgrad is not None:
        multiplied.append(plan.wgrad)
    for gemm in multiplied:
        work = Amounts(outlier_product(plan, gemm))
        each = work["bf16 operation"] / 2
        yield Cost(gemm.name, "x", "outliers", multiply_adds=each, precision="bf16", work=work)


def _mean(plan: LinearPlan) -> Iterator[Cost]:
    """X is read for its sums before it is quantized, and W for the product of the mean. dW gets its
    part of the mean in a pass of its own."""
    setting = plan.setting
    rows, columns = setting.shape("x", is_part=setting.has_part("x"))
    of_w = float(setting.outputs * setting.inputs)
    if plan.subtracts_mean:
        of_y = of_w if plan.mean_in_y is not None else 0.0
        yield Cost("fprop", "x", "mean", **moved(BF16 * (rows * columns + of_y), 0.0))
    if plan.mean_in_dw:
        yield Cost("wgrad", "x", "mean", **moved(FP32 * of_w, FP32 * of_w))


def _estimators(plan: LinearPlan) -> Iterator[Cost]:
    """dW is read in float32 beside W, and the result is added to main_grad. dX is read and written
    beside X. With a gradient through the maximum or the outer scale the codes are read too, and all
    again in a further pass, after the sums of each block, unless blocks are short enough for one,
    and after the sums of what shares an outer scale."""
    recipe, setting = plan.recipe, plan.setting
    into = FP32 if setting.main_grad is not None else 0
    for letter, gemm, estimates, estimator, given, added in (
        ("w", plan.wgrad, plan.estimates_w, recipe.estimator, FP32, into),
        ("x", plan.dgrad, plan.estimates_x, recipe.x_estimator, BF16, 0),
    ):
        if estimates is None or estimator is None or gemm is None:
            continue
        operand = plan.fprop.b if letter == "w" else plan.fprop.a
        quantizer, elements = operand.quantizer, _elements(operand)
        assert quantizer is not None
        read = (given + BF16) * elements
        through = estimator.maximum != "straight-through"
        through_outer = estimator.outer_scale != "straight-through"
        if through or through_outer:
            read += operand_bytes(operand)
            read *= 1 + (through and quantizer.spans_axis) + through_outer
        saved = BF16 * _elements(operand) if letter == "x" else 0.0
        yield Cost(
            gemm.name, letter, "estimator", saved=saved,
            **moved(read + added * elements, given * elements),
        )  # fmt: skip


def _state(plan: LinearPlan) -> Iterator[Cost]:
    """State beside the weight, which the optimizer reads and writes once a step; an average reads
    the weight too."""
    recipe, elements = plan.recipe, float(plan.setting.inputs * plan.setting.outputs)
    size = elements * sum(dtype.itemsize for dtype in recipe.kept_dtypes.values())
    if not size:
        return
    weight = FP32 * elements if recipe.weight_states else 0.0
    found = moved(size + weight, size)
    yield Cost("wgrad", "w", "state beside the weight", kept=size, once=True, **found)


def _kept(plan: LinearPlan) -> Iterator[Cost]:
    """What is saved for backward, beside outliers and X of its estimator, and what is sent."""
    apart = outlier_bytes(plan) if plan.residual_in_dw else 0.0
    if plan.estimates_x is not None:
        apart += BF16 * _elements(plan.fprop.a)
    yield Cost("backward", "", "saved", saved=saved_bytes(plan) - apart)
    for gemm, sends in (("fprop", of_forward(plan)), ("backward", of_backward(plan))):
        sent = sum(each.sent for each in sends)
        if sent:
            work = Amounts({"byte over NVLink": sent})
            yield Cost(gemm, "", "sent", sent=sent, work=work)
