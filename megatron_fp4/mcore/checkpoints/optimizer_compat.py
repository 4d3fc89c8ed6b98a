"""Mends how Megatron-core 0.19 saves and loads the state of optimizers.

Upstream writes this code for runs in BF16 and for the fused optimizers of Transformer Engine and
apex, which count steps once for each group of parameters. torch's count them once for each
parameter, and all have no state before their first step.

C stands for megatron/core, T for megatron/training.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import SGD, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.training import checkpointing, get_args, global_vars


def install() -> None:
    """Applies the mends; harmless when called again."""
    if hasattr(ChainedOptimizer.load_state_dict, "__wrapped__"):
        return
    _mend_initial_state()
    _mend_fp32_shards()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _mend_distributed_adam()
    _mend_ckpt_step()
    _mend_learning_rates()
    ChainedOptimizer.load_state_dict = _of_other_experts(ChainedOptimizer.load_state_dict)


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


# --- other learning rates ----------------------------------------------------------------------

_RATES = ("max_lr", "min_lr")


def _mend_learning_rates() -> None:
    """Lets a run go on with another --lr or --min-lr.

    C/optimizer/optimizer.py:param_group_identifier_keys has the two rates among what tells groups
    of parameters apart, so that no group of the checkpoint is found for any of the launch's
    (ValueError, KeyError), whatever --override-opt_param-scheduler says.
    """
    find = MegatronOptimizer._filter_and_reorder_param_groups
    load = DistributedOptimizer.load_state_dict

    @functools.wraps(find)
    def _filter_and_reorder_param_groups(
        current_groups: list[dict[str, Any]], state_dict_groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        _agree_on_rates(current_groups, state_dict_groups)
        return find(current_groups, state_dict_groups)

    @functools.wraps(load)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        if "optimizer" in state_dict:
            _agree_on_rates(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"])
        load(self, state_dict)

    MegatronOptimizer._filter_and_reorder_param_groups = staticmethod(
        _filter_and_reorder_param_groups
    )
    DistributedOptimizer.load_state_dict = load_state_dict


def _agree_on_rates(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Gives each saved group the rates of the launch's group that is like it in all else; with
    --use-checkpoint-opt_param-scheduler the reverse. Whether rates may change is for
    C/optimizer_param_scheduler.py to say."""
    keys = [key for key in param_group_identifier_keys if key not in _RATES]
    by_key = {tuple(group.get(key) for key in keys): group for group in current}
    if len(by_key) < len(current):
        return  # --decoupled-lr: the rates alone tell groups apart
    for group in saved:
        own = by_key.get(tuple(group.get(key) for key in keys))
        if own is not None:
            keeps = get_args().use_checkpoint_opt_param_scheduler
            source, target = (group, own) if keeps else (own, group)
            target |= {rate: source[rate] for rate in _RATES if rate in source}


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
