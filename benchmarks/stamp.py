"""Where and of what a result was measured."""

import json
import platform
import subprocess
import sys
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


def resumed(out: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that `out` has already; none where there is no such file. Ends the program where it
    was measured elsewhere, at another commit or with other settings than `result` says."""
    if not out.exists():
        return []
    earlier = json.loads(out.read_text())
    rows: list[dict[str, Any]] = earlier.pop("rows")
    if earlier != {key: value for key, value in result.items() if key != "rows"}:
        sys.exit(f"{out} was measured elsewhere or with other settings: choose another")
    return rows


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
