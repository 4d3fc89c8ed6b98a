"""pretrain_gpt.py, after which each rank saves the quantized operands of all its training steps.

    torchrun ... pretrain_recording_operands.py FOLDER FLAGS ...

FOLDER/RANK.pt is a list of dicts, one for each operand that was made: its linear, GEMM, letter and
step, rows and columns in the unsharded matrix of the global batch, and of each element (float64,
[rows, columns]) the matrix that was quantized, the decoded value, the scale, and whether another
element of its block is not zero. For recipes without transforms and row scales.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

GROUP = 8  # columns that a placement gives one number


def main() -> None:
    cpu.install()
    from megatron.training import training

    from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
    from megatron_fp4.execution import backward, forward, making
    from megatron_fp4.operands import Computed

    folder, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    records: list[dict[str, Any]] = []
    make, evaluate, evaluates = making.make_operands, training.evaluate, [False]

    def evaluating(*args: Any, **kwargs: Any) -> Any:
        evaluates[0] = True
        result = evaluate(*args, **kwargs)
        evaluates[0] = False
        return result

    def recording(makings: Any, matrices: Any, folds: Any, site: Any, call: Any) -> Any:
        made = make(makings, matrices, folds, site, call)
        for each in makings:
            for operand in each.operands:
                if operand.quantizer is not None and not evaluates[0]:
                    matrix = matrices[each.matrix]
                    if isinstance(matrix, Computed):
                        matrix = matrix.by(each.compute)
                    if isinstance(matrix, QuantizedTensor):
                        matrix = matrix.dequantize()
                    records.append(record(operand, matrix, made[operand].operand, site, call))
        return made

    training.evaluate = evaluating
    forward.make_operands = backward.make_operands = recording
    pretrain.main()
    folder.mkdir(exist_ok=True)
    torch.save(records, folder / f"{os.environ['RANK']}.pt")


def record(operand: Any, matrix: Tensor, found: Any, site: Any, call: Any) -> dict[str, Any]:
    place, (rows, columns) = site.placement(operand, call), matrix.shape
    groups = torch.arange(columns // GROUP) if place.groups is None else place.groups
    exact, length = matrix.double(), found.quantizer.block[1]
    blocks = exact.movedim(operand.axis, -1).reshape(-1, length)
    used = (blocks != 0).any(1, keepdim=True).expand(blocks.shape).double()
    scales = found.block_scales(torch.float64).view(-1, 1).expand(blocks.shape)
    moved = exact.movedim(operand.axis, -1).shape
    return {
        "name": site.name,
        "gemm": operand.gemm,
        "letter": operand.letter,
        "step": call.key.step + 1,
        "rows": torch.arange(rows) if place.rows is None else place.rows,
        "columns": (groups[:, None] * GROUP + torch.arange(GROUP)).flatten(),
        "exact": exact.clone(),
        "decoded": found.dequantize(torch.float64),
        "scale": scales.reshape(moved).movedim(-1, operand.axis).clone(),
        "used": used.reshape(moved).movedim(-1, operand.axis).clone(),
    }


if __name__ == "__main__":
    main()
