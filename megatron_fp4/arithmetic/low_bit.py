"""A parameter whose moments of Adam are stored in few bits (moments.py), and a step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.fp8_blocks import bits_at
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.philox import Key, stream_id
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.arithmetic.segments import Place


class Owned(NamedTuple):
    """Which elements of a model's parameter an optimizer's parameter has.

    name: the global name of the model's parameter, the same on all ranks that have a part of it or
        a copy; of this name are its random streams (`stream_of`).
    place: where the elements of the rank's parameter lie in the unsharded parameter, by which
        random bits are drawn.
    start: the first element in the rank's parameter, flattened, at whose beginning the first block
        begins: 0 unless the distributed optimizer gives the rank a range of it.
    """

    name: str
    place: Place
    start: int = 0


def moment_label(name: str, key: str) -> str:
    """The label of the random stream that rounds a moment of a parameter.

    name: of the parameter. key: "exp_avg" or "exp_avg_sq".
    """
    return f"{name}:{key}"


def stream_of(name: str, key: str) -> int:
    """The number of that stream."""
    return stream_id(moment_label(name, key))


def scale_key(key: str) -> str:
    """The key of a moment's scales in the state of a parameter."""
    return f"{key}_scale"


@dataclass(frozen=True, eq=False)
class LowBit:
    """A parameter, float32, and its state: the moments in codes, their scales and the step.

    state: as `LowBitAdamW` describes it.
    """

    weight: Tensor
    state: dict[str, Any]
    moments: Moments
    owned: Owned

    def decoded(self, key: str) -> Tensor:
        """A moment in float32, of the weight's shape. One stored in float32 is the state's own."""
        form, scales = self.moments.forms[key], self.state.get(scale_key(key))
        values = form.decode(self.state[key].view(-1), scales, self.owned.start)
        return values.view(self.weight.shape)

    def store(self, key: str, moment: Tensor, bits: Tensor | None = None) -> None:
        """Encodes a moment, float32 of the weight's shape, into the state.

        bits: int32 [elements]; None rounds to nearest.
        """
        form = self.moments.forms[key]
        codes, scales = form.encode(moment.reshape(-1), self.owned.start, bits)
        self.state[key] = codes.view(self.weight.shape)
        if scales is not None:
            self.state[scale_key(key)] = scales

    def bits(self, key: str, draws: Key) -> Tensor | None:
        """The random bits that round a moment: int32 [elements]; None if it is not rounded so."""
        if not self.moments.draws(key):
            return None
        name, place, start = self.owned
        index = place.indices(start, start + self.weight.numel(), self.weight.device)
        return bits_at(index, draws, stream_of(name, key))


@torch.no_grad()
def step(of: LowBit, gradient: Tensor, adam: Adam, seed: int) -> None:
    """Takes one step of AdamW with a weight and its moments, in place.

    The moments are decoded and updated, the weight is updated by them, and then they are rounded
    and stored. So rounding first shows in the next step. gradient: float32, of the weight's shape.
    seed: of the random bits that round the moments.
    """
    draws = Key(seed, adam.step)
    decoded = {key: of.decoded(key) for key in of.moments.forms}
    m, v = decoded.values()
    update(of.weight, gradient, m, v, adam)
    for key, moment in decoded.items():
        of.store(key, moment, of.bits(key, draws))


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
