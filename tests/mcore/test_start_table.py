"""Notes of the start table about what is saved of X (--fp4-saved-x)."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.mcore.model import start_table
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.recipes import list_recipes
from megatron_fp4.setting import Setting, column_parallel
from megatron_fp4.target import target_of


def notes(recipe: str, tokens: int, packs_x: bool) -> tuple[tuple[str, ...], str]:
    """(notes, what is saved of X) of a linear with a sequence-parallel group of four."""
    bf16, target = torch.bfloat16, target_of(torch.device("cpu"))
    sharding = column_parallel(4, sequence_parallel=True)
    setting = Setting(tokens, 64, 64, bf16, target, bf16, sharding)
    plan = compile_plan(get_recipe(recipe), replace(setting, packs_x=packs_x))
    row = start_table.planned("mlp.linear_fc1", torch.empty(64, 64), plan, tokens)
    return row.notes, plan.saves_x


@pytest.mark.parametrize(
    ("recipe", "sequence", "told"),
    [("mxfp4", 8, True), ("mxfp4", 16, False), ("tetrajet", 8, False)],
)
def test_an_x_that_cannot_be_packed_is_told(recipe: str, sequence: int, told: bool) -> None:
    """Two samples of a sequence, whose tokens wgrad takes in blocks of 32; ranks of a sequence-
    parallel group have less."""
    for packs_x in (True, False):
        line = "X of linear_fc1 is kept in BF16 for backward: 16 tokens on a rank are not a "
        found, _ = notes(recipe, 2 * sequence, packs_x)
        assert any(each.startswith(line + "multiple of 32") for each in found) == (told and packs_x)


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_saved_x_of_bf16_that_changes_nothing_is_told(recipe: str) -> None:
    usual, packed = notes(recipe, 256, packs_x=True)
    told, kept = notes(recipe, 256, packs_x=False)
    line = f"--fp4-saved-x bf16 changes nothing for {recipe}: its backward quantizes no X itself"
    assert (line in told) == (kept == packed) and line not in usual
