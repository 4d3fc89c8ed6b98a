"""The stamp of a result: the device, versions and commit that were measured."""

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "megatron-core", "liger-kernel", "transformer-engine", "numpy")


def stamp(commit: str | None = None) -> dict[str, Any]:
    """The device, the versions and the commit. commit: given where the tree has no git folder."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "device": gpus or [f"CPU, {torch.get_num_threads()} threads"],
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit or _commit(),
    }


def resumed(out: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that the file `out` has already; none if there is no such file.

    Ends the program if they were measured on another device, at another commit or with other
    settings than those of `result`.
    """
    if not out.exists():
        return []
    earlier = json.loads(out.read_text())
    rows: list[dict[str, Any]] = earlier.pop("rows")
    if earlier != {key: value for key, value in result.items() if key != "rows"}:
        sys.exit(f"{out} was measured elsewhere or with other settings: choose another")
    return rows


def write(out: Path, result: dict[str, Any]) -> None:
    """Writes a result to the file `out` as JSON, and prints its "table", a list of lines."""
    out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(result["table"]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"
