"""Gradient estimators: the gradient through the quantizer of W or X.

A quantizer turns a block x into Q(v) S, with the scaled values v = x / S, the block scale S, which
follows from the block's largest magnitude m, and Q, which rounds to the grid. Q is a step function,
so the gradient needs a model of it. Recipes without an estimator use the straight-through
estimator, which needs no code: Q' is 1, and S does not depend on x.

Where S is a number w that is rounded to a format of scales, that rounding is a step function too.

The framework is that of "Elucidating the Design Space of FP4 training" (arXiv 2509.17791).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import E2M1, Fp4, table, widen
from megatron_fp4.arithmetic.scaling import in_blocks
from megatron_fp4.errors import ConfigError, check_choices

# What takes each field that not all forms have a use for.
_FORMS = "form", "scale_form"
_TAKEN_BY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "k": (_FORMS, ("dge", "sigmoid")),
    "clip": (_FORMS, ("dge",)),
    "width": (_FORMS, ("spline",)),
    "temperature": (("maximum",), ("softmax",)),
}
# Scales are rounded, so that the scaled value of a block's maximum may exceed the largest element
# by a few units in the last place. It counts as that element.
_ROUNDING = 1 + 2.0**-18


class Ranks(NamedTuple):
    """The ranks over which blocks are spread whose scales they share.

    maximum, total: the elementwise maximum and sum of a tensor over these ranks.
    """

    maximum: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


class Scales(NamedTuple):
    """The block scales S of a quantizer, which are numbers w that were rounded to nearest.

    values: S, float32 or float64, [rows / height, K / length]. grid: the numbers of their format,
    ascending. share: w is `share` times S times the block's largest |v|.
    """

    values: Tensor
    grid: tuple[float, ...]
    share: float


ONE_RANK = Ranks(lambda own: own, lambda own: own)


@dataclass(frozen=True)
class Estimator:
    """How backward models a quantizer of 4-bit elements, whose true derivative is almost always 0.

    A quantizer turns an element x of a block with the scale S into Q(v) S, with v = x / S and Q
    the rounding to the grid of the elements. Backward takes a smooth function f in place of Q.

    form: the function f. It is odd, and is given for magnitudes between two neighbouring grid
        points lo and lo + d by u = 2 (|v| - lo)/d - 1, which is -1 and 1 at these points and 0 at
        the threshold of rounding. The gradient of an element is multiplied by f'(v).
        dge: f = lo + d/2 (1 + sign(u) |u|^(1/k)); f' is at most `clip`. The differentiable gradient
            estimator of "Optimizing LLM Training Using FP4 Quantization" (arXiv 2501.17116, section
            3.1).
        spline: a straight line of width `width` * d around the threshold, and constant beside it;
            f' is 1/width where |u| <= width, else 0.
        sigmoid: f = lo + d/2 (1 + tanh(k u / 2) / tanh(k / 2)), a sigmoid of k u, normalized so
            that f meets the grid points: f' = k/2 (1 - tanh(k u / 2)^2) / tanh(k / 2).
        straight-through: f' is 1.
        The mean of f' between two grid points is 1, but for dge, whose `clip` lowers it.
        arXiv 2509.17791 compares splines and sigmoids. These definitions of them, with their
        parameters, are this project's.
    k: the steepness of dge (1 or more) and of sigmoid (above 0), also of `scale_form`, as are clip
        and width.
    clip: the upper bound of f' of dge, above 0.
    width: of spline, above 0 and at most 1.
    beyond: f' of magnitudes beyond the largest element, which are clipped: that of the last step's
        formula, whose u is then above 1 ("continued"), "zero", which is the slope of clipping, or
        "one".
    maximum: the gradient through m, the largest magnitude of the block. S is taken to be
        proportional to m: dS/dm = S/m. For scales that are not rounded this is exact, and for
        rounded ones, powers of two among them, it is a straight-through model.
        straight-through: none.
        absmax: the element of magnitude m gets its own term g (Q(v) - f'(v) v) / |v|, with g the
            gradient of the decoded value: the elementwise form of arXiv 2509.17791.
        vjp: it gets the sum of g (Q(v) - f'(v) v) over the block, times its sign, divided by its
            |v|: the vector-Jacobian product. Elements that tie share it equally.
        softmax: the same sum is shared by the softmax of |v| / `temperature` over the block, each
            share times the element's sign: the gradient where m is a smoothed maximum,
            t log(sum(exp(|x|/t))) with t = `temperature` * S.
        The softmax's temperature and the shares of ties are this project's.
    temperature: of softmax, in units of scaled values, above 0.
    outer_scale: the gradient through the outer scale t, of the tensor or of the row
        (`Quantizer.tensor_max`, `row_max`), which is taken to be proportional to the largest
        magnitude of the tensor or row. arXiv 2509.17791 compares ignoring and keeping it; the model
        and the shares of ties are this project's.
        straight-through: none: t is held fixed.
        vjp: the element of that magnitude gets the vector-Jacobian product; see `with_outer_scale`.
        It is zero where `maximum` is vjp already, unless there is a `scale_form`.
    scale_form: how the rounding of a block's scale is modelled, in the gradient through m. S is w
        rounded to nearest, with w proportional to m.
        straight-through: S is taken to be proportional to m, as said of `maximum`.
        dge, spline, sigmoid: S is f(w), with the function f of `form` between two neighbouring
            numbers of the scales' format in place of grid points: dS/dm = f'(w) w/m. Beyond the
            smallest and the largest of them f' is 0.
        arXiv 2509.17791 compares these. That they share k, clip and width with `form` is this
        project's.
    Raises ConfigError for other values, for one that the form has no use for, and for an estimator
    that is the same as none.
    """

    form: Literal["dge", "spline", "sigmoid", "straight-through"] = "dge"
    k: float = 5.0
    clip: float = 3.0
    width: float = 0.5
    beyond: Literal["continued", "zero", "one"] = "continued"
    maximum: Literal["straight-through", "absmax", "vjp", "softmax"] = "straight-through"
    temperature: float = 0.5
    outer_scale: Literal["straight-through", "vjp"] = "straight-through"
    scale_form: Literal["straight-through", "dge", "spline", "sigmoid"] = "straight-through"

    def __post_init__(self) -> None:
        check_choices(self)
        if "dge" in (self.form, self.scale_form) and not self.k >= 1:
            raise ConfigError(f"k of dge is 1 or more, not {self.k}")
        if not self.k > 0:
            raise ConfigError(f"k of sigmoid is above 0, not {self.k}")
        if not (self.clip > 0 and 0 < self.width <= 1 and self.temperature > 0):
            raise ConfigError(
                "clip and temperature are above 0, and width is above 0 and at most 1, not "
                f"{self.clip}, {self.temperature}, {self.width}"
            )
        for name, (owners, takers) in _TAKEN_BY.items():
            is_set = getattr(self, name) != getattr(type(self), name)  # the default
            if is_set and not any(getattr(self, owner) in takers for owner in owners):
                raise ConfigError(
                    f"{name} belongs to {owners[0]} {' and '.join(takers)}, not to "
                    f"{getattr(self, owners[0])}: leave it out"
                )
        straight = self.form == self.maximum == self.outer_scale == "straight-through"
        if straight and self.beyond != "zero":
            raise ConfigError(
                "straight-through, with nothing through the maximum, is the gradient without an "
                "estimator: leave it out"
            )
        is_straight = self.scale_form == "straight-through"
        if self.maximum == "straight-through" and not is_straight:
            raise ConfigError(
                f"scale_form {self.scale_form} is of the gradient through the maximum: give a "
                "maximum, or leave scale_form out"
            )
        if self.maximum == self.outer_scale == "vjp" and is_straight:
            raise ConfigError(
                "with maximum: vjp a block is decoded alike under any outer scale, so that nothing "
                "goes through it: leave outer_scale out"
            )

    def factor(self, scaled: Tensor, form: Fp4 = E2M1) -> Tensor:
        """f' of each scaled value.

        scaled: values divided by their block scales; any shape. form: the format of the elements.
        Computed and returned in float32 (float64 for float64 input). NaN for NaN.
        """
        x = widen(scaled).abs()  # f' is even
        slope = self._slope(self.form, x, form.magnitudes)
        if self.beyond != "continued":
            slope = torch.where(x > form.max * _ROUNDING, float(self.beyond == "one"), slope)
        return slope

    def gradient(
        self,
        given: Tensor,
        scaled: Tensor,
        rounded: Tensor | None,
        block: tuple[int, int],
        ranks: Ranks = ONE_RANK,
        form: Fp4 = E2M1,
        scales: Scales | None = None,
    ) -> Tensor:
        """The gradient with respect to a quantizer's input, from that of its decoded output. What
        goes through the outer scale is not in it: see `with_outer_scale`.

        given: the gradient of the decoded output, [rows, K] with the blocked axis last.
        scaled: the input divided by its block scales, v.
        rounded: the elements Q(v), or None where nothing goes through the maximum.
        block: the quantizer's; see `Quantizer`.
        ranks: those over which blocks are spread. form: the format of the elements.
        scales: of the blocks; required by a `scale_form`.
        The tensors are float32 or float64, of one shape. Returns a new one of that shape and dtype.
        """
        slope = self.factor(scaled, form)
        if self.maximum == "straight-through" or not given.numel():
            return given * slope
        assert rounded is not None
        through = in_blocks(given * (rounded - slope * scaled), block)  # times dS/S
        blocks = in_blocks(scaled, block)
        size = blocks.abs()
        maxima = ranks.maximum(size.amax((1, 3), keepdim=True))
        term = self._through_maximum(through, size, maxima, ranks)
        if self.scale_form != "straight-through":
            assert scales is not None
            term = term * self._change_of_scale(maxima, scales)
        # A block of zeros has no gradient through its maximum.
        term = term * blocks.sign() / torch.where(maxima == 0, 1, maxima)
        return given * slope + term.view(given.shape)

    def _slope(self, form: str, x: Tensor, points: tuple[float, ...]) -> Tensor:
        """f' of magnitudes between grid points, with the last step's formula beyond the largest.

        form: as of `Estimator`. points: ascending.
        """
        if form == "straight-through":
            return 0 * x + 1  # NaN for NaN
        grid = table(points, x.dtype, x.device)
        low = (torch.bucketize(x, grid, right=True) - 1).clamp(0, len(grid) - 2)
        u = 2 * (x - grid[low]) / (grid[low + 1] - grid[low]) - 1
        if form == "dge":
            return u.abs().pow(1 / self.k - 1).div(self.k).clamp(max=self.clip)
        if form == "spline":
            within = u.abs() <= self.width * _ROUNDING
            return torch.where(within, 1 / self.width, 0 * u)  # NaN for NaN
        half = torch.full_like(u, self.k / 2)
        return half * (1 - (half * u).tanh().square()) / half.tanh()

    def _change_of_scale(self, maxima: Tensor, scales: Scales) -> Tensor:
        """dS/dm by `scale_form`, divided by S/m, for each block. maxima: the largest |v| of each,
        [rows / height, 1, K / length, 1]."""
        quotient = scales.share * maxima  # w / S
        wanted = quotient * scales.values.view(maxima.shape)
        slope = self._slope(self.scale_form, wanted, scales.grid)
        least, most = scales.grid[0], scales.grid[-1] * _ROUNDING
        return torch.where((wanted < least) | (wanted > most), 0, slope) * quotient

    def _through_maximum(
        self, through: Tensor, size: Tensor, maxima: Tensor, ranks: Ranks
    ) -> Tensor:
        """What each element gets of the terms `through`, before the division by `maxima` and the
        multiplication by its sign.

        through, size: the terms g (Q(v) - f'(v) v), and |v|, in blocks as `in_blocks` makes them.
        maxima: the largest |v| of each block.
        """
        is_maximum = size == maxima
        if self.maximum == "absmax":
            return torch.where(is_maximum, through, 0 * size)
        shares = is_maximum.to(size.dtype)
        if self.maximum == "softmax":
            shares = ((size - maxima) / self.temperature).exp()
        sums = torch.stack((shares.sum((1, 3), True), through.sum((1, 3), True)))
        parts, total = ranks.total(sums)
        return shares * (total / parts)


def with_outer_scale(
    gradient: Tensor,
    given: Tensor,
    x: Tensor,
    decoded: Tensor,
    *,
    of_rows: bool,
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """Adds what goes through the outer scale to a gradient in which that scale is held fixed, for
    `outer_scale: vjp` of `Estimator`.

    gradient: dx, from `Estimator.gradient`.
    given: g, the gradient of the decoded output.
    x: the quantizer's input. decoded: y, its decoded output.
    of_rows: whether each row has an outer scale; else the tensor has one.
    ranks: those that share an outer scale.
    The tensors are [rows, K], in float32 or float64. Returns one of that shape and dtype. Sums are
    in float64. Blocks that decode to NaN have no part in the outer scale, and none in the sums.

    The quantizer is y = t F(x / t), with the outer scale t and the quantizer F of blocks. The model
    takes t to be proportional to the largest magnitude M of the tensor or row: dt/dM = t/M. By the
    chain rule the gradient with respect to M, through t, is (sum(g y) - sum(dx x)) / M. The
    elements of magnitude M share it equally, times their signs.
    """
    if not given.numel():
        return gradient
    axes = (1,) if of_rows else (0, 1)
    counts = ~decoded.isnan()
    size = torch.where(counts, x.abs(), 0)
    largest = ranks.maximum(size.amax(axes, keepdim=True))
    is_largest = (size == largest) & (largest > 0)
    terms = torch.where(counts, given * decoded - gradient * x, 0)
    wide = torch.float64
    sums = torch.stack((terms.sum(axes, True, dtype=wide), is_largest.sum(axes, True, dtype=wide)))
    total, ties = ranks.total(sums)
    share = (total / ties / largest).to(x.dtype)
    return torch.where(is_largest, gradient + share * x.sign(), gradient)
