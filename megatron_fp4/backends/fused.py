"""What the Triton kernels make, where they do: on a GPU, operands in MXFP4, NVFP4 and FP8, and
clamped tokens with what the clamp took off."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron_fp4.backends.base import ROCM, Operand, Preparation
from megatron_fp4.estimators import DGE
from megatron_fp4.outliers import OutlierClamp, Residual
from megatron_fp4.philox import Noise
from megatron_fp4.quantizer import QuantizedTensor

OLDEST = (3, 4)  # of Triton


@cache
def problem() -> str | None:
    """Why the kernels cannot run on a GPU, if they cannot: operands are then made in plain PyTorch,
    and multiplied in BF16."""
    if torch.version.hip is not None:
        return ROCM
    remedy = f"pip install 'triton>={OLDEST[0]}.{OLDEST[1]}'"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {remedy}"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
        return f"Triton {triton.__version__} is too old: {remedy}"
    return None


@cache
def kernels() -> ModuleType:
    """The package with those that Hopper's operands and products take, which import Triton; found
    once, since an import statement takes the host longer."""
    from megatron_fp4 import kernels
    from megatron_fp4.kernels import (  # noqa: F401
        blocks,
        carrier,
        cublaslt,
        launch,
        quantize,
        rows,
    )

    return kernels


def split(x: Tensor, clamp: OutlierClamp) -> tuple[Tensor, Residual] | None:
    """`clamp.split(x)` without a sort; None where the kernel does not take x."""
    if x.device.type != "cuda" or problem() is not None:
        return None
    from megatron_fp4.kernels import outliers  # imports Triton

    return outliers.split(x, clamp) if outliers.takes(x, clamp) else None


def prepare(x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[Operand | None]:
    """Operands of one matrix [rows, columns], read once for two copies that differ in their axis
    alone; None for those that the kernels do not make."""
    if not _kernels_run_on(x):
        return [None] * len(preparations)
    with kernels().launch.on(x.codes if isinstance(x, QuantizedTensor) else x):
        if len(preparations) == 2 and _together(*preparations):
            made = _mxfp4(x, *preparations)
            if made is not None:
                return [*made]
        return [_alone(x, preparation) for preparation in preparations]


def estimates(dw: Tensor, estimator: DGE, w: QuantizedTensor, weight: Tensor) -> bool:
    """Whether a kernel has multiplied dw by the estimator's factor."""
    if not _kernels_run_on(dw):
        return False
    from megatron_fp4.kernels import estimator as kernel  # imports Triton

    taken = kernel.takes(dw, w, weight)
    if taken:
        kernel.scale(dw, estimator, w, weight)
    return taken


def _kernels_run_on(x: Tensor | QuantizedTensor) -> bool:
    return x.device.type == "cuda" and problem() is None


def _alone(x: Tensor | QuantizedTensor, p: Preparation) -> Operand | None:
    rows, blocks = kernels().rows, kernels().blocks
    if isinstance(x, Tensor) and p.quantizer is not None and not p.group:
        if rows.takes(x, p.quantizer, p.axis):
            return rows.quantize(x, p.quantizer, p.axis, p.fold, p.widest)
        if p.fold is None and blocks.takes(x, p.quantizer, p.axis):
            return blocks.quantize(x, p.quantizer, p.axis, p.noise, p.widest)
    if isinstance(x, QuantizedTensor) and p.quantizer is None and rows.turns(x, p.axis):
        return rows.turned(x)
    made = _mxfp4(x, p)
    return None if made is None else made[0]


def _mxfp4(x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[QuantizedTensor] | None:
    """Copies that share all but their axis."""
    quantize = kernels().quantize
    quantizer, group = preparations[0].quantizer, preparations[0].group
    for p in preparations:
        plain = p.fold is None and p.widest is None
        if quantizer is None or not plain or not quantize.takes(x, quantizer, p.axis, group):
            return None
    assert quantizer is not None
    copies = [quantize.Copy(p.axis, p.noise, p.signs, p.carrier) for p in preparations]
    average = preparations[0].average
    made: list[QuantizedTensor] = quantize.quantize(x, quantizer, copies, group, average)
    return made


def _together(one: Preparation, other: Preparation) -> bool:
    def common(p: Preparation) -> tuple[object, ...]:
        return p.quantizer, p.group, _draw(p.noise), id(p.average)

    return one.axis != other.axis and common(one) == common(other)


def _draw(noise: Noise | None) -> tuple[object, ...] | None:
    """What two operands' draws must share: all but the stream."""
    if noise is None:
        return None
    place = noise.placement
    at = [None if t is None else (t.data_ptr(), len(t)) for t in (place.rows, place.groups)]
    return noise.key, *at, place.groups_per_row, place.first_row
