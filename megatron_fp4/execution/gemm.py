"""Runs one GEMM of a linear from its plan, and reports its operands to the observer."""

from __future__ import annotations

from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.operands import Carriers, Decoded, Form, Made
from megatron_fp4.plan.data import GemmPlan


def run_gemm(
    gemm: GemmPlan,
    a: Made,
    b: Made,
    site: Site,
    into: Tensor | None = None,
    held: HeldWeight | None = None,
) -> Tensor:
    """A B^T in the output dtype of the plan, or added to `into`, which is then returned.

    held: where the decoded form of W's operand is stored for the other calls of the step, if the
    plan says so, and where an earlier call stored it.
    """
    product, multiplier, names = gemm.product, gemm.multiplier, (gemm.a.letter, gemm.b.letter)
    kept = held.forms.get(gemm.name) if held is not None and gemm.holds_form else None
    if kept is not None:
        [first] = multiplier.decode([a], names[:1], product.dtype)
        second = kept
    else:
        first, second = multiplier.decode([a, b], names, product.dtype)
        if held is not None and gemm.holds_form:
            held.forms[gemm.name] = second
    if site.observe is not None:
        _show(gemm.a, a, first, site)
        if kept is None:  # else an earlier call has reported it
            _show(gemm.b, b, second, site)
    return multiplier.multiply(first, second, product.correction, product.out_dtype, into)


def _show(plan: OperandPlan, made: Made, form: Form | None, site: Site) -> None:
    """Reports the tally of an operand to `Site.observe`, if the recipe quantizes it for this GEMM,
    and its carriers to `Site.watch`.

    form: the operand as it is multiplied; None if it is multiplied later.
    """
    if (plan.quantizer is None and not plan.is_sent) or site.observe is None:
        return
    assert isinstance(made.operand, QuantizedTensor)
    if site.watch is not None and isinstance(form, Carriers):
        site.watch.carried(site, plan, form)
    counted = form.tally if isinstance(form, Decoded | Carriers) else None
    site.observe(plan.gemm, plan.letter, made.operand.tally() if counted is None else counted)


def show_codes(plan: OperandPlan, made: Made, site: Site) -> None:
    """Reports an operand that is saved now and multiplied later; its codes are checked for NaN."""
    _show(plan, made, None, site)
