"""Writes lines about a run while it trains: where a NaN or Inf appeared, how many elements were
rounded when they were converted to FP8, and which phase of a recipe begins.

Several ranks may have the same line. One of them writes it (`runtime.ranks.once`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import torch
from megatron.core import parallel_state as mpu

from megatron_fp4.mcore.runtime.ranks import once
from megatron_fp4.monitor import CarrierRounding, NonFinite
from megatron_fp4.recipe import Recipe


class RunLog:
    """Writes the lines of this rank, and remembers what was written.

    args: Megatron's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._told: dict[Recipe, int] = {}  # how many phases of a recipe had begun when last told
        self._last_nonfinite = -2  # the last step with a NaN or Inf; no step follows -2

    def nonfinite(self, seen: NonFinite | None) -> None:
        """Writes where a step had its first NaN or Inf; nothing if the step before had one too."""
        if seen is None:
            return
        # After a NaN all later steps normally have one: report only the first of successive steps.
        is_news, self._last_nonfinite = seen.step != self._last_nonfinite + 1, seen.step
        # Once for each pipeline stage: its other ranks saw the same NaN, or one that it caused.
        stage = mpu.get_pipeline_model_parallel_rank()
        if is_news and once(f"nonfinite:{seen.step}:{stage}"):
            where = f"pipeline stage {stage}, rank {torch.distributed.get_rank()}"
            # One write for the whole line, since several stages may write at the same time.
            sys.stderr.write(f"megatron-fp4: {seen} ({where})\n")

    def rounding(self, rounding: CarrierRounding | None) -> None:
        """Writes how many elements were rounded, in steps that Megatron logs, for each stage."""
        if rounding is None or rounding.step % self._args.log_interval:
            return
        stage = mpu.get_pipeline_model_parallel_rank()
        if once(f"rounded:{rounding.step}:{stage}"):
            sys.stderr.write(f"megatron-fp4: {rounding} (pipeline stage {stage})\n")

    def phases(self, recipes: Iterable[Recipe], step: int, steps: int) -> None:
        """Prints one line in the first step of each phase of a recipe, and after a resume.

        step: the current one, from 0. steps: of the whole training.
        """
        for number, recipe in enumerate(dict.fromkeys(recipes)):
            begun = recipe.phases_begun(step / steps)
            if begun == self._told.get(recipe, 0):
                continue
            self._told[recipe] = begun
            if once(f"phase:{number}:{begun}"):
                share = recipe.phases[begun - 1].after
                first = next(s for s in range(int(share * steps), steps + 1) if s / steps >= share)
                before, held = recipe.in_turn[begun - 1 : begun + 1]
                print(
                    f"megatron-fp4: recipe {held.name} takes the place of {before.name} from step "
                    f"{first + 1} on",
                    flush=True,
                )
