"""Begins the exchange that --fp4-grad-comm asks for, and says what is sent."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.exchange.buckets import groups_of, install, ranks_of
from megatron_fp4.mcore.exchange.places import places
from megatron_fp4.mcore.model import start_lines
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.model.start_lines import SentGradients
from megatron_fp4.mcore.runtime.ranks import of_all


def begin(args: Namespace, run: Run | None, chunks: Sequence[Any]) -> str:
    """Makes data-parallel ranks exchange gradients as --fp4-grad-comm says. All ranks call it.

    args: Megatron's. run: the FP4 run; None without a recipe. chunks: the model's, wrapped in
    Megatron's DDP. Returns what a rank sends, in words. Raises ConfigError where something else
    than Megatron's DDP wraps them.
    """
    if not all(hasattr(chunk, "bucket_groups") for chunk in chunks):
        raise ConfigError(
            "--fp4-grad-comm needs Megatron's DistributedDataParallel around the model: wrap it, "
            "or leave out the flag"
        )
    form = messages.FORMS[args.fp4_grad_comm_element]

    def key() -> Key:
        return Key(args.fp4_seed, args.curr_iteration) if run is None else run.key(run.now())

    exchange = install(chunks, form, key, places(unwrap_model(list(chunks))))
    name = messages.form_name(args.fp4_grad_comm_element)
    held = max(of_all(0 if exchange is None else exchange.slots.bytes))
    mine = [(kind, _sent_of(group)) for kind, group in groups_of(chunks)]
    # Shards may be uneven, so that one rank sends more than another.
    return start_lines.gradients(name, held, _by_kind(one for each in of_all(mine) for one in each))


def _by_kind(sent: Iterable[tuple[str, SentGradients]]) -> dict[str, SentGradients]:
    """The sums of what is sent, by kind of parameter."""
    found: dict[str, list[SentGradients]] = {}
    for kind, one in sent:
        found.setdefault(kind, []).append(one)
    return {
        kind: SentGradients(
            each[0].ranks, *(sum(column) for column in [*zip(*each, strict=True)][1:])
        )
        for kind, each in found.items()
    }


def _sent_of(group: Any) -> SentGradients:
    """What this rank sends of the gradients of a group of buckets."""
    ranks = ranks_of(group)
    elements = sum(parameter.numel() for parameter in group.params)
    to_owners = to_all = 0
    if ranks.size() > 1:
        for piece in (piece for bucket in group.buckets for piece in group.exchange.pieces[bucket]):
            to_owners += sum(piece.lengths) - piece.lengths[piece.own]
            to_all += (ranks.size() - 1) * max(piece.lengths)
    if group.ddp_config.use_distributed_optimizer:
        to_all = 0
    return SentGradients(ranks.size(), elements, to_owners, to_all)
