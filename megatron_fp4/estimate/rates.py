"""Seconds of each unit of work on an H200, and how they scale to other GPUs.

`python -m benchmarks.estimate_fit` fits the values of FITTED to committed results; tests compare
this table with that fit. RATES has beside them what was never measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.layout import Layout

Limit = Literal["fp32", "bf16", "fp8", "fp4", "bandwidth", "integer", "nvlink", "network", "host"]


class Unit(NamedTuple):
    """A kind of work whose time is estimated, such as a byte quantized.

    kind: the column of a report in which its time is counted.
    limit: the field of Gpu that limits its speed: on a GPU with twice that value it takes half the
        time. "host" is no such field; the time is then the same on every GPU.
    """

    kind: str
    limit: Limit


def by_torch(unit: str) -> str:
    """The unit for the same work in torch's kernels (--fp4-fused-kernels off)."""
    return f"{unit}, by torch"


# Work outside the linears, which fused kernels do or torch's.
_OUTSIDE = ("activation element", "query, key or value", "residual element", "logit", "parameter")
_ROUNDED: tuple[str, Limit] = ("quantize", "integer")
_OTHER: tuple[str, Limit] = ("other", "bandwidth")
UNITS: dict[str, Unit] = {
    "fp32 operation": Unit("gemm", "fp32"),
    "bf16 operation": Unit("gemm", "bf16"),
    "fp8 operation": Unit("gemm", "fp8"),
    "fp4 operation": Unit("gemm", "fp4"),
    "GEMM": Unit("gemm", "host"),
    "attention operation": Unit("attention", "bf16"),
    "byte quantized": Unit("quantize", "bandwidth"),
    "element rounded to nearest": Unit(*_ROUNDED),
    "element rounded stochastically": Unit(*_ROUNDED),
    "element drawn": Unit(*_ROUNDED),
    "element transformed": Unit(*_ROUNDED),
    "element decoded": Unit(*_ROUNDED),
    "element in a second direction": Unit(*_ROUNDED),
    "element normed": Unit(*_ROUNDED),
    "element of SwiGLU's gradient": Unit(*_ROUNDED),
    "element with a row scale": Unit(*_ROUNDED),
    "element with a mantissa scale": Unit(*_ROUNDED),
    "element of four over six": Unit(*_ROUNDED),
    "element transformed, mantissa scale": Unit(*_ROUNDED),
    "element clamped": Unit(*_ROUNDED),
    "element by PyTorch": Unit("quantize", "bandwidth"),
    "element converted": Unit("quantize", "bandwidth"),
    "element corrected": Unit("quantize", "bandwidth"),
    **{unit: Unit(*_OTHER) for name in _OUTSIDE for unit in (name, by_torch(name))},
    "weight accumulated": Unit(*_OTHER),
    "gradient in fp8": Unit(*_OTHER),
    "gradient in bf16": Unit(*_OTHER),
    "parameter updated": Unit("optimizer", "bandwidth"),
    "parameter updated, by torch": Unit("optimizer", "bandwidth"),
    "layer": Unit("host", "host"),
    "BF16 linear": Unit("host", "host"),
    "quantized linear": Unit("host", "host"),
    "linear with outliers": Unit("host", "host"),
    "collective": Unit("host", "host"),
    "collective in C++": Unit("host", "host"),
    "byte over NVLink": Unit("communication", "nvlink"),
    "byte of gradients over NVLink": Unit("communication", "nvlink"),
    "byte over the network": Unit("communication", "network"),
}


class Idle(NamedTuple):
    """The share of a step in which a GPU waits between kernels: with fused kernels outside the
    linears, and with torch's, of which there are more."""

    fused: float
    by_torch: float

    def of(self, layout: Layout) -> float:
        """The share in a layout."""
        return self.fused if layout.fused_kernels else self.by_torch


class Rates(NamedTuple):
    """What the time of a step is computed from.

    seconds: of each unit of work on an H200. idle: see `Idle`. exposed: the share of the
    communication of gradients and weights that computation does not hide. alone: the time of a
    kernel that quantizes in a benchmark of its own, as a share of its time in a step.
    """

    seconds: Mapping[str, float]
    idle: Idle
    exposed: float
    alone: float


# Fitted to committed results.
FITTED: dict[str, float] = {
    "BF16 linear": 0.000467,
    "activation element": 3.85e-12,
    "activation element, by torch": 5.854e-12,
    "attention operation": 2.41e-15,
    "bf16 operation": 1.432e-15,
    "byte of gradients over NVLink": 9.378e-12,
    "byte over NVLink": 3.798e-12,
    "byte quantized": 2.967e-13,
    "collective": 0.0003315,
    "collective in C++": 0.0002184,
    "element by PyTorch": 5.758e-11,
    "element clamped": 1.899e-11,
    "element converted": 4.626e-13,
    "element corrected": 9.548e-14,
    "element decoded": 4.322e-13,
    "element drawn": 2.771e-13,
    "element in a second direction": 3.012e-13,
    "element normed": 1.729e-13,
    "element of SwiGLU's gradient": 1.204e-12,
    "element of four over six": 6.715e-12,
    "element rounded stochastically": 6.843e-14,
    "element rounded to nearest": 4.184e-14,
    "element transformed": 7.548e-13,
    "element transformed, mantissa scale": 2.648e-13,
    "element with a mantissa scale": 2.263e-12,
    "element with a row scale": 2.267e-12,
    "fp8 operation": 7.257e-16,
    "gradient in bf16": 4.168e-12,
    "gradient in fp8": 6.22e-12,
    "layer": 0.001957,
    "linear with outliers": 0.000681,
    "logit": 1.368e-11,
    "logit, by torch": 2.664e-11,
    "parameter": 5.927e-12,
    "parameter updated": 1.064e-11,
    "parameter updated, by torch": 2.12e-11,
    "parameter, by torch": 7.617e-12,
    "quantized linear": 0.000469,
    "query, key or value": 2.178e-12,
    "query, key or value, by torch": 3.733e-11,
    "residual element": 1.02e-11,
    "residual element, by torch": 4.321e-12,
    "weight accumulated": 4.826e-12,
}
# Measured nowhere: a GEMM takes some microseconds to start and end, float32 reaches its peak, and a
# network 80% of its. FP4 tensor cores are assumed to reach the share of their peak that FP8's reach
# on an H200 (`seconds_of`).
ASSUMED = {
    "GEMM": 3e-6,
    "fp32 operation": 1 / MEASURED.fp32,
    "byte over the network": 1 / (0.8 * MEASURED.network),
}
RATES = Rates(FITTED | ASSUMED, Idle(0.0101, 0.0223), exposed=0.503, alone=0.821)


def seconds_of(unit: str, gpu: Gpu, rates: Mapping[str, float]) -> float:
    """Seconds of one unit of work on a GPU. rates: those on an H200."""
    limit = UNITS[unit].limit
    if limit == "host":
        return rates[unit]
    if limit == "fp4":  # no H200 has it
        return rates["fp8 operation"] * MEASURED.fp8 / gpu.fp4
    return rates[unit] * float(getattr(MEASURED, limit)) / float(getattr(gpu, limit))


def seconds(work: Mapping[str, float], gpu: Gpu, rates: Mapping[str, float]) -> Amounts:
    """Seconds of work by kind. work: amounts by unit."""
    found = Amounts()
    for unit, amount in work.items():
        found[UNITS[unit].kind] += amount * seconds_of(unit, gpu, rates)
    return found
