"""Some lines of an operand, which stand for all of them in metrics.

A line lies along an axis of a matrix: a row along axis 1, a column along axis 0. Lines are picked
before codes are decoded, so that the cost does not depend on the size of the matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.arithmetic.formats import pack
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.operands import Computed, Matrix, Operand


def lines_of(matrix: Matrix, axis: int, lines: Tensor) -> Tensor:
    """Some lines along `axis` of a matrix, [n, K] with that axis last. Codes are decoded to BF16.

    lines: int64 [n], their indices along the other axis.
    """
    if isinstance(matrix, Computed):
        return matrix.lines(axis, lines)
    if not isinstance(matrix, QuantizedTensor):
        return matrix.movedim(axis, -1)[lines]
    if matrix.axis == axis:
        return rows_of(matrix, lines).dequantize(torch.bfloat16)
    return _across_blocks(matrix, lines).t()


def rows_of(quantized: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """Some rows of a quantized matrix, as a matrix with the blocked axis last.

    rows: int64 [n], indices along the axis that is not blocked.
    """
    across = quantized.quantizer.block[0]
    scales = quantized.scales.reshape(-1, quantized.scales.shape[-1])
    of_rows = rows  # the row of scales for each row of codes
    if across != 1:
        of_rows = rows // across if across else torch.zeros_like(rows)
    outer_scale = quantized.tensor_scale
    if outer_scale is not None and quantized.quantizer.row_max:
        outer_scale = outer_scale[rows]
    return QuantizedTensor(
        codes=quantized.codes[rows],
        scales=scales[of_rows],
        tensor_scale=outer_scale,
        quantizer=_in_rows(quantized.quantizer),
        shape=torch.Size((len(rows), quantized.shape[quantized.axis])),
        axis=1,
    )


def decoded(each: Sequence[Operand]) -> list[Tensor]:
    """The values of several matrices, [rows, K] in float32 or, of a matrix in high precision, in
    its own dtype.

    Quantized ones are those of `rows_of`. Those of one quantizer and width are decoded together,
    which launches as many kernels as one of them.
    """
    found = dict[int, Tensor]()
    groups = defaultdict[tuple[Any, ...], dict[int, QuantizedTensor]](dict)
    for i, matrix in enumerate(each):
        if isinstance(matrix, QuantizedTensor):
            alone = None if matrix.tensor_scale is None else i
            groups[matrix.quantizer, matrix.shape[1], alone][i] = matrix
        else:
            found[i] = matrix
    for own in groups.values():
        found.update(zip(own, _decoded_together([*own.values()]), strict=True))
    return [found[i] for i in range(len(each))]


def _decoded_together(each: Sequence[QuantizedTensor]) -> Sequence[Tensor]:
    sizes = [matrix.shape[0] for matrix in each]
    whole = replace(
        each[0],
        codes=torch.cat([matrix.codes for matrix in each]),
        scales=torch.cat([matrix.scales for matrix in each]),
        shape=torch.Size((sum(sizes), each[0].shape[1])),
    )
    return whole.dequantize().split(sizes)


def _across_blocks(quantized: QuantizedTensor, columns: Tensor) -> Tensor:
    """Some indices along the blocked axis, decoded: [rows, n] in BF16, with that axis last."""
    count = len(columns)
    columns = pad(columns, (0, count % 2))  # two codes share a byte
    along = quantized.quantizer.block[1]
    codes, scales = quantized.codes, quantized.scales
    if quantized.quantizer.format.packed:
        shifts = (columns % 2 * 4).to(torch.uint8)
        codes = pack((codes.index_select(1, columns // 2) >> shifts) & 0xF)
    else:
        codes = codes.index_select(1, columns)
    if along != WHOLE_AXIS:
        scales = scales.index_select(1, columns // along)
    some = replace(
        quantized,
        codes=codes,
        scales=scales,
        quantizer=_in_columns(quantized.quantizer),
        shape=torch.Size((codes.shape[0], len(columns))),
        axis=1,
        counts=None,
    )
    return some.dequantize(torch.bfloat16)[:, :count]


@cache
def _in_rows(quantizer: Quantizer) -> Quantizer:
    """The quantizer with a scale for each row of a block."""
    return replace(quantizer, block=(1, quantizer.block[1]))


@cache
def _in_columns(quantizer: Quantizer) -> Quantizer:
    """The quantizer with a scale for each column of a block."""
    across, along = quantizer.block
    return replace(quantizer, block=(across, along and 1))
