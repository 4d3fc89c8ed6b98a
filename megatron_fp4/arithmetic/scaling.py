"""Block scales: computes the scales of a matrix, and the scaled values that are rounded to codes.

docs/numerics.md, Scales, defines the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.fp8_scales import choose
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.errors import ConfigError


def rows_along(x: Tensor, axis: int) -> Tensor:
    """`x` as a matrix [rows, K] with `axis` last, float32 or wider."""
    moved = x.detach().movedim(axis, -1)
    rows, k = math.prod(moved.shape[:-1]), moved.shape[-1]
    return widen(moved.reshape(rows, k).contiguous())  # a transpose costs less before widening


def in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """A [rows, K] matrix as [rows of blocks, block height, columns of blocks, block length]."""
    rows, k = matrix.shape
    across, along = block[0] or rows, block[1] or k
    blocked = (rows // across if block[0] else 1, across, k // along if block[1] else 1, along)
    return matrix.reshape(blocked)


def per_block(
    matrix: Tensor,
    block: tuple[int, int],
    scales: Tensor,
    op: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """op(element, scale of its block) for each element of a [rows, K] matrix.

    scales: one for each block, of any shape with rows of blocks before columns of blocks.
    """
    blocks = in_blocks(matrix, block)
    return op(blocks, scales.reshape(blocks.shape[0], 1, blocks.shape[2], 1)).reshape(matrix.shape)


def _block_maxima(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block, [rows / height, K / length].

    Inf if the block has an Inf or a NaN, and 0 if it has no elements.
    """
    blocks = in_blocks(matrix.abs(), block)
    if blocks.numel() == 0:
        return blocks.new_zeros(blocks.shape[0], blocks.shape[2])
    maxima = blocks.amax((1, 3))
    return torch.where(maxima.isnan(), math.inf, maxima)


def largest_for_scales(matrix: Tensor, quantizer: Quantizer) -> Tensor:
    """The largest magnitudes from which the scales that ranks may share are computed.

    They are those of the blocks [rows / height, K / length], or with a tensor scale that of the
    tensor's finite blocks (a scalar), or with `row_max` those of each row's finite blocks
    [rows, 1]. Ranks that share such a scale take the maximum of theirs. A block with a NaN has Inf,
    since a collective need not preserve a NaN.
    """
    maxima = _block_maxima(matrix, quantizer.block)
    if quantizer.tensor_max or quantizer.row_max:
        return _largest_of(maxima, quantizer)
    return maxima


def _largest_of(maxima: Tensor, quantizer: Quantizer) -> Tensor:
    """The largest magnitude of the tensor's finite blocks, or, with `row_max`, of each row's.

    maxima: of the blocks. The scale of a block that is not finite is NaN and does not need it.
    """
    finite = torch.where(maxima.isfinite(), maxima, 0)
    if quantizer.row_max:
        return finite.amax(1, keepdim=True) if maxima.shape[1] else maxima.new_zeros(len(maxima), 1)
    return finite.amax() if maxima.numel() else maxima.new_zeros(())


def _outer_scale(maxima: Tensor, quantizer: Quantizer, largest: Tensor | None) -> Tensor | None:
    """The tensor scale (a scalar) or the row scales [rows, 1]; None without an outer scale.

    maxima, largest: as in `scale_blocks`.
    """
    limit = quantizer.format.max * (quantizer.tensor_max or quantizer.row_max)
    if not limit:
        return None
    if largest is None:
        largest = _largest_of(maxima, quantizer)
    scale = largest / torch.full_like(largest, limit)
    return torch.where(scale > 0, scale, 1.0)  # all zeros, or the quotient underflows


def scale_blocks(
    matrix: Tensor, quantizer: Quantizer, largest: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(scaled values [rows, K], stored scales, tensor scale, finite) of a [rows, K] matrix.

    The last three are as in `QuantizedTensor`, and a bool for each block. The scale of a block with
    a NaN or an Inf is NaN, so that the overflow shows at once; its scaled values are undefined.

    largest: the maximum of `largest_for_scales` over all ranks that share a scale; None if no rank
    shares one.
    """
    if largest is None or quantizer.tensor_max or quantizer.row_max:
        maxima = _block_maxima(matrix, quantizer.block)
    else:
        maxima = largest
    finite = maxima.isfinite()
    outer_scale = _outer_scale(maxima, quantizer, largest)
    if quantizer.scale == "e8m0":
        if outer_scale is not None:
            matrix, maxima = (
                _divided_by_row_scales(matrix, outer_scale, quantizer),
                maxima / outer_scale,
            )
            maxima = maxima.clamp(max=quantizer.format.max * quantizer.row_max)
        scaled, scales = _scale_e8m0(matrix, maxima, finite, quantizer)
    elif quantizer.scale == "fp32":
        scaled, scales = _scale_fp32(matrix, maxima, finite, quantizer)
    else:
        divisor = maxima.new_ones(()) if outer_scale is None else outer_scale
        scaled, scales = _scale_float(matrix, maxima, finite, quantizer, divisor)
    return scaled, scales, outer_scale, finite


def _divided_by_row_scales(matrix: Tensor, scales: Tensor, quantizer: Quantizer) -> Tensor:
    """A matrix divided by its row scales.

    A quotient may be rounded to beyond the row's largest magnitude, which is the largest element
    times `row_max`. It is limited to that.
    """
    limit = quantizer.format.max * quantizer.row_max
    return (matrix / scales).clamp_(-limit, limit)


def average_for(shape: torch.Size, quantizer: Quantizer, average: Tensor | None) -> Tensor | None:
    """`average` if the quantizer rounds towards it (rounding ema), else None.

    shape: of the tensor that is quantized. Raises ConfigError if an average is needed and there is
    none of this shape.
    """
    if quantizer.rounding != "ema":
        return None
    if average is None or average.shape != shape:
        raise ConfigError("rounding ema takes a moving average of the tensor's shape")
    return average


def scale_average(
    average: Tensor, matrix: Tensor, scales: Tensor, finite: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor, Tensor]:
    """(scaled average [rows, K], stored scales, finite) for rounding `matrix` towards `average`.

    average, matrix: [rows, K]. scales, finite: what `scale_blocks` returned for the matrix, with
    E8M0 scales; the average is divided by these scales. A NaN or an Inf in the average makes its
    block NaN too. Where the matrix is zero the result is zero, so that zeros are not changed.
    """
    finite = finite & _block_maxima(average, quantizer.block).isfinite()
    inverse = formats.decode_e8m0(2 * formats.E8M0_BIAS - scales.int(), matrix.dtype)
    average = torch.where(matrix == 0, 0, average)
    scales = torch.where(finite, scales, formats.E8M0_NAN).to(torch.uint8)
    return per_block(average, quantizer.block, inverse, torch.mul), scales, finite


def _scale_e8m0(
    matrix: Tensor, maxima: Tensor, finite: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    mantissa, exponent = formats.block_exponent(torch.where(finite, maxima, 0))
    limit, binade = _binade(quantizer.format.max)
    exponent = exponent - binade
    if quantizer.rule == "ceil":
        exponent += mantissa > limit
    if quantizer.rule == "nearest":  # M / L is mantissa / limit, from 1/2 to 3/2, times 2^exponent
        exponent -= (mantissa < limit * 0.75).int()
    byte = formats.encode_e8m0(torch.where(maxima == 0, -formats.E8M0_BIAS, exponent))
    scaled = _divided(matrix, byte, quantizer.block)
    if quantizer.rule == "mse":
        byte += _next_errs_less(scaled, quantizer) & (byte < 2 * formats.E8M0_BIAS)
        scaled = _divided(matrix, byte, quantizer.block)
    return scaled, torch.where(finite, byte, formats.E8M0_NAN).to(torch.uint8)


def _binade(limit: float) -> tuple[float, int]:
    """(m, e) of the largest element, m * 2^e with 1 <= m < 2: 1.5 and 2 for E2M1's 6."""
    mantissa, exponent = math.frexp(limit)
    return mantissa * 2, exponent - 1


def _divided(matrix: Tensor, byte: Tensor, block: tuple[int, int]) -> Tensor:
    """`matrix` divided by its blocks' E8M0 scales. byte: uint8, not a NaN's."""
    inverse = formats.decode_e8m0(2 * formats.E8M0_BIAS - byte.int(), matrix.dtype)
    return per_block(matrix, block, inverse, torch.mul)


# An element's squared error is an integer in units of 2^-18, so that the order of a sum does not
# matter.
_PER_SQUARE = 2.0**18


def _next_errs_less(scaled: Tensor, quantizer: Quantizer) -> Tensor:
    """Whether twice the scale gives each block a smaller squared error. Returns a bool a block.

    scaled: [rows, K], divided by the scale that rule floor gives, and so within the binade of the
    largest element.
    """
    form, (_, binade) = quantizer.format, _binade(quantizer.format.max)
    limit = math.ldexp(1.0, binade + 1)
    scaled = scaled.clamp(-limit, limit)  # of float64 a scale may be clamped

    def error(rounded: Tensor) -> Tensor:
        off = rounded - scaled  # exact
        counted = torch.round(off * off * _PER_SQUARE).to(torch.int64)
        return in_blocks(counted, quantizer.block).sum((1, 3))

    same = form.decode(form.encode(scaled), scaled.dtype)
    double = form.decode(form.encode(scaled / 2), scaled.dtype) * 2
    return error(double) < error(same)


def _scale_fp32(
    matrix: Tensor, maxima: Tensor, finite: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    factor, stored = gamma(maxima, finite, quantizer)
    return per_block(matrix, quantizer.block, factor, torch.mul), stored


def gamma(maxima: Tensor, finite: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """(factor, stored scale) of float32 scales, for blocks with the maxima `maxima`.

    maxima: one element for each block. finite: bool, of the shape of maxima: whether the block has
    neither a NaN nor an Inf. Both results have this shape.

    The factor multiplies the values. It is stored as the scale, except that the stored scale of a
    block that is not finite is NaN.
    """
    limit = quantizer.format.max
    # Divides a tensor by a tensor: if one side is a number, torch may multiply by a rounded
    # reciprocal. The clamp keeps the factor of a denormal maximum finite.
    factor = (torch.full_like(maxima, limit) / maxima).clamp(max=torch.finfo(torch.float32).max)
    factor = torch.where(maxima == 0, 1.0, factor)
    return factor, torch.where(finite, factor, math.nan).to(widen(maxima).dtype)


def _scale_float(
    matrix: Tensor,
    maxima: Tensor,
    finite: Tensor,
    quantizer: Quantizer,
    outer_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """outer_scale: of `_outer_scale`; 1 if there is none."""
    safe = torch.where(finite, maxima, 0)

    def quantize_to(target: float) -> tuple[Tensor, Tensor]:
        """The candidate whose block scales map each block's largest magnitude to `target`.

        Returns (scaled values in the shape of `matrix`, uint8 scale codes, one for each block).
        """
        scale_format = formats.SCALE_FLOATS[quantizer.scale]
        wanted = safe / (target * outer_scale) * quantizer.inflate
        code = scale_format.encode(wanted, up=quantizer.rule == "up")
        divisor = scale_format.decode(code, matrix.dtype) * outer_scale
        # A block whose scale is rounded to zero has elements of zero.
        divisor = torch.where(divisor > 0, divisor, math.inf)
        return per_block(matrix, quantizer.block, divisor, torch.div), code

    if quantizer.rule == "mse-fp8":
        scaled, code = _scale_for_fp8(matrix / outer_scale, safe / outer_scale, quantizer)
    else:
        scaled, code = quantize_to(quantizer.format.max)
    if quantizer.rule == "four-over-six":
        scaled, code = _smaller_error(
            matrix, quantizer, outer_scale, (scaled, code), quantize_to(4.0)
        )
    code = torch.where(finite, code, formats.SCALE_FLOATS[quantizer.scale].nan).to(torch.uint8)
    return scaled, code


def _scale_for_fp8(matrix: Tensor, maxima: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Chooses block scales by rule mse-fp8 (docs/numerics.md).

    matrix: float32, already divided by the outer scale. maxima: the largest magnitude of each of
    its blocks; 0 for a block with Inf or NaN. Returns (the elements divided by their block scales,
    the codes of the scales).
    """
    blocks = in_blocks(matrix, quantizer.block).squeeze(1)
    inverse, code = choose(blocks, maxima, quantizer.scale)
    return per_block(matrix, quantizer.block, inverse, torch.mul), code


def _smaller_error(
    matrix: Tensor,
    quantizer: Quantizer,
    outer_scale: Tensor,
    six: tuple[Tensor, Tensor],
    four: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """(scaled values, scale codes) with, for each block, the candidate of smaller squared error.

    A tie takes `six`. Errors are summed in float64, so that the order of a sum does not decide.
    """
    scale_format = formats.SCALE_FLOATS[quantizer.scale]

    def error(candidate: tuple[Tensor, Tensor]) -> Tensor:
        scaled, code = candidate
        rounded = formats.E2M1.decode(formats.E2M1.encode(scaled), torch.float64)
        scales = scale_format.decode(code, torch.float64) * outer_scale.double()
        off = per_block(rounded, quantizer.block, scales, torch.mul) - matrix
        return in_blocks(off.square(), quantizer.block).sum((1, 3))

    use_four = error(four) < error(six)
    chosen = per_block(use_four.new_ones(matrix.shape), quantizer.block, use_four, torch.mul)
    return torch.where(chosen, four[0], six[0]), torch.where(use_four, four[1], six[1])
