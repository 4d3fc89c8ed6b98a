"""Fixes for errors of Megatron-core 0.19, and the hooks of checkpoints (checkpoints/), which every
launch needs. plugin.py has the other hooks of this package.

They apply on every device. C stands for megatron/core, T for megatron/training.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.tensor_parallel import random
from megatron.core.transformer.module import MegatronModule
from megatron.training import activation_logging, arguments, dgrad_logging, get_args, training
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelConfig

from megatron_fp4 import replay
from megatron_fp4.mcore.checkpoints import (
    distributed_states,
    loading,
    optimizer_compat,
    optimizer_state,
)
from megatron_fp4.mcore.launch import flags
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.loop import pipelined_graphs
from megatron_fp4.mcore.model.spec import layer_spec, mtp_block_spec
from megatron_fp4.mcore.runtime.wrapping import wrap_once


def install() -> None:
    """Applies all fixes that do not need parsed arguments. Idempotent."""
    # T/initialize.py:_compile_dependencies calls compile_helpers, which runs `make` and exits if
    # that fails. The wheel has no Makefile, and does not need one: it has the compiled helper.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
    # T/models/gpt.py:GPTModelBuilder.build_model builds multi-token prediction from upstream's
    # layers and ignores transformer_layer_spec.
    wrap_once(gpt, "mtp_block_spec", _like_the_layers)
    # When a loss is NaN, T/training.py:train saves a checkpoint. Without --save its path is None.
    wrap_once(RerunStateMachine, "should_checkpoint_and_exit", _saving_where_told)
    # T/ft_integration.py:setup parses the command line again without the plugin's flags, and would
    # refuse a recipe. A script that parses by itself is refused in plugin.py, with a remedy.
    wrap_once(arguments, "parse_args", _knowing_recipes)
    # Without Transformer Engine T/activation_logging.py and T/dgrad_logging.py list stand-ins of
    # its layers, which are no types: --save-activations-interval and --save-dgrads-interval raise.
    for saver in (activation_logging, dgrad_logging):
        saver.LINEAR_TYPES = tuple(each for each in saver.LINEAR_TYPES if isinstance(each, type))
    for name in ("initialize_megatron", "setup_model_and_optimizer"):
        wrap_once(training, name, _demanding)
    _follow_checkpoints()
    optimizer_compat.install()
    distributed_states.install()
    optimizer_state.install()
    loading.install()
    pipelined_graphs.install()


def _follow_checkpoints() -> None:
    """Makes Megatron's activation recomputation repeat the random bits of the first pass.

    See megatron_fp4/replay.py.
    """
    replay.follow(random.CheckpointFunction)
    wrap_once(random.CheckpointWithoutOutput, "checkpoint", _replaying)


def _replaying(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return upstream(self, replay.recomputed(run_function), *args)

    return checkpoint


def _like_the_layers(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def build(model: GPTModelConfig, layers: Any, vp_stage: int | None = None) -> Any:
        ours = model.transformer_layer_spec is layer_spec
        return (mtp_block_spec if ours else upstream)(model, layers, vp_stage=vp_stage)

    return build


def _demanding(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # Some of Megatron's checks of flags run only when it builds a layer or an optimizer.
    @functools.wraps(upstream)
    def build(*args: Any, **kwargs: Any) -> Any:
        with megatrons_demands(while_building=True):
            return upstream(*args, **kwargs)

    return build


def _saving_where_told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def should_checkpoint_and_exit(self: RerunStateMachine) -> tuple[bool, bool, int]:
        save, leave, status = method(self)
        return save and get_args().save is not None, leave, status

    return should_checkpoint_and_exit


def _knowing_recipes(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    @functools.wraps(parse)
    def parse_args(
        extra_args_provider: Any = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return parser if flags.are_in(parser) else flags.add_flags(parser)

        return parse(provide, ignore_unknown_args)

    return parse_args


def to_gpu(model: list[MegatronModule]) -> list[MegatronModule]:
    """Moves model chunks to the GPU, if there is one; a pre-wrap hook of Megatron's model builder.

    With --use-cpu-initialization T/models/dist_utils.py does not move the model to the GPU
    (prepare_existing_model_chunks_for_distributed_training), though T/training.py:get_model does.
    """
    return [chunk.cuda() for chunk in model] if torch.cuda.is_available() else model
