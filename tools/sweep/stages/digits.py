"""Stage `digits`: a small classifier of noisy digits, first and last linear in float32.

With new noise in each step the model cannot learn the images by heart, so that its held-out loss
says how well it was optimized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tools.sweep.axes import Combination
from tools.sweep.stages.images import CLASSES, HELD_OUT, PIXELS, digits
from tools.sweep.stages.stage import Figures, Stage
from tools.sweep.stages.training import SETTINGS, linear, train
from tools.sweep.tensors import Recorded

WIDTH, BATCH, STEPS, LEARNING_RATE = 128, 128, 300, 3e-3
NOISE = 0.7  # standard deviation, of pixels in [-1, 1]
TESTED = 8  # draws of noise for each held-out image


class Classifier(nn.Module):
    """Two hidden layers under the combination's recipe, each after a norm and beside a residual
    connection. First and last linear are in float32."""

    def __init__(self, combination: Combination, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, WIDTH)
        self.hidden = nn.ModuleList()
        for layer in range(2):
            own = linear(combination, WIDTH, WIDTH, f"hidden.{layer}", seed)
            self.hidden.append(nn.Sequential(nn.RMSNorm(WIDTH), own, nn.ReLU()))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The logits [n, classes] of images [n, pixels]."""
        hidden = self.first(images)
        for layer in self.hidden:
            hidden = hidden + layer(hidden)
        return self.last(hidden)


def evaluate(combination: Combination, recorded: list[Recorded], seed: int) -> Figures:
    """ "loss": the held-out cross-entropy."""
    return {"loss": held_out_loss(Classifier, combination, seed)}


def held_out_loss(kind: type[Classifier], combination: Combination, seed: int) -> float:
    """Trains a classifier of the digits; returns its mean cross-entropy on held-out digits.

    kind: the classifier's class. combination: what its hidden linears quantize. seed: of its first
    weights, of the batches and of the noise in the images.
    """
    images, labels, held_out, held_out_labels = digits()
    torch.manual_seed(seed)
    model, source = kind(combination, seed), torch.Generator().manual_seed(seed)

    def loss(_: int) -> Tensor:
        chosen = torch.randint(len(images), (BATCH,), generator=source)
        return cross_entropy(model(_noisy(images[chosen], source)), labels[chosen])

    train(model, loss, combination, STEPS, LEARNING_RATE)
    fixed = torch.Generator().manual_seed(0)  # the same noise for every combination and seed
    with torch.no_grad():
        logits = model(_noisy(held_out.repeat(TESTED, 1), fixed))
    return float(cross_entropy(logits, held_out_labels.repeat(TESTED)))


def _noisy(images: Tensor, source: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=source)


STAGE = Stage(
    name="digits",
    what=f"a classifier of digits, two hidden layers of {WIDTH}, {STEPS} steps",
    evaluate=evaluate,
    seeds=3,
    score="loss",
    settings={
        "width": WIDTH,
        "batch": BATCH,
        "steps": STEPS,
        "lr": LEARNING_RATE,
        "noise": NOISE,
        "tested": TESTED,
        "held out": HELD_OUT,
        **SETTINGS,
    },
)
