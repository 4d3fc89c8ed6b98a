"""AdamW whose moments are stored in few bits (moments.py), as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic import low_bit
from megatron_fp4.arithmetic.adamw import count_steps, take_groups, with_steps
from megatron_fp4.arithmetic.low_bit import LowBit, Owned, scale_key
from megatron_fp4.arithmetic.moments import DEFAULT, Moments
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.errors import ConfigError

_UNKNOWN_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")


Update = Callable[[LowBit, Tensor, Adam, int], None]


class LowBitAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, whose moments are stored in few bits between the steps.

    A step decodes the moments to float32, updates the weight with what `update` makes of them, and
    encodes these, so that an error of rounding acts from the next step on. They are rounded
    stochastically, by bits that depend on the seed, the number of the step, the name of the
    parameter, the moment and the index of the element alone.

    The state of a parameter has its moments, "exp_avg" and "exp_avg_sq", in their codes, of its
    shape; beside them those in blocks have "exp_avg_scale" or "exp_avg_sq_scale", uint8 [blocks];
    and "step", as AdamW has it. What leaves the optimizer, by `state_dict` or `state_in_float32`,
    is decoded: an AdamW can load it. It lies in the host's memory, since in float32 it is larger
    than what it is decoded from. What enters the optimizer is encoded, rounded to nearest; values
    that were decoded at the same place are not changed by that. A NaN or Inf in a gradient makes an
    element NaN, and in blocks the whole block of that moment.

    Parameters are float32. Each needs a `place` before its first step.
    """

    def __init__(
        self,
        params: Any,
        moments: Moments = DEFAULT,
        seed: int = 0,
        update: Update = low_bit.step,
        **options: Any,
    ) -> None:
        """params, options: as for torch.optim.AdamW. seed: of the run, as for `Key`. update:
        `low_bit.step`, or a kernel.

        Raises ConfigError for parameters that are not float32, for options of AdamW with which the
        step is not defined, and for an invalid seed.
        """
        Key(seed)  # raises ConfigError for a seed that is out of range
        self.moments, self._seed, self._apply = moments, seed, update
        self._owned: dict[Tensor, Owned] = {}
        super().__init__(params, **options)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("moments", "_seed", "_apply", "_owned")}
        return super().__getstate__() | own  # a copy has these too

    @classmethod
    def in_place_of(
        cls,
        optimizer: torch.optim.Optimizer,
        moments: Moments = DEFAULT,
        seed: int = 0,
        update: Update = low_bit.step,
    ) -> LowBitAdamW:
        """A LowBitAdamW of the parameters of `optimizer`, in the dictionaries of its groups.

        Parameters may be views, which torch's constructor refuses. The state of `optimizer` is not
        taken over. moments, seed, update and errors: as for the constructor.
        """
        found = cls([torch.nn.Parameter(torch.empty(0))], moments, seed, update)
        for group in optimizer.param_groups:
            _refuse(group)
        take_groups(found, optimizer)
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.AdamW does.

        Raises ConfigError for a group that the constructor would refuse.
        """
        super().add_param_group(param_group)
        _refuse(self.param_groups[-1])

    def place(self, weight: Tensor, owned: Owned) -> None:
        """Says which elements of a model's parameter `weight`, a parameter of this optimizer, has.

        Raises ConfigError if it is none.
        """
        if not any(each is weight for group in self.param_groups for each in group["params"]):
            raise ConfigError(f"{owned.name} is no parameter of this optimizer; pass its own")
        self._owned[weight] = owned

    # --- steps ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, like that of torch.optim.AdamW(foreach=False).

        Raises ConfigError for a parameter with a gradient and without a place.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        count_steps(self)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        self.init_state(weight)
        state = self.state[weight]
        state["step"] += 1
        options = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        self._apply(self._of(weight), weight.grad, Adam(int(state["step"]), *options), self._seed)

    def _of(self, weight: Tensor) -> LowBit:
        if weight not in self._owned:
            raise ConfigError("a parameter has no place: call place with it before the first step")
        return LowBit(weight, self.state[weight], self.moments, self._owned[weight])

    # --- state ------------------------------------------------------------------------------------

    def init_state(self, weight: Tensor) -> None:
        """Adds to the state of a parameter what is not there yet: moments of zeros, step 0.

        Raises ConfigError for a parameter without a place.
        """
        of = self._of(weight)
        of.state.setdefault("step", torch.tensor(0.0))
        for key in self.moments.forms:
            if key not in of.state:
                of.store(key, torch.zeros_like(weight))

    def state_in_float32(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of a parameter as AdamW has it: "step", and moments float32 of its shape.

        The moments are in the host's memory. Those that are stored there in float32 are the
        optimizer's own. Raises ConfigError for a parameter without state.
        """
        if "exp_avg" not in self.state.get(weight, {}):
            raise ConfigError("this parameter has no state yet: call init_state with it first")
        of = self._of(weight)
        return {"step": of.state["step"], **{k: of.decoded(k).cpu() for k in self.moments.forms}}

    def set_state_in_float32(self, weight: Tensor, state: dict[str, Any]) -> None:
        """Encodes a parameter's state from that of AdamW, rounded to nearest.

        state: "step", and "exp_avg" and "exp_avg_sq", float32 of the parameter's shape, on any
        device; copied. Raises ConfigError for other moments, and for a parameter without a place.
        """
        of = self._of(weight)
        _refuse_state(state, weight)
        of.state["step"] = torch.tensor(float(state["step"]))
        for key in self.moments.forms:
            of.store(key, state[key].detach().to(weight.device, copy=True))

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim.AdamW, with the moments in float32, in the host's memory."""
        found = super().state_dict()
        states = dict(found["state"])
        for number, weight in self._numbered(found):
            if "exp_avg" in states.get(number, {}):
                others = self._others(states[number])
                states[number] = {**self.state_in_float32(weight), **others}
        return {**found, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict`, of this class or of torch.optim.AdamW, returned.

        A parameter without a number of steps gets that of its group. Raises ConfigError as
        `set_state_in_float32` does, and for options as the constructor does.
        """
        numbered, states = self._numbered(state_dict), with_steps(state_dict)
        for number, weight in numbered:
            if number in states:
                _refuse_state(states[number], weight)
        # Without the moments, which torch would copy in float32 to where the parameters are.
        others = {n: {"step": s["step"], **self._others(s)} for n, s in states.items()}
        super().load_state_dict({**state_dict, "state": others})
        for group in self.param_groups:
            _refuse(group)
        for number, weight in numbered:
            if number in states:
                self.set_state_in_float32(weight, states[number])

    def load_settings(self, state_dict: dict[str, Any]) -> None:
        """Loads the options of groups and the counts of steps alone, as `load_state_dict` does, and
        keeps all else of the state."""
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            _refuse(group)
        self.state = own
        states = with_steps(state_dict)
        for number, weight in self._numbered(state_dict):
            if "step" in states.get(number, {}):
                self.state[weight]["step"] = states[number]["step"]

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """The number of each parameter in `state_dict`, and the parameter."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return list(zip(numbers, weights, strict=False))  # torch says which sizes differ

    def _others(self, state: dict[str, Any]) -> dict[str, Any]:
        """What others keep in a parameter's state."""
        return {key: value for key, value in state.items() if key not in self.keys}

    @property
    def keys(self) -> set[str]:
        """The keys of what this class keeps in a parameter's state."""
        return {"step", *self.moments.forms, *map(scale_key, self.moments.forms)}


def _refuse(group: dict[str, Any]) -> None:
    """Raises ConfigError for a group of parameters for which the step is not defined."""
    for option in _UNKNOWN_OPTIONS:
        if group.get(option):
            raise ConfigError(
                f"moments in few bits are not defined with AdamW's {option}; leave it out"
            )
    if not group.get("decoupled_weight_decay", True):
        raise ConfigError("moments in few bits are those of AdamW, not of Adam; use AdamW")
    for weight in group["params"]:
        if weight.dtype != torch.float32:
            raise ConfigError(
                f"moments in few bits belong to float32 weights, not {weight.dtype}; give the "
                "optimizer the main weights"
            )


def _refuse_state(state: dict[str, Any], weight: Tensor) -> None:
    """Raises ConfigError unless `state` has moments in float32 of the weight's shape."""
    for key in ("exp_avg", "exp_avg_sq"):
        moment = state.get(key)
        if moment is None or moment.dtype != torch.float32 or moment.shape != weight.shape:
            found = "none" if moment is None else f"{moment.dtype} {list(moment.shape)}"
            raise ConfigError(
                f"{key} is loaded as float32 {list(weight.shape)}, not {found}; save it with "
                "state_dict"
            )
