"""Checkpoints as FP4 runs save them, without a training: weights of a small model, with arguments
that record a recipe."""

from pathlib import Path
from typing import Any

import torch

from megatron_fp4.convert import command
from megatron_fp4.convert.huggingface import import_hf
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import content
from testing.builders.small_hf import save
from testing.patching import patched

_LAYERS = {
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}


def recorded(
    recipe: Recipe | None, modules: tuple[tuple[str, Recipe | None], ...] = (), **args: Any
) -> dict[str, Any]:
    """The arguments by which a checkpoint records the recipes of its run.

    recipe, modules: of --fp4-recipe and of each --fp4-module-recipe. args: others.
    """
    own = [(glob, other and content.write(other)) for glob, other in modules]
    return {
        "fp4_recipe_content": recipe and content.write(recipe),
        "fp4_module_contents": own,
        **_LAYERS,
        **args,
    }


def checkpoint(
    folder: Path,
    model: str,
    args: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    **fields: Any,
) -> Path:
    """A checkpoint of the model `model` of small_hf.MODELS; returns its folder, in `folder`.

    The model itself is in folder/hf. args: of `recorded`. fields: of the model's configuration.
    """
    save(model, folder / "hf", dtype, **fields)
    plain = import_hf.HuggingFaceModel.arguments

    def arguments(self: import_hf.HuggingFaceModel) -> dict[str, Any]:
        return plain(self) | args

    with patched(import_hf.HuggingFaceModel, "arguments", arguments):
        run("import-hf", folder / "hf", "--output", folder / "megatron", "--force")
    return folder / "megatron"


def run(*words: object) -> None:
    """Runs a subcommand of tools.checkpoint, which must succeed."""
    assert command.main([str(word) for word in words]) == 0


def export(checkpoint: Path, output: Path, *flags: str) -> Path:
    """Exports a checkpoint for compressed-tensors, unless `flags` name another format."""
    form = [] if "--format" in flags else ["--format", "compressed-tensors"]
    run("export-hf", checkpoint, "--output", output, "--force", *form, *flags)
    return output
