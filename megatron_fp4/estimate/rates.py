"""Seconds of each unit of work on an H200, and how they scale to other GPUs.

`python -m benchmarks.estimate_fit` fits the values of FITTED to committed results; tests compare
this table with that fit. RATES has beside them what was never measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED, Gpu

Limit = Literal["bf16", "fp8", "fp4", "bandwidth", "integer", "nvlink", "network", "host"]


class Unit(NamedTuple):
    """A kind of work whose time is estimated, such as a byte quantized.

    kind: the column of a report in which its time is counted.
    limit: the field of Gpu that limits its speed: on a GPU with twice that value it takes half the
        time. "host" is no such field; the time is then the same on every GPU.
    """

    kind: str
    limit: Limit


_ROUNDED: tuple[str, Limit] = ("quantize", "integer")
_OTHER: tuple[str, Limit] = ("other", "bandwidth")
UNITS: dict[str, Unit] = {
    "bf16 operation": Unit("gemm", "bf16"),
    "fp8 operation": Unit("gemm", "fp8"),
    "fp4 operation": Unit("gemm", "fp4"),
    "GEMM": Unit("gemm", "host"),
    "attention operation": Unit("attention", "bf16"),
    "byte quantized": Unit("quantize", "bandwidth"),
    "element rounded to nearest": Unit(*_ROUNDED),
    "element rounded stochastically": Unit(*_ROUNDED),
    "element transformed": Unit(*_ROUNDED),
    "element decoded": Unit(*_ROUNDED),
    "element in a second direction": Unit(*_ROUNDED),
    "element with a row scale": Unit(*_ROUNDED),
    "element clamped": Unit(*_ROUNDED),
    "element by PyTorch": Unit("quantize", "bandwidth"),
    "element converted": Unit("quantize", "bandwidth"),
    "element corrected": Unit("quantize", "bandwidth"),
    "activation element": Unit(*_OTHER),
    "query, key or value": Unit(*_OTHER),
    "residual element": Unit(*_OTHER),
    "logit": Unit(*_OTHER),
    "weight accumulated": Unit(*_OTHER),
    "parameter": Unit(*_OTHER),
    "parameter updated": Unit("optimizer", "bandwidth"),
    "layer": Unit("host", "host"),
    "BF16 linear": Unit("host", "host"),
    "quantized linear": Unit("host", "host"),
    "linear with outliers": Unit("host", "host"),
    "collective": Unit("host", "host"),
    "byte over NVLink": Unit("communication", "nvlink"),
    "byte of gradients over NVLink": Unit("communication", "nvlink"),
    "byte over the network": Unit("communication", "network"),
}


class Rates(NamedTuple):
    """What the time of a step is computed from.

    seconds: of each unit of work on an H200. idle: the share of a step in which a GPU waits between
    kernels. exposed: the share of the communication of gradients and weights that computation does
    not hide.
    """

    seconds: Mapping[str, float]
    idle: float
    exposed: float


# Fitted to committed results.
FITTED: dict[str, float] = {
    "BF16 linear": 0.0001994,
    "activation element": 5.854e-12,
    "attention operation": 2.36e-15,
    "bf16 operation": 1.397e-15,
    "byte of gradients over NVLink": 9.181e-12,
    "byte over NVLink": 3.982e-12,
    "byte quantized": 2.396e-13,
    "collective": 0.0007742,
    "element by PyTorch": 5.758e-11,
    "element clamped": 2.266e-11,
    "element converted": 5.299e-13,
    "element corrected": 1.292e-13,
    "element decoded": 2.691e-13,
    "element in a second direction": 2.619e-13,
    "element rounded stochastically": 2.653e-13,
    "element rounded to nearest": 2.97e-14,
    "element transformed": 6.09e-13,
    "element with a row scale": 3.709e-12,
    "fp8 operation": 7.249e-16,
    "layer": 0.003027,
    "linear with outliers": 0.002972,
    "logit": 2.664e-11,
    "parameter": 7.617e-12,
    "parameter updated": 2.12e-11,
    "quantized linear": 0.001034,
    "query, key or value": 3.733e-11,
    "residual element": 4.321e-12,
    "weight accumulated": 4.278e-12,
}
# Measured nowhere: a GEMM takes some microseconds to start and end, and a network reaches 80% of
# its peak. FP4 tensor cores are assumed to reach the share of their peak that FP8's reach on an
# H200 (`seconds_of`).
ASSUMED = {"GEMM": 3e-6, "byte over the network": 1 / (0.8 * MEASURED.network)}
RATES = Rates(FITTED | ASSUMED, idle=0.0223, exposed=0.528)


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
