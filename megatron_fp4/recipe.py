"""Recipe and GemmRecipe: what each operand of the three GEMMs of a linear goes through.

X is [tokens, in], W [out, in], dY [tokens, out].
  fprop  Y  = X W^T   contracts in
  dgrad  dX = dY W    contracts out
  wgrad  dW = dY^T X  contracts tokens
A recipe is data: a method that recombines these words needs no new code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from megatron_fp4.errors import ConfigError, SizeError, check_choices
from megatron_fp4.estimators import DGE
from megatron_fp4.hadamard import Hadamard
from megatron_fp4.outliers import OutlierClamp
from megatron_fp4.quantizer import Quantizer

GEMMS = ("fprop", "dgrad", "wgrad")
# The two operands of each GEMM, by the letters that streams and messages use.
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True)
class GemmRecipe:
    """One GEMM.

    a, b: the quantizers of its operands in the order of OPERANDS; None leaves one in high
        precision (in a backward GEMM: as the forward pass left it, where Recipe.backward says
        "forward").
    hadamard: the transform that both operands share along the contracted axis.
    correction: multiplies the product in float32 (16/9 undoes two prescales of 3/4).
    """

    a: Quantizer | None = None
    b: Quantizer | None = None
    hadamard: Hadamard | None = None
    correction: float = 1.0

    def __hash__(self) -> int:  # a key in every call of every linear
        return hash((self.a, self.b))

    @property
    def quantized(self) -> bool:
        return self.a is not None or self.b is not None

    @property
    def multiple(self) -> int:
        """What the contracted axis of a shard must be a multiple of."""
        tiles = [1 if self.hadamard is None else self.hadamard.group]
        for q in (self.a, self.b):
            if q is not None:
                tiles += [q.block[1] or 1, 2 if q.element == "e2m1" else 1]  # two codes a byte
        return math.lcm(*tiles)


HIGH_PRECISION = GemmRecipe()


@dataclass(frozen=True)
class Recipe:
    """A published method, or a user's own. `description.describe` says in words what it does.

    paper: where the method was published, if it was.
    backward: "forward": dgrad and wgrad take the operands W and X that the forward pass really
        multiplied, quantized (TetraJet's double quantization); "raw": the unquantized ones.
    estimator: the gradient through W's quantizer; None is straight-through.
    outliers: what is done to X before it is quantized in fprop; None is nothing.
    bias_gradient: sums the raw dY, or dY as dgrad's quantizer left it.
    bf16_after: a share of training, in [0, 1], after which `bf16_gemms` return to high precision.
    """

    name: str
    paper: str = ""
    fprop: GemmRecipe = HIGH_PRECISION
    dgrad: GemmRecipe = HIGH_PRECISION
    wgrad: GemmRecipe = HIGH_PRECISION
    backward: Literal["forward", "raw"] = "raw"
    estimator: DGE | None = None
    outliers: OutlierClamp | None = None
    bias_gradient: Literal["raw", "quantized"] = "raw"
    bf16_after: float | None = None
    bf16_gemms: tuple[str, ...] = field(default=GEMMS)

    def __post_init__(self) -> None:
        try:
            check_choices(self)
            self._check_fields()
            for gemm in GEMMS:
                self._check_correction(gemm)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _check_fields(self) -> None:
        if any(quantizer.rounding == "ema" for quantizer in self._quantizers):
            raise ConfigError("no linear keeps the moving average that rounding ema takes")
        w = self.fprop.b
        if self.estimator and (w is None or w.element != "e2m1"):
            raise ConfigError("DGE needs an E2M1 quantizer of W in fprop")
        if self.estimator and (self.backward != "forward" or self.fprop.hadamard):
            raise ConfigError(
                "DGE takes the scaled weight that the forward pass quantized; use "
                "backward: forward, and no Hadamard in fprop"
            )
        if self.backward == "forward" and _prescale(self.fprop) != 1.0:
            raise ConfigError("backward: forward would meet fprop's prescaled operands again")
        dy = self.dgrad.a
        if self.bias_gradient == "quantized" and (
            dy is None or self.dgrad.hadamard or dy.prescale != 1.0
        ):
            raise ConfigError(
                "a quantized bias gradient needs a quantized dY in dgrad without Hadamard or "
                "prescale; use bias_gradient: raw"
            )
        share = self.bf16_after
        if share is not None and not (isinstance(share, (int, float)) and 0.0 <= share <= 1.0):
            raise ConfigError(f"bf16_after is a share of training in [0, 1], not {share!r}")
        unknown = [g for g in self.bf16_gemms if g not in GEMMS]
        if unknown:
            raise ConfigError(f"no GEMM is called {unknown[0]!r}; known: {', '.join(GEMMS)}")
        if not self.bf16_gemms or (share is None and self.bf16_gemms != GEMMS):
            raise ConfigError(
                "bf16_gemms names the GEMMs that bf16_after returns to BF16: give both"
            )

    def _check_correction(self, gemm: str) -> None:
        correction, needed = self.gemm(gemm).correction, 1 / _prescale(self.gemm(gemm))
        if not math.isclose(correction, needed, rel_tol=1e-9):
            raise ConfigError(
                f"{gemm}'s correction is {correction!r} but its operands' prescales need {needed!r}"
            )

    def gemm(self, name: str) -> GemmRecipe:
        """The GemmRecipe called fprop, dgrad or wgrad."""
        return self._gemms[name]

    @cached_property
    def _gemms(self) -> dict[str, GemmRecipe]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    def multiplied(self, gemm: str) -> GemmRecipe:
        """The same, with the quantizer of fprop where its operand comes as that left it and its
        float32 scale, which spans the axis, is folded into dY: what is multiplied are its elements.
        """
        return self._multiplied[gemm]

    @cached_property
    def _multiplied(self) -> dict[str, GemmRecipe]:
        found = dict(self._gemms)
        if self.backward == "forward" and self.fprop.hadamard is None:
            for gemm in ("dgrad", "wgrad"):
                own, left = found[gemm], self.quantizer("fprop", OPERANDS[gemm][1])
                plain = own.b is None and own.hadamard is None
                if plain and left is not None and left.scale == "fp32":
                    found[gemm] = replace(own, b=left)
        return found

    def quantizer(self, gemm: str, operand: str) -> Quantizer | None:
        """The quantizer of an operand of a GEMM."""
        recipe = self.gemm(gemm)
        return recipe.a if OPERANDS[gemm][0] == operand else recipe.b

    @cached_property
    def draws(self) -> bool:
        """Whether it rounds by random bits, or transforms under random signs."""
        transforms = [gemm.hadamard for gemm in self._gemms.values() if gemm.hadamard is not None]
        return any(transform.signs == "random" for transform in transforms) or any(
            quantizer.stochastic for quantizer in self._quantizers
        )

    @property
    def _quantizers(self) -> list[Quantizer]:
        operands = [operand for gemm in self._gemms.values() for operand in (gemm.a, gemm.b)]
        return [quantizer for quantizer in operands if quantizer is not None]

    @property
    def keeps_forward_x(self) -> bool:
        """Whether backward takes X as fprop's quantizer left it."""
        return self.backward == "forward" and self.fprop.a is not None

    def packs_x(self, tokens: int) -> bool:
        """Whether the codes that wgrad makes of X may be kept in its place: it makes them of X
        itself, and of whole blocks of a rank's tokens."""
        makes = self.wgrad.b is not None and not self.keeps_forward_x
        return makes and tokens % self.token_tile("wgrad", "x") == 0

    def token_tile(self, gemm: str, operand: str) -> int:
        """How many tokens a part of an operand must be a multiple of to be prepared by itself."""
        if gemm == "wgrad":  # contracts them
            return self.gemm(gemm).multiple
        quantizer = self.quantizer(gemm, operand)
        return 1 if quantizer is None else quantizer.block[0] or 1

    @cached_property
    def token_multiple(self) -> int:
        """What a number of tokens is a multiple of that every GEMM takes."""
        operands = (("fprop", "x"), ("dgrad", "dy"), ("wgrad", "x"))
        return math.lcm(*(self.token_tile(gemm, operand) for gemm, operand in operands))

    def at(self, progress: float) -> Recipe:
        """The recipe in force after a share `progress` of training."""
        if self.bf16_after is None or progress < self.bf16_after:
            return self
        return self._late

    @cached_property
    def _late(self) -> Recipe:
        return replace(
            self,
            bf16_after=None,
            bf16_gemms=GEMMS,
            **{gemm: HIGH_PRECISION for gemm in self.bf16_gemms},  # type: ignore[arg-type]
            # What hangs on a quantizer goes with it.
            estimator=None if "fprop" in self.bf16_gemms else self.estimator,
            outliers=None if "fprop" in self.bf16_gemms else self.outliers,
            bias_gradient="raw" if "dgrad" in self.bf16_gemms else self.bias_gradient,
        )

    def check_linear(self, tokens: int | None, inputs: int, outputs: int, where: str) -> None:
        """Raise SizeError unless blocks and Hadamard groups tile a local [tokens, inputs] x
        [outputs, inputs] linear. tokens: None where they are not known yet."""
        sizes = {"tokens": tokens, "in_features": inputs, "out_features": outputs}
        for gemm, (contracted, *rows) in _AXES.items():
            recipe = self.gemm(gemm)
            tiles = [(contracted, recipe.multiple)]
            for axis, quantizer in zip(rows, (recipe.a, recipe.b), strict=True):
                tiles.append((axis, 1 if quantizer is None else quantizer.block[0] or 1))
            for axis, multiple in tiles:
                size = sizes[axis]
                if size is not None and size % multiple:
                    reason = f"which {gemm} of recipe {self.name} takes in blocks"
                    raise SizeError(where, axis, size, multiple, reason)


def _prescale(gemm: GemmRecipe) -> float:
    return math.prod(q.prescale for q in (gemm.a, gemm.b) if q is not None)


# The contracted axis of each GEMM, and the other axis of its operands a and b.
_AXES = {
    "fprop": ("in_features", "tokens", "out_features"),
    "dgrad": ("out_features", "tokens", "in_features"),
    "wgrad": ("tokens", "out_features", "in_features"),
}
