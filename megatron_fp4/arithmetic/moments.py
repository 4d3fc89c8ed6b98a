"""Adam's two moments in few bits: how each of them is stored.

m, the mean of the gradients, and v, the mean of their squares, are vectors of float32 numbers that
are stored between two steps. Sources: FP8-LM (arXiv 2310.18313) and "Optimizing LLM Training Using
FP4 Quantization" (arXiv 2501.17116) keep m in FP8 and v in FP16, with a scale for a tensor and
rounded to nearest. Differences from them: a scale belongs to a block of 128 elements and is a power
of two, so that what has been decoded is encoded again without a change of its values; and rounding
is stochastic, since a moment that is rounded to nearest stands still where a step changes it by
less than half the distance of two neighbours. A positive v never becomes 0, whose root as a divisor
would give a step far too large: what would be rounded to 0 becomes the smallest positive number.
For v below it, and for it alone, rounding is therefore biased.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.bf16 import rounded
from megatron_fp4.arithmetic.fp8_blocks import FloatBlocks, Fp8Blocks, RootBlocks
from megatron_fp4.errors import ConfigError


class MomentForm(Protocol):
    """How one moment is stored.

    dtype: of the codes, one for each element. bits: of an element, its share of a scale included.
    draws: whether `encode` reads random bits.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def bits(self) -> float: ...

    @property
    def draws(self) -> bool: ...

    def encode(
        self, x: Tensor, start: int, bits: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Codes (`dtype` [n]) and scales (uint8 E8M0, one for each block; None without blocks).

        x: float32 [n]. start: the place of its first element in the parameter, at whose beginning
        the first block begins; a block of which x has a part has a scale of that part. bits: None
        rounds to nearest even; otherwise int32 [n], uniform integers in [0, 65536), for stochastic
        rounding.
        """
        ...

    def decode(self, codes: Tensor, scales: Tensor | None, start: int) -> Tensor:
        """The values, float32 [n], of what `encode` returned for the same `start`.

        They may be `codes` itself, if that is float32.
        """
        ...


@dataclass(frozen=True)
class Float32:
    """A moment as it is."""

    dtype = torch.float32
    bits = 32.0
    draws = False

    def encode(self, x: Tensor, start: int, bits: Tensor | None = None) -> tuple[Tensor, None]:
        return x, None

    def decode(self, codes: Tensor, scales: Tensor | None, start: int) -> Tensor:
        return codes


@dataclass(frozen=True)
class BFloat16:
    """A moment in BF16; see `bf16.rounded`.

    is_square: whether the moment is v, of which no positive element becomes 0.
    """

    is_square: bool = False

    dtype = torch.bfloat16
    bits = 16.0
    draws = True

    def encode(self, x: Tensor, start: int, bits: Tensor | None = None) -> tuple[Tensor, None]:
        codes = rounded(x, bits)
        if self.is_square:
            _keep_positive(codes, codes, x)
        return codes, None

    def decode(self, codes: Tensor, scales: Tensor | None, start: int) -> Tensor:
        return codes.float()


@dataclass(frozen=True)
class InBlocks:
    """A moment in blocks, whose scales are powers of two.

    blocks: how. is_square: whether the moment is v, of which no positive element becomes 0.
    """

    blocks: FloatBlocks
    is_square: bool = False

    draws = True

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def bits(self) -> float:
        return self.blocks.bits

    def encode(
        self, x: Tensor, start: int, bits: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        padding = None if bits is None else self._from_block(bits, start)
        codes, scales = self.blocks.encode(self._from_block(x, start), padding)
        codes = codes[start % self.blocks.block :].contiguous()
        if self.is_square:
            _keep_positive(codes, self.decode(codes, scales, start), x)
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor | None, start: int) -> Tensor:
        assert scales is not None
        found = self.blocks.decode(self._from_block(codes, start), scales)
        return found[start % self.blocks.block :]

    def _from_block(self, x: Tensor, start: int) -> Tensor:
        """`x` with zeros before it, for the elements of its first block that it does not have."""
        return torch.nn.functional.pad(x, (start % self.blocks.block, 0))


def _keep_positive(codes: Tensor, decoded: Tensor, x: Tensor) -> None:
    """Sets codes of 0 to that of the smallest positive number where x is positive, in place.

    codes, decoded, x: [n]; the second are the values of the first.
    """
    integers = {1: torch.uint8, 2: torch.int16}[codes.itemsize]
    codes.view(integers).masked_fill_((x > 0) & (decoded == 0), 1)


FIRST: dict[str, MomentForm] = {
    "fp32": Float32(),
    "bf16": BFloat16(),
    "fp8": InBlocks(Fp8Blocks()),
}
SECOND: dict[str, MomentForm] = {
    "fp32": Float32(),
    "bf16": BFloat16(is_square=True),
    "fp16": InBlocks(FloatBlocks("fp16"), is_square=True),
    "fp8": InBlocks(RootBlocks(), is_square=True),
}

ROUNDING = ("stochastic", "nearest")


@dataclass(frozen=True)
class Moments:
    """How Adam's moments are stored.

    m: "fp32", "bf16" or "fp8" (E4M3). v: "fp32", "bf16", "fp16", or "fp8" (E4M3 of its root, which
    is noisy: the root of v then has errors of 11% to 16%). FP8 and FP16 are in blocks of 128.
    round: how moments are rounded: "stochastic", or "nearest", by which a moment stands still
    where a step changes it by less than half the distance of two neighbours.
    Raises ConfigError for others.
    """

    m: str = "fp8"
    v: str = "fp16"
    round: str = "stochastic"

    def __post_init__(self) -> None:
        for name, given, known in (("m", self.m, FIRST), ("v", self.v, SECOND)):
            if given not in known:
                words = ", ".join(known)
                raise ConfigError(f"{name} is stored in one of {words}, not {given!r}")
        if self.round not in ROUNDING:
            words = " or ".join(ROUNDING)
            raise ConfigError(f"round is {words}, not {self.round!r}")

    @classmethod
    def read(cls, text: str) -> Moments:
        """From text such as "m=fp8,v=fp16", or "m=bf16,round=nearest"; the rest is the default.

        Raises ConfigError for other text.
        """
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not equals or key in given or key not in {field.name for field in fields(cls)}:
                raise ConfigError(
                    f"Adam's moments are given as m=FORMAT,v=FORMAT, such as {DEFAULT}, with or "
                    f"without round=nearest, not as {text!r}"
                )
            given[key] = value
        return cls(**given)

    @property
    def forms(self) -> dict[str, MomentForm]:
        """The forms of m and v, by their keys in torch's optimizers."""
        return {"exp_avg": FIRST[self.m], "exp_avg_sq": SECOND[self.v]}

    @property
    def bytes(self) -> float:
        """The bytes that both moments of one element take, its share of their scales included."""
        return sum(form.bits for form in self.forms.values()) / 8

    def draws(self, key: str) -> bool:
        """Whether a moment, by its key in torch's optimizers, is rounded by random bits."""
        return self.round == "stochastic" and self.forms[key].draws

    def __str__(self) -> str:
        """What `read` reads."""
        rounding = "" if self.round == "stochastic" else f",round={self.round}"
        return f"m={self.m},v={self.v}{rounding}"


DEFAULT = Moments()
FLOAT32 = Moments("fp32", "fp32")  # as without this package
