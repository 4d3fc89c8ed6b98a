"""Plans of linears that compute the RMSNorm before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target

SETTING = Setting(
    512, 256, 256, torch.bfloat16, Target("cuda", (9, 0)), torch.bfloat16, normed=True
)


def planned(recipe: str, **fields: Any) -> LinearPlan:
    return compile_plan(get_recipe(recipe), replace(SETTING, **fields))


@pytest.mark.parametrize("recipe", ["tetrajet", "mxfp4"])
def test_the_kernel_that_quantizes_x_computes_it(recipe: str) -> None:
    plan = planned(recipe)
    making = next(making for making in plan.forward if plan.fprop.a in making.operands)
    assert making.matrix == ("x", "normed") and making.computes_source
    assert plan.compute_x is None and "normed" not in {
        o.source for m in plan.backward for o in m.operands
    }


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [("dge-occ", {}), ("mxfp4", {"packs_x": False})],
    ids=("X is clamped", "X is kept"),
)
def test_x_that_something_else_reads_is_computed_first(recipe: str, fields: dict[str, Any]) -> None:
    plan = planned(recipe, **fields)
    assert plan.compute_x is not None
    assert all(making.matrix != ("x", "normed") for making in plan.makings)


def test_a_row_that_no_kernel_holds_is_pytorch_s() -> None:
    wide = planned("tetrajet", inputs=32768)
    making = next(making for making in wide.forward if wide.fprop.a in making.operands)
    assert making.compute is not None and not making.computes_source
    assert making.compute.__name__ == "_by_pytorch"
