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
from megatron.core.optimizer.optimizer import ChainedOptimizer, param_group_identifier_keys
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.module import MegatronModule
from megatron.training import arguments, get_args, training
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelConfig

from megatron_fp4.mcore import checkpoint, flags, vocabulary
from megatron_fp4.mcore.arguments import validate
from megatron_fp4.mcore.demands import megatrons_demands
from megatron_fp4.mcore.spec import layer_spec, mtp_block_spec


def install() -> None:
    """Applies the mends that need no arguments; harmless when called again."""
    # T/initialize.py:_compile_dependencies calls it to run `make` where the wheel ships no
    # Makefile, and exits; the compiled helper is in the wheel.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
    # T/models/gpt.py:GPTModelBuilder.build_model builds multi-token prediction of stock layers,
    # whatever transformer_layer_spec says.
    if not hasattr(gpt.mtp_block_spec, "__wrapped__"):
        gpt.mtp_block_spec = _like_the_layers(gpt.mtp_block_spec)
    # T/training.py:train saves to a path of None when a loss is NaN and --save was not given.
    if not hasattr(RerunStateMachine.should_checkpoint_and_exit, "__wrapped__"):
        RerunStateMachine.should_checkpoint_and_exit = _saving_where_told(
            RerunStateMachine.should_checkpoint_and_exit
        )
    # T/ft_integration.py:setup parses the command line once more, with Megatron's own flags alone,
    # and would refuse a recipe.
    if not hasattr(arguments.parse_args, "__wrapped__"):
        arguments.parse_args = _knowing_recipes(arguments.parse_args)
    if not hasattr(arguments.validate_args, "__wrapped__"):
        arguments.validate_args = _after_ours(arguments.validate_args)
    for name in ("initialize_megatron", "setup_model_and_optimizer"):
        if not hasattr(getattr(training, name), "__wrapped__"):
            setattr(training, name, _demanding(getattr(training, name)))
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _mend_distributed_adam()
    if not hasattr(ChainedOptimizer.load_state_dict, "__wrapped__"):
        ChainedOptimizer.load_state_dict = _of_other_experts(ChainedOptimizer.load_state_dict)
    vocabulary.install()
    checkpoint.install()


def _like_the_layers(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def build(model: GPTModelConfig, layers: Any, vp_stage: int | None = None) -> Any:
        ours = model.transformer_layer_spec is layer_spec
        return (mtp_block_spec if ours else upstream)(model, layers, vp_stage=vp_stage)

    return build


def _after_ours(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # T/arguments.py:parse_and_validate_args calls it once a checkpoint has brought its arguments.
    @functools.wraps(upstream)
    def validate_args(args: argparse.Namespace, *others: Any, **kwargs: Any) -> Any:
        if args.use_checkpoint_args:
            validate(args)
        return upstream(args, *others, **kwargs)

    return validate_args


def _demanding(upstream: Callable[..., Any]) -> Callable[..., Any]:
    # What Megatron demands of flags it may say as late as when it builds a layer or an optimizer.
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


def _mend_distributed_adam() -> None:
    """Lets C/optimizer/distrib_optimizer.py save and load the step count of torch's Adam.

    state_dict asserts that there is one, and before the first step there is none, as when a
    checkpoint is loaded. load_state_dict gives all parameters one and the same tensor for it, to
    which Adam adds 1 in place for each of them. _set_main_param_and_optimizer_states wants the
    count among a parameter's own tensors, where a fully reshardable checkpoint has none (KeyError)
    and a dp_reshardable one has the 0 from before loading.
    """
    save, load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        _init_state(self)
        return save(self)

    @functools.wraps(load)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    @functools.wraps(set_states)
    def set_states_but_step(
        self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        set_states(self, parameter, tensors | {"step": None})  # what is no tensor is passed over

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict


def _init_state(optimizer: DistributedOptimizer) -> None:
    adam = optimizer.optimizer
    for parameter in [p for group in adam.param_groups for p in group["params"]]:
        if not adam.state[parameter]:
            adam.state[parameter] = {"step": torch.tensor(0.0)} | {
                key: torch.zeros_like(parameter) for key in optimizer.optimizer_state_keys
            }


def _of_other_experts(upstream: Callable[..., None]) -> Callable[..., None]:
    # C/optimizer/__init__.py gives the parameters of experts an optimizer of their own where
    # expert parallelism is on. Tensors are found by their names; what else an optimizer has lies
    # under its number, or under none where it is alone, and is moved to where it is looked for.
    @functools.wraps(upstream)
    def load_state_dict(self: ChainedOptimizer, state: Any) -> None:
        count = len(self.chained_optimizers)
        if isinstance(state, dict):  # a list is of the format torch, which keeps its layout
            saved = [state] if _has_settings(state) else _numbered(state)
            if len(saved) != count:
                own = [state] if count == 1 else _numbered(state)
                for optimizer, one in zip(self.chained_optimizers, own, strict=True):
                    _settle(one, saved, optimizer.optimizer.state_dict()["param_groups"])
                state = state if count == 1 else dict(enumerate(own))
        upstream(self, state)

    return load_state_dict


def _has_settings(state: dict[str, Any]) -> bool:
    return any("lr" in group for group in state.get("optimizer", {}).get("param_groups", []))


def _numbered(state: dict[Any, Any]) -> list[dict[str, Any]]:
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def _settle(
    state: dict[str, Any], saved: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Gives an optimizer's loaded tensors the rest of its state, and the saved settings of its
    parameter groups, whichever optimizer had them."""
    _fill(state, saved[0])
    keys = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]
    settings = {
        tuple(group.get(key) for key in keys): group
        for one in saved
        for group in one["optimizer"]["param_groups"]
    }
    state["optimizer"] = state["optimizer"] | {
        "param_groups": [
            settings[tuple(group.get(key) for key in keys)]
            | {key: group[key] for key in ("params", "is_expert_parallel")}
            for group in groups
        ]
    }


def _fill(state: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(state.get(name), dict):
            _fill(state[name], value)
        elif isinstance(name, str):
            state.setdefault(name, value)


def _knowing_recipes(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    @functools.wraps(parse)
    def parse_args(
        extra_args_provider: Any = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        return parse(extra_args_provider or flags.add_flags, ignore_unknown_args)

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
