"""Stage `regression`: one linear learns a random linear function of Gaussian inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tools.sweep.axes import Combination
from tools.sweep.stages.stage import Figures, Stage
from tools.sweep.stages.training import SETTINGS, linear, train
from tools.sweep.tensors import Recorded

WIDTH, BATCH, STEPS, LEARNING_RATE = 128, 128, 200, 3e-3
TESTED = 2048  # inputs


def evaluate(combination: Combination, recorded: list[Recorded], seed: int) -> Figures:
    """ "loss": the squared error on new inputs, relative to the targets' squares.

    The forward pass of the test is that of training.
    """
    source = torch.Generator().manual_seed(seed)
    teacher = torch.randn(WIDTH, WIDTH, generator=source) / WIDTH**0.5
    torch.manual_seed(seed)
    model = nn.Sequential(linear(combination, WIDTH, WIDTH, "student", seed))

    def loss(_: int) -> Tensor:
        x = torch.randn(BATCH, WIDTH, generator=source)
        return (model(x) - x @ teacher.t()).square().mean()

    train(model, loss, combination, STEPS, LEARNING_RATE)
    x = torch.randn(TESTED, WIDTH, generator=source)
    target = x @ teacher.t()
    with torch.no_grad():
        off = (model(x) - target).square().sum() / target.square().sum()
    return {"loss": float(off)}


STAGE = Stage(
    name="regression",
    what=f"a linear of {WIDTH}² learns a linear function of Gaussian inputs, {STEPS} steps",
    evaluate=evaluate,
    seeds=2,
    score="loss",
    settings={
        "width": WIDTH,
        "batch": BATCH,
        "steps": STEPS,
        "lr": LEARNING_RATE,
        "tested": TESTED,
        **SETTINGS,
    },
)
