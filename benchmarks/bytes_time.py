"""Measures how long a linear takes, forward and backward, for each way to keep X and W."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.linear import quantized_linear
from megatron_fp4.recipes import get_recipe, uniform_recipes

# The values of --fp4-saved-x and --fp4-weight-cache; the defaults first.
VARIANTS = {
    "both packed": ("packed", "packed"),
    "saved-x bf16": ("bf16", "packed"),
    "weight-cache decoded": ("packed", "decoded"),
    "weight-cache off": ("packed", "off"),
}


def times(
    tokens: int, inputs: int, outputs: int, microbatches: int, rounds: int
) -> dict[str, dict[str, float]]:
    """The median time of a microbatch in ms, by recipe and variant.

    Variants are measured in turn, round by round, so that changes in the machine's speed affect all
    of them alike.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    x = torch.randn(tokens, inputs, device=device).bfloat16().requires_grad_()
    weight = torch.randn(outputs, inputs, device=device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, outputs, device=device).bfloat16()
    found: dict[str, dict[str, float]] = {}
    for recipe in uniform_recipes():
        taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(rounds + 1):
            for variant in VARIANTS:
                taken[variant].append(one_step(recipe, variant, x, weight, dy, microbatches))
        # The first round is a warm-up.
        found[recipe] = {v: round(statistics.median(t[1:]), 3) for v, t in taken.items()}
    return found


def one_step(recipe: str, variant: str, x: Any, weight: Any, dy: Any, microbatches: int) -> float:
    """The mean time of a microbatch in ms, in a step of `microbatches` microbatches.

    No operand of W is held when the step begins. variant: a key of VARIANTS.
    """
    saved_x, cache = VARIANTS[variant]
    keeps: Any = None if cache == "off" else cache
    site = Site(keeps_w=keeps, packs_x=saved_x == "packed")
    held = None if keeps is None else HeldWeight()
    start = now()
    for _ in range(microbatches):
        y = quantized_linear(x, weight, None, get_recipe(recipe), site, Call(Key(1)), held)
        y.backward(dy)
        x.grad = weight.grad = None
    return (now() - start) * 1e3 / microbatches


def now() -> float:
    """A time in seconds: wall-clock time for a GPU, else this process's CPU time, since other
    processes may use the CPU too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
