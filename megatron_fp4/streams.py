"""Checks that no two random streams of a model collide."""

from collections.abc import Iterable

from megatron_fp4.arithmetic.philox import rounding_label, stream_id, stream_label
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, OPERANDS


def check_streams(names: Iterable[str]) -> None:
    """Check that all operands and Hadamard signs of the modules `names` have different streams.

    Raises ConfigError if the 32-bit hashes of two of them (docs/numerics.md, Random bits) are
    equal: both would draw the same random bits.
    """
    seen: dict[int, str] = {}
    for name in names:
        for gemm in GEMMS:
            labels = [rounding_label(name, gemm, operand) for operand in OPERANDS[gemm]]
            for label in (stream_label(name, gemm), *labels):
                other = seen.setdefault(stream_id(label), label)
                if other != label:
                    raise ConfigError(
                        f"the noise streams of {other} and {label} collide; rename a module"
                    )
