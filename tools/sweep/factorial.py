"""Combinations that go through all stages of every sweep, beside those that are drawn at random.

They test what "Elucidating the Design Space of FP4 training" (arXiv 2509.17791) found: findings.py
compares pairs of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tools.sweep.axes import AXES, Combination

STAR = "factorial"  # in place of a star's key, in results

# Rules of which stochastic rounding is unbiased: no value is clipped.
E8M0 = {"scale": "e8m0", "rule": "ceil", "backward_rule": "ceil"}
E4M3 = {"scale": "e4m3", "rule": "nearest", "backward_rule": "inflated"}
UE5M3 = E4M3 | {"scale": "ue5m3"}
FP32 = {"scale": "fp32", "rule": "absmax", "backward_rule": "absmax"}
TENSOR = {"outer_scale": "tensor"}
HADAMARD = {"hadamard": "backward", "group": "32"}
STOCHASTIC = {"rounding": "gradients"}
BACKWARD = {"rounding": "backward"}  # all operands of the backward pass
LOSS_SCALE = {"loss_scale": "65536"}


def combinations() -> list[Combination]:
    """The combinations that every sweep has.

    - All formats of block scales. E4M3 and UE5M3 are there with and without a tensor scale, and
      UE5M3 with a loss scale too.
    - Each of these in blocks of 32 and of 16, with and without stochastic rounding of dY, and with
      and without a Hadamard transform of the backward pass.
    - Four of them with each estimator, and with each gradient through a block's maximum.
    """
    return [*_formats(), *_loss_scales(), *_estimators()]


def _formats() -> Iterator[Combination]:
    for scale in (E8M0, E4M3, UE5M3, FP32):
        for outer in ({}, TENSOR) if scale in (E4M3, UE5M3) else ({},):
            yield from _switched(scale | outer)


def _loss_scales() -> Iterator[Combination]:
    for outer in ({}, TENSOR):
        yield from _switched(UE5M3 | LOSS_SCALE | outer)


def _switched(values: dict[str, str]) -> Iterator[Combination]:
    switches = product(("32", "16"), (STOCHASTIC, {}), (HADAMARD, {}))
    for block, rounding, hadamard in switches:
        yield Combination(block=block, **values, **rounding, **hadamard)


def _estimators() -> Iterator[Combination]:
    scaled = ({**scale, **TENSOR, **STOCHASTIC} for scale in (E4M3, UE5M3))
    for formats in (E8M0, E8M0 | STOCHASTIC, *scaled):
        for axis in ("estimator", "maximum"):
            for form in AXES[axis][1:]:
                yield replace(Combination(block="16", **formats), **{axis: form})
