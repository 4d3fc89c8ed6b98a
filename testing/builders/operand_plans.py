"""Plans of single operands, for tests of the makers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.pytorch import make_operand
from megatron_fp4.operands import Operand


def plan(x: Operand, quantizer: Quantizer | None, axis: int, **fields: Any) -> OperandPlan:
    """The OperandPlan of an operand that is made from `x` [rows, columns].

    axis: the contracted axis. group: the size of Hadamard groups; left out: no transform. fields:
    other fields of OperandPlan.
    """
    group = fields.pop("group", 0)
    codes = x.quantizer if isinstance(x, QuantizedTensor) else None
    given: dict[str, Any] = {
        "gemm": "dgrad",
        "letter": "w",
        "source": "model" if codes is None else "codes",
        "dtype": x.dtype if isinstance(x, Tensor) else torch.bfloat16,
        "codes": codes,
        "shape": tuple(x.shape),
        "is_part": False,
        "gathered": "",
        "folds": False,
        "hadamard": Hadamard(group) if group else None,
        "agrees": False,
    }
    return OperandPlan(axis=axis, quantizer=quantizer, **given | fields)


def made_in_pytorch(
    x: Operand, quantizer: Quantizer, axis: int, group: int = 0, **given: Any
) -> QuantizedTensor:
    """The operand that plain PyTorch makes from `x` [rows, columns], blocked along `axis`.

    group: the size of Hadamard groups; 0: no transform. given: fields of Given.
    """
    wanted = plan(x, quantizer, axis, group=group, folds=given.get("fold") is not None)
    made = make_operand(x, wanted, Given(**given))
    assert isinstance(made, QuantizedTensor)
    return made
