"""GPUs as data: published peaks, from which rates measured on an H200 are scaled."""

from __future__ import annotations

from typing import NamedTuple

from megatron_fp4.errors import ConfigError
from megatron_fp4.target import Target, gpu_named


class Gpu(NamedTuple):
    """A GPU of a data center, in the form with NVLink.

    architecture: as nvcc names it. memory: GiB that torch can allocate. bf16, fp8, fp4: dense
    tensor-core FLOP/s; 0 if it has none. bandwidth: bytes/s of its memory. nvlink: bytes/s in one
    direction. network: bytes/s of the network adapter for one GPU in usual hosts. integer: SMs
    times clock (GHz), which limits rounding.
    """

    name: str
    architecture: str
    memory: float
    bf16: float
    fp8: float
    fp4: float
    bandwidth: float
    nvlink: float
    network: float
    integer: float

    @property
    def fp32(self) -> float:
        """FLOP/s of its units for float32: 128 multiply-adds a clock of each SM."""
        return 2 * 128e9 * self.integer

    @property
    def target(self) -> Target:
        """The Target for which linears are planned."""
        return gpu_named(self.architecture)


# NVIDIA's data sheets, without sparsity; memory as torch reports it, of a B200 and B300 as
# nvidia-smi does.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", "sm_80", 79.1, 312e12, 0, 0, 2.04e12, 300e9, 25e9, 108 * 1.41),
        Gpu("h100", "sm_90", 79.1, 989e12, 1979e12, 0, 3.35e12, 450e9, 50e9, 132 * 1.98),
        Gpu("h200", "sm_90", 139.8, 989e12, 1979e12, 0, 4.8e12, 450e9, 50e9, 132 * 1.98),
        Gpu("b200", "sm_100", 178.0, 2250e12, 4500e12, 9000e12, 8e12, 900e9, 50e9, 148 * 1.96),
        Gpu("b300", "sm_103", 267.0, 2250e12, 4500e12, 14e15, 8e12, 900e9, 100e9, 148 * 1.92),
    )
}
MEASURED = GPUS["h200"]


def find(name: str) -> Gpu:
    """The GPU of a name, such as "h200". Raises ConfigError for an unknown name."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu {name} is not known: give one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
