"""Names of modules whose noise streams differ."""

from collections.abc import Iterable

from megatron_fp4.arithmetic.philox import stream_id, stream_label
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, OPERANDS


def check_streams(names: Iterable[str]) -> None:
    """Raises ConfigError if two operands or transforms of these modules draw from one stream: their
    32-bit hashes (docs/numerics.md) are equal."""
    seen: dict[int, str] = {}
    for name in names:
        for gemm in GEMMS:
            for operand in ("", *OPERANDS[gemm]):
                label = stream_label(name, gemm, operand)
                other = seen.setdefault(stream_id(label), label)
                if other != label:
                    raise ConfigError(
                        f"the noise streams of {other} and {label} collide; rename a module"
                    )
