"""Gives every operand of a layout the inputs that one process had, so that what it makes of them
must be the same: in float32 a code moves only if its input did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from testing.layouts.recorder import Place, Record, positions

# How far apart two float32 layouts' inputs of a linear may be: sums of some hundred terms.
NEAR = 1e-4


def teacher(
    one: Iterable[Record], in_place: Callable[[str], bool], as_tokens: Callable[[str], bool]
) -> Callable[[Place, Tensor], Tensor]:
    """(where an operand lies, the matrix it would be made of) -> one process's own matrix there.

    in_place, as_tokens: the labels whose places are one process's, and those of experts, whose rows
    are found by what they hold. Other operands keep their own.
    """
    whole = {record.key: record for record in one}
    labelled: dict[str, list[Record]] = defaultdict(list)
    for record in whole.values():
        labelled[record.label].append(record)

    def taught(place: Place, matrix: Tensor) -> Tensor:
        if in_place(place.label) and place.key in whole:
            record = whole[place.key]
            found = record.matrix[positions(record.rows, place.rows)][:, place.columns]
        elif as_tokens(place.label) and place.label in labelled:
            rows = torch.cat([r.matrix[:, place.columns] for r in labelled[place.label]])
            found = _nearest(rows, matrix.cpu() * place.scale)
        else:
            return matrix
        found = (found / place.scale).to(matrix)
        assert (found - matrix).norm() <= NEAR * matrix.norm(), f"{place.key}: another input"
        return found

    return taught


def _nearest(rows: Tensor, wanted: Tensor) -> Tensor:
    return rows[torch.cdist(wanted.double(), rows.double()).argmin(1)]
