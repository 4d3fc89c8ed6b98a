"""Gathers the model's weights where Megatron reads them, under --fp4-param-gather.

Between steps ranks then have codes, and the weights of their own shards alone. T stands for
megatron/training.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megatron.training import training

from megatron_fp4.mcore.loop.loop_state import gather_weights


def install(args: argparse.Namespace) -> None:
    """Wraps the functions of T/training.py that read weights. Call it once. args: Megatron's."""
    training.save_checkpoint = _with_weights(training.save_checkpoint, 1)
    training.check_param_hashes_across_dp_replicas = _with_weights(
        training.check_param_hashes_across_dp_replicas, 0
    )
    if args.fp4_eval_forward == "bf16":
        training.evaluate = _with_weights(training.evaluate, 2)


def _with_weights(upstream: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`upstream`, called when all ranks have all weights. place: of the model among its
    arguments."""

    @functools.wraps(upstream)
    def call(*given: Any, **named: Any) -> Any:
        gather_weights(given[place] if len(given) > place else named["model"])
        return upstream(*given, **named)

    return call
