"""What a rank has of a linear: its part of the tokens, and where its operands lie in the unsharded
tensors, which rounding noise is keyed by."""

from __future__ import annotations

import argparse

import torch

from megatron_fp4.arithmetic.philox import GROUP, Placement
from megatron_fp4.plan.setting import Sharding


def tokens_on_rank(
    args: argparse.Namespace, sharding: Sharding, batch: str = "micro_batch_size"
) -> int:
    """Tokens of X or dY, whichever is the smaller part under sequence parallelism, in a linear that
    is none of an expert's. args: Megatron's; batch: which of them counts the samples."""
    tokens: int = (getattr(args, batch) or args.micro_batch_size) * args.seq_length
    return tokens // (sharding.ranks if sharding.tokens is not None else 1)


def whole_sequence(length: int, sharding: Sharding) -> int:
    """The length of a sequence of which a rank's X has `length` tokens."""
    return length * (sharding.ranks if sharding.tokens == "x" else 1)


def column_parallel_placements(
    rank: int, ranks: int, length: int, ranges: int, device: torch.device
) -> dict[str, Placement]:
    """Where X, W and dY of a column-parallel linear lie: W's rows and dY's features are sharded.

    A rank's rows of W are `ranges` parts of the tensor, of `length` rows each: 2 in SwiGLU's fc1,
    which has a part of the gate and a part of the up projection.
    """
    starts = [(part * ranks + rank) * length for part in range(ranges)]
    rows = torch.cat([torch.arange(start, start + length) for start in starts]).to(device)
    features = Placement(
        groups=rows[::GROUP] // GROUP, groups_per_row=ranks * ranges * length // GROUP
    )
    return {"x": Placement(), "w": Placement(rows=rows), "dy": features}


def row_parallel_placements(
    rank: int, ranks: int, length: int, device: torch.device
) -> dict[str, Placement]:
    """Where X, W and dY of a row-parallel linear lie: the columns of X and W are sharded, `length`
    of them to a rank."""
    start = rank * length // GROUP
    groups = torch.arange(start, start + length // GROUP, device=device)
    columns = Placement(groups=groups, groups_per_row=ranks * length // GROUP)
    return {"x": columns, "w": columns, "dy": Placement()}
