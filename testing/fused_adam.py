"""A stand-in for Transformer Engine's FusedAdam, which needs a GPU, where Megatron takes it as its
precision-aware optimizer (--use-precision-aware-optimizer).

It shows what Megatron and this package do around that optimizer, and none of its arithmetic: its
moments and main weights are in float32, and its step is that of torch's AdamW.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from megatron.core import optimizer as megatron
from torch import Tensor

from megatron_fp4.mcore.launch.refusals import packages


class FusedAdam(torch.optim.Optimizer):
    """Keeps the main weights, reads `decoupled_grad`, and writes the model's weights."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool,
        **_: Any,
    ) -> None:
        assert use_decoupled_grad and {
            master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype
        } == {torch.float32}  # fmt: skip
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._main: torch.optim.AdamW | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        # Made in the first step, as FusedAdam does, when the weights have been loaded.
        main = self._main = self._main or torch.optim.AdamW(
            [
                group | {"params": list(map(_main_weight, group["params"]))}
                for group in self.param_groups
            ]
        )
        for own, group in zip(self.param_groups, main.param_groups, strict=True):
            group.update(lr=own["lr"], weight_decay=own["weight_decay"])
            for weight, kept in zip(own["params"], group["params"], strict=True):
                kept.grad = weight.decoupled_grad.float()
        main.step()
        for own, group in zip(self.param_groups, main.param_groups, strict=True):
            for weight, kept in zip(own["params"], group["params"], strict=True):
                weight.data.copy_(kept)  # as a kernel does, which raises no version


def _main_weight(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()


def install() -> None:
    """Makes this process's Megatron take the stand-in."""
    module: Any = types.ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    sys.modules[module.__name__] = module
    names: Any = megatron
    names.Adam, names.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    needed = [name for name in packages._NEEDS_TE if name != "use_precision_aware_optimizer"]
    packages._NEEDS_TE = tuple(needed)  # type: ignore[assignment]
