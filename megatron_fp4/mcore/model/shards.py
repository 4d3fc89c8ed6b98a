"""A rank's part of a linear: its tokens, and the place of its operands in the unsharded tensors.

Random bits depend on an element's place in the unsharded tensor.
"""

from __future__ import annotations

import argparse

import torch

from megatron_fp4.arithmetic.philox import GROUP, Placement
from megatron_fp4.setting import Sharding


def tokens_on_rank(
    args: argparse.Namespace, sharding: Sharding, batch: str = "micro_batch_size"
) -> int:
    """The number of tokens of a microbatch on a rank, in a linear that belongs to no expert.

    Under sequence parallelism this is the rank's part of the tokens, which it has of X or of dY.
    args: Megatron's. batch: the argument with the sequences of a microbatch, such as
    "eval_micro_batch_size"; if that is None, micro_batch_size is used.
    """
    tokens: int = (getattr(args, batch) or args.micro_batch_size) * args.seq_length
    return tokens // (sharding.ranks if sharding.scattered is not None else 1)


def whole_sequence(length: int, sharding: Sharding) -> int:
    """The length of a whole sequence, of which X on a rank has `length` tokens."""
    return length * (sharding.ranks if sharding.scattered == "x" else 1)


def column_parallel_placements(
    rank: int, ranks: int, length: int, ranges: int, device: torch.device
) -> dict[str, Placement]:
    """The placements of "x", "w" and "dy" of a column-parallel linear on this rank.

    The rows of W and the features of dY are sharded. rank, ranks: of the tensor-parallel group.
    ranges, length: a rank has `ranges` separate ranges of W's rows, each of `length` rows. fc1 of
    SwiGLU has 2, one of the gate and one of the up projection; other linears have 1.
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
    """The placements of "x", "w" and "dy" of a row-parallel linear on this rank.

    The columns of X and W are sharded; each rank has `length` of them. rank, ranks: of the
    tensor-parallel group.
    """
    start = rank * length // GROUP
    groups = torch.arange(start, start + length // GROUP, device=device)
    columns = Placement(groups=groups, groups_per_row=ranks * length // GROUP)
    return {"x": columns, "w": columns, "dy": Placement()}
