"""Where and of what a result was measured."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "megatron-core", "numpy")


def stamp(commit: str | None = None) -> dict[str, Any]:
    """The device, the versions and the commit; `commit` where the tree has no git of its own."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "device": gpus or [f"CPU, {torch.get_num_threads()} threads"],
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit or _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"
