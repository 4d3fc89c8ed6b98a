"""The bytes that a plan's operands take, that it saves for backward, and that it holds."""

from __future__ import annotations

from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import LinearPlan


def operand_bytes(operand: OperandPlan) -> int:
    """The bytes of an operand's codes and scales, or of its matrix where it is not quantized."""
    rows, k = operand.shape[1 - operand.axis], operand.shape[operand.axis]
    quantizer = operand.quantizer or operand.codes
    return rows * k * operand.dtype.itemsize if quantizer is None else quantizer.nbytes(rows, k)


def saved_bytes(plan: LinearPlan) -> int:
    """The bytes that one call saves for its backward pass, the sum of `saved_sizes`."""
    return sum(saved_sizes(plan).values())


def saved_sizes(plan: LinearPlan) -> dict[str, int]:
    """The bytes that one call saves for its backward pass, by the fields of
    `execution.forward.Saved`; without the fields that are None.

    `weight` is never among them, nor is `w` where it is W itself, which the model holds anyway, or
    where the calls of a step share it. What an RMSNorm before the linear saves (`norm_bytes`) is
    not counted, since it does so without the linear too.
    """
    setting, x, found = plan.setting, saved_operand_of_x(plan), dict[str, int]()
    rows, columns = setting.shape("x", is_part=setting.has_part("x"))
    whole = rows * columns * setting.dtype.itemsize
    if plan.saves_x:
        found["x"] = whole if x is None else operand_bytes(x)
    if plan.estimates_x is not None:
        found["x_itself"] = whole
    if plan.residual_in_dw:
        found["outliers"] = outlier_bytes(plan)
    if plan.mean_in_dw:
        found["mean"] = columns * setting.dtype.itemsize
    if size := y_bytes(plan):
        found["y"] = size
    if plan.saves_w == "operand" and not setting.holds_w and not setting.sent_w:
        found["w"] = operand_bytes(plan.fprop.b)
    return found


def saved_operand_of_x(plan: LinearPlan) -> OperandPlan | None:
    """The operand of X that is saved for backward; None where X is saved as a matrix, or not."""
    if plan.saves_x == "packed" and plan.wgrad is not None:
        return plan.wgrad.b
    return plan.fprop.a if plan.saves_x == "operand" else None


def y_bytes(plan: LinearPlan) -> int:
    """The bytes of Y as it is kept for the gradient of the SwiGLU that follows; 0 where none does
    (`Setting.kept_y`)."""
    setting = plan.setting
    if setting.swiglu != "before" or (plan.dgrad is None and plan.wgrad is None):
        return 0
    rows, columns = setting.shape("dy", is_part=False)
    return rows * columns * (setting.kept_y or setting.dtype).itemsize


def norm_bytes(plan: LinearPlan) -> int:
    """The bytes of what goes into the RMSNorm that the linear computes, which is saved for its
    gradient (`execution.norm.before_linear`); 0 without a norm."""
    setting = plan.setting
    rows, columns = setting.shape("x", is_part=setting.has_part("x"))
    return rows * columns * setting.dtype.itemsize if setting.normed else 0


def outlier_bytes(plan: LinearPlan) -> int:
    """The bytes of the values and places of X's outliers, of this rank's tokens; 0 where the recipe
    splits none off."""
    setting, outliers = plan.setting, plan.recipe.outliers
    if outliers is None:
        return 0
    shape = setting.shape("x", is_part=setting.has_part("x"))
    return outliers.nbytes(*shape, setting.dtype.itemsize)


def sent_bytes(plan: LinearPlan) -> int:
    """The bytes of the codes and scales that W's owners send; 0 where W does not come as these.

    They lie in buffers of their own over the whole run; see `Setting.sent_w`.
    """
    return operand_bytes(plan.fprop.b) if plan.fprop.b.is_sent else 0


def held_bytes(plan: LinearPlan) -> int:
    """The bytes of W's operands that all calls of a step share; 0 where the plan holds none.

    See `execution.weights.HeldWeight`.
    """
    total = 0
    for gemm in (plan.fprop, plan.dgrad):
        if gemm is None or not gemm.holds_b:
            continue
        rows, k = gemm.b.shape[1 - gemm.b.axis], gemm.b.shape[gemm.b.axis]
        if gemm.b.is_quantized and not gemm.b.is_sent:
            total += operand_bytes(gemm.b)
        if not gemm.b.is_quantized or gemm.holds_form:
            total += rows * k * gemm.multiplier.form_bytes(plan.setting.dtype)
    return total
