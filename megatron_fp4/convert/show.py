"""Show what a checkpoint has: its run, recipe and layout, and the sizes of its parts.

--layers adds the range of each weight in each layer and, for linears that the recipe quantizes, the
shares of elements that its quantizer of W in fprop (rounding to nearest) clips or rounds to zero.
Without it only .metadata and the file with the arguments are read and verified.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_fp4.convert import arguments, integrity, keys, metadata, rewrite
from megatron_fp4.convert.layers import ranges
from megatron_fp4.convert.torch_dist import COMMON, Checkpoint, find
from megatron_fp4.description import describe
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipes import content

_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_experts "
    "padded_vocab_size seq_length"
).split()
_FP4 = (
    "fp4_recipe fp4_recipe_option fp4_module_recipe fp4_seed fp4_plugin_version "
    "fp4_numerics_version"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("checkpoint", type=Path, help="its folder, or that of several")
    parser.add_argument("--step", type=int, help="the one of several; default: the newest")
    parser.add_argument("--layers", action="store_true", help="read all weights, too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    rewrite.add_verify(parser)


def run(args: argparse.Namespace) -> None:
    """Prints what a checkpoint has. Raises ConfigError if it cannot be read."""
    path = find(args.checkpoint, args.step)
    checkpoint = Checkpoint(path)
    if args.layers:
        rewrite.verify([checkpoint], args)
    elif not args.no_verify:
        integrity.verify(path, [metadata.FILE, *_files_with_arguments(checkpoint)])
    found = summary(checkpoint)
    if args.layers:
        found["weights"] = {name: each.data() for name, each in ranges(checkpoint)}
    print(json.dumps(found, indent=2, default=str) if args.json else _text(found))


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint has, as JSON data (but for values of arguments that are objects)."""
    common, args = checkpoint.common(), checkpoint.args()
    sharding = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    return {
        "checkpoint": str(checkpoint.path),
        "made_by": _made_by(checkpoint),
        "step": common.get("iteration"),
        "consumed_samples": getattr(args, "consumed_train_samples", None),
        "model": _values(args, _MODEL),
        "recipe": _values(args, _FP4) | {"description": _description(args)},
        "layout": _values(args, arguments.LAYOUT),
        "optimizer": {"name": getattr(args, "optimizer", None), "state": sharding},
        "sizes": _sizes(checkpoint),
        "files": len(checkpoint.files),
    }


_NONE = "no recipe: the linears are not quantized"


def _values(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _description(args: argparse.Namespace) -> list[str]:
    try:
        recorded = getattr(args, "fp4_recipe_content", None)
        return describe(content.read(recorded)) if recorded else [_NONE]
    except ConfigError as error:  # of another version of this package
        return [str(error)]


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The number of weights' elements, and bytes of each kind of tensor and of the objects."""
    tensors = checkpoint.tensors.items()
    weights = [info for key, info in tensors if keys.kind(key) == "weights"]
    sizes: dict[str, Any] = {
        "parameters": sum(info.elements for info in weights),
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in weights}),
    }
    for kind in ("weights", "optimizer", "states"):
        sizes[kind] = sum(info.bytes for key, info in tensors if keys.kind(key) == kind)
    sizes["rest"] = sum(len(checkpoint.raw(key)) for key in checkpoint.objects)
    return sizes


def _made_by(checkpoint: Checkpoint) -> Any:
    """What `rewrite` noted; "a training run" if there is no note."""
    file = checkpoint.path / rewrite.MADE_BY
    try:
        return json.loads(file.read_text()) if file.is_file() else "a training run"
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: remove it") from error


def _files_with_arguments(checkpoint: Checkpoint) -> list[str]:
    if checkpoint.common_file.is_file():
        return [checkpoint.common_file.name]
    return [checkpoint.file_of_object(COMMON)] if COMMON in checkpoint.objects else []


def _text(found: dict[str, Any]) -> str:
    sizes = found["sizes"]
    made_by = found["made_by"]
    if isinstance(made_by, dict):
        made_by = f"{made_by.get('command')} from {', '.join(map(str, made_by.get('sources', [])))}"
    samples, optimizer, layout = (found[k] for k in ("consumed_samples", "optimizer", "layout"))
    recipe = {k: v for k, v in found["recipe"].items() if k != "description"}
    # A checkpoint that was imported has no samples, layout, optimizer and recipe.
    lines = [
        found["checkpoint"],
        f"made by {made_by}",
        f"step {found['step']}" + ("" if samples is None else f", {samples} samples"),
        f"model: {_pairs(found['model'])}",
        *([f"layout: {_pairs(layout)}"] if layout else []),
        f"optimizer: {optimizer['name']}, state {optimizer['state'] or 'whole'}"
        if optimizer["name"]
        else "optimizer: none",
        *found["recipe"]["description"],
        *([f"  {_pairs(recipe)}"] if recipe else []),
        f"{sizes['parameters']:,} parameters in {', '.join(sizes['dtypes'])}; "
        + ", ".join(
            f"{name} {rewrite.size_words(sizes[name])}"
            for name in ("weights", "optimizer", "states", "rest")
        )
        + f"; {found['files']} files",
    ]
    return "\n".join(lines + [_line(*each) for each in found.get("weights", {}).items()])


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _line(name: str, data: dict[str, Any]) -> str:
    numbers = "  ".join(
        f"{number} {data[number]:.3g}" if data[number] is not None else f"{number} -"
        for number in ("min", "max", "absmax", "rms")
    )
    line = f"  {name}: {numbers}"
    if data["nonfinite"]:
        line += f"  NaN or Inf {data['nonfinite']}"
    if quantized := data.get("quantized"):
        clipped, zeroed = data["clipped"] / quantized, data["zeroed"] / quantized
        line += f"  clipped {clipped:.2%}  to zero {zeroed:.2%}"
    return line
