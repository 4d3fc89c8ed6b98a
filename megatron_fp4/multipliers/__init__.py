"""Multipliers, which run GEMMs: in FP4, FP8, BF16 or float32.

`choose` finds the fastest multiplier of a product, and why each faster one cannot run it.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_fp4.errors import ConfigError
from megatron_fp4.multipliers.base import Multiplier, Product
from megatron_fp4.multipliers.bf16 import Bf16
from megatron_fp4.multipliers.blackwell import Blackwell
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.multipliers.nvfp4 import Nvfp4
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.multipliers.sm100 import Sm100
from megatron_fp4.target import Target

# The fastest first.
MULTIPLIERS: tuple[Multiplier, ...] = (
    Sm100(),
    Blackwell(),
    Nvfp4(),
    Hopper(),
    Bf16(),
    Reference(),
)


class MultiplierChoice(NamedTuple):
    """multiplier: what runs the product. passed_over: (name, reason) of each faster one."""

    multiplier: Multiplier
    passed_over: tuple[tuple[str, str], ...]


def choose(product: Product, target: Target, fastest: str | None = None) -> MultiplierChoice:
    """The fastest multiplier that runs `product` on `target`.

    fastest: the name of one of MULTIPLIERS: those before it are not considered, as for
        --fp4-multiplier. None: all are. Raises ConfigError if no multiplier has this name.
    """
    passed_over: list[tuple[str, str]] = []
    is_allowed = fastest is None
    for multiplier in MULTIPLIERS:
        is_allowed = is_allowed or multiplier.name == fastest
        reason = (
            multiplier.refuses(product, target)
            if is_allowed
            else f"--fp4-multiplier {fastest} excludes it"
        )
        if reason is None:
            return MultiplierChoice(multiplier, tuple(passed_over))
        passed_over.append((multiplier.name, reason))
    raise ConfigError(f"no multiplier is called {fastest!r}")  # the reference runs everything
