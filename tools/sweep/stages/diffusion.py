"""Stage `diffusion`: a small model learns to remove noise from digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tools.sweep.axes import Combination
from tools.sweep.stages.images import HELD_OUT, PIXELS, digits
from tools.sweep.stages.stage import Figures, Stage
from tools.sweep.stages.training import SETTINGS, linear, train
from tools.sweep.tensors import Recorded

WIDTH, BLOCKS, BATCH, STEPS, LEARNING_RATE = 128, 2, 128, 600, 2e-3
FREQUENCIES = 16  # of the embedding of the noise's level
TESTED = 8  # levels of noise for each held-out image


class Denoiser(nn.Module):
    """Predicts the noise in an image. The residual blocks, of two linears each, are under the
    combination's recipe; first and last linear are in float32."""

    def __init__(self, combination: Combination, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS + 2 * FREQUENCIES, WIDTH)
        self.blocks = nn.ModuleList()
        for block in range(BLOCKS):
            up = linear(combination, WIDTH, 2 * WIDTH, f"{block}.up", seed)
            down = linear(combination, 2 * WIDTH, WIDTH, f"{block}.down", seed)
            self.blocks.append(nn.Sequential(nn.RMSNorm(WIDTH), up, nn.SiLU(), down))
        self.last = nn.Linear(WIDTH, PIXELS)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        """The noise [n, pixels] in images [n, pixels] at noise levels [n, 1] in [0, 1]."""
        angles = level * torch.arange(1, FREQUENCIES + 1) * math.pi
        hidden = self.first(torch.cat((noisy, angles.sin(), angles.cos()), 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def evaluate(combination: Combination, recorded: list[Recorded], seed: int) -> Figures:
    """ "loss": the mean squared error of the predicted noise on held-out digits."""
    images, _, held_out, _ = digits()
    torch.manual_seed(seed)
    model, source = Denoiser(combination, seed), torch.Generator().manual_seed(seed)

    def loss(_: int) -> Tensor:
        chosen = images[torch.randint(len(images), (BATCH,), generator=source)]
        return _loss(model, chosen, source)

    train(model, loss, combination, STEPS, LEARNING_RATE)
    fixed = torch.Generator().manual_seed(0)  # the same noise for every combination and seed
    with torch.no_grad():
        found = [_loss(model, held_out, fixed) for _ in range(TESTED)]
    return {"loss": float(torch.stack(found).mean())}


def _loss(model: nn.Module, images: Tensor, source: torch.Generator) -> Tensor:
    """Of images with noise: cos(a) image + sin(a) noise, for a level a · 2 / pi drawn evenly."""
    level = torch.rand(len(images), 1, generator=source)
    noise = torch.randn(images.shape, generator=source)
    angle = level * math.pi / 2
    predicted = model(angle.cos() * images + angle.sin() * noise, level)
    return (predicted - noise).square().mean()


STAGE = Stage(
    name="diffusion",
    what=f"a denoiser of digits, {BLOCKS} blocks of width {WIDTH}, {STEPS} steps",
    evaluate=evaluate,
    seeds=2,
    score="loss",
    settings={
        "width": WIDTH,
        "blocks": BLOCKS,
        "batch": BATCH,
        "steps": STEPS,
        "lr": LEARNING_RATE,
        "frequencies": FREQUENCIES,
        "tested": TESTED,
        "held out": HELD_OUT,
        **SETTINGS,
    },
)
