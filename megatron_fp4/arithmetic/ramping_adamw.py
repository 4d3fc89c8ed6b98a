"""AdamW with Q-Ramping (ramping.py) as a torch optimizer, and the snapshot of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.adamw import count_steps, plain_step, take_groups, with_steps
from megatron_fp4.arithmetic.offload import copy_of
from megatron_fp4.arithmetic.ramping import LONGEST, STATES, Adam, Ramped, update
from megatron_fp4.arithmetic.weight_states import key_of
from megatron_fp4.errors import ConfigError

SUM, COUNT, PERIOD = _OWN = tuple(map(key_of, STATES))

_UNKNOWN_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")

Update = Callable[[Ramped, Tensor, Adam], None]


class RampingAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, in which weights may be updated at a period of their own.

    A weight that `ramp` was called with takes the step of `ramping.update`, every other one that of
    AdamW. Beside AdamW's own state such a weight has, of its shape, the sum (in its dtype) and the
    count (int16) of the gradients since each element's last update, and the period (int16). The
    state is made in the weight's first step, as AdamW's is.

    calibrates: while it is True all weights take AdamW's own step, and sums and counts stay.
    """

    def __init__(self, params: Any, update: Update = update, **options: Any) -> None:
        """params, options: as for torch.optim.AdamW. update: `ramping.update`, or a kernel."""
        super().__init__(params, **options)
        self._step = update
        self.calibrates = False
        self._ramped: set[Tensor] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch expects a number of steps in each state, also before a weight's first step.
        for each in state["state"].values():
            if each:
                each.setdefault("step", torch.tensor(0.0))
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("_step", "calibrates", "_ramped")}
        return super().__getstate__() | own  # a copy has these too

    @classmethod
    def in_place_of(cls, optimizer: torch.optim.Optimizer, update: Update = update) -> RampingAdamW:
        """A RampingAdamW of the parameters of `optimizer`, in the dictionaries of its groups.

        Parameters may be views, which torch's constructor refuses. update: as for the constructor.
        """
        found = cls([torch.nn.Parameter(torch.empty(0))], update)
        take_groups(found, optimizer)
        return found

    def ramp(self, weight: Tensor) -> None:
        """Gives each element of `weight` a period: 1 until `set_period`.

        weight: a parameter of this optimizer, float32 (or float64, for tests). Raises ConfigError
        if it is not, or if AdamW has an option that Q-Ramping does not know.
        """
        groups = [group for group in self.param_groups if any(p is weight for p in group["params"])]
        if not groups:
            raise ConfigError("Q-Ramping updates parameters of its optimizer; this is none of them")
        for option in _UNKNOWN_OPTIONS:
            if groups[0].get(option):
                raise ConfigError(f"Q-Ramping is not defined with AdamW's {option}; leave it out")
        if weight.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"Q-Ramping updates float32 weights, not {weight.dtype}; give the optimizer the "
                "main weights"
            )
        self._ramped.add(weight)

    def set_period(self, weight: Tensor, period: Tensor) -> None:
        """Sets the period of each element of `weight`, from the next step on.

        Gradients that were summed under an earlier period are kept. weight: one that `ramp` was
        called with. period: of its shape, integers in [1, 16383]. Raises ConfigError if they are
        not.
        """
        if weight not in self._ramped:
            raise ConfigError("this weight has no periods: call ramp with it first")
        if period.shape != weight.shape:
            shapes = f"{list(period.shape)}, and the weight's {list(weight.shape)}"
            raise ConfigError(f"the shape of the periods is {shapes}")
        if period.numel() and not 1 <= int(period.min()) <= int(period.max()) <= LONGEST:
            raise ConfigError(f"a period is a number of steps in [1, {LONGEST}]; clamp the periods")
        self._start(weight)
        self.state[weight][PERIOD].copy_(period)

    def _start(self, weight: Tensor) -> None:
        """Adds to the weight's state what is not there yet."""
        state = self.state[weight]
        if "exp_avg" not in state:  # no step so far
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        if SUM not in state:
            state[SUM] = torch.zeros_like(weight)
        if COUNT not in state:
            state[COUNT] = torch.zeros_like(weight, dtype=torch.int16)
        if PERIOD not in state:
            state[PERIOD] = torch.ones_like(weight, dtype=torch.int16)

    def _is_ramped(self, weight: Tensor) -> bool:
        return not self.calibrates and weight in self._ramped

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        # Collects the parameters of AdamW's own step.
        own = [weight for weight in group["params"] if not self._is_ramped(weight)]
        # torch makes moments in a state that is empty. What else is in it is put back afterwards.
        beside = []
        for weight in own:
            if weight.grad is not None and "exp_avg" not in (state := self.state[weight]):
                state.pop("step", None)
                beside.append((state, dict(state)))
                state.clear()
        found = super()._init_group({**group, "params": own}, *lists)
        for state, others in beside:
            state.update(others)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, like that of torch.optim.AdamW(foreach=False)."""
        for group in self.param_groups:
            group["foreach"] = False  # which takes less memory, and may have been loaded otherwise
        loss = plain_step(self, closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and self._is_ramped(weight):
                    self._update(weight, group)
        count_steps(self)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        self._start(weight)
        state = self.state[weight]
        state["step"] += 1
        options = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        moments = state["exp_avg"], state["exp_avg_sq"]
        ramped = Ramped(weight, *moments, state[SUM], state[COUNT], state[PERIOD])
        self._step(ramped, weight.grad, Adam(int(state["step"]), *options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, as torch.optim.AdamW does.

        A parameter without a number of steps gets that of its group.
        """
        super().load_state_dict({**state_dict, "state": with_steps(state_dict)})
        # torch converts a state to its parameter's dtype.
        for state in self.state.values():
            for key in (COUNT, PERIOD):
                if key in state:
                    state[key] = state[key].to(torch.int16)


class Snapshot:
    """The weights and the state of an optimizer at one moment, but for Q-Ramping's own state, which
    a calibration does not change."""

    def __init__(self, optimizer: torch.optim.Optimizer, offload: bool = False) -> None:
        """offload: whether the copies are kept in the host's memory, as in `copy_of`."""
        self._optimizer = optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._weights = [(weight, copy_of(weight, offload)) for weight in weights]
        self._states = {
            weight: {
                name: _copy(value, offload)
                for name, value in optimizer.state[weight].items()
                if name not in _OWN
            }
            for weight in weights
            if weight in optimizer.state
        }
        self._options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Sets weights, state and options of the optimizer to what they were.

        Weights and states that are there are written in place, so that other references to them
        see the old values too.
        """
        for weight, old in self._weights:
            weight.copy_(old, non_blocking=True)
        for weight in list(self._optimizer.state):
            if weight in self._states:
                _restore(self._optimizer.state[weight], self._states[weight])
            else:
                del self._optimizer.state[weight]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(options)


def _restore(state: dict[str, Any], old: dict[str, Any]) -> None:
    for name in state.keys() - old.keys() - set(_OWN):
        del state[name]
    for name, value in old.items():
        if isinstance(value, Tensor):
            state[name].copy_(value, non_blocking=True)
        else:
            state[name] = value


def _copy(value: Any, offload: bool) -> Any:
    return copy_of(value, offload) if isinstance(value, Tensor) else value
