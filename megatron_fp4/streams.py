"""Checks that no two random streams of a model collide."""

from collections.abc import Iterable, Iterator

from megatron_fp4.arithmetic.low_bit import moment_label
from megatron_fp4.arithmetic.moments import DEFAULT
from megatron_fp4.arithmetic.philox import rounding_label, stream_id, stream_label
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, OPERANDS


def check_streams(names: Iterable[str], parameters: Iterable[str] = ()) -> None:
    """Check that all random streams of a model are different.

    names: of modules, of which all operands and Hadamard signs have a stream. parameters: the names
    of those whose moments an optimizer rounds. Raises ConfigError if the 32-bit hashes of two of
    them (docs/numerics.md, Random bits) are equal: both would draw the same random bits.
    """
    seen: dict[int, str] = {}
    for label in _labels(names, parameters):
        other = seen.setdefault(stream_id(label), label)
        if other != label:
            raise ConfigError(f"the random streams of {other} and {label} collide; rename a module")


def _labels(names: Iterable[str], parameters: Iterable[str]) -> Iterator[str]:
    for name in names:
        for gemm in GEMMS:
            yield stream_label(name, gemm)
            yield from (rounding_label(name, gemm, operand) for operand in OPERANDS[gemm])
    for name in parameters:
        yield from (moment_label(name, key) for key in DEFAULT.forms)
