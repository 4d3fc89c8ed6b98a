"""Mends what Megatron-core 0.19's wheel gets wrong on any device.

C stands for megatron/core, T for megatron/training.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.training import arguments
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelConfig

from megatron_fp4.mcore import options
from megatron_fp4.mcore.spec import mtp_block_spec


def install() -> None:
    """Applies the mends that need no arguments; harmless when called again."""
    # T/initialize.py:_compile_dependencies calls it to run `make` where the wheel ships no
    # Makefile, and exits; the compiled helper is in the wheel.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
    # T/models/gpt.py:GPTModelBuilder.build_model builds multi-token prediction of stock layers,
    # whatever transformer_layer_spec says.
    gpt.mtp_block_spec = mtp_block_spec
    # T/ft_integration.py:setup parses the command line once more, with Megatron's own flags alone,
    # and would refuse a recipe.
    if not hasattr(arguments.parse_args, "__wrapped__"):
        arguments.parse_args = _knowing_recipes(arguments.parse_args)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        DistributedOptimizer.state_dict = _wrap(DistributedOptimizer.state_dict, before=_init_state)
        DistributedOptimizer.load_state_dict = _wrap(
            DistributedOptimizer.load_state_dict, after=_unshare_steps
        )


def _wrap(
    method: Callable[..., Any],
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """`method` with a call before or after it; itself where that has been done already."""
    if hasattr(method, "__wrapped__"):
        return method

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        if before:
            before(self)
        result = method(self, *args)
        if after:
            after(self)
        return result

    return call


def _init_state(optimizer: DistributedOptimizer) -> None:
    """C/optimizer/distrib_optimizer.py:state_dict asserts a step count that torch's Adam has not
    before its first step, as when a checkpoint is loaded."""
    adam = optimizer.optimizer
    for parameter in [p for group in adam.param_groups for p in group["params"]]:
        if not adam.state[parameter]:
            adam.state[parameter] = {"step": torch.tensor(0.0)} | {
                key: torch.zeros_like(parameter) for key in optimizer.optimizer_state_keys
            }


def _unshare_steps(optimizer: DistributedOptimizer) -> None:
    """C/optimizer/distrib_optimizer.py:load_state_dict gives every parameter the same tensor as its
    step count; torch's Adam adds 1 to it in place, for each of them."""
    for state in optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


def _knowing_recipes(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    @functools.wraps(parse)
    def parse_args(
        extra_args_provider: Any = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        return parse(extra_args_provider or options.add_options, ignore_unknown_args)

    return parse_args


def mend_model_config(model: GPTModelConfig, args: argparse.Namespace) -> None:
    """Gives `model` what T/argument_utils.py:gpt_config_from_args leaves out."""
    # Without it, --rope-scaling-factor is read and ignored.
    model.rope_scaling_factor = args.rope_scaling_factor
    # T/models/dist_utils.py:prepare_existing_model_chunks_for_distributed_training takes
    # --use-cpu-initialization to mean that the model stays on the CPU.
    if args.use_cpu_initialization and torch.cuda.is_available():
        model.pre_wrap_hooks.append(_to_gpu)


def _to_gpu(model: list[MegatronModule]) -> list[MegatronModule]:
    return [chunk.cuda() for chunk in model]
