"""Gives each operand of a layout the matrix that it was made from in one process.

Its codes must then be those of one process, in float32 too, where a layout's own inputs differ by
the order of sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from testing.layouts.recorder import OperandPart, Record, positions

# The relative difference that the inputs of a linear may have in two layouts in float32. They are
# sums of some hundred terms.
NEAR = 1e-4


def teacher(
    one: Iterable[Record], in_place: Callable[[str], bool], as_tokens: Callable[[str], bool]
) -> Callable[[OperandPart, Tensor], Tensor]:
    """A function: (part of an operand, its matrix) -> one process's matrix of that part.

    one: the records of one process.
    in_place: whether an operand, by its label, has the same place in all layouts.
    as_tokens: whether it belongs to an expert, whose tokens can have any order. Each of its rows is
        replaced by the most similar row of one process.

    The function returns the matrix of any other operand unchanged. It asserts that the two matrices
    differ by no more than NEAR.
    """
    whole = {record.key: record for record in one}
    labelled: dict[str, list[Record]] = defaultdict(list)
    for record in whole.values():
        labelled[record.label].append(record)

    def taught(part: OperandPart, matrix: Tensor) -> Tensor:
        if in_place(part.label) and part.key in whole:
            record = whole[part.key]
            found = record.matrix[positions(record.rows, part.rows)][:, part.columns]
        elif as_tokens(part.label) and part.label in labelled:
            rows = torch.cat([r.matrix[:, part.columns] for r in labelled[part.label]])
            found = _nearest(rows, matrix.cpu() * part.scale)
        else:
            return matrix
        found = (found / part.scale).to(matrix)
        assert (found - matrix).norm() <= NEAR * matrix.norm(), f"{part.key}: another input"
        return found

    return taught


def _nearest(rows: Tensor, wanted: Tensor) -> Tensor:
    return rows[torch.cdist(wanted.double(), rows.double()).argmin(1)]
