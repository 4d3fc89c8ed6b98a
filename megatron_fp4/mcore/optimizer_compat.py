"""Mends how Megatron-core 0.19 saves and loads the state of optimizers.

Upstream writes this code for runs in BF16 and for the fused optimizers of Transformer Engine and
apex, which count steps once for each group of parameters. torch's count them once for each
parameter, and all have no state before their first step.

C stands for megatron/core, T for megatron/training.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import SGD, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import AdaptiveMuon
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.training import checkpointing, global_vars

from megatron_fp4.errors import ConfigError


def install() -> None:
    """Applies the mends; harmless when called again."""
    if hasattr(ChainedOptimizer.load_state_dict, "__wrapped__"):
        return
    _mend_initial_state()
    _mend_fp32_shards()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _mend_distributed_adam()
    _mend_ckpt_step()
    ChainedOptimizer.load_state_dict = _of_other_experts(ChainedOptimizer.load_state_dict)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for an optimizer that does not run, or cannot be saved, as asked for."""
    name, sharded = args.optimizer, args.use_distributed_optimizer
    if name == "adam":
        return
    if name == "sgd":
        if sharded:
            raise ConfigError(
                "--optimizer sgd does not support --use-distributed-optimizer: leave it out"
            )
        return
    if args.fp16:
        raise ConfigError(f"--optimizer {name} does not support --fp16: use --bf16")
    if (sharded or name == "dist_muon") and not args.bf16:
        without = "muon" if name == "dist_muon" else name
        raise ConfigError(
            f"a distributed {name} needs --bf16: add it, or use --optimizer {without} without "
            "--use-distributed-optimizer"
        )
    if name == "adaptive_muon" and hasattr(AdaptiveMuon, "_apply_muon_scale"):
        raise ConfigError(
            "--optimizer adaptive_muon of Megatron-core 0.19 does not run with the installed "
            "emerging-optimizers (0.3 changed it): use --optimizer muon"
        )
    # C/dist_checkpointing/optimizer.py saves tensors of a weight's shape. SOAP's factors are none.
    keeps = args.load or (args.save and not args.no_save_optim)
    if name == "soap" and keeps and args.ckpt_format != "torch":
        raise ConfigError(
            f"--ckpt-format {args.ckpt_format} cannot hold the state of --optimizer soap: "
            "use --ckpt-format torch"
        )


# --- state before the first step ---------------------------------------------------------------


def _mend_initial_state() -> None:
    """Lets a checkpoint be saved, and loaded, before an optimizer's first step.

    C/optimizer/__init__.py:_get_megatron_optimizer_based_on_param_groups has no function that
    allocates the state of SGD (TypeError on loading), and its function for Adam leaves out the
    step count of torch's. C/optimizer/optimizer.py:sharded_state_dict allocates it for loading and
    not for saving, and --fp16 takes no step until its loss scale fits: what was not saved is then
    looked for (KeyError: optimizer.state.exp_avg...). A step count of 0 is not saved at all.
    """
    MegatronOptimizer.__init__ = _with_full_state(MegatronOptimizer.__init__)
    for kind in (Float16OptimizerWithFloat16Params, FP32Optimizer):
        kind.sharded_state_dict = _counting(_allocated(kind.sharded_state_dict))
    for name in ("state_dict", "get_parameter_state_dp_zero"):
        method = getattr(DistributedOptimizer, name)
        setattr(DistributedOptimizer, name, _allocated(method))


def _with_full_state(upstream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upstream)
    def __init__(
        self: MegatronOptimizer, optimizer: Any, config: Any, init_state_fn: Any = None
    ) -> None:
        known = isinstance(optimizer, torch.optim.Adam | SGD)
        upstream(self, optimizer, config, init_state if known else init_state_fn)

    return __init__


def init_state(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Gives every parameter that has no state yet the state that a first step starts from: zeros.

    optimizer: torch's Adam or AdamW, or the SGD that Megatron has chosen. config: Megatron's, which
    is not read.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                continue
            if isinstance(optimizer, torch.optim.Adam):
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif group["momentum"] != 0:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def _allocated(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def method(self: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
        # Upstream's function calls that of Transformer Engine's precision-aware Adam with too few
        # arguments.
        known = self.init_state_fn is not None and not self.config.use_precision_aware_optimizer
        if known and not self.is_stub_optimizer:
            self.init_state_fn(self.optimizer, self.config)
        return upstream(self, *args, **kwargs)

    return method


def _counting(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def sharded_state_dict(self: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
        saved = upstream(self, *args, **kwargs)
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        if steps:
            _inner(saved)["state"].setdefault("common_step", steps[0])
        return saved

    return sharded_state_dict


# --- the distributed optimizer -----------------------------------------------------------------


def _mend_fp32_shards() -> None:
    """Lets C/optimizer/distrib_optimizer.py load into a model of FP32 weights.

    There the main weights are views of the model's weights, which require a gradient, and autograd
    refuses to copy into them. Two of the four functions that load forget torch.no_grad.
    """
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(set_states)


def _mend_distributed_adam() -> None:
    """Lets C/optimizer/distrib_optimizer.py load the step count of torch's Adam.

    load_state_dict gives all parameters one and the same tensor for it, to which Adam adds 1 in
    place for each of them. _set_main_param_and_optimizer_states wants the count among a parameter's
    own tensors, where a fully reshardable checkpoint has none (KeyError) and a dp_reshardable one
    has the 0 from before loading.
    """
    load = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

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
    DistributedOptimizer.load_state_dict = load_state_dict


def _mend_ckpt_step() -> None:
    """Lets --ckpt-step choose the state of the distributed optimizer in --ckpt-format torch.

    T/checkpointing.py:load_checkpoint takes the model of that step, then reads the tracker file
    once more, loads the state of the step that is named there and goes on counting from it.
    """
    upstream = checkpointing.read_metadata

    @functools.wraps(upstream)
    def read_metadata(tracker: str) -> tuple[int, bool]:
        iteration, release = upstream(tracker)
        args = global_vars._GLOBAL_ARGS  # None while arguments are parsed
        if args is None or not args.ckpt_step or args.load is None:
            return iteration, release
        is_loaded = tracker == checkpointing.get_checkpoint_tracker_filename(args.load)
        return args.ckpt_step if is_loaded else iteration, release

    checkpointing.read_metadata = read_metadata


# --- experts in an optimizer of their own ------------------------------------------------------


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


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """What torch's optimizer has of a saved state: all of it where the weights are FP32."""
    return state.get("optimizer", state)


def _has_settings(state: dict[str, Any]) -> bool:
    return any("lr" in group for group in _inner(state).get("param_groups", []))


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
        for group in _inner(one)["param_groups"]
    }
    own = [
        settings[tuple(group.get(key) for key in keys)]
        | {key: group[key] for key in ("params", "is_expert_parallel")}
        for group in groups
    ]
    if "optimizer" in state:  # it may be another's as well
        state["optimizer"] = state["optimizer"] | {"param_groups": own}
    else:
        state["param_groups"] = own


def _fill(state: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(state.get(name), dict):
            _fill(state[name], value)
        elif isinstance(name, str):
            state.setdefault(name, value)
