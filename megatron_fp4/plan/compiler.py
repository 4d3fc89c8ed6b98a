"""Compiles a recipe and a setting to a LinearPlan.

All choices are made here: what each operand is made from, which maker makes it, what is gathered
and when, what is kept, and which multiplier runs each GEMM. A call of a linear makes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from megatron_fp4 import makers, multipliers
from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.errors import ConfigError
from megatron_fp4.makers import computed, estimator, outliers
from megatron_fp4.makers.base import OperandPlan, Source
from megatron_fp4.multipliers.base import Multiplier, Product
from megatron_fp4.operands import Compute
from megatron_fp4.plan import reads
from megatron_fp4.plan.data import GemmPlan, LinearPlan, Making
from megatron_fp4.plan.owned_codes import reader_of_w
from megatron_fp4.plan.sizes import CONTRACTED, token_tile
from megatron_fp4.recipe import OPERANDS, Recipe
from megatron_fp4.setting import Setting


def compile_plan(recipe: Recipe, setting: Setting) -> LinearPlan:
    """The plan of a linear with this recipe in this setting.

    Raises ConfigError where ranks share a row whose scale is under one of the tensor.
    """
    fprop = _gemm(recipe, "fprop", setting)
    dgrad = _gemm(recipe, "dgrad", setting) if setting.dx else None
    wgrad = _gemm(recipe, "wgrad", setting) if setting.dw else None
    saves_x = reads.saves_x(recipe, setting)
    assert not setting.sent_w or reader_of_w(recipe) is None
    forward, backward, late = _order(fprop, dgrad, wgrad, packs_x=saves_x == "packed")
    # Of the operand that is made again only the codes are read.
    again = [replace(fprop.b, carrier=None)] if reads.remakes_w(recipe, setting) else []
    return LinearPlan(
        recipe=recipe,
        setting=setting,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        forward=makings(forward, setting),
        backward=makings(again, setting) + makings(backward, setting),
        late=makings(late, setting),
        saves_x=saves_x,
        saves_w=reads.saves_w(recipe, setting),
        splitting=outliers.choose(recipe, setting),
        compute_x=_compute_x(recipe, fprop.a, setting),
        compensation=_high_precision(setting) if reads.compensates(recipe) else None,
        residual_in_dw=setting.dw and reads.residual_in_dw(recipe),
        mean_in_y=_high_precision(setting) if reads.centered_x(recipe, "fprop") else None,
        mean_in_dw=reads.mean_in_dw(recipe, setting),
        shows_packed_x=saves_x == "packed" and recipe.fprop.a is None,
        estimates_w=estimator.choose(reads.estimator_of(recipe, "w", setting), fprop.b, setting),
        estimates_x=estimator.choose(reads.estimator_of(recipe, "x", setting), fprop.a, setting),
    )


def _order(
    fprop: GemmPlan, dgrad: GemmPlan | None, wgrad: GemmPlan | None, packs_x: bool
) -> tuple[list[OperandPlan], list[OperandPlan], list[OperandPlan]]:
    """(forward, backward, late): when the operands are made, in their order; see LinearPlan.

    Operands that are made from one matrix follow each other, so that one maker can make both.
    packs_x: whether wgrad's operand of X is made in the forward pass.
    """
    forward, backward, late = [fprop.a], list[OperandPlan](), list[OperandPlan]()
    if wgrad is not None and packs_x:
        forward.append(wgrad.b)
    if not fprop.b.is_sent:
        forward.append(fprop.b)
    if dgrad is not None:
        backward.append(dgrad.b)
    if wgrad is not None and not packs_x:
        (late if wgrad.b.gathered == "before" else backward).append(wgrad.b)
    if dgrad is not None:
        backward.append(dgrad.a)
    if wgrad is not None:
        # Row scales of X that multiply dY are known only after X is gathered. Where X is gathered
        # before it is quantized, dY's operand for wgrad waits for it; the one for dgrad does not.
        (late if late and wgrad.a.folds else backward).append(wgrad.a)
    return forward, backward, late


def _high_precision(setting: Setting) -> Multiplier:
    """The multiplier for what the recipe takes out of X (outliers, or the mean), which it
    multiplies with W or dY in the model's dtype, and adds to Y or dW."""
    dtype, shape = setting.dtype, (0, 0, 0)
    product = Product(dtype, dtype, shape, dtype, wide(dtype), adds=True)
    return multipliers.choose(product, setting.target, setting.fastest).multiplier


# --- operands -------------------------------------------------------------------------------------


class _From(NamedTuple):
    """What an operand is made from; see OperandPlan."""

    source: Source
    dtype: torch.dtype
    codes: Quantizer | None = None


def _source(recipe: Recipe, gemm: str, letter: str, setting: Setting) -> _From:
    """What an operand is made from: the first of the sources below that applies.

    A backward operand of W or X is made from fprop's codes where the recipe says so. Then it is
    decoded to the narrowest dtype in which its values are exact.
    """
    dtype = setting.dtype
    if (gemm, letter) == ("fprop", "x") and recipe.outliers is not None:
        return _From("inliers", dtype)
    if letter == "x" and reads.centered_x(recipe, gemm):
        return _From("centered", dtype)
    if (gemm, letter) == ("fprop", "w") and setting.sent_w:
        return _From("codes", dtype, recipe.fprop.b)
    if gemm == "fprop" or letter == "dy" or not reads.from_fprop_codes(recipe, letter):
        return _From(_computed_source(recipe, gemm, letter, setting) or "model", dtype)
    codes, own = recipe.quantizer("fprop", letter), recipe.gemm(gemm)
    assert codes is not None
    transformed = recipe.fprop.hadamard is not None
    if own.b is None and own.hadamard is None and not transformed:
        even = not any(size % 2 for size in setting.shape(letter, is_part=False))
        if codes.scale == "fp32" and codes.spans_axis and even:
            return _From("elements", dtype, replace(codes, block=(WHOLE_AXIS, WHOLE_AXIS)))
        # An element times its block scale is exact in BF16, and may overflow in float16.
        fits = dtype == torch.bfloat16 and codes.exact_in_bf16
        return _From("values", dtype if fits else wide(dtype))
    # A 4-bit element times a block scale is exact in BF16 too.
    narrow = codes.exact_in_bf16 and not codes.scales_product and dtype == torch.bfloat16
    narrow = narrow and not transformed
    if narrow and codes.scale == "e8m0" and own.b is not None:
        return _From("codes", dtype, codes)
    return _From("decoded", dtype if narrow else wide(dtype))


def _computed_source(
    recipe: Recipe, gemm: str, letter: str, setting: Setting
) -> Literal["swiglu", "normed", ""]:
    """The source of an operand of X or dY, if it is "swiglu" or "normed" and not "model"."""
    if letter == "dy":
        return "swiglu" if setting.swiglu == "before" else ""
    if letter != "x":
        return ""
    if setting.normed:
        return "" if _reads_normed_x(recipe, setting) else "normed"
    if setting.swiglu != "after" or reads.subtracts_mean(recipe, setting):
        return ""
    if gemm == "fprop" or reads.saves_x(recipe, setting) == "packed":
        return "swiglu"
    if _keeps_swiglu(recipe, setting):
        return ""
    fprop = operand_plan(recipe, "fprop", "x", setting)
    maker = makers.choose(fprop, setting.target).maker
    return "swiglu" if recipe.outliers is None and maker.computes_source(fprop) else ""


def _keeps_x(recipe: Recipe, setting: Setting) -> bool:
    """Whether X is saved for backward in high precision, alone or beside its codes."""
    return (
        reads.saves_x(recipe, setting) == "model"
        or reads.estimator_of(recipe, "x", setting) is not None
    )


def _reads_normed_x(recipe: Recipe, setting: Setting) -> bool:
    """Whether something but fprop's maker reads the result of a norm as a matrix."""
    return _splits_x(recipe, setting) or _keeps_x(recipe, setting)


def _keeps_swiglu(recipe: Recipe, setting: Setting) -> bool:
    """Whether X after a SwiGLU is saved for backward in high precision as the result of the SwiGLU,
    and not as what goes through it.

    An estimator of X reads the result. So does wgrad where fc1 keeps Y rounded (`Setting.kept_y`).
    """
    if reads.estimator_of(recipe, "x", setting) is not None:
        return True
    return setting.kept_y is not None and _keeps_x(recipe, setting)


def _splits_x(recipe: Recipe, setting: Setting) -> bool:
    """Whether outliers or the mean are taken out of X."""
    return recipe.outliers is not None or reads.subtracts_mean(recipe, setting)


def _compute_x(recipe: Recipe, x: OperandPlan, setting: Setting) -> Compute | None:
    """See `LinearPlan.compute_x`. x: fprop's operand."""
    if setting.normed and _reads_normed_x(recipe, setting):
        return computed.choose(replace(x, source="normed"), setting)
    reads_swiglu = _splits_x(recipe, setting) or _keeps_swiglu(recipe, setting)
    return computed.choose(x, setting) if setting.swiglu == "after" and reads_swiglu else None


def _has_scales_to_fold(recipe: Recipe, gemm: str, setting: Setting) -> bool:
    """Whether dY is multiplied by scales of a backward GEMM's W or X before it is quantized.

    It is where W or X comes from fprop's codes with scales of whole rows or of the tensor: these
    lie along the axis that the GEMM contracts, and so cannot multiply its product.
    """
    letter = OPERANDS[gemm][1]
    if gemm == "fprop":
        return False
    source = _source(recipe, gemm, letter, setting).source
    codes = recipe.quantizer("fprop", letter)
    if source != "values" or codes is None:
        return source == "elements"
    return codes.scales_product


def _gathered(
    recipe: Recipe, gemm: str, letter: str, setting: Setting
) -> Literal["", "before", "after"]:
    """Whether the operand's tokens are gathered over the ranks, and when; see OperandPlan.

    Codes are gathered ("after") where a rank can quantize its part of the tokens. The matrix itself
    is gathered ("before") where blocks would straddle the ranks' tokens, or where the operand stays
    in high precision.
    """
    if not setting.has_part(letter):
        return ""
    if gemm == "fprop":
        return "after"
    if letter == "x":
        packed = reads.saves_x(recipe, setting) == "packed"
        return "after" if packed or _stands_alone(recipe, gemm, letter, setting) else "before"
    # If one operand of dY is not 4-bit, gathering dY itself costs no more bytes than gathering that
    # operand, and both are made from the gathered dY.
    asked_for = {"dgrad": setting.dx, "wgrad": setting.dw}
    alone = all(_stands_alone(recipe, name, "dy", setting) for name in asked_for if asked_for[name])
    return "after" if alone and not (setting.dw and reads.residual_in_dw(recipe)) else "before"


def _stands_alone(recipe: Recipe, gemm: str, letter: str, setting: Setting) -> bool:
    """Whether a rank can quantize its part of the tokens to 4-bit codes without the other parts."""
    quantizer = recipe.quantizer(gemm, letter)
    tile = token_tile(recipe, gemm, letter)
    return quantizer is not None and quantizer.format.packed and setting.tokens % tile == 0


def operand_plan(recipe: Recipe, gemm: str, letter: str, setting: Setting) -> OperandPlan:
    """The plan of one operand, without `carrier`, which depends on the multiplier.

    Raises ConfigError where ranks share a row whose scale is under one of the tensor.
    """
    made_from, axis = _source(recipe, gemm, letter, setting), CONTRACTED[gemm, letter]
    is_sent = (gemm, made_from.source) == ("fprop", "codes")
    quantizer = None if is_sent else recipe.quantizer(gemm, letter)
    gathered = _gathered(recipe, gemm, letter, setting)
    is_part, agrees = gathered == "after", False
    if quantizer is not None and setting.sharding.ranks > 1:
        sharded = 0 if is_part else setting.sharding.axis(letter)
        agrees = quantizer.scale_spans(sharded, axis)
        if quantizer.tensor_max and quantizer.spans_axis and sharded == axis:
            raise ConfigError(
                f"{gemm} {letter}: ranks share a row, whose scale is under one of the tensor: "
                "give tensor_max 0, or blocks along the row"
            )
    return OperandPlan(
        gemm=gemm,
        letter=letter,
        **made_from._asdict(),
        shape=setting.shape(letter, is_part),
        axis=axis,
        is_part=is_part,
        gathered=gathered,
        folds=letter == "dy" and _has_scales_to_fold(recipe, gemm, setting),
        hadamard=recipe.gemm(gemm).hadamard,
        quantizer=quantizer,
        agrees=agrees,
    )


def makings(operands: Iterable[OperandPlan], setting: Setting) -> tuple[Making, ...]:
    """Which maker makes each of these operands, in their order.

    A Making is one call of a maker. Successive operands that are made from the same matrix share a
    Making if their maker can make them in one pass.
    """
    found: list[Making] = []
    for operand in operands:
        matrix, choice = (operand.letter, operand.source), makers.choose(operand, setting.target)
        last = found[-1] if found else None
        if last is not None and (last.matrix, last.maker) == (matrix, choice.maker):
            if all(choice.maker.joins(other, operand) for other in last.operands):
                found[-1] = replace(last, operands=(*last.operands, operand))
                continue
        compute, computes = None, False
        if operand.source in ("swiglu", "normed"):
            compute = computed.choose(operand, setting)
            computes = choice.maker.computes_source(operand) and computed.reads_y(operand, setting)
        found.append(
            Making(matrix, choice.maker, (operand,), choice.passed_over, compute, computes)
        )
    return tuple(found)


# --- products -------------------------------------------------------------------------------------


def _gemm(recipe: Recipe, gemm: str, setting: Setting) -> GemmPlan:
    a, b = (operand_plan(recipe, gemm, letter, setting) for letter in OPERANDS[gemm])
    out_dtype, adds = _output(recipe, gemm, setting)
    product = Product(
        _format(a), _format(b), _shape(gemm, setting), setting.dtype, out_dtype, adds,
        recipe.gemm(gemm).correction,
    )  # fmt: skip
    multiplier, passed_over = multipliers.choose(product, setting.target, setting.fastest)
    a, b = (_with_carrier(operand, multiplier, setting) for operand in (a, b))
    if reads.saves_x(recipe, setting) == "packed" and gemm == "wgrad":
        b = replace(b, carrier=None)  # made in forward, multiplied in backward: only codes are kept
    # An operand that is only decoded from fprop's codes takes as many bytes as W. It is held only
    # where the setting asks for decoded forms. Calls without tokens may have another multiplier.
    decoded = setting.keeps_w == "decoded" and b.letter == "w" and setting.tokens > 0
    held = ("fprop",) if setting.keeps_w == "fprop" else ("fprop", "dgrad") * setting.holds_w
    holds_b = gemm in held and (b.is_quantized or (decoded and gemm == "dgrad"))
    return GemmPlan(
        gemm, a, b, product, multiplier, passed_over, holds_b, decoded and b.is_quantized
    )


def _format(operand: OperandPlan) -> Quantizer | torch.dtype:
    """The operand's format in the product: its quantizer, or the dtype of high precision."""
    if operand.quantizer is not None:
        return operand.quantizer
    if operand.codes is not None:
        return operand.codes
    # Row scales are multiplied into dY, and Hadamard transforms computed, in float32.
    return wide(operand.dtype) if operand.folds or operand.group else operand.dtype


def _shape(gemm: str, setting: Setting) -> tuple[int, int, int]:
    tokens, inputs = setting.shape("x", is_part=False)
    outputs = setting.outputs
    return {
        "fprop": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (outputs, inputs, tokens),
    }[gemm]


def _output(recipe: Recipe, gemm: str, setting: Setting) -> tuple[torch.dtype, bool]:
    """(dtype of the product, whether it is added to main_grad).

    The product is in float32 where another term is added to it before it is rounded.
    """
    dtype = setting.dtype
    if gemm == "fprop":
        adds_to_y = reads.compensates(recipe) or reads.centered_x(recipe, "fprop")
        return wide(dtype) if setting.has_bias or adds_to_y else dtype, False
    if gemm == "dgrad":
        return dtype, False
    # The mean's product is added in place, to a main_grad too if that is not rounded between.
    apart = reads.mean_in_dw(recipe, setting) and setting.main_grad != wide(dtype)
    if recipe.estimator is not None or reads.residual_in_dw(recipe) or apart:
        return wide(dtype), False
    return setting.main_grad or setting.weight_dtype, setting.main_grad is not None


def _with_carrier(operand: OperandPlan, multiplier: Multiplier, setting: Setting) -> OperandPlan:
    """The operand with `carrier` set, where its maker is to write carriers.

    Carriers are useful only for an operand that is multiplied directly: what is gathered is the
    codes.
    """
    maker = makers.choose(operand, setting.target).maker
    if operand.is_part or not maker.writes_carriers(operand):
        return operand
    return replace(operand, carrier=multiplier.carrier(operand.letter))
