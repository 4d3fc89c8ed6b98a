"""Fixes for how Megatron-core 0.19 saves and loads optimizer state.

Upstream's code is written for BF16 and for the fused optimizers of Transformer Engine and apex,
which count steps once for each parameter group. torch's optimizers count steps for each parameter,
and have no state before their first step.

C stands for megatron/core, T for megatron/training.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import SGD
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
    """Applies the fixes to Megatron's classes. Idempotent."""
    if hasattr(ChainedOptimizer.load_state_dict, "__wrapped__"):
        return
    _mend_initial_state()
    _mend_fp32_shards()
    _mend_distributed_adam()
    _mend_padded_buckets()
    _mend_ckpt_step()
    _mend_learning_rates()
    ChainedOptimizer.load_state_dict = _of_other_experts(ChainedOptimizer.load_state_dict)


# --- state before the first step ---------------------------------------------------------------


def _mend_initial_state() -> None:
    """Allows a checkpoint to be saved and loaded before an optimizer's first step.

    Upstream fails in these cases:

    - C/optimizer/__init__.py:_get_megatron_optimizer_based_on_param_groups has no function that
      allocates the state of SGD (TypeError in loading). The one for Adam leaves out the step count
      of torch's Adam.
    - C/optimizer/optimizer.py:sharded_state_dict allocates state for loading but not for saving.
      With --fp16 no step is taken until the loss scale fits. A checkpoint saved before that has no
      state, and loading looks for it (KeyError: optimizer.state.exp_avg...).
    - A step count of 0 is not saved.
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
    """Allocates the state, zeros, of every parameter that has none, as before a first step.

    optimizer: torch's Adam or AdamW, or Megatron's SGD. config: not used; Megatron passes it.
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
        # For Transformer Engine's precision-aware Adam upstream's init_state_fn fails: it calls a
        # function of that optimizer with too few arguments.
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
    """Allows C/optimizer/distrib_optimizer.py to load into a model with FP32 weights.

    The main weights of such a model are views of its weights, which require a gradient, so autograd
    forbids copying into them. Two of upstream's four loading functions lack torch.no_grad.
    """
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(set_states)


def _mend_distributed_adam() -> None:
    """Allows C/optimizer/distrib_optimizer.py to load the step count of torch's Adam.

    Upstream's load_state_dict gives the same tensor to all parameters, and Adam adds 1 to it in
    place for each of them. _set_main_param_and_optimizer_states expects the count among the tensors
    of a parameter. There a fully reshardable checkpoint has none (KeyError), and a dp_reshardable
    checkpoint has the 0 from before loading. Where Transformer Engine or apex is installed upstream
    loads no count at all, since their FusedAdam has none, but Q-Ramping's optimizer is torch's.
    """
    load = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(load)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            step = float(state_dict["optimizer"]["param_groups"][0].get("step", 0))
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step)

    @functools.wraps(set_states)
    def set_states_but_step(
        self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        if isinstance(self.optimizer, torch.optim.Adam):
            tensors = tensors | {"step": None}  # upstream skips what is no tensor
        set_states(self, parameter, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.load_state_dict = load_state_dict


def _mend_padded_buckets() -> None:
    """Makes C/optimizer/distrib_optimizer.py save the right state of each parameter in the fully
    reshardable format, where buckets have padding at their ends.

    get_parameter_state_dp_zero joins the buckets of a buffer without that padding, but
    sharded_param_state_fully_reshardable takes a parameter's state from its place in the buffer,
    which counts it. Everything behind the first padded bucket is then saved from a wrong place.
    """
    upstream = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(upstream)
    def sharded_param_state_fully_reshardable(
        self: DistributedOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.param_index_map = _places_without_padding(buffer)
        try:
            return upstream(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    DistributedOptimizer.sharded_param_state_fully_reshardable = (
        sharded_param_state_fully_reshardable
    )


def _places_without_padding(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """(start, end, bucket) of each parameter of one of Megatron's _ParamAndGradBuffer, as if its
    buckets had no padding at their ends."""
    before = [0]  # padding before each bucket
    for (start, end), bucket in zip(buffer.bucket_indices, buffer.buckets, strict=True):
        before.append(before[-1] + end - start - bucket.numel_unpadded)
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _mend_ckpt_step() -> None:
    """Makes --ckpt-step select the distributed optimizer's state too, in --ckpt-format torch.

    T/checkpointing.py:load_checkpoint loads the model of that step. It then reads the tracker file
    again, loads the optimizer state of the step named there, and continues counting from that step.
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
    """Allows a run to resume with another --lr or --min-lr.

    Upstream identifies parameter groups by keys that include these two rates
    (C/optimizer/optimizer.py:param_group_identifier_keys). With another rate it finds no group of
    the checkpoint for those of the launch (ValueError or KeyError), even with
    --override-opt_param-scheduler.
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
    """Copies learning rates between matching parameter groups, so that upstream can match them.

    Groups match if all other identifying keys are equal. The rates of the launch are copied to the
    saved groups or, with --use-checkpoint-opt_param-scheduler, the reverse. Whether rates may
    change at all is checked in C/optimizer_param_scheduler.py.
    """
    keys = [key for key in param_group_identifier_keys if key not in _RATES]
    by_key = {tuple(group.get(key) for key in keys): group for group in current}
    if len(by_key) < len(current):
        return  # --decoupled-lr: some groups differ only in their rates
    for group in saved:
        own = by_key.get(tuple(group.get(key) for key in keys))
        if own is not None:
            keeps = get_args().use_checkpoint_opt_param_scheduler
            source, target = (group, own) if keeps else (own, group)
            target |= {rate: source[rate] for rate in _RATES if rate in source}


# --- a separate optimizer for experts ----------------------------------------------------------


def _of_other_experts(upstream: Callable[..., None]) -> Callable[..., None]:
    # With expert parallelism C/optimizer/__init__.py makes a separate optimizer for the parameters
    # of experts, so a checkpoint can have another number of optimizers than the launch. Tensors are
    # found by their names. The other state of an optimizer is saved under its number, or without
    # one if it is the only optimizer, and has to be moved to the place where it is looked for.
    @functools.wraps(upstream)
    def load_state_dict(self: ChainedOptimizer, state: Any) -> None:
        count = len(self.chained_optimizers)
        if isinstance(state, dict):  # a list: the format torch, whose layout cannot change
            saved = [state] if _has_settings(state) else _numbered(state)
            if len(saved) != count:
                own = [state] if count == 1 else _numbered(state)
                for optimizer, one in zip(self.chained_optimizers, own, strict=True):
                    _settle(one, saved, optimizer.optimizer.state_dict()["param_groups"])
                state = state if count == 1 else dict(enumerate(own))
        upstream(self, state)

    return load_state_dict


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a saved state that belongs to torch's optimizer: all of it for FP32 weights."""
    return state.get("optimizer", state)


def _has_settings(state: dict[str, Any]) -> bool:
    return any("lr" in group for group in _inner(state).get("param_groups", []))


def _numbered(state: dict[Any, Any]) -> list[dict[str, Any]]:
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def _settle(
    state: dict[str, Any], saved: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Completes `state`, which has an optimizer's loaded tensors, with the rest of its state.

    saved: the states of all optimizers in the checkpoint. The settings of each parameter group are
    taken from the saved optimizer that has that group. groups: the optimizer's parameter groups in
    this launch.
    """
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
    if "optimizer" in state:  # a new dict, since other optimizers may share this one
        state["optimizer"] = state["optimizer"] | {"param_groups": own}
    else:
        state["param_groups"] = own


def _fill(state: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(state.get(name), dict):
            _fill(state[name], value)
        elif isinstance(name, str):
            state.setdefault(name, value)
