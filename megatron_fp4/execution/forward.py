"""The forward pass of a linear, Y = X W^T + bias, executed from its plan.

Under sequence parallelism X's operand is made from this rank's tokens, and its codes and scales are
gathered for the GEMM. What is saved for backward is of this rank's tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_fp4.arithmetic.hot_channels import Columns, Outliers
from megatron_fp4.arithmetic.token_mean import centered, mean_of, token_sums
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.communication import Pending
from megatron_fp4.execution.gemm import run_gemm, show_codes
from megatron_fp4.execution.making import Matrices, make_operands
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers.base import MatrixName, OperandPlan, Source
from megatron_fp4.makers.outliers import Splitting
from megatron_fp4.operands import Computed, Decoded, Made, Matrix, Operand, Swiglu
from megatron_fp4.plan.data import LinearPlan


@dataclass(slots=True)
class Saved:
    """What the forward pass saves for backward, of this rank's tokens.

    x: see `LinearPlan.saves_x`; None where backward reads nothing of X.
    w: see `LinearPlan.saves_w`.
    weight: W, if an estimator is applied to dW, which reads it; else None.
    x_itself: X, if an estimator is applied to dX, which reads it; else None.
    outliers: those of X, if dW contains a product with them; else None.
    y: Y, in `Setting.kept_y`, if the gradient of a SwiGLU of it arrives in backward; else None.
    mean: the mean of X over the tokens of all ranks, [in], if dW contains a product with it; else
        None.
    """

    x: Operand | None
    w: Operand
    weight: Tensor | None
    x_itself: Tensor | None
    outliers: Outliers | None
    y: Tensor | None
    mean: Tensor | None


def forward(
    plan: LinearPlan,
    x: Tensor | Computed,
    weight: Tensor,
    bias: Tensor | None,
    site: Site,
    call: Call,
    held: HeldWeight | None = None,
) -> tuple[Tensor, Saved]:
    """(Y [tokens, out], Saved) for X [tokens, in], W [out, in] and bias [out] or None.

    X may be a SwiGLU or an RMSNorm that is computed here (`Setting.swiglu`, `Setting.normed`).

    The product, the bias and the product of X's outliers or mean are summed before Y is rounded to
    X's dtype. held: W's operands, where the calls of a step share them: read if they were made
    before, else made and stored here.
    """
    dtype = plan.setting.dtype
    matrices: dict[MatrixName, Matrix] = {}
    if not plan.fprop.b.is_sent:
        matrices["w", "model"] = weight.to(dtype)
    source: Source = "swiglu" if plan.setting.swiglu == "after" else "model"
    matrices["x", "normed" if plan.setting.normed else source] = x
    whole, outliers, mean, splitting = x, None, None, plan.splitting
    if plan.compute_x is not None:
        assert isinstance(x, Computed)
        whole = matrices["x", "model"] = x.by(plan.compute_x)
    if splitting is not None:
        assert isinstance(whole, Tensor)
        matrices["x", "inliers"], outliers = _split(whole, splitting, site)
    if plan.subtracts_mean:
        assert isinstance(whole, Tensor)
        mean = _mean(whole, plan, site)
        whole = matrices["x", "centered"] = centered(whole, mean)
    made = _operands(plan, matrices, site, call, held)
    a, b = made[plan.fprop.a], made[plan.fprop.b]
    if plan.fprop.a.gathered and site.parallel is not None:
        a = Made(site.parallel.gather(a.operand).wait())
    y = run_gemm(plan.fprop, a, b, site, held=held)
    if outliers is not None and plan.compensation is not None:
        y = _with_outliers(plan, y, weight.to(dtype), all_tokens(outliers, plan, site).wait())
    if mean is not None and plan.mean_in_y is not None:
        w = weight.to(dtype)
        y += plan.mean_in_y.multiply(Decoded(mean[None]), Decoded(w), 1.0, y.dtype)
    if bias is not None:
        y += bias
    y = y.to(dtype)
    if site.parallel is not None and plan.setting.has_part("dy"):
        y = site.parallel.scatter_sum(y).wait()
    return y, _saved(plan, whole if plan.mean_in_dw else x, weight, made, outliers, mean, y)


def _split(x: Tensor, splitting: Splitting, site: Site) -> tuple[Tensor, Outliers]:
    """(X without its outliers, the outliers), of this rank's tokens."""
    parallel = site.parallel
    if not splitting.takes_total or parallel is None:
        return splitting.split(x)
    return splitting.split(x, lambda own: parallel.sum(own).wait())


def _with_outliers(plan: LinearPlan, y: Tensor, weight: Tensor, outliers: Outliers) -> Tensor:
    """Y, to which the product of X's outliers and W is added. y: float32 or wider."""
    splitting, compensation = plan.splitting, plan.compensation
    assert splitting is not None and compensation is not None
    if isinstance(outliers, Columns):
        weight = weight.index_select(1, outliers.channels)
    dense = Decoded(splitting.dense(outliers))
    return compensation.multiply(dense, Decoded(weight), 1.0, y.dtype, y)


def _mean(x: Tensor, plan: LinearPlan, site: Site) -> Tensor:
    """The mean of X over the tokens of all ranks, [in] in X's dtype."""
    sums, tokens = token_sums(x), len(x)
    if site.parallel is not None and plan.setting.has_part("x"):
        sums, tokens = site.parallel.sum(sums).wait(), tokens * site.parallel.size
    return mean_of(sums, tokens, x.dtype)


def _operands(
    plan: LinearPlan,
    matrices: Matrices,
    site: Site,
    call: Call,
    held: HeldWeight | None,
) -> dict[OperandPlan, Made]:
    """The operands of the forward pass, by their plans.

    W's operand comes from an earlier call of the step if it is held, and from the ranks that own W
    if it is sent. wgrad's operand of X is included where the plan packs X for backward.
    """
    w, makings = plan.fprop.b, plan.forward
    is_held = held is not None and "fprop" in held.made
    if is_held:
        makings = tuple(making for making in makings if w not in making.operands)
    made = make_operands(makings, matrices, {}, site, call)
    if w.is_sent:
        assert site.sent_w is not None
        made[w] = Made(site.sent_w)
    if held is not None and is_held:
        made[w] = held.made["fprop"]
    elif held is not None and plan.fprop.holds_b:
        held.made["fprop"] = Made(made[w].operand)
    if plan.shows_packed_x and plan.wgrad is not None:
        show_codes(plan.wgrad.b, made[plan.wgrad.b], site)
    return made


def _saved(
    plan: LinearPlan,
    x: Tensor | Computed,
    weight: Tensor,
    made: dict[OperandPlan, Made],
    outliers: Outliers | None,
    mean: Tensor | None,
    y: Tensor,
) -> Saved:
    """x: X, or X without its mean where that is what wgrad reads."""
    kept_x: Operand | None = None
    if plan.saves_x == "operand":
        kept_x = made[plan.fprop.a].operand
    elif plan.saves_x == "packed" and plan.wgrad is not None:
        kept_x = made[plan.wgrad.b].operand
    elif plan.saves_x == "model":
        kept_x = _kept_x(plan, x)
    return Saved(
        x=kept_x,
        w=made[plan.fprop.b].operand if plan.saves_w == "operand" else weight,
        weight=None if plan.estimates_w is None else weight,
        x_itself=None if plan.estimates_x is None else _kept_x(plan, x),
        outliers=outliers if plan.residual_in_dw else None,
        y=_kept_y(plan, y) if plan.setting.swiglu == "before" else None,
        mean=mean if plan.mean_in_dw else None,
    )


def _kept_y(plan: LinearPlan, y: Tensor) -> Tensor | None:
    """Y as the gradient of the SwiGLU that follows reads it; None where nothing does."""
    if plan.dgrad is None and plan.wgrad is None:
        return None
    return y if plan.setting.kept_y is None else y.to(plan.setting.kept_y)


def _kept_x(plan: LinearPlan, x: Tensor | Computed) -> Tensor:
    """X as it is kept in high precision. After a SwiGLU this is fc1's Y, if the SwiGLU is computed
    again in backward, else the result of the SwiGLU."""
    if not isinstance(x, Computed):
        return x
    if isinstance(x, Swiglu) and plan.wgrad is not None and plan.wgrad.b.source == "swiglu":
        return x.y
    return x.result


def all_tokens(outliers: Outliers, plan: LinearPlan, site: Site) -> Pending[Outliers]:
    """The outliers of X with the tokens of all ranks, gathered under sequence parallelism."""
    if site.parallel is None or not plan.setting.has_part("x"):
        return Pending(None, outliers)
    return site.parallel.gather_outliers(outliers)
