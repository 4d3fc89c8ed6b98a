"""Makes operands in FP8 or E2M1 with a float32 scale for each row, or for all; see rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import COUNTS, QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels.launch import Launch, planned, tiles
from megatron_fp4.kernels.rows import Element, Out, RowForm, cast_kernel, largest_kernel, row_kernel
from megatron_fp4.operands import Decoded, Made

EXPONENTS = {"e4m3": (3, 7), "e5m2": (2, 15), "e2m1": (1, 1)}  # mantissa bits and bias
CARRIERS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # mantissa bits
TILE_ROWS, TILE_COLUMNS, WARPS = 64, 64, 4
WIDEST = 16384  # the most columns of which a program holds a row
PER_WARP = 1024  # elements of such a row: 32 for each thread


@dataclass(slots=True)
class RowOperand:
    """One operand of a matrix.

    axis: its contracted axis, which is last in the result.
    fold: float32, one factor for each index along `axis`, which multiplies the matrix first; None
        for none.
    largest: the maximum over the ranks that share a scale; see `quantize_matrix`. None takes those
        of the matrix.
    carrier: the FP8 dtype of the carriers that are written beside E2M1 codes, or None.
    """

    axis: int
    fold: Tensor | None = None
    largest: Tensor | None = None
    carrier: torch.dtype | None = None


def quantize(x: Tensor, quantizer: Quantizer, copies: Sequence[RowOperand]) -> list[Made]:
    """Quantizes a matrix with a float32 scale for each row of an operand, or for all of it.

    x: BF16 [rows, columns].
    copies: one, or one for each axis; then neither has `largest`.
    """
    x = x.contiguous()
    rows, columns = x.shape
    in_one_read = len(copies) == 1 and _is_held(copies[0], quantizer, columns)
    finds = not in_one_read and copies[0].largest is None
    sizes = [_room(copy, quantizer, x.shape, finds) for copy in copies]
    # Zeros: counts that kernels add to, and magnitudes that they raise.
    zeros = x.new_zeros(sum(map(sum, sizes)), dtype=torch.int32)
    parts = iter(zeros.split([size for each in sizes for size in each if size]))
    made: list[Made] = []
    given: list[Any] = []
    kinds: list[_Kind] = []
    for copy in copies:
        axis, counts, largest = copy.axis, next(parts), next(parts) if finds else None
        lines, n = x.shape[1 - axis], x.shape[axis]
        codes = x.new_empty(lines, _bytes_of(quantizer, n), dtype=torch.uint8)
        gamma = x.new_empty(lines if quantizer.block[0] == 1 else 1, 1, dtype=torch.float32)
        counts = counts[: COUNTS + lines]
        operand = QuantizedTensor(codes, gamma, None, quantizer, x.shape, axis, counts)
        fold, elements = copy.fold, None
        if fold is not None:
            fold = fold.float().contiguous()
        if copy.carrier is not None:
            elements = x.new_empty(lines, n, dtype=copy.carrier)
        made.append(Made(operand, None, None if elements is None else form_of(operand, elements)))
        if copy.largest is not None:
            largest = copy.largest.float().contiguous().view(torch.int32)
        given += fold, largest, codes, elements, gamma, counts
        kinds += ((axis, fold is not None, copy.carrier),)
    if in_one_read:
        _row_launch(rows, columns, quantizer, kinds[0])(x.device, x, *given, rows, columns)
        return made
    if len(copies) == 1:
        given += _NOTHING
    if finds:
        _find_launch(rows, columns, quantizer, *kinds)(x.device, x, *given, rows, columns)
    _cast_launch(rows, columns, quantizer, *kinds)(x.device, x, *given, rows, columns)
    return made


def find_largest(x: Tensor, quantizer: Quantizer, copy: RowOperand) -> Tensor:
    """The largest magnitude of each row of an operand, from which the row scale follows:
    float32 [lines, 1]. With one scale for the tensor that of all elements, [1, 1]. Inf stands for
    NaN too.

    x: BF16 [rows, columns]. copy: the operand; its `largest` and `carrier` are not read.
    """
    x = x.contiguous()
    rows, columns = x.shape
    lines = x.shape[1 - copy.axis] if quantizer.block[0] == 1 else 1
    found = x.new_zeros(lines, 1, dtype=torch.int32)
    fold = None if copy.fold is None else copy.fold.float().contiguous()
    out = fold, found, None, None, None, None
    find = _find_launch(rows, columns, quantizer, (copy.axis, fold is not None, None))
    find(x.device, x, *out, *_NOTHING, rows, columns)
    return found.view(torch.float32)


def _is_held(copy: RowOperand, quantizer: Quantizer, columns: int) -> bool:
    """Whether programs that hold a whole row make this operand of a matrix with `columns`."""
    rows_alone = copy.axis == 1 and quantizer.block[0] == 1 and copy.largest is None
    return rows_alone and columns <= WIDEST


def form_of(operand: QuantizedTensor, elements: Tensor) -> Decoded:
    """The form in which an operand with `counts` is multiplied. elements: its elements in FP8."""
    assert operand.counts is not None
    return Decoded(elements, operand.reciprocals, operand.counts[:2])


def _bytes_of(quantizer: Quantizer, n: int) -> int:
    return n // 2 if quantizer.element == "e2m1" else n


def _room(
    copy: RowOperand, quantizer: Quantizer, shape: torch.Size, finds: bool
) -> tuple[int, int]:
    """The integers of a copy's counts and, if a kernel `finds` them, of its largest magnitudes, in
    multiples of 16 bytes."""
    lines = shape[1 - copy.axis]
    largest = lines if quantizer.block[0] == 1 else 1
    return tiles(COUNTS + lines, 4) * 4, tiles(largest, 4) * 4 if finds else 0


# Of an operand: the contracted axis, whether something is folded, and the dtype of its carriers.
_Kind = tuple[int, bool, torch.dtype | None]
_OUT = Out(torch.float32, torch.int32, torch.uint8, torch.uint8, torch.float32, torch.int32)
_NOTHING = (None,) * len(_OUT)


def _form(quantizer: Quantizer, kind: _Kind) -> RowForm:
    axis, has_fold, carrier = kind
    mantissa = 0 if carrier is None else CARRIERS[carrier]
    return RowForm(axis, quantizer.block[0] == 1, has_fold, mantissa)


def _element(quantizer: Quantizer) -> Element:
    element = quantizer.element
    return Element(quantizer.format.max, element == "e2m1", *EXPONENTS[element])


def _tiled(rows: int, columns: int, quantizer: Quantizer, kinds: Sequence[_Kind]) -> Any:
    """(grid, types, constants) of the two kernels that read tiles."""
    grid = tiles(rows, TILE_ROWS), tiles(columns, TILE_COLUMNS)
    a, b = (*(_form(quantizer, kind) for kind in kinds), None)[:2]
    form = dict(A=a, B=b, TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS)
    return grid, (torch.int16, _OUT, _OUT, rows, columns), form


@planned
def _find_launch(rows: int, columns: int, quantizer: Quantizer, *kinds: _Kind) -> Launch:
    """The launch of `largest_kernel`, which finds the largest magnitudes of the rows of one operand
    or two, made of a matrix [rows, columns].

    kinds: of each operand, the contracted axis, whether it is multiplied by scales first, and the
    dtype of its FP8 elements.
    """
    return Launch(largest_kernel, *_tiled(rows, columns, quantizer, kinds), num_warps=WARPS)


@planned
def _cast_launch(rows: int, columns: int, quantizer: Quantizer, *kinds: _Kind) -> Launch:
    """The launch of `cast_kernel`, which quantizes a matrix [rows, columns] for one operand or two.

    kinds: see `_find_launch`.
    """
    grid, types, form = _tiled(rows, columns, quantizer, kinds)
    constants = form | dict(ELEMENT=_element(quantizer))
    return Launch(cast_kernel, grid, types, constants, num_warps=WARPS)


@planned
def _row_launch(rows: int, columns: int, quantizer: Quantizer, kind: _Kind) -> Launch:
    """The launch of `row_kernel`, which finds the scales and quantizes in one read."""
    block = triton.next_power_of_2(columns)
    constants = dict(FORM=_form(quantizer, kind), ELEMENT=_element(quantizer), COLUMNS=block)
    types = torch.int16, _OUT, rows, columns
    warps = min(max(block // PER_WARP, 1), 16)
    return Launch(row_kernel, (rows,), types, constants, num_warps=warps)
