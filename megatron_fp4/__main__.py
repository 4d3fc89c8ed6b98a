"""The command `python -m megatron_fp4`, installed as `megatron-fp4`.

info prints what is installed and which GEMMs can run on this machine. flags prints docs/flags.md.
plan prints what a recipe does to one linear, and with --layer also what a whole layer of a model
saves for the backward pass.
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_fp4 import __version__, get_recipe, list_recipes
from megatron_fp4.description import describe
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.saved import layer_text
from megatron_fp4.mcore.launch import flags
from megatron_fp4.multipliers import MULTIPLIERS
from megatron_fp4.plan import command
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipes import ALIASES
from megatron_fp4.setting import Setting
from megatron_fp4.target import ROCM, target_of

PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "apex", "liger-kernel"),
    "sentencepiece",
)


def info() -> str:
    """The text that `python -m megatron_fp4 info` prints."""
    lines = [f"megatron-fp4 {__version__}, Python {platform.python_version()}"]
    lines += [f"  {name:18} {_version(name)}" for name in PACKAGES]
    lines.append("devices")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    lines += [f"  {device}: {_name(device)}" for device in devices]
    lines += [] if devices else ["  no GPU: everything runs on the CPU"]
    lines.append("multipliers, the fastest first (for a model in BF16)")
    device = devices[0] if devices else torch.device("cpu")
    products = [gemm.product for name in list_recipes() for gemm in _plan(name, device).gemms]
    for multiplier in MULTIPLIERS:
        reasons = {multiplier.refuses(product, target_of(device)) for product in products}
        missing = "; ".join(sorted(reason for reason in reasons if reason is not None))
        runs = "every GEMM of every recipe" if not missing else f"some GEMMs; else {missing}"
        lines.append(f"  {multiplier.name:18} {runs if None in reasons else missing}")
    lines.append("recipes")
    for name in list_recipes():
        lines += [f"  {line}" for line in describe(get_recipe(name))]
    lines += [f"  {alias} is {name}" for alias, name in ALIASES.items()]
    return "\n".join(lines) + "\n"


def _plan(recipe: str, device: torch.device) -> LinearPlan:
    """The plan of a recipe, by its name, for a 4096 x 4096 linear of a model in BF16."""
    setting = Setting(8192, 4096, 4096, torch.bfloat16, target_of(device), torch.bfloat16)
    return compile_plan(get_recipe(recipe), replace(setting, main_grad=torch.float32))


def _planned(args: argparse.Namespace, prog: str) -> str:
    """The text that `python -m megatron_fp4 plan` prints."""
    text = command.run(args)
    return text if args.layer is None else text + layer_text(args, prog)


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
    parser.add_argument("--version", action="version", version=f"megatron-fp4 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("info", help="print versions, devices, multipliers and recipes")
    commands.add_parser("flags", help="print docs/flags.md")
    plan = commands.add_parser("plan", help="print what a recipe does to one linear")
    command.add_arguments(plan)
    args = parser.parse_args()
    try:
        texts = {"info": info, "flags": flags.reference, "plan": lambda: _planned(args, prog)}
        print(texts[args.command](), end="")
    except ConfigError as error:
        sys.exit(f"{prog}: error: {error}")


if __name__ == "__main__":
    main()
