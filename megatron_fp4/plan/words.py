"""Parts of a plan in words, for the start table and `python -m megatron_fp4 plan`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.decoding import has_inverse_kernel
from megatron_fp4.gemms import LETTERS
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import GemmPlan, LinearPlan
from megatron_fp4.target import kernels_problem


def gemm_words(plan: LinearPlan, gemm: GemmPlan) -> str:
    """The element formats of both operands and the multiplier, as in "e2m1 x e2m1 on bf16"."""
    if not plan.recipe.gemm(gemm.name).quantized:
        return "high precision"
    elements = (_element(plan, operand) for operand in (gemm.a, gemm.b))
    return f"{' x '.join(elements)} on {gemm.multiplier.name}"


def _element(plan: LinearPlan, operand: OperandPlan) -> str:
    quantizer = operand.quantizer or operand.codes
    if quantizer is None and operand.source in ("values", "decoded"):
        quantizer = plan.recipe.quantizer("fprop", operand.letter)
    return "high" if quantizer is None else quantizer.element


def notes(plan: LinearPlan) -> Iterator[str]:
    """A line for each multiplier and kernel that is not used, with its reason."""
    for gemm in plan.gemms:
        yield from (f"not used: {name}: {why}" for name, why in gemm.passed_over)
    yield from kernel_notes(plan)


def kernel_notes(plan: LinearPlan) -> Iterator[str]:
    """A line for each kernel that is not used to make an operand or to apply an estimator, with its
    reason, and for what PyTorch computes since it has no kernel; none on a CPU, which runs no
    kernels."""
    if plan.setting.target.kind == "cpu":
        return
    for making in plan.makings:
        names = " and ".join(f"{LETTERS[o.letter]} of {o.gemm}" for o in making.operands)
        for name, why in making.passed_over:
            yield f"not used: {name}: {why}; PyTorch makes {names}"
        if making.maker.transforms_in_pytorch(making.operands[0]):
            yield f"PyTorch transforms {names}, and the {making.maker.name} quantizes the result"
        if _inverts_in_pytorch(plan, making.operands[0]):
            yield f"PyTorch undoes the transform of fprop for {names}"
    if isinstance(plan.recipe.outliers, HotChannels):
        yield "no kernel splits hot channels off X: PyTorch does, from X as a matrix"
    if plan.subtracts_mean:
        yield "no kernel subtracts the mean of X: PyTorch does, from X as a matrix"
    for name, estimates in (("dW", plan.estimates_w), ("dX", plan.estimates_x)):
        for kernel, why in () if estimates is None else estimates.passed_over:
            yield f"not used: {kernel}: {why}; PyTorch applies the estimator to {name}"


def _inverts_in_pytorch(plan: LinearPlan, operand: OperandPlan) -> bool:
    """Whether PyTorch applies the inverse of fprop's transform to what an operand is made from."""
    transform = plan.recipe.fprop.hadamard
    if operand.source != "decoded" or transform is None:
        return False
    quantizer = plan.recipe.quantizer("fprop", operand.letter)
    assert quantizer is not None
    runs = kernels_problem(plan.setting.target) is None
    return not (runs and has_inverse_kernel(quantizer, transform.group, operand.dtype))
