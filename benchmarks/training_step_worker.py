"""One rank of benchmarks/training_step.py.

It runs pretrain_gpt.py, profiles one step, and counts the bytes sent in another.

    torchrun -m benchmarks.training_step_worker <Megatron's flags>
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import te
from benchmarks.traffic import Traffic
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

# A kernel is of the first kind of which a word occurs in its name.
KINDS = {
    "quantize": (
        *("quantize_kernel", "transform_kernel", "top_kernel", "largest_kernel", "cast_kernel"),
        *("row_kernel", "split_kernel", "dense_kernel", "factor_kernel", "signs_kernel"),
        "restore_kernel",
        *("cast_transpose", "amax", "unary_kernel", "transpose_optimized"),  # Transformer Engine's
    ),
    "carry": (
        "carry_kernel",
        "elements_kernel",
        "transpose_kernel",
        "decode_kernel",
        "scale_kernel",
    ),
    "attention": ("fmha", "flash", "attention", "cudnn"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "wgrad", "cublas"),
    "optimizer": ("multi_tensor", "adam", "foreach", "blend_kernel", "ramp_kernel"),
    "rotary": ("rotary_kernel",),
    "swiglu": ("swiglu",),
    "norm": ("rms_norm", "layer_norm", "gammabeta"),
    "cross-entropy": ("parallel_ce", "cross_entropy"),
    "gradients": ("encode_kernel", "sum_kernel", "sums_kernel"),  # on their way between ranks
    "communication": ("nccl",),
    "copies": ("memcpy", "memset"),
}
# Only GPU time is reported. Without a GPU the profiler runs on the CPU, and there is none.
ACTIVITY = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
found: dict[str, Any] = {}
Interval = tuple[float, float]  # start and end


def kind(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return "other"


def watched(train_step: Any) -> Any:
    """Megatron's train_step, wrapped: profiles one step, and counts the bytes of another."""
    steps = itertools.count()

    def step(*args: Any, **kwargs: Any) -> Any:
        number = next(steps)
        if number == int(os.environ["PROFILED_STEP"]):
            torch.cuda.synchronize()
            with profile(activities=[ACTIVITY]) as profiler:
                done = train_step(*args, **kwargs)
                torch.cuda.synchronize()
            tell(profiler)
            return done
        if number == int(os.environ["COUNTED_STEP"]):
            with Traffic() as traffic:
                done = train_step(*args, **kwargs)
            found["sent"] = traffic.sent
            return done
        return train_step(*args, **kwargs)

    return step


def tell(profiler: profile) -> None:
    """Records the GPU time by kind of kernel, the kernels that took most of it, and the time of
    communication that nothing else hides."""
    totals: dict[str, float] = {}
    largest = []
    for event in profiler.key_averages():
        if event.is_user_annotation:  # a named range; its kernels have events of their own
            continue
        ms = event.self_device_time_total / 1e3
        totals[kind(event.key)] = totals.get(kind(event.key), 0.0) + ms
        largest.append((round(ms, 2), event.count, event.key[:70]))
    found["gpu_ms"] = {name: round(ms, 2) for name, ms in totals.items() if ms}
    found["largest"] = sorted(largest, reverse=True)[:25]
    found["exposed_ms"] = round(exposed_ms(profiler.events()), 2)


def on_gpu(events: Any) -> list[Any]:
    """The events of what ran on the GPU: kernels and copies, without named ranges around them."""
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def exposed_ms(events: Any) -> float:
    """The milliseconds in which kernels of communication ran on the GPU, and no other kernel.

    events: of the profiler, with times in microseconds.
    """
    communication, others = list[Interval](), list[Interval]()
    for event in on_gpu(events):
        into = communication if kind(event.name) == "communication" else others
        into.append((event.time_range.start, event.time_range.end))
    return (covered(communication + others) - covered(others)) / 1e3


def covered(intervals: list[Interval]) -> float:
    """The length of the union of the intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def stand_ins(words: list[str]) -> list[str]:
    """The folders of stand-ins for a launch with these flags: one if the linears are Transformer
    Engine's, which add dW to main_grad in the GEMM only where Megatron finds Apex."""
    its_linears = te.LAYERS[-1] in words and "--fp4-recipe" not in words
    return [str(Path(__file__).parent / "stand_ins")] if its_linears else []


def main() -> None:
    cpu.install()
    sys.path += stand_ins(sys.argv)  # after Apex, if that is installed
    from megatron.training import training

    training.train_step = watched(training.train_step)
    pretrain.main()
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    Path(os.environ["FOUND"], os.environ["RANK"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
