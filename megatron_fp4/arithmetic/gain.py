"""Block scales that give each group of elements a gain of 1 (MS-EDEN, arXiv 2601.22813).

Rounding x to q changes its length along x: the gain <x, q> / <x, x> of a group of elements is not
1. The scales of the group's blocks are multiplied by <x, x> / <x, q>, and rounded to scales again.
If they are rounded stochastically, the gain is 1 on average. The error that is left is orthogonal
to x, and a random rotation before the rounding turns it in any direction: it averages out over
rotations. A Hadamard transform with random signs is close to that for a group with many elements of
similar sizes, and is not for a group with a few large elements alone.

Both products are of decoded values, as in EDEN (arXiv 2108.08842), where they make the estimate
unbiased. The training code of MS-EDEN's authors takes x and q divided by the scales of their blocks
instead, which weighs all blocks alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.arithmetic import formats
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.arithmetic.scaling import per_block


def scales_of_unit_gain(
    matrix: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer_scale: Tensor | None,
    quantizer: Quantizer,
    bits: Tensor | None,
) -> Tensor:
    """The scales (uint8 [rows, K / length]) that give each group of `unit_gain` elements a gain
    of 1.

    matrix: [rows, K]. codes: its E2M1 codes, one in each byte, under `scales` and `outer_scale`.
    bits: as `quantize_matrix` takes them, [rows, K]; the scale of a block takes those of its first
    element. None rounds to nearest. A block with a NaN or an Inf,
    whose scale is NaN, keeps it and counts nowhere; so does a group whose elements are all rounded
    to zero.
    """
    group, length = quantizer.unit_gain, quantizer.block[1]
    scale_format = formats.SCALE_FLOATS[quantizer.scale]
    given = scale_format.decode(scales, torch.float64)
    combined = given if outer_scale is None else given * outer_scale.double()
    decoded = formats.E2M1.decode(codes, torch.float64)
    q = per_block(decoded, quantizer.block, combined, torch.mul).view(-1, group)
    x = torch.where(q.isnan(), 0.0, matrix.double().view(-1, group))
    xx, xq = (x * x).sum(1), (x * q.nan_to_num(nan=0.0)).sum(1)
    correction = torch.where(xq > 0, xx / xq, 1.0)
    wanted = (given.view(-1, group // length) * correction[:, None]).view(given.shape)
    draws = None if bits is None else bits[:, ::length]
    return scale_format.encode(wanted.to(matrix.dtype), bits=draws)
