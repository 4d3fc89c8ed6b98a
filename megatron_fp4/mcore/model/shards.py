"""How many tokens of a microbatch a rank holds."""

from __future__ import annotations

import argparse

from megatron_fp4.plan.setting import Sharding


def tokens_on_rank(
    args: argparse.Namespace, sharding: Sharding, batch: str = "micro_batch_size"
) -> int:
    """Tokens of X or dY, whichever is the smaller part under sequence parallelism, in a linear that
    is none of an expert's. args: Megatron's; batch: which of them counts the samples."""
    tokens: int = (getattr(args, batch) or args.micro_batch_size) * args.seq_length
    return tokens // (sharding.ranks if sharding.tokens is not None else 1)
