"""The training loop of the small tasks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_fp4 import Linear
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.stages.stable_spam import StableSPAM

WARMUP = 0.1  # share of the steps
LAST = 0.1  # of the learning rate, at the end of its cosine decay
BETAS, DECAY = (0.9, 0.95), 0.01
# A language model's loss is the mean over some 100,000 tokens: gradients of single tokens are that
# small, and formats of scales may lose them. Those of these tasks, whose batches are about 100, are
# made as small for the backward pass.
SHARE = 2.0**-10
SETTINGS = {  # of all small tasks
    "share": SHARE,
    "warmup": WARMUP,
    "last": LAST,
    "betas": list(BETAS),
    "decay": DECAY,
}


def linear(combination: Combination, inputs: int, outputs: int, name: str, seed: int) -> nn.Linear:
    """A linear without bias under the combination's recipe; nn.Linear if it quantizes nothing."""
    if not combination.quantized:
        return nn.Linear(inputs, outputs, bias=False)
    recipe = recipe_of(combination)
    return Linear(inputs, outputs, bias=False, recipe=recipe, seed=seed, name=name)


def train(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    combination: Combination,
    steps: int,
    learning_rate: float,
) -> None:
    """Trains the model by the combination's optimizer, with its loss scale.

    loss: of the model in a step, from 0. The learning rate rises over WARMUP of the steps, and
    falls as a cosine to LAST of itself. Raises ArithmeticError if a loss is not finite.
    """
    optimizer = {"adam": torch.optim.AdamW, "stable-spam": StableSPAM}[combination.optimizer](
        model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=DECAY
    )
    scale = float(combination.loss_scale) * SHARE
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _share(step, steps)
        found = loss(step)
        if not math.isfinite(found.item()):
            raise ArithmeticError(f"the loss is {found.item()} in step {step}")
        optimizer.zero_grad()
        (found * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
    model.eval()


def _share(step: int, steps: int) -> float:
    warmup = max(round(WARMUP * steps), 1)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2
