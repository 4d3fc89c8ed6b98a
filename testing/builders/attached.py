"""Small models, and the runs that `attach` gives them to, for tests of what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron_fp4.mcore.model.run import Run
from megatron_fp4.recipe import Recipe
from testing.builders import small_gpt
from testing.builders.launch_arguments import launch_arguments


def model(num_layers: int = 4, **options: Any) -> MegatronModule:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    return small_gpt.build(small_gpt.config(num_layers=num_layers, **sizes | options), 96, 32)


def run(
    recipe: Recipe,
    start: int = 0,
    end: int = 0,
    num_layers: int = 4,
    modules: Sequence[tuple[str, Recipe | None]] = (),
) -> Run:
    """`start` and `end`: how many layers are kept in BF16."""
    args = launch_arguments(
        first_last_layers_bf16=bool(start or end),
        num_layers=num_layers,
        num_layers_at_start_in_bf16=start,
        num_layers_at_end_in_bf16=end,
    )
    return Run(recipe, args, modules)


def printed(text: str) -> list[list[str]]:
    """The cells of a table's lines: head and linears."""
    lines = [line for line in text.splitlines() if line.startswith("  ") and "   " in line.strip()]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
