"""Saves and loads Adam's moments in few bits (--fp4-optimizer-state) with Megatron's checkpoints.

What leaves an optimizer is decoded, float32 under Adam's own keys, and what enters it is encoded.
So a checkpoint is that of a launch without the flag, and a launch with other formats can load it.
`LowBitAdamW` does so in its state dicts. The distributed optimizer takes tensors from the state of
torch's optimizer instead. C stands for megatron/core.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW
from megatron_fp4.mcore.model.optimizers import main_part_of


def install() -> None:
    """Lets Megatron's distributed optimizer save and load moments in few bits. Idempotent.

    C/optimizer/distrib_optimizer.py has two functions by which all formats of checkpoints get and
    set a parameter's state. The moments are decoded to the host's memory, because dp_reshardable
    gets those of all parameters before it writes or loads them. From the state dict of torch's
    optimizer upstream takes the counts of steps alone.
    """
    states_of = DistributedOptimizer._get_main_param_and_optimizer_states
    if hasattr(states_of, "fp4_decodes"):
        return
    set_states_of = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(states_of)
    def _get_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = states_of(self, weight)
        if not isinstance(self.optimizer, LowBitAdamW):
            return found
        others = {key: value for key, value in found.items() if key not in self.optimizer.keys}
        return {**others, **self.optimizer.state_in_float32(_main(self, weight))}

    @functools.wraps(set_states_of)
    def _set_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        if not isinstance(self.optimizer, LowBitAdamW):
            set_states_of(self, weight, tensors)
            return
        # Upstream skips what is no tensor.
        set_states_of(self, weight, tensors | dict.fromkeys(self.optimizer.keys))
        main = _main(self, weight)
        step = self.optimizer.state[main]["step"]
        self.optimizer.set_state_in_float32(main, tensors | {"step": step})

    _get_main_param_and_optimizer_states.fp4_decodes = True  # type: ignore[attr-defined]
    DistributedOptimizer._get_main_param_and_optimizer_states = _get_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
    for name in ("state_dict", "load_state_dict"):
        setattr(DistributedOptimizer, name, _of_settings(getattr(DistributedOptimizer, name)))


def _of_settings(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def method(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_stub_optimizer or not isinstance(self.optimizer, LowBitAdamW):
            return upstream(self, *args, **kwargs)
        with _without_moments(self.optimizer):
            return upstream(self, *args, **kwargs)

    return method


@contextmanager
def _without_moments(optimizer: LowBitAdamW) -> Iterator[None]:
    """With state dicts of `optimizer` that decode no moments, and in loading keep its own."""
    plain = functools.partial(torch.optim.AdamW.state_dict, optimizer)
    own = {"state_dict": plain, "load_state_dict": optimizer.load_settings}
    vars(optimizer).update(own)
    try:
        yield
    finally:
        for name in own:
            vars(optimizer).pop(name, None)


def _main(optimizer: DistributedOptimizer, weight: torch.nn.Parameter) -> Tensor:
    """This rank's part of the FP32 main weight of a parameter."""
    own = main_part_of(optimizer, weight)
    assert own is not None
    return own[0]
