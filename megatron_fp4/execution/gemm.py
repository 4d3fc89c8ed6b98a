"""Runs one GEMM of a linear, as its plan says."""

from __future__ import annotations

from torch import Tensor

from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.operands import Decoded, Form, Made
from megatron_fp4.plan.data import GemmPlan, OperandPlan


def run_gemm(
    gemm: GemmPlan,
    a: Made,
    b: Made,
    site: Site,
    into: Tensor | None = None,
    held: HeldWeight | None = None,
) -> Tensor:
    """A B^T in the dtype of the plan's product, or added to `into`. held: keeps the form in which W
    is multiplied, where the plan says so, and has it from an earlier call of the step."""
    product, multiplier, names = gemm.product, gemm.multiplier, (gemm.a.letter, gemm.b.letter)
    kept = None if held is None else held.forms.get(gemm.name)
    if kept is not None:
        [first] = multiplier.decode([a], names[:1], product.dtype)
        second = kept
    else:
        first, second = multiplier.decode([a, b], names, product.dtype)
        if held is not None and gemm.holds_form:
            held.forms[gemm.name] = second
    if site.observe is not None:
        _show(gemm.a, a, first, site)
        if kept is None:  # else an earlier call has shown it
            _show(gemm.b, b, second, site)
    return multiplier.multiply(first, second, product.correction, product.out_dtype, into)


def _show(plan: OperandPlan, made: Made, form: Form | None, site: Site) -> None:
    """Give the tally of an operand that this GEMM's recipe quantized to the observer."""
    if plan.quantizer is None or site.observe is None:
        return
    assert isinstance(made.operand, QuantizedTensor)
    counted = form.tally if isinstance(form, Decoded) else None
    site.observe(plan.gemm, plan.letter, made.operand.tally() if counted is None else counted)


def show_codes(plan: OperandPlan, made: Made, site: Site) -> None:
    """The same for an operand that is kept, to be multiplied later."""
    _show(plan, made, None, site)
