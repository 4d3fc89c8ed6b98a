"""Starts the executor in C++ for the linears of a run (--fp4-executor)."""

from __future__ import annotations

import torch

from megatron_fp4.cpp import extension
from megatron_fp4.mcore.model.run import Run


def start(run: Run) -> str | None:
    """Makes the linears of this process run in C++, if the flag and the machine let them.

    Returns why they run in Python, in a few words; None if they run in C++, or on a CPU, whose host
    time nobody measures.
    """
    if run.args.fp4_executor == "python":
        return "--fp4-executor python"
    if not torch.cuda.is_available():
        return None
    try:
        run.monitor.from_cpp = extension.start().Tallies()
    except extension.CannotBuild as error:
        return f"the executor in C++ cannot be built: {error}"
    return None


def line(problem: str | None) -> str:
    """The line of the start table about the executor. problem: see `start`."""
    if problem is not None:
        return f"\n  linears run in Python: {problem}"
    if not torch.cuda.is_available():
        return ""
    return "\n  linears run in C++ once their calls have been recorded, in the first steps"
