"""What the AdamWs of this package have in common: groups of parameters, counts of steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch

# Once an AdamW exists, torch has replaced AdamW.step by a function that also calls the optimizer's
# hooks. It replaces the steps of derived classes too, and the hooks would be called twice.
plain_step = inspect.unwrap(torch.optim.Adam.step)


def take_groups(own: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Makes the groups of parameters of `other` those of `own`: the same dictionaries, to which
    options of `own` that they lack are added.

    Parameters may be views, which torch's constructors refuse. No state is taken over.
    """
    own.param_groups = other.param_groups
    for group in own.param_groups:
        for name, value in own.defaults.items():
            group.setdefault(name, value)


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Writes to each group of parameters the largest number of steps that one of them has taken.

    Megatron reads it in the group where it would use a FusedAdam, as of Transformer Engine, and
    from the state of a parameter where it would use torch's AdamW. optimizer: an AdamW.
    """
    for group in optimizer.param_groups:
        # A parameter without a gradient so far may have an average of its weight, and no step.
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        counts = [int(state["step"]) for state in states if "step" in state]
        if counts:
            group["step"] = max(counts)


def with_steps(state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The states of an AdamW's state dict, by the numbers of parameters. Moments without a count
    of steps, as those of Transformer Engine's FusedAdam, get the count of their group."""
    states = {}
    for group in state_dict["param_groups"]:
        for number in group["params"]:
            if number in state_dict["state"]:
                state = state_dict["state"][number]
                if "exp_avg" in state:
                    steps = float(state.get("step", group.get("step", 0)))
                    state = {**state, "step": torch.tensor(steps)}
                states[number] = state
    return states
