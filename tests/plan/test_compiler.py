"""What plans say, and that one plan serves the numbers of tokens that it is given for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp4 import ConfigError, Quantizer, get_recipe, list_recipes
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.cache import plan_for, tokens_of_plan
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipe import GemmRecipe, Recipe
from megatron_fp4.setting import Setting, Sharding, column_parallel, row_parallel
from megatron_fp4.target import Target, target_of

CPU, H200, B200 = target_of(torch.device("cpu")), Target("cuda", (9, 0)), Target("cuda", (10, 0))
ALONE, COLUMN, ROW = Sharding(), column_parallel(2, sequence_parallel=True), row_parallel(2)
ROW_SP = row_parallel(2, sequence_parallel=True)
NV = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0)


def setting(**fields: Any) -> Setting:
    given: dict[str, Any] = {
        "tokens": 256,
        "inputs": 256,
        "outputs": 256,
        "target": H200,
        "main_grad": torch.float32,
    }
    return Setting(dtype=torch.bfloat16, weight_dtype=torch.bfloat16, **given | fields)


def plan(recipe: str | Recipe, **fields: Any) -> LinearPlan:
    chosen = get_recipe(recipe) if isinstance(recipe, str) else recipe
    return compile_plan(chosen, setting(**fields))


def operands(made: LinearPlan) -> dict[str, OperandPlan]:
    found = (operand for gemm in made.gemms for operand in (gemm.a, gemm.b))
    return {f"{operand.gemm} {operand.letter}": operand for operand in found}


def decisions(made: LinearPlan) -> Any:
    """All that a plan decides, without sizes."""
    return (
        [(o.source, o.gathered, o.is_part, o.folds, o.agrees, o.carrier) for o in
         operands(made).values()],
        [(gemm.multiplier.name, gemm.holds_b, gemm.holds_form) for gemm in made.gemms],
        [(m.maker.name, m.matrix, len(m.operands)) for m in made.makings],
        (made.saves_x, made.saves_w, made.residual_in_dw, made.shows_packed_x),
    )  # fmt: skip


@pytest.mark.parametrize("target", [CPU, H200, B200], ids=lambda target: str(target.capability))
@pytest.mark.parametrize("sharding", [ALONE, COLUMN, ROW, ROW_SP], ids=str)
@pytest.mark.parametrize("name", list_recipes())
def test_one_plan_serves_all_numbers_of_tokens_with_one_divisor(
    name: str, sharding: Sharding, target: Target
) -> None:
    recipe, seen = get_recipe(name), set()
    for tokens in (0, 1, 7, 8, 16, 24, 31, 32, 48, 64, 96, 128, 160, 256, 1000, 8192):
        divisor = tokens_of_plan(recipe, tokens)
        seen.add(divisor)
        one, other = (
            plan(name, tokens=t, sharding=sharding, target=target) for t in (tokens, divisor)
        )
        assert decisions(one) == decisions(other), tokens
    assert len(seen) <= 9
    # The control: they are not all alike.
    odd, even = (plan("mxfp4", tokens=t, sharding=sharding, target=H200) for t in (24, 32))
    assert decisions(odd) != decisions(even)


def test_an_expert_s_tokens_are_a_few_plans() -> None:
    recipe, size, cpu = get_recipe("tetrajet"), torch.Size((64, 64)), torch.device("cpu")
    bf16 = torch.bfloat16
    plan_for.cache_clear()
    for tokens in range(0, 4096, 32):
        rest = ALONE, None, True, True, False, None, True
        plan_for(recipe, tokens_of_plan(recipe, tokens), size, bf16, cpu, bf16, *rest)
    assert plan_for.cache_info().misses == 4  # 0, 32, 64, 128


def test_where_codes_travel_and_where_the_matrix_does() -> None:
    found = operands(plan("tetrajet", sharding=COLUMN))
    assert found["fprop x"].gathered == found["wgrad x"].gathered == "after"
    assert not any(o.gathered for name, o in found.items() if not name.endswith(" x"))
    # Blocks of 32 tokens straddle the ranks' parts of 16.
    found = operands(plan("tetrajet", tokens=16, sharding=COLUMN))
    assert (found["fprop x"].gathered, found["wgrad x"].gathered) == ("after", "before")
    found = operands(plan("tetrajet", sharding=ROW_SP))
    assert found["dgrad dy"].gathered == found["wgrad dy"].gathered == "after"
    # E5M2 is no smaller than the codes of both copies: dY itself travels.
    found = operands(plan("dge-occ", sharding=ROW_SP))
    assert found["dgrad dy"].gathered == found["wgrad dy"].gathered == "before"


def test_scales_that_are_folded_into_dy_wait_for_x_alone() -> None:
    made = plan("dge-occ", sharding=COLUMN)
    assert [o.gemm for making in made.backward for o in making.operands] == ["dgrad", "dgrad"]
    assert [o.letter for making in made.late for o in making.operands] == ["x", "dy"]
    assert not plan("dge-occ").late and not plan("tetrajet", sharding=COLUMN).late


@pytest.mark.parametrize(("w", "folds"), [(NV, True), (replace(NV, tensor_max=0.0), False)])
def test_an_outer_scale_of_decoded_w_goes_into_a_wide_dy(w: Quantizer, folds: bool) -> None:
    """dgrad reads W's elements times block scales, which are BF16 numbers; a tensor scale is not
    one, and its product with dY stays in float32."""
    made = plan(Recipe("decoded", fprop=GemmRecipe(w, w), backward="forward"))
    assert made.dgrad is not None and made.dgrad.b.source == "values"
    assert made.dgrad.a.folds == folds
    assert made.dgrad.product.a == (torch.float32 if folds else torch.bfloat16)


def test_dy_is_read_once_for_both_directions() -> None:
    made = plan("tetrajet")
    [together] = [making for making in made.backward if len(making.operands) == 2]
    assert together.matrix == ("dy", "model") and together.maker.name == "mxfp4 kernel"
    on_cpu = plan("tetrajet", target=CPU)
    assert all(len(making.operands) == 1 for making in on_cpu.makings)


def test_only_what_is_asked_for_is_planned() -> None:
    made = plan("tetrajet", dx=False)
    assert made.dgrad is None and [gemm.name for gemm in made.gemms] == ["fprop", "wgrad"]
    assert made.saves_w == "model"  # wgrad does not read it
    made = plan("tetrajet", dw=False)
    assert made.wgrad is None and made.saves_x == "" and made.saves_w == "operand"
    made = plan("tetrajet", dx=False, dw=False)
    assert not made.backward and not made.late


def test_ranks_agree_on_the_scales_that_they_share() -> None:
    nv = GemmRecipe(NV, NV)
    recipe = Recipe("nv", fprop=nv, dgrad=nv, wgrad=nv)
    found = operands(plan(recipe, sharding=COLUMN))
    assert all(operand.agrees for operand in found.values())
    assert not any(operand.agrees for operand in operands(plan(recipe)).values())
    rows = {name for name, o in operands(plan("dge-occ", sharding=ROW)).items() if o.agrees}
    assert rows == {"fprop x", "fprop w"}  # a scale of a row whose features are sharded


def test_rows_under_a_scale_of_the_tensor_are_not_shared() -> None:
    """Ranks would have to agree on the rows' maxima and on the tensor's."""
    rows = Quantizer(scale="e4m3", rule="nearest", block=(1, 0), tensor_max=448.0)
    found = Recipe("rows", fprop=GemmRecipe(rows, rows))
    assert plan(found).fprop.a.quantizer == rows
    plan(found, sharding=COLUMN)  # whole rows
    with pytest.raises(ConfigError, match="fprop x: ranks share a row"):
        plan(found, sharding=ROW)


def test_products_say_why_no_faster_one_runs() -> None:
    fprop, dgrad, wgrad = plan("tetrajet", target=B200).gemms
    assert [g.multiplier.name for g in (fprop, dgrad, wgrad)] == ["sm100", "sm100", "blackwell"]
    assert dict(wgrad.passed_over)["sm100"].startswith("torch's MXFP4 GEMMs are BF16")
    assert plan("tetrajet", target=B200, has_bias=True).fprop.multiplier.name == "blackwell"
    wide = plan(Recipe("h", fprop=GemmRecipe(None, None, Hadamard(32, "none"))), target=H200).fprop
    assert wide.multiplier.name == "reference"
    assert dict(wide.passed_over)["bf16"] == "an operand is in float32"


def test_carriers_are_written_for_what_is_multiplied_at_once() -> None:
    made = operands(plan("tetrajet"))
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert {name: o.carrier for name, o in made.items()} == {
        "fprop x": e4m3, "fprop w": e4m3, "dgrad dy": e5m2, "dgrad w": e4m3,
        "wgrad dy": e5m2, "wgrad x": e4m3,
    }  # fmt: skip
    assert operands(plan("mxfp4"))["wgrad x"].carrier is None  # packed in forward
    assert operands(plan("tetrajet", sharding=COLUMN))["fprop x"].carrier is None  # it travels
    assert operands(plan("mxfp4-rht-sr"))["dgrad dy"].carrier is None  # after a transform
    assert operands(plan("tetrajet", target=B200))["fprop x"].carrier is None


def test_plans_of_all_recipes_dtypes_and_layouts_compile() -> None:
    for name, dtype, sharding, target in itertools.product(
        list_recipes(),
        (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        (ALONE, COLUMN, ROW, ROW_SP),
        (CPU, H200, B200, Target("rocm"), Target("cuda", (7, 0))),
    ):
        given = replace(setting(sharding=sharding, target=target), dtype=dtype, weight_dtype=dtype)
        made = compile_plan(get_recipe(name), given)
        multipliers = {gemm.multiplier.name for gemm in made.gemms}
        if dtype != torch.bfloat16 or target.capability == (7, 0) or target.kind == "rocm":
            assert multipliers == {"reference"}


A100, L40 = Target("cuda", (8, 0)), Target("cuda", (8, 9))


@pytest.mark.parametrize(
    ("target", "reads"), [(A100, False), (L40, True), (H200, True), (B200, True)], ids=str
)
def test_kernels_read_y_in_e4m3_where_the_gpu_converts_it(target: Target, reads: bool) -> None:
    """Older GPUs convert it to BF16 first, so that no kernel is compiled that they cannot run."""
    for kept_y, computes_source in ((None, True), (torch.float8_e4m3fn, reads)):
        made = plan("tetrajet", target=target, swiglu="before", kept_y=kept_y)
        of_dy = [making for making in made.backward if making.matrix == ("dy", "swiglu")]
        assert of_dy and all(making.computes_source == computes_source for making in of_dy)
        after = plan("tetrajet", target=target, swiglu="after", kept_y=kept_y)
        assert all(m.computes_source for m in after.forward if m.matrix == ("x", "swiglu"))


def test_an_x_that_is_kept_is_not_computed_from_a_y_that_is_gone() -> None:
    """In BF16, where no codes of it are kept: fc1 keeps its Y rounded, from which another X would
    follow."""
    fields: Any = {"swiglu": "after", "packs_x": False}
    plain, rounded = (plan("mxfp4", kept_y=kept, **fields) for kept in (None, torch.float8_e4m3fn))
    assert plain.wgrad is not None and plain.wgrad.b.source == "swiglu"
    assert rounded.wgrad is not None and rounded.wgrad.b.source == "model"
    assert rounded.fprop.a.source == "swiglu" and rounded.forward[0].computes_source


def test_a_call_without_tokens_holds_no_form_of_w() -> None:
    """It has another multiplier on Hopper, which reads another form than the calls with tokens."""
    full, empty = (plan("tetrajet", tokens=n, keeps_w="decoded") for n in (256, 0))
    assert full.fprop.holds_form and not empty.fprop.holds_form
    assert full.fprop.multiplier.name != empty.fprop.multiplier.name
