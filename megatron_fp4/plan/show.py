"""A plan as text, as `python -m megatron_fp4 plan` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_fp4.arithmetic.messages import FORMS, form_name
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.description import estimator_words, quantizer_words, transform_words
from megatron_fp4.gemms import LETTERS
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import GemmPlan, LinearPlan, Making
from megatron_fp4.plan.memory import (
    held_bytes,
    norm_bytes,
    operand_bytes,
    saved_operand_of_x,
    saved_sizes,
    sent_bytes,
)
from megatron_fp4.plan.words import kernel_notes

_PRODUCTS = {
    "fprop": "Y = X W^T",
    "dgrad": "dX = dY W",
    "wgrad": "dW = dY^T X",
}
_SOURCES = {
    "model": "",
    "swiglu": "through SwiGLU",
    "normed": "through RMSNorm",
    "inliers": "without its outliers",
    "centered": "without its mean over tokens",
    "codes": "from the codes of fprop",
    "decoded": "decoded from the codes of fprop",
    "values": "decoded from the codes of fprop",
    "elements": "the codes of fprop",
}
_KEPT = {  # fields of `saved_sizes`
    "x_itself": "X itself, which its estimator reads",
    "outliers": "the outliers of X",
    "mean": "the mean of X",
}
_LABEL = 9  # the width of the column before an operand's text


def show(plan: LinearPlan, moments: Moments | None = None) -> str:
    """The text of a plan. moments: how an optimizer stores Adam's; None leaves it out.

    It has the GEMMs, with how and by which maker each operand is made and which multiplier runs the
    product; what is sent between ranks and what is kept, in bytes; and why faster multipliers and
    kernels are not used.
    """
    lines = [_head(plan)]
    for gemm in plan.gemms:
        lines += _gemm(plan, gemm)
    lines += [*_extras(plan), *_kept(plan)]
    if moments is not None:
        lines.append(_state(plan, moments))
    lines += _unused(plan)
    return "\n".join(lines) + "\n"


def show_exchange(plan: LinearPlan, ranks: int, element: str | None) -> str:
    """The lines about W and dW between data-parallel ranks; "" for one rank.

    element: the elements in which dW is sent, a key of `arithmetic.messages.FORMS`; None: in
    float32, by Megatron's collectives.
    """
    if ranks == 1:
        return ""
    setting = plan.setting
    elements = setting.inputs * setting.outputs

    def sent(bits: float) -> str:
        return _size(round(bits / 8 * elements * (ranks - 1) / ranks))

    def from_each(bits: float, form: str, collective: str) -> str:
        share = f"{ranks - 1}/{ranks} of {bits:.3g} bits a parameter"
        return f"{sent(bits)} from each by {collective}, {share}, {form}"

    plain, name = 8 * setting.dtype.itemsize, _short(setting.dtype)
    if size := sent_bytes(plan):
        w = from_each(8 * size / elements, "as codes of fprop", "all-gather")
        w += f" (in {name} {sent(plain)})"
    else:
        w = from_each(plain, f"in {name}, with the distributed optimizer", "all-gather")
    if element is None:
        dw = from_each(32, "in float32", "reduce-scatter")
        dw += f" (in BF16 {sent(16)}); all-reduce sends twice that"
    else:
        dw = from_each(FORMS[element].bits, f"in {form_name(element)}", "all-to-all")
        dw += f" (by reduce-scatter in float32 {sent(32)}, in BF16 {sent(16)})"
        dw += "; without the distributed optimizer as much again by all-gather"
    return (
        f"W   gathered by {ranks} data-parallel ranks: {w}\n"
        f"dW  summed over {ranks} data-parallel ranks: {dw}\n"
    )


def _head(plan: LinearPlan) -> str:
    setting, sharding = plan.setting, plan.setting.sharding
    target = setting.target
    named = {"cpu": "a CPU", "rocm": "an AMD GPU"}
    where = named.get(target.kind, "sm_{}{}".format(*target.capability))
    tokens, _ = setting.shape("x", is_part=False)
    text = (
        f"recipe {plan.recipe.name}: {setting.inputs} inputs, {setting.outputs} outputs, {tokens} "
        f"tokens, in {_short(setting.dtype)}, on {where}"
    )
    if sharding.ranks == 1:
        return text
    kind = "column" if sharding.w == 0 else "row"
    how = " with sequence parallelism" if sharding.scattered else ""
    return f"{text}; {kind}-parallel over {sharding.ranks} ranks{how}"


def _gemm(plan: LinearPlan, gemm: GemmPlan) -> Iterator[str]:
    m, n, k = gemm.product.shape
    yield f"{gemm.name}  {_PRODUCTS[gemm.name]}   [{m}, {n}], contracts {k}"
    for operand in (gemm.a, gemm.b):
        yield f"  {LETTERS[operand.letter]:{_LABEL}}{_operand(plan, operand)}"
    yield f"  {'product':{_LABEL}}{_product(gemm)}"


def _operand(plan: LinearPlan, operand: OperandPlan) -> str:
    """The words on an operand's line: how it is made, step by step, and its bytes."""
    if operand.is_sent:
        assert operand.codes is not None
        size = _size(operand_bytes(operand))
        return f"{quantizer_words(operand.codes)} by the ranks that own W, {size}"
    made = _making(plan, operand)
    words = [_SOURCES[operand.source]]
    if operand.gathered == "before":
        part = operand_bytes(operand) // plan.setting.sharding.ranks
        words.append(f"gathered from all ranks: {_size(part)} from each")
    if operand.folds:
        words.append("times the row scales of the other operand")
    if operand.hadamard is not None:
        words.append(f"transformed {transform_words(operand.hadamard)}")
    if operand.quantizer is not None:
        words.append(quantizer_words(operand.quantizer))
        words.append(f"by {made.maker.name}{_beside(operand, made)}")
    if operand.carrier is not None:
        words.append(f"with {_short(operand.carrier)} carriers")
    if operand.agrees:
        words.append("after the ranks' maximum")
    if operand.gathered == "after":
        words.append(f"gathered from all ranks: {_size(operand_bytes(operand))} from each")
    elif operand.is_quantized:
        words.append(_size(operand_bytes(operand)))
    return ", ".join(word for word in words if word) or "in high precision"


def _beside(operand: OperandPlan, making: Making) -> str:
    """Words for the other operands that the maker makes in the same pass over the matrix."""
    others = [f"{LETTERS[o.letter]} of {o.gemm}" for o in making.operands if o is not operand]
    return f" in one pass with {' and '.join(others)}" if others else ""


def _product(gemm: GemmPlan) -> str:
    product = gemm.product
    words = [f"by {gemm.multiplier.name}"]
    if product.correction != 1.0:
        words.append(f"times {product.correction:.4g}")
    goes = "added to main_grad in" if product.adds else "in"
    return ", ".join([*words, f"{goes} {_short(product.out_dtype)}"])


def _extras(plan: LinearPlan) -> Iterator[str]:
    recipe, sharding = plan.recipe, plan.setting.sharding
    if plan.compensation is not None:
        reaches = "Y and dW" if plan.residual_in_dw else "Y"
        totals = plan.splitting is not None and plan.splitting.takes_total
        chosen = "chosen by sums over the ranks, " if totals else ""
        by = plan.compensation.name
        yield f"outliers  {chosen}multiplied in high precision by {by}, added to {reaches}"
    if plan.subtracts_mean:
        summed = ", summed over the ranks" if sharding.scattered == "x" else ""
        text = f"mean of X  by pytorch{summed}, in {_short(plan.setting.dtype)}"
        if plan.mean_in_y is not None:
            text += f"; times W^T by {plan.mean_in_y.name}, added to Y"
        yield text + ("; times the sum of dY by pytorch, added to dW" if plan.mean_in_dw else "")
    for name, estimates, estimator in (
        ("dW", plan.estimates_w, recipe.estimator),
        ("dX", plan.estimates_x, recipe.x_estimator),
    ):
        if estimates is not None and estimator is not None:
            sums = estimates.takes_ranks or estimates.takes_outer_ranks
            summed = ", which takes sums over the ranks" if sums else ""
            yield f"{name}  {estimator_words(estimator)}, by {estimates.name}{summed}"
    if sharding.scattered == "dy":
        yield "Y  summed over the ranks, each of which takes its tokens"
    if sharding.scattered == "x":
        yield "dX  summed over the ranks, each of which takes its tokens"
    elif sharding.sums_dx:
        yield "dX  summed over the ranks"


def _kept(plan: LinearPlan) -> Iterator[str]:
    """The lines that say what is kept for backward, and held over a step."""
    setting, sizes = plan.setting, saved_sizes(plan)
    words = [*_kept_x(plan, sizes)]
    words += [f"{_KEPT[field]}, {_size(sizes[field])}" for field in _KEPT if field in sizes]
    if size := norm_bytes(plan):
        words.append(f"the input of its RMSNorm, {_size(size)}")
    if "y" in sizes:
        words.append(f"Y in {_short(setting.kept_y or setting.dtype)}, {_size(sizes['y'])}")
    if "w" in sizes:
        words.append(f"W as codes of fprop, {_size(sizes['w'])}")
    elif not setting.holds_w and not setting.sent_w:
        words.append("W itself")
    yield "kept for backward  " + ("; ".join(words) or "nothing")
    if size := sent_bytes(plan):
        yield f"kept over the run  W as codes of fprop, {_size(size)}"
    if setting.holds_w:
        what = "W's operand" if setting.keeps_w == "fprop" else "W's operands"
        yield f"held over a step  {what}, {setting.keeps_w}: {_size(held_bytes(plan))}"


def _kept_x(plan: LinearPlan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Words for X as it is kept for backward, if it is. sizes: of `saved_sizes`."""
    setting, operand = plan.setting, saved_operand_of_x(plan)
    if operand is not None:
        rows, columns = setting.shape("x", is_part=setting.has_part("x"))
        whole = f"{_size(rows * columns * setting.dtype.itemsize)} in {_short(setting.dtype)}"
        yield f"X as codes of {operand.gemm}, {_size(sizes['x'])} (X itself: {whole})"
    elif "x" in sizes:
        text = "X without its mean" if plan.wgrad and plan.wgrad.b.source == "centered" else "X"
        yield f"{text}, {_size(sizes['x'])}"


def _state(plan: LinearPlan, moments: Moments) -> str:
    """The line that says what an optimizer keeps of the weight."""
    each = 4 + moments.bytes
    size = round(each * plan.setting.inputs * plan.setting.outputs)
    return (
        f"optimizer state  the weight in float32, moments as {moments}: {_size(size)}, {each:.4g} "
        "bytes a parameter in place of 12"
    )


def _unused(plan: LinearPlan) -> Iterator[str]:
    """The lines that say why a faster multiplier or kernel is not used, and for which GEMMs."""
    gemms: dict[tuple[str, str], list[str]] = {}
    for gemm in plan.gemms:
        for reason in gemm.passed_over:
            gemms.setdefault(reason, []).append(gemm.name)
    for (name, why), names in gemms.items():
        yield f"{name} not used in {', '.join(names)}: {why}"
    yield from kernel_notes(plan)


def _making(plan: LinearPlan, operand: OperandPlan) -> Making:
    return next(making for making in plan.makings if operand in making.operands)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
