"""What comparisons of functions and gradients with float64 share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SEQUENCE, BATCH = 6, 2
U = 2.0**-24  # the largest relative error of a rounding to FP32


@dataclass(frozen=True)
class Case:
    """name: of the operation. results: outputs and gradients. exact: the same in float64.
    bounds: by how much FP32 arithmetic may move each element. roundings: to the dtype of a result,
    of each. mistaken: the exact results of a known mistake."""

    name: str
    results: list[Tensor]
    exact: list[Tensor]
    bounds: list[Tensor]
    roundings: list[int]
    mistaken: list[Tensor]

    def differences(self) -> Iterator[str]:
        if not self._agree(self.exact):
            yield f"{self.name}: {[float(e) for e in self._excess(self.exact)]} times the bounds"
        if self._agree(self.mistaken):
            yield f"{self.name}: a mistake would not be noticed"

    def _agree(self, wanted: list[Tensor]) -> bool:
        return all(bool(excess <= 1) for excess in self._excess(wanted))

    def _excess(self, wanted: list[Tensor]) -> Iterator[Tensor]:
        for result, value, bound, times in zip(
            self.results, wanted, self.bounds, self.roundings, strict=True
        ):
            unit = torch.finfo(result.dtype).eps / 2
            allowed = bound + times * (unit * (value.abs() + bound) + least(result.dtype))
            yield ((result.double().cpu() - value).abs() / allowed).max()


def least(dtype: torch.dtype) -> float:
    """Half of a step between subnormal numbers: what a rounding moves the smallest numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], dys: list[Tensor]
) -> list[Tensor]:
    """The outputs of `function`, then the gradients of its inputs. dys: those of its outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = function(*(leaf * 1 for leaf in leaves))  # what is overwritten is no leaf
    outputs = made if isinstance(made, tuple) else (made,)
    found = [output.detach().clone() for output in outputs]
    return found + list(torch.autograd.grad(outputs, leaves, [dy.clone() for dy in dys]))


class Made:
    """Makes random inputs of one dtype on the CPU, and copies of them on one device.

    Called with a shape, it returns a new tensor on the CPU. `on` copies tensors to the device.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self._dtype, self._device = dtype, device

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(self._dtype)

    def on(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(self._device) for tensor in tensors]


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]
