"""Makes Megatron's optimizer keep and send what the flags ask for."""

from argparse import Namespace
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_fp4.mcore.gather import buckets
from megatron_fp4.mcore.loop import optimizer_state, ramping, whole_weights
from megatron_fp4.mcore.model import optimizers
from megatron_fp4.mcore.model.run import Run


def set_up(
    optimizer: MegatronOptimizer, chunks: list[Any], args: Namespace, run: Run | None
) -> None:
    """Changes `optimizer` as the flags and the recipes ask for. All ranks call it.

    The order matters: state beside weights is kept by the optimizer that replaces Megatron's, and
    the buckets that send codes read this state.

    chunks: the model's. args: Megatron's. run: the FP4 run; None without a recipe.
    """
    if args.fp4_fused_adamw:
        optimizers.fuse(optimizer)
    if run is not None:
        _replace(optimizer, chunks, run)
        _keep_states(optimizer, run)
        _gather_codes(chunks, run)


def _replace(optimizer: MegatronOptimizer, chunks: list[Any], run: Run) -> None:
    """Puts optimizers in the place of torch's, for Q-Ramping or for moments in few bits."""
    if run.ramping is not None:
        ramping.replace_optimizers(optimizer)
    if run.args.fp4_optimizer_state is not None:
        optimizer_state.replace_optimizers(optimizer, chunks, run)


def _keep_states(optimizer: MegatronOptimizer, run: Run) -> None:
    """Has the state beside weights updated after each step of `optimizer`."""
    if run.kept:
        run.weight_states.follow(optimizer, run.args)


def _gather_codes(chunks: list[Any], run: Run) -> None:
    """Has data-parallel ranks gather weights as codes (--fp4-param-gather)."""
    if run.args.fp4_gathers_codes:
        buckets.install(chunks, run.sent_weights, run.weight_states)
        whole_weights.install(run.args)
