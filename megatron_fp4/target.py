"""Target: the device that a linear is planned for, and whether the Triton kernels run on it."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import NamedTuple

import torch

from megatron_fp4.errors import ConfigError

ROCM = "torch is built for ROCm, and megatron-fp4's kernels run on NVIDIA GPUs only"


class Target(NamedTuple):
    """The device that a linear is planned for.

    kind: "cpu", "cuda" for an NVIDIA GPU, "rocm" for an AMD GPU (which torch calls "cuda" too).
    capability: the compute capability of an NVIDIA GPU, else (0, 0).
    device: None if the plan is for a GPU that is not in this machine.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    device: torch.device | None = None


def target_of(device: torch.device) -> Target:
    """The Target of a device of this machine."""
    if device.type != "cuda":
        return Target("cpu", device=device)
    if torch.version.hip is not None:
        return Target("rocm", device=device)
    return Target("cuda", torch.cuda.get_device_capability(device), device)


def gpu_named(name: str) -> Target:
    """The Target of an NVIDIA GPU by its architecture: "sm_90", "sm_100" and so on.

    Raises ConfigError for a name that is no such architecture.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)a?", name)
    if match is None:
        raise ConfigError(f"{name!r} is no GPU architecture; give sm_90 or sm_100, for example")
    return Target("cuda", (int(match[1]), int(match[2])))


OLDEST_TRITON = (3, 4)


def kernels_problem(target: Target) -> str | None:
    """Why the Triton kernels cannot run on `target`, in a few words; None where they can."""
    if target.kind != "cuda":
        return ROCM if target.kind == "rocm" else "kernels need an NVIDIA GPU"
    return triton_problem()


@cache
def triton_problem() -> str | None:
    """Why the installed Triton cannot compile the kernels, with a remedy; None where it can."""
    remedy = f"pip install 'triton>={OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}'"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {remedy}"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is too old: {remedy}"
    return None
