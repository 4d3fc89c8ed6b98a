"""Which rows of the random bits a data-parallel process draws, without Megatron.

Data-parallel processes hold different tokens. If all of them drew the random bits of rows 0, 1, 2,
..., the errors of stochastic rounding would be correlated, and would not average out in the
gradient. docs/numerics.md, Random bits, defines the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from numbers import Integral

from torch import distributed

from megatron_fp4.arithmetic.philox import Placement
from megatron_fp4.errors import ConfigError

ROWS = 2**32  # rows reserved for each replica; more tokens than a device can hold
_REPLICAS = 2**16


def own_replica() -> int:
    """This process's rank in torch.distributed's default group; 0 where there is none."""
    return distributed.get_rank() if distributed.is_initialized() else 0


@cache
def replica_placements(replica: int) -> Mapping[str, Placement]:
    """The placements of X and dY in data-parallel replica `replica`, by "x" and "dy".

    Their rows begin at replica * 2^32. W is the same on all replicas, and so are its random bits.

    The index of a group of eight elements is row * (groups in a row) + group, modulo 2^64. With up
    to 2^16 groups in a row (524,288 features), no two of 2^16 replicas share an index, since
    replica * 2^32 * 2^16 is below 2^64. Raises ConfigError for a replica that is not an integer in
    [0, 2^16).
    """
    if not isinstance(replica, Integral) or not 0 <= replica < _REPLICAS:
        raise ConfigError(f"a replica is an integer from 0 to {_REPLICAS - 1}, not {replica!r}")
    tokens = Placement(first_row=int(replica) * ROWS)
    return {"x": tokens, "dy": tokens}
