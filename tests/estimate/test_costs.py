"""The costs of techniques are those that are derived by hand for a small linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_recipe, list_recipes
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.estimate import costs as module
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.costs import Cost, costs
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.overhead import DEVICES, plan_of, setting_of
from megatron_fp4.estimate.plans import BF16
from megatron_fp4.estimate.rates import UNITS
from megatron_fp4.estimate.traffic import of_backward, of_forward
from megatron_fp4.estimate.work import SECOND_SCALE, of_linear
from megatron_fp4.plan.memory import saved_bytes
from megatron_fp4.setting import UNSHARDED, Sharding, column_parallel

TOKENS, IN, OUT = 256, 128, 384
X, W, DY = TOKENS * IN, OUT * IN, TOKENS * OUT
PRODUCT = TOKENS * IN * OUT
CODES = 17 / 32  # bytes of an element of MXFP4
BLACKWELL = DEVICES["blackwell"]


def alike(quantizer: Quantizer, hadamard: Hadamard | None = None, **others: Any) -> Recipe:
    """A recipe with one quantizer for all six operands."""
    gemm = GemmRecipe(quantizer, quantizer, hadamard, quantizer.prescale**-2)
    return Recipe("alike", fprop=gemm, dgrad=gemm, wgrad=gemm, **others)


THROUGH_OUTER = Estimator("straight-through", outer_scale="vjp")
RECIPES = {"bf16": BF16} | {name: get_recipe(name) for name in list_recipes()}
RECIPES |= {
    "nvfp4": alike(get_quantizer("nvfp4")),
    "nvfp4 twice": alike(get_quantizer("nvfp4-sr"), backward="forward"),
    "ue5m3 square": alike(Quantizer(scale="ue5m3", block=(16, 16), rule="up")),
    "four-over-six of all": alike(get_quantizer("nvfp4-four-over-six"), Hadamard(16)),
    "rht of all": alike(Quantizer(), Hadamard(32, "none"), backward="forward"),
    "forward alone": replace(BF16, fprop=alike(Quantizer()).fprop, backward="forward"),
    "dge": replace(
        alike(Quantizer(), backward="forward"), estimator=get_recipe("dge-occ").estimator
    ),
    "estimators": replace(
        alike(Quantizer()), estimator=Estimator(maximum="vjp"), x_estimator=Estimator("spline")
    ),
    "outer scale": replace(
        alike(get_quantizer("nvfp4")), estimator=THROUGH_OUTER, x_estimator=THROUGH_OUTER
    ),
    "one operand": replace(BF16, wgrad=GemmRecipe(Quantizer(), None, Hadamard(64))),
    "float32 scales": alike(Quantizer(scale="fp32", rule="absmax"), backward="forward"),
    "two levels": alike(replace(get_quantizer("nvfp4"), tensor_max=0.0, row_max=448.0)),
    "mse": alike(Quantizer(rule="mse"), Hadamard(64, "fixed")),
    "mean": replace(get_recipe("tetrajet"), x_mean="subtracted"),
    "channels": get_recipe("dge-occ", scope="channel", compensate=False),
    "hot": replace(get_recipe("tetrajet"), outliers=HotChannels(64, 3)),
}


def found(
    recipe: Recipe, gpu: Gpu = MEASURED, sharding: Sharding = UNSHARDED, **others: Any
) -> list[Cost]:
    setting = replace(setting_of(gpu, IN, OUT, TOKENS, sharding), **others)
    return costs(plan_of(recipe, setting, gpu), gpu)


def total(each: Sequence[Cost], name: str, *techniques: str) -> float:
    """The sum of a field of the costs of these techniques; of all but the products if none."""
    wanted = [
        c for c in each if (c.technique in techniques if techniques else c.technique != "product")
    ]
    return sum(getattr(cost, name) for cost in wanted)


# --- derived by hand ------------------------------------------------------------------------------


def test_nearest_mxfp4() -> None:
    """X and dY are read once for both of their operands, W once in each pass."""
    each = found(alike(Quantizer()))
    assert total(each, "read", "codes") == 2 * (X + 2 * W + DY)
    assert total(each, "written", "codes") == CODES * 2 * (X + W + DY)
    # FP8 carriers, a byte an element. X of wgrad waits for the backward pass as codes.
    assert total(each, "written", "form") == 2 * (X + W + DY)
    assert total(each, "read", "form") == CODES * X
    assert total(each, "saved") == CODES * X
    assert [(c.multiply_adds, c.precision) for c in each if c.technique == "product"] == [
        (PRODUCT, "fp8")
    ] * 3
    fprop = next(c for c in each if c.technique == "product")
    assert (fprop.read, fprop.written) == (X + W, 2 * DY)
    assert total(each, "words") == total(each, "multiply_adds") == total(each, "sent") == 0
    # FP4 tensor cores take the codes.
    each = found(alike(Quantizer()), BLACKWELL)
    assert total(each, "written") == total(each, "written", "codes") == CODES * 2 * (X + W + DY)
    assert {c.precision for c in each if c.technique == "product"} == {"fp4"}


def test_stochastic_rounding_draws_a_word_an_element() -> None:
    """Both operands of dY have the same random bits, X and W of the forward pass none."""
    each = found(get_recipe("tetrajet"))
    assert total(each, "words") == X + W + DY
    assert total(each, "words", "random words") == X + W + DY
    # Double quantization reads codes.
    assert total(each, "read", "codes") == 2 * (X + W + DY) + CODES * (X + W)
    assert total(found(get_recipe("tetrajet", backward_rounding="nearest")), "words") == 0


def test_a_hadamard_transform_takes_its_group_for_each_element_of_both_operands() -> None:
    each = found(get_recipe("mxfp4-rht-sr"))
    assert total(each, "multiply_adds") == 64 * (X + W + 2 * DY)
    assert {c.precision for c in each if c.technique == "Hadamard transform"} == {"bf16"}
    assert total(found(get_recipe("mxfp4-rht-sr", hadamard=128)), "multiply_adds") == 128 * (
        X + W + 2 * DY
    )
    assert total(found(get_recipe("mxfp4-rht-sr", hadamard=0)), "multiply_adds") == 0


def test_an_operand_that_is_transformed_and_not_quantized() -> None:
    each = found(RECIPES["one operand"])
    assert total(each, "multiply_adds") == 64 * (X + DY)
    [x] = [c for c in each if (c.technique, c.operand) == ("Hadamard transform", "x")]
    assert (x.read, x.written) == (2 * X, 2 * X)


def test_a_tensor_scale_takes_a_pass_that_reads_each_matrix_again() -> None:
    nvfp4 = get_quantizer("nvfp4")
    plain, scaled = found(alike(replace(nvfp4, tensor_max=0.0))), found(alike(nvfp4))
    assert total(scaled, "read", "tensor scale") == 2 * (X + 2 * W + DY)
    reads = [total(each, "read", "codes", "tensor scale") for each in (scaled, plain)]
    assert reads[0] - reads[1] == total(scaled, "read", "codes")
    # After a transform each direction has a maximum of its own, of values that are transformed
    # for it.
    turned = found(alike(nvfp4, Hadamard(16)))
    assert total(turned, "read", "tensor scale") == 2 * 2 * (X + W + DY)
    assert total(turned, "multiply_adds", "tensor scale") == 16 * 2 * (X + W + DY)


def test_rows_have_scales_by_such_a_pass_too() -> None:
    each = found(get_recipe("fp8"))
    assert total(each, "read", "row scales") == 2 * (X + 2 * W + DY)
    assert total(each, "read", "codes") == 2 * (X + 2 * W + DY)
    assert total(each, "written", "codes") == 2 * (X + W + DY) + 4 * 2 * (TOKENS + OUT + IN)
    assert total(each, "written", "form") == 0


def test_scales_of_rows_beside_block_scales_take_the_pass_too() -> None:
    each = found(alike(replace(Quantizer(), row_max=1.0)))
    assert total(each, "read", "row scales") == 2 * (X + 2 * W + DY)


def test_float32_scales_of_blocks_multiply_the_sums_of_blocks() -> None:
    each = found(alike(Quantizer(scale="fp32", rule="absmax", block=(1, 16))))
    assert total(each, "multiply_adds", "block scales") == 3 * PRODUCT / 16
    assert {c.precision for c in each if c.technique == "block scales"} == {"fp32"}
    assert not total(found(get_recipe("fp8")), "multiply_adds", "block scales")


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (Quantizer(), {}),
        (Quantizer(rule="mse"), {"element rounded to nearest": SECOND_SCALE}),
        (RECIPES["nvfp4-nvidia"].fprop.a, {"element with a mantissa scale": 1}),
        (
            RECIPES["four-over-six"].fprop.a,
            {"element with a mantissa scale": 1, "element of four over six": 1},
        ),
        (
            Quantizer(scale="e4m3", rule="mse-fp8"),
            {"element with a mantissa scale": 1, "element rounded to nearest": 3 * SECOND_SCALE},
        ),
    ],
)
def test_what_scales_take(quantizer: Quantizer, expected: dict[str, float]) -> None:
    """Of each operand, both ways: X, W and dY."""
    taken = Amounts()
    for cost in found(alike(quantizer)):
        if cost.technique == "scales":
            taken.add(cost.work)
    assert taken == {unit: each * 2 * (X + W + DY) for unit, each in expected.items()}


def test_transforms_under_mantissa_scales_are_counted() -> None:
    each = [c for c in found(get_recipe("nvfp4-nvidia")) if c.technique == "scales"]
    unit = "element transformed, mantissa scale"
    assert {(c.gemm, c.operand) for c in each if c.work[unit]} == {("wgrad", "x"), ("wgrad", "dy")}


def test_the_mean_of_x() -> None:
    """X is read for its sums, and W to multiply the mean; dW gets a part of rank one."""
    each = found(RECIPES["mean"])
    parts = [(c.gemm, c.read, c.written) for c in each if c.technique == "mean"]
    assert parts == [("fprop", 2 * X + 2 * W, 0), ("wgrad", 4 * W, 4 * W)]
    plain = [c for c in found(get_recipe("tetrajet")) if c.technique == "mean"]
    assert not plain and len(each) == len(found(get_recipe("tetrajet"))) + 2


def test_hot_channels() -> None:
    """X is read for its sums and again to be split; Y and dW get products of 3 / 64 of K."""
    each = [c for c in found(RECIPES["hot"]) if c.technique == "outliers"]
    apart = 3 * IN // 64 * (2 * TOKENS + 8)  # values in BF16, channels in int64
    assert [(c.gemm, c.read, c.written, c.multiply_adds) for c in each] == [
        ("fprop", 4 * X, 2 * X + apart, 0),
        ("fprop", 0, 0, PRODUCT * 3 / 64),
        ("wgrad", 0, 0, PRODUCT * 3 / 64),
    ]
    assert sum(c.saved for c in each) == apart


def test_dge_and_occ() -> None:
    recipe = get_recipe("dge-occ")
    each = found(recipe)
    kept = 2 * (int(0.01 * (IN - 1)) + 2)  # of both ends of a token, and one more
    residual = TOKENS * kept * (2 + 2)  # values in BF16, places in int16
    outliers = [c for c in each if c.technique == "outliers"]
    assert [(c.gemm, c.read, c.written, c.multiply_adds) for c in outliers] == [
        ("fprop", 2 * X, 2 * X + residual, 0),
        ("fprop", 0, 0, PRODUCT),
        ("wgrad", 0, 0, PRODUCT),
    ]
    assert total(each, "saved", "outliers") == residual
    assert total(each, "saved", "saved") == X // 2 + 4 * TOKENS + W // 2 + 4 * OUT
    # dW in float32, W in BF16 and main_grad are read, main_grad is written.
    assert total(each, "read", "estimator") == (4 + 2 + 4) * W
    assert total(each, "written", "estimator") == 4 * W
    # Backward multiplies fprop's codes, transposed, as FP8.
    transposed = [c for c in each if c.technique == "form" and c.gemm != "fprop"]
    assert [(c.operand, c.read, c.written) for c in transposed] == [
        ("w", W // 2 + 4 * OUT, W),
        ("x", X // 2 + 4 * TOKENS, X),
    ]
    assert not total(found(get_recipe("dge-occ", occ=False, dge=False)), "read", "estimator")


def test_estimators_of_x_and_through_the_maximum() -> None:
    """X is kept in BF16 beside its codes, and read beside dX. The maximum takes the codes of W."""
    each = [c for c in found(RECIPES["estimators"]) if c.technique == "estimator"]
    assert [(c.gemm, c.operand, c.read, c.written, c.saved) for c in each] == [
        ("wgrad", "w", (4 + 2 + CODES + 4) * W, 4 * W, 0),
        ("dgrad", "x", (2 + 2) * X, 2 * X, 2 * X),
    ]
    # The sums of blocks as long as a row are known only after a pass.
    rows = replace(
        alike(get_quantizer("vector")), estimator=Estimator("straight-through", maximum="absmax")
    )
    assert (
        total(found(rows), "read", "estimator") == 2 * (4 + 2) * W + 2 * (W // 2 + 4 * OUT) + 4 * W
    )


def test_estimators_through_an_outer_scale() -> None:
    """Its sums are known only after a pass, so that gradient, matrix and codes are read twice."""
    each = [c for c in found(RECIPES["outer scale"]) if c.technique == "estimator"]
    nvfp4 = 1 / 2 + 1 / 16
    assert [(c.gemm, c.operand, c.read, c.written, c.saved) for c in each] == [
        ("wgrad", "w", 2 * ((4 + 2 + nvfp4) * W + 4) + 4 * W, 4 * W, 0),
        ("dgrad", "x", 2 * ((2 + 2 + nvfp4) * X + 4), 2 * X, 2 * X),
    ]
    # The sums of rows, whose blocks are under a scale of the tensor, are known before those of it.
    rows = alike(replace(get_quantizer("nvfp4"), block=(1, 0)))
    three = replace(THROUGH_OUTER, maximum="softmax")
    once, thrice = (
        total(found(replace(rows, x_estimator=e)), "read", "estimator")
        for e in (Estimator(), three)
    )
    assert (once, thrice) == (4 * X, 3 * (4 * X + X // 2 + TOKENS + 4))


def test_state_beside_a_weight_is_updated_once_a_step() -> None:
    each = found(get_recipe("tetrajet-ema"))
    assert total(each, "read", "average") == 4 * W
    [state] = [c for c in each if c.technique == "state beside the weight"]
    assert (state.read, state.written, state.kept, state.once) == (8 * W, 4 * W, 4 * W, True)
    [state] = [c for c in found(get_recipe("tetrajet-ramping")) if c.kept]
    assert (state.read, state.written, state.kept) == (8 * W, 8 * W, 8 * W)


def test_what_ranks_send() -> None:
    """Codes and scales of X forward; of X and of dX, whose sum is scattered, backward."""
    sharding = column_parallel(2, sequence_parallel=True)
    each = found(get_recipe("tetrajet"), sharding=sharding)  # IN, OUT and TOKENS are a rank's
    sent = {c.gemm: c.sent for c in each if c.technique == "sent"}
    assert sent == {"fprop": CODES * X, "backward": CODES * X + 2 * X}
    plan = plan_of(
        get_recipe("tetrajet"), setting_of(MEASURED, IN, OUT, TOKENS, sharding), MEASURED
    )
    assert sum(sent.values()) == sum(s.sent for s in (*of_forward(plan), *of_backward(plan)))


def test_held_operands_of_w_are_made_once_a_step() -> None:
    held = found(get_recipe("tetrajet"), keeps_w="packed")
    assert {(c.operand, c.technique) for c in held if c.once} == {
        ("w", name) for name in ("codes", "rounding", "random words")
    }
    decoded = found(get_recipe("tetrajet"), keeps_w="decoded")
    assert {c.technique for c in decoded if c.once} == {"codes", "rounding", "random words", "form"}
    assert not any(c.once for c in found(get_recipe("tetrajet")))


def test_a_gain_of_1_draws_a_word_a_block() -> None:
    """The blocks of dY begin at other elements in either direction. Each element takes two
    products, in all four operands of quartet-2's backward GEMMs."""
    each = found(get_recipe("quartet-2"))
    assert total(each, "words") == total(each, "words", "gain of 1") == (X + W + 2 * DY) / 16
    rounded = [c.work["element rounded to nearest"] for c in each if c.technique == "gain of 1"]
    assert sum(rounded) == X + W + 2 * DY
    assert not total(found(get_recipe("quartet-2", unit_gain=False)), "words", "gain of 1")


# --- negative controls ----------------------------------------------------------------------------


def test_a_transform_of_one_operand_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(where: tuple[str, str], technique: str, operand: Any, *moved: float) -> Cost:
        left = replace(operand, hadamard=None) if where == ("dgrad", "w") else operand
        return transform(where, technique, left, *moved)

    transform = module._transform
    monkeypatch.setattr(module, "_transform", one)
    with pytest.raises(AssertionError):
        test_a_hadamard_transform_takes_its_group_for_each_element_of_both_operands()


def test_a_tensor_scale_without_its_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(operands: Any, recipe: Recipe) -> Iterator[Cost]:
        return (c for c in of_operands(operands, recipe) if c.technique != "tensor scale")

    of_operands = module.of_operands
    monkeypatch.setattr(module, "of_operands", without)
    with pytest.raises(AssertionError):
        test_a_tensor_scale_takes_a_pass_that_reads_each_matrix_again()


# --- against the rest of the package --------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_saved_bytes_are_the_plan_s(name: str) -> None:
    for keeps_w in (None, "packed", "remade"):
        for packs_x in (True, False):
            others: dict[str, Any] = {"keeps_w": keeps_w, "packs_x": packs_x}
            setting = replace(setting_of(MEASURED, IN, OUT, TOKENS), **others)
            plan = plan_of(RECIPES[name], setting, MEASURED)
            assert total(costs(plan, MEASURED), "saved") == saved_bytes(plan)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gpu", DEVICES.values())
def test_work_is_what_is_counted(name: str, gpu: Gpu) -> None:
    """Bytes and words have their units, and every unit is one with a rate."""
    for cost in found(RECIPES[name], gpu):
        assert cost.work.keys() <= UNITS.keys()
        if cost.technique != "product":
            assert cost.work["byte quantized"] == cost.read + cost.written
            assert cost.work[f"{cost.precision or 'bf16'} operation"] == 2 * cost.multiply_adds
        assert cost.work["element drawn"] == cost.words
        assert cost.work["byte over NVLink"] == cost.sent


@pytest.mark.parametrize("name", ["mxfp4", "tetrajet", "tetrajet-ramping"])
def test_with_kernels_for_all_it_is_the_work_of_a_step(name: str) -> None:
    """Where every technique has a kernel on this GPU, what it needs is what runs."""
    plan = plan_of(RECIPES[name], setting_of(MEASURED, IN, OUT, TOKENS), MEASURED)
    needed, runs = dict.fromkeys(UNITS, 0.0), dict.fromkeys(UNITS, 0.0)
    for cost in costs(plan, MEASURED):
        for unit, amount in cost.work.items():
            needed[unit] += amount * (cost.technique != "state beside the weight")
    work = of_linear(plan, MEASURED)
    for amounts in (work.forward.gpu, work.backward.gpu):
        for unit, amount in amounts.items():
            runs[unit] += amount
    # A conversion has a unit of its own there: it reads codes and writes a byte an element.
    runs["byte quantized"] += (CODES + 1) * runs.pop("element converted")
    needed.pop("element converted")
    assert needed == runs
