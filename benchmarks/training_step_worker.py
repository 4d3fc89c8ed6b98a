"""One rank of benchmarks/training_step.py: pretrain_gpt.py, with one step profiled.

torchrun training_step_worker.py <Megatron's flags>
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_fp4.mcore import cpu, pretrain

# Whose name holds one of these, in this order.
KINDS = {
    "quantize": ("quantize_kernel",),
    "carry": ("carry_kernel",),
    "attention": ("fmha", "flash", "attention", "cudnn"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "wgrad", "cublas"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "communication": ("nccl",),
    "copies": ("memcpy", "memset"),
}
found: dict[str, Any] = {}


def kind(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return "other"


def profiled(train_step: Any) -> Any:
    """Megatron's train_step, which profiles one step."""
    steps = iter(range(1 << 30))

    def step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) != int(os.environ["PROFILED_STEP"]):
            return train_step(*args, **kwargs)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            done = train_step(*args, **kwargs)
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        largest = []
        for event in profiler.key_averages():
            ms = event.self_device_time_total / 1e3
            totals[kind(event.key)] = totals.get(kind(event.key), 0.0) + ms
            largest.append((round(ms, 2), event.count, event.key[:70]))
        found["gpu_ms"] = {name: round(ms, 2) for name, ms in totals.items() if ms}
        found["largest"] = sorted(largest, reverse=True)[:25]
        return done

    return step


def main() -> None:
    cpu.install()
    from megatron.training import training

    training.train_step = profiled(training.train_step)
    pretrain.main()
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if int(os.environ["RANK"]) == 0:
        print(f"benchmark: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
