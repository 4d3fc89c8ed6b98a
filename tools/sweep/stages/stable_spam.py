"""StableSPAM, an optimizer for training in four bits (arXiv 2502.17055, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class StableSPAM(Optimizer):
    """AdamW with gradients whose spikes are clipped, whose norm is smoothed, and whose moments are
    reset.

    In each step, for each parameter with the gradient g:

    1. Elements above T, a moving average of max|g| with the decay `spikes`, are scaled so that the
       largest is T (AdaClip).
    2. g is scaled to the norm M / sqrt(V), where M and V are moving averages of its norm and of
       the square of its norm, with the decays `norms` (AdaGN).
    3. After every `reset` steps Adam's moments and its step count begin anew (MoRet).

    All moving averages are corrected for their start at 0. lr, betas, eps and weight_decay are
    those of torch's AdamW.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        norms: tuple[float, float] = (0.7, 0.9),
        spikes: float = 0.999,
        reset: int = 1000,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"norms": norms, "spikes": spikes, "reset": reset})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "top": 0.0, "norm": 0.0, "square": 0.0, "since": 0}
            state |= {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
        state["step"] += 1
        gradient = self._smoothed(self._clipped(gradient, state, group), state, group)
        self._adam(parameter, gradient, state, group)

    @staticmethod
    def _clipped(gradient: Tensor, state: dict, group: dict) -> Tensor:
        decay, top = group["spikes"], gradient.abs().max()
        state["top"] = decay * state["top"] + (1 - decay) * top
        limit = state["top"] / (1 - decay ** state["step"])
        spikes = gradient.abs() > limit
        return torch.where(spikes, gradient / top * limit, gradient)

    @staticmethod
    def _smoothed(gradient: Tensor, state: dict, group: dict) -> Tensor:
        (first, second), norm = group["norms"], gradient.norm()
        state["norm"] = first * state["norm"] + (1 - first) * norm
        state["square"] = second * state["square"] + (1 - second) * norm**2
        mean = state["norm"] / (1 - first ** state["step"])
        root = (state["square"] / (1 - second ** state["step"])).sqrt()
        return gradient / (norm + group["eps"]) * mean / (root + group["eps"])

    @staticmethod
    def _adam(parameter: Tensor, gradient: Tensor, state: dict, group: dict) -> None:
        if (state["step"] - 1) % group["reset"] == 0:
            state["m"].zero_()
            state["v"].zero_()
            state["since"] = 0
        state["since"] += 1
        first, second = group["betas"]
        state["m"].lerp_(gradient, 1 - first)
        state["v"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["m"] / (1 - first ** state["since"])
        root = (state["v"] / (1 - second ** state["since"])).sqrt()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * mean / (root + group["eps"]))
