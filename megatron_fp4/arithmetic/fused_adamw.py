"""torch's AdamW that updates the weights of a group by one fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.adamw import plain_step


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with the state and the options of torch.optim.AdamW().

    Of torch's implementations the fused one reads and writes each element once, and allocates no
    temporaries of the weights' size. It wants the number of steps on the GPU. Here that number
    stays on the host, where state dicts of AdamW() have it, so that checkpoints are the same and
    can be loaded by either. The options of a group do not say fused either.
    """

    @classmethod
    def in_place_of(cls, optimizer: torch.optim.AdamW) -> FusedAdamW:
        """A FusedAdamW with the groups of parameters of `optimizer`, and its state.

        Parameters may be views, which torch's constructor refuses.
        """
        found = cls([torch.nn.Parameter(torch.empty(0))])
        found.param_groups, found.state = optimizer.param_groups, optimizer.state
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, like that of torch.optim.AdamW."""
        given = [(group["fused"], group["foreach"]) for group in self.param_groups]
        for group in self.param_groups:
            group.update(fused=True, foreach=False)
        try:
            return plain_step(self, closure)
        finally:
            for group, (fused, foreach) in zip(self.param_groups, given, strict=True):
                group.update(fused=fused, foreach=foreach)

    def _init_group(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        largest: list[Tensor],
        steps: list[Tensor],
    ) -> Any:
        # Collects what the step reads. AdamW()'s state is made here, in a weight's first step.
        collected = weights, gradients, averages, squares, largest, steps
        found = super()._init_group({**group, "fused": None}, *collected)
        if steps:
            copies = torch.stack(steps).to(weights[0].device, non_blocking=True)
            for step in steps:
                step += 1  # the kernel counts in the copies
            steps[:] = copies.unbind()
        return found
