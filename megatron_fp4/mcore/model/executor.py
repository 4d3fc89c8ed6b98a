"""Starts the executor in C++ for the linears of a run (--fp4-executor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_fp4.cpp import extension
from megatron_fp4.linear import execute_by, in_python
from megatron_fp4.mcore.launch import cuda_graphs
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.plan.data import LinearPlan


class Started(NamedTuple):
    """What runs the linears of a rank.

    problem: why all of them run in Python, in a few words; None if they run in C++, or on a CPU,
    whose host time nobody measures. refusals: (name of a recipe, why linears that follow it run in
    Python, or None if they run in C++).
    """

    problem: str | None = None
    refusals: frozenset[tuple[str, str | None]] = frozenset()


def start(run: Run, plans: Sequence[LinearPlan]) -> Started:
    """Makes the linears of this process run in C++, if the flag and the machine let them.

    plans: those of all its linears, some of which may have to stay in Python.
    """
    if run.args.fp4_executor == "python":
        return Started("--fp4-executor python")
    if not torch.cuda.is_available():
        return Started()
    try:
        loaded = extension.start()
    except extension.CannotBuild as error:
        return Started(f"the executor in C++ cannot be built: {error}")
    from megatron_fp4.cpp.following import refusal  # imports Triton
    from megatron_fp4.cpp.lowering import layout_problem

    for target in {plan.setting.target for plan in plans}:
        if (problem := layout_problem(target)) is not None:
            execute_by(in_python)
            return Started(f"the executor in C++ cannot launch kernels: {problem}")
    run.monitor.from_cpp = loaded.Tallies()
    return Started(refusals=frozenset((plan.recipe.name, refusal(plan)) for plan in plans))


def lines(run: Run, started: Sequence[Started]) -> list[str]:
    """The lines of the start table about the executor. started: on each rank."""
    problem = next((each.problem for each in started if each.problem is not None), None)
    refusals = {each for one in started for each in one.refusals}
    in_cpp = {recipe for recipe, why in refusals if why is None}
    in_python = sorted((recipe, why) for recipe, why in refusals if why is not None)
    found = []
    if problem is not None:
        found.append(f"linears run in Python: {problem}")
    else:
        if in_cpp:
            outside = "in CUDA graphs; outside of them " if cuda_graphs.wanted(run.args) else ""
            when = "once their calls have been recorded, in the first steps"
            found.append(f"linears run {outside}in C++ {when}")
        for recipe, why in in_python:
            which = "some linears" if recipe in in_cpp else "linears"
            found.append(f"{which} of recipe {recipe} run in Python: {why}")
    if torch.cuda.is_available():
        slow = problem is not None or bool(in_python)
        found += filter(None, [cuda_graphs.advice(run.args, run.recipes, slow)])
    return found
