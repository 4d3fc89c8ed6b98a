"""python -m megatron_fp4 info: versions, devices, recipes, and what each backend can do here."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_fp4 import __version__, get_recipe, list_recipes
from megatron_fp4.backends import BACKENDS, ROCM
from megatron_fp4.description import describe
from megatron_fp4.mcore import flags
from megatron_fp4.recipe import GEMMS

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "sentencepiece")


def info() -> str:
    """What `python -m megatron_fp4 info` prints."""
    lines = [f"megatron-fp4 {__version__}, Python {platform.python_version()}"]
    lines += [f"  {name:18} {_version(name)}" for name in PACKAGES]
    lines.append("devices")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    lines += [f"  {device}: {_name(device)}" for device in devices]
    lines += [] if devices else ["  no GPU: everything runs on the CPU"]
    lines.append("backends, the fastest first (for a model in BF16)")
    device = devices[0] if devices else torch.device("cpu")
    for backend in BACKENDS:
        reasons = {
            backend.unavailable(get_recipe(recipe).gemm(gemm), device, torch.bfloat16)
            for recipe in list_recipes()
            for gemm in GEMMS
        }
        missing = "; ".join(sorted(reason for reason in reasons if reason is not None))
        runs = "every GEMM of every recipe" if not missing else f"some GEMMs; else {missing}"
        lines.append(f"  {backend.name:18} {runs if None in reasons else missing}")
    lines.append("recipes")
    for name in list_recipes():
        lines += [f"  {line}" for line in describe(get_recipe(name))]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _name(device: torch.device) -> str:
    if torch.version.hip is not None:
        return f"{torch.cuda.get_device_name(device)}, not supported: {ROCM}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def main() -> None:
    is_script = Path(sys.argv[0]).name == "megatron-fp4"  # the console script of the same module
    prog = "megatron-fp4" if is_script else "python -m megatron_fp4"
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument(
        "command",
        choices=["info", "flags"],
        help="info: print versions, devices and backends; flags: print docs/flags.md",
    )
    parser.add_argument("--version", action="version", version=f"megatron-fp4 {__version__}")
    print({"info": info, "flags": flags.reference}[parser.parse_args().command](), end="")


if __name__ == "__main__":
    main()
