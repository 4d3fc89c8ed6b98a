"""Known mistakes in the kernel of AdamW with moments in few bits."""

from __future__ import annotations

from typing import Any

from megatron_fp4.kernels import float_blocks, low_bit_adamw, philox
from testing.kernels.mistakes.injection import Mistake, argument, result


def _at_the_range(right: Any, owned: Any, size: int) -> Any:
    """Blocks and draws begin at the range's first element."""
    return right(owned._replace(start=0), size)


def _floor(right: Any, maxima: Any, FORM: Any) -> Any:
    """The scale of the exponent alone, by which the block's largest element may not fit."""
    return right(maxima & 0x7F800000, FORM)


def _biased(right: Any, steps: Any, integer: Any, rest: Any, random: Any, FORM: Any,
            STOCHASTIC: Any) -> Any:  # fmt: skip
    """Roots are rounded as if they were the numbers."""
    return right(steps, integer, rest, random, "fp8", STOCHASTIC)


def _to_nearest(right: Any, steps: Any, integer: Any, rest: Any, random: Any, FORM: Any,
                STOCHASTIC: Any) -> Any:  # fmt: skip
    return right(steps, integer, rest, random, FORM, False)


def _to_zero(right: Any, code: Any, x: Any) -> Any:
    """A positive v may become 0."""
    return code


def _without_the_rank(right: Any, local: Any, where: Any, SHARDED: Any) -> Any:
    """All ranks draw the bits of the first one."""
    return local


def _ties_up(right: Any, steps: Any, integer: Any, rest: Any, random: Any, FORM: Any,
             STOCHASTIC: Any) -> Any:  # fmt: skip
    return rest >= 0.5 if not STOCHASTIC else right(steps, integer, rest, random, FORM, STOCHASTIC)


LOW_BIT_ADAMW = {
    "blocks of the range": Mistake("range 11", low_bit_adamw._where, _at_the_range),
    "the largest does not fit": Mistake("range 0", float_blocks.scale_byte, _floor),
    "roots as numbers": Mistake("v=fp8 formats", float_blocks._is_up, _biased),
    "moments to nearest": Mistake("range 0", float_blocks._is_up, _to_nearest),
    "a tie goes up": Mistake("nearest formats", float_blocks._is_up, _ties_up),
    "v becomes zero": Mistake("formats", float_blocks.kept_positive, _to_zero),
    "draws of the first rank": Mistake("place columns", low_bit_adamw._place, _without_the_rank),
    "draws of another step": Mistake(
        "range 0 128",
        low_bit_adamw._drawn,
        argument("draws", lambda d: d._replace(step=d.step + 1)),
    ),
    "m's scale for v": Mistake(
        "range 0", float_blocks.decoded, argument("byte", lambda b: b * 0 + 120)
    ),
    "half of a word": Mistake(
        "odd columns", philox.random16, argument("index", lambda index: index ^ 1)
    ),
    "a block of NaN stays": Mistake(
        "range 0 4101", float_blocks.encoded, result(lambda found: (found[0], found[1] & 0x7F))
    ),
}
