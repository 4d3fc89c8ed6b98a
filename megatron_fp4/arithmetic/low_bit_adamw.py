"""AdamW whose moments are stored in few bits (moments.py), as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.fp8_blocks import bits_at
from megatron_fp4.arithmetic.moments import DEFAULT, Moments
from megatron_fp4.arithmetic.philox import Key, stream_id
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.arithmetic.ramping_adamw import count_steps
from megatron_fp4.errors import ConfigError

_UNKNOWN_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")


@dataclass(frozen=True, eq=False)
class Part:
    """Where the elements of an optimizer's parameter lie in a parameter of the model.

    An optimizer's parameter may be a part of the model's: a range of the flattened tensor, of the
    distributed optimizer, or a shard of it, of tensor parallelism.

    name: the global name of the model's parameter, the same on all ranks that have a part of it or
        a copy; of this name are its random streams (`stream_of`).
    start: the index of the first element in the flattened tensor, of the shard where it is sharded;
        blocks are counted from that tensor's beginning.
    index: int64 [elements], the index of each element in the flattened unsharded tensor, by which
        random bits are drawn; it takes eight bytes an element. None: start, start + 1, ...
    """

    name: str
    start: int = 0
    index: Tensor | None = None

    def indices(self, elements: int, device: torch.device) -> Tensor:
        """The index of each element: int64 [elements]."""
        if self.index is not None:
            return self.index.to(device)
        return torch.arange(self.start, self.start + elements, device=device)


def stream_of(name: str, key: str) -> int:
    """The random stream that rounds a moment. key: "exp_avg" or "exp_avg_sq"."""
    return stream_id(f"{name}:{key}")


@torch.no_grad()
def update(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, adam: Adam) -> None:
    """One step of torch.optim.AdamW(foreach=False), in place: its operations in its order.

    All tensors are float32, of one shape.
    """
    beta1, beta2 = adam.betas
    if adam.weight_decay != 0:
        weight.mul_(1 - adam.lr * adam.weight_decay)
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (1 - beta2**adam.step) ** 0.5
    divisor = (v.sqrt() / root).add_(adam.eps)
    weight.addcdiv_(m, divisor, value=-adam.lr / (1 - beta1**adam.step))


class LowBitAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, whose moments are stored in few bits between the steps.

    A step decodes the moments to float32, updates the weight with what `update` makes of them, and
    encodes these, so that an error of rounding acts from the next step on. They are rounded
    stochastically, by bits that depend on the seed, the number of the step, the name of the
    parameter, the moment and the index of the element alone.

    The state of a parameter has its moments, "exp_avg" and "exp_avg_sq", in their codes, of its
    shape; beside them those in blocks have "exp_avg_scale" or "exp_avg_sq_scale", uint8 [blocks];
    and "step", as AdamW has it. What leaves the optimizer, by `state_dict` or `state_in_float32`,
    is decoded: an AdamW can load it. What enters it is encoded, rounded to nearest; values that
    were decoded at the same place are not changed by that. A NaN or Inf in a gradient makes an
    element NaN, and in blocks the whole block of that moment.

    Parameters are float32. Each needs a `place` before its first step.
    """

    def __init__(
        self, params: Any, moments: Moments = DEFAULT, seed: int = 0, **options: Any
    ) -> None:
        """params, options: as for torch.optim.AdamW. seed: of the run, as for `Key`.

        Raises ConfigError for parameters that are not float32, and for options of AdamW with which
        the step is not defined.
        """
        Key(seed)
        self.moments, self._seed = moments, seed
        self._places: dict[Tensor, Part] = {}
        super().__init__(params, **options)

    @classmethod
    def in_place_of(
        cls, optimizer: torch.optim.Optimizer, moments: Moments = DEFAULT, seed: int = 0
    ) -> LowBitAdamW:
        """A LowBitAdamW of the parameters of `optimizer`, in the dictionaries of its groups.

        Parameters may be views, which torch's constructor refuses. The state of `optimizer` is not
        taken over. moments, seed and errors: as for the constructor.
        """
        found = cls([torch.nn.Parameter(torch.empty(0))], moments, seed)
        for group in optimizer.param_groups:
            _refuse(group)
        found.param_groups = optimizer.param_groups
        for group in found.param_groups:
            for name, value in found.defaults.items():
                group.setdefault(name, value)
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.AdamW does.

        Raises ConfigError for a group that the constructor would refuse.
        """
        super().add_param_group(param_group)
        _refuse(self.param_groups[-1])

    def place(self, weight: Tensor, part: Part) -> None:
        """Says where the elements of `weight`, a parameter of this optimizer, lie.

        Raises ConfigError if it is none, or for an index of another size.
        """
        if not any(each is weight for group in self.param_groups for each in group["params"]):
            raise ConfigError(f"{part.name} is no parameter of this optimizer; pass its own")
        if part.index is not None and part.index.shape != (weight.numel(),):
            raise ConfigError(
                f"the indices of {part.name} are {list(part.index.shape)}, and its elements "
                f"{[weight.numel()]}"
            )
        self._places[weight] = part

    # --- steps ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, as of torch.optim.AdamW(foreach=False).

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
        number = int(state["step"])
        options = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        decoded = {key: self._decoded(weight, key) for key in self.moments.forms}
        m, v = decoded.values()
        update(weight, weight.grad, m, v, Adam(number, *options))
        for key, form in self.moments.forms.items():
            bits = self._bits(weight, key, number) if form.draws else None
            self._store(weight, key, decoded[key], bits)

    def _bits(self, weight: Tensor, key: str, number: int) -> Tensor | None:
        """The random bits of a moment in step `number`: int32 [elements]."""
        place = self._place_of(weight)
        index = place.indices(weight.numel(), weight.device)
        return bits_at(index, Key(self._seed, number), stream_of(place.name, key))

    # --- state ------------------------------------------------------------------------------------

    def init_state(self, weight: Tensor) -> None:
        """Adds to the state of a parameter what is not there yet: moments of zeros, step 0.

        Raises ConfigError for a parameter without a place.
        """
        self._place_of(weight)
        state = self.state[weight]
        state.setdefault("step", torch.tensor(0.0))
        for key in self.moments.forms:
            if key not in state:
                self._store(weight, key, torch.zeros_like(weight), None)

    def state_in_float32(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of a parameter as AdamW has it: "step", and moments float32 of its shape.

        Moments that are stored in float32 are the optimizer's own. Raises ConfigError for a
        parameter without state.
        """
        if "exp_avg" not in self.state.get(weight, {}):
            raise ConfigError("this parameter has no state yet: call init_state with it first")
        moments = {key: self._decoded(weight, key) for key in self.moments.forms}
        return {"step": self.state[weight]["step"], **moments}

    def set_state_in_float32(self, weight: Tensor, state: dict[str, Any]) -> None:
        """Encodes a parameter's state from that of AdamW, rounded to nearest.

        state: "step", and "exp_avg" and "exp_avg_sq", float32 of the parameter's shape; copied.
        Raises ConfigError for other moments, and for a parameter without a place.
        """
        self._place_of(weight)
        _refuse_state(state, weight)
        self.state[weight]["step"] = torch.tensor(float(state["step"]))
        for key in self.moments.forms:
            self._store(weight, key, state[key].detach().to(weight.device, copy=True), None)

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim.AdamW, with the moments in float32."""
        found = super().state_dict()
        states = dict(found["state"])
        for number, weight in self._numbered(found):
            if "exp_avg" in states.get(number, {}):
                others = {k: v for k, v in states[number].items() if k not in self._keys}
                states[number] = {**self.state_in_float32(weight), **others}
        return {**found, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict`, of this class or of torch.optim.AdamW, returned.

        The number of steps is that of the group, where it has one. Raises ConfigError as
        `set_state_in_float32` does, and for options as the constructor does.
        """
        groups, given = state_dict["param_groups"], state_dict["state"]
        steps = {n: group["step"] for group in groups if "step" in group for n in group["params"]}
        states = {}
        for number, weight in self._numbered(state_dict):
            if number in given:
                # Here, since torch would convert codes to float32 as if they were values.
                _refuse_state(given[number], weight)
                count = float(steps.get(number, given[number].get("step", 0)))
                states[number] = {**given[number], "step": torch.tensor(count)}
        super().load_state_dict({**state_dict, "state": states})
        for group in self.param_groups:
            _refuse(group)
        for number, weight in self._numbered(state_dict):
            if number in states:
                self.set_state_in_float32(weight, self.state[weight])

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """The number of each parameter in `state_dict`, and the parameter."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return list(zip(numbers, weights, strict=False))  # torch says which sizes differ

    @property
    def _keys(self) -> set[str]:
        """The keys of what this class keeps in a parameter's state."""
        return {"step", *self.moments.forms, *map(_scale_key, self.moments.forms)}

    def _place_of(self, weight: Tensor) -> Part:
        if weight not in self._places:
            raise ConfigError("a parameter has no place: call place with it before the first step")
        return self._places[weight]

    def _decoded(self, weight: Tensor, key: str) -> Tensor:
        """A moment in float32, of the weight's shape."""
        state, form = self.state[weight], self.moments.forms[key]
        start = self._place_of(weight).start
        values = form.decode(state[key].view(-1), state.get(_scale_key(key)), start)
        return values.view(weight.shape)

    def _store(self, weight: Tensor, key: str, moment: Tensor, bits: Tensor | None) -> None:
        """Encodes a moment into the state. bits: None rounds to nearest."""
        form = self.moments.forms[key]
        codes, scales = form.encode(moment.reshape(-1), self._place_of(weight).start, bits)
        self.state[weight][key] = codes.view(weight.shape)
        if scales is not None:
            self.state[weight][_scale_key(key)] = scales


def _scale_key(key: str) -> str:
    return f"{key}_scale"


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
