"""What the kernels leave to plain PyTorch, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fp4 import Quantizer, Recipe, get_quantizer
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.kernels import outliers as kernel
from megatron_fp4.makers import choose, outliers
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target, target_of
from testing.builders.operand_plans import plan

X = torch.zeros(64, 64, dtype=torch.bfloat16)
GPU, CPU = Target("cuda", (9, 0)), target_of(torch.device("cpu"))
NVFP4 = get_quantizer("nvfp4")


def told(x: Any, quantizer: Quantizer | None, axis: int = 1, **fields: Any) -> tuple[str, str]:
    """The maker's name on a GPU, and the reason of the kernel that would be faster."""
    choice = choose(plan(x, quantizer, axis, **fields), GPU)
    return choice.maker.name, "".join(why for _, why in choice.passed_over)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("prescale", [1.0, 0.75, 0.5, 0.9, 2.0])
def test_a_prescale_that_could_clip_or_round(rounding: str, prescale: float) -> None:
    quantizer = Quantizer(rounding=rounding, prescale=prescale)  # type: ignore[arg-type]
    taken = prescale == 1.0 or (prescale == 0.75 and rounding == "stochastic")
    maker, why = told(X, quantizer)
    assert maker == ("mxfp4 kernel" if taken else "pytorch")
    assert why == ("" if taken else f"does not prescale by {prescale:g}")


@pytest.mark.parametrize(("prescale", "taken"), [(1.0, True), (0.75, False)])
def test_a_prescale_of_nearest_scales_could_clip(prescale: float, taken: bool) -> None:
    """Up to 9 times 3/4."""
    quantizer = Quantizer(rule="nearest", rounding="stochastic", prescale=prescale)
    assert told(X, quantizer)[0] == ("mxfp4 kernel" if taken else "pytorch")


@pytest.mark.parametrize("prescale", [1.0, 0.75])
def test_a_prescale_of_fp8(prescale: float) -> None:
    quantizer = Quantizer(
        element="e4m3", scale="fp32", block=(1, 0), rule="absmax", prescale=prescale
    )
    assert told(X, quantizer)[0] == ("row scale kernel" if prescale == 1.0 else "pytorch")


@pytest.mark.parametrize("element", ["e2m1", "e1m2", "e4m3", "e5m2"])
def test_elements_that_the_row_scale_kernel_makes(element: Any) -> None:
    quantizer = Quantizer(element=element, scale="fp32", block=(1, 0), rule="absmax")
    none = ("pytorch", "makes no E1M2 elements")
    assert told(X, quantizer) == (none if element == "e1m2" else ("row scale kernel", ""))


CODES = quantize_matrix(X, Quantizer(), axis=1)
ROWS = quantize_matrix(X, Quantizer(row_max=1.0), axis=1)
E1M2 = quantize_matrix(X, Quantizer(element="e1m2"), axis=1)
TALL = quantize_matrix(X, Quantizer(block=(32, 32)), axis=1)


@pytest.mark.parametrize(
    ("x", "quantizer", "fields", "why"),
    [
        (X.half(), Quantizer(), {}, "reads BF16 only"),
        (X.double(), Quantizer(), {}, "reads BF16 only"),
        (X, Quantizer(block=(1, 64)), {}, "makes E2M1 with E8M0 scales in blocks of 1 x 16 and"),
        (X, Quantizer(block=(32, 32)), {}, "makes E2M1 with E8M0 scales in blocks of 1 x 16 and"),
        (TALL, Quantizer(), {}, "reads E2M1 with E8M0 scales in blocks of 1 x 16 and 1 x 32 only"),
        (X[:, :48], Quantizer(), {}, "takes multiples of 32 along the contracted axis"),
        (X, Quantizer(), {"group": 16}, "transforms in groups of 32, 64, 128 only"),
        (X[:0], Quantizer(), {}, "there are no elements"),
        (X, Quantizer(rounding="ema"), {"group": 64}, "rounds nothing to an average after"),
        (CODES, Quantizer(), {"group": 64}, "neither transforms codes"),
        (X, Quantizer(), {"folds": True}, "folds no scales"),
        (X, Quantizer(row_max=1.0), {}, "gives rows no scales of their own"),
        (X, Quantizer(element="e1m2"), {}, "makes E2M1 with E8M0 scales in blocks of 1 x 16 and"),
        (E1M2, Quantizer(), {}, "reads E2M1 with E8M0 scales in blocks of 1 x 16 and 1 x 32 only"),
        (ROWS, Quantizer(), {}, "reads E2M1 with E8M0 scales in blocks of 1 x 16 and 1 x 32 only"),
    ],
)  # fmt: skip
def test_what_the_mxfp4_kernel_refuses(x: Any, quantizer: Any, fields: Any, why: str) -> None:
    maker, reason = told(x, quantizer, **fields)
    assert maker == "pytorch" and why in reason
    for group in (0, 64):
        for block in (16, 32):  # the control
            made = told(X, Quantizer(block=(1, block)), 0, group=group)
            assert made == ("mxfp4 kernel", "")


@pytest.mark.parametrize(
    ("quantizer", "why"),
    [
        (Quantizer(rule="mse"), "has no rule mse for e8m0 scales"),
        (Quantizer(rounding="ema"), "rounds nothing to an average"),
        (Quantizer(block=(1, 128)), "takes blocks that divide 64 x 64"),
        (Quantizer(row_max=1.0), "gives rows no scales of their own"),
        (Quantizer(element="e1m2"), "makes no E1M2 elements"),
    ],
)
def test_what_is_not_made_of_float32_matrices(quantizer: Any, why: str) -> None:
    assert told(X.float(), quantizer) == ("pytorch", why)
    controls: list[tuple[Any, int]] = [("floor", 0), ("ceil", 32), ("nearest", 16)]
    for rule, group in controls:
        made = told(X.float(), Quantizer(rule=rule, rounding="stochastic"), 0, group=group)
        assert made == ("block scale kernel", "")


@pytest.mark.parametrize(
    ("x", "quantizer", "why"),
    [
        (X.float(), NVFP4, "reads BF16 only"),
        (X[:, :40], NVFP4, "takes multiples of blocks of 1 x 16"),
        (X[:40], replace(NVFP4, block=(16, 16)), "takes multiples of blocks of 16 x 16"),
        (X, replace(NVFP4, block=(1, 128)), "takes blocks that divide 64 x 64"),
        (X[:0], NVFP4, "there are no elements"),
        (X, replace(NVFP4, tensor_max=0.0, row_max=448.0), "gives rows no scales of their own"),
        (X, replace(NVFP4, element="e1m2"), "makes no E1M2 elements"),
        (
            X,
            replace(NVFP4, unit_gain=48),
            "corrects a gain only in groups that divide 128",
        ),
    ],
)
def test_what_the_block_scale_kernel_refuses(x: Any, quantizer: Any, why: str) -> None:
    assert told(x, quantizer) == ("pytorch", why)
    assert told(X, NVFP4, 0)[0] == "block scale kernel"  # the controls
    assert told(X[:, :48], replace(NVFP4, block=(16, 16)))[0] == "block scale kernel"
    assert told(X, get_quantizer("nvfp4-four-over-six"), group=16)[0] == "block scale kernel"
    assert told(X, NVFP4, folds=True) == ("pytorch", "folds no scales")


def test_codes_without_a_scale_of_their_own_are_transposed() -> None:
    codes = quantize_matrix(X, get_quantizer("vector"), axis=1).unscaled()
    assert told(codes, None, 0, source="elements") == ("transpose kernel", "")
    assert told(codes, None, 1, source="elements")[0] == "pytorch"
    uniform = quantize_matrix(X, replace(get_quantizer("vector"), element="e1m2"), axis=1)
    assert told(uniform.unscaled(), None, 0, source="elements")[0] == "pytorch"
    assert choose(plan(codes, None, 0, source="elements"), CPU).maker.name == "pytorch"


def test_a_cpu_has_no_kernels() -> None:
    choice = choose(plan(X, Quantizer(), 1), CPU)
    assert choice.maker.name == "pytorch"
    assert choice.passed_over == (("kernels", "kernels need an NVIDIA GPU"),)


@pytest.mark.parametrize(
    ("clamp", "features", "dtype", "takes"),
    [
        (OutlierClamp(), 64, torch.bfloat16, True),
        (OutlierClamp(), 2**15 - 2, torch.bfloat16, True),
        (OutlierClamp(), 2**15 - 1, torch.bfloat16, False),  # words of two
        (OutlierClamp(), 2**15, torch.bfloat16, False),
        (OutlierClamp(), 0, torch.bfloat16, False),
        (OutlierClamp(scope="channel"), 64, torch.bfloat16, False),
        (OutlierClamp(scope="tensor"), 64, torch.bfloat16, False),
        (OutlierClamp(), 64, torch.float32, False),
        (OutlierClamp(), 64, torch.float16, False),
    ],
)
def test_outliers_of_other_scopes_dtypes_and_shapes(
    clamp: OutlierClamp, features: int, dtype: torch.dtype, takes: bool
) -> None:
    setting = Setting(64, features, 64, dtype, GPU, dtype)
    for given, on_gpu in ((setting, takes), (replace(setting, target=CPU), False)):
        splitting = outliers.choose(Recipe("clamps", outliers=clamp), given)
        assert splitting is not None
        assert (
            isinstance(splitting.split, partial) and splitting.split.func is kernel.split
        ) == on_gpu
        assert (splitting.dense is kernel.dense) == on_gpu
    assert outliers.choose(Recipe("clamps"), setting) is None
