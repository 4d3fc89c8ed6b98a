"""What benchmarks.training_step says of a GPU's time, and of launches that fail."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from benchmarks import training_step
from benchmarks.training_step import asked
from benchmarks.training_step_worker import covered, exposed_ms, kind

KERNELS = Path(__file__).parents[2] / "megatron_fp4/kernels"


def test_every_kernel_of_the_package_is_told_apart() -> None:
    found = {
        name: kind(name)
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found.pop("product_kernel") == "other"  # a GEMM on Blackwell, which has no such profile
    assert found.pop("probe_kernel") == "other"  # it is compiled, and never launched
    # Of averages of weights, of Q-Ramping, of moments in few bits.
    for name in ("blend_kernel", "ramp_kernel", "adamw_kernel"):
        assert found.pop(name) == "optimizer"
    for name in ("swiglu_kernel", "swiglu_gradient_kernel"):  # where no quantize kernel does it
        assert found.pop(name) == "swiglu"
    for name in [name for name in found if name.startswith("rms_norm")]:
        assert found.pop(name) == "norm"
    assert found.pop("rotary_kernel") == "rotary"
    # Of gradients on their way between ranks.
    for name in ("encode_kernel", "sum_kernel", "encode_sums_kernel"):
        assert found.pop(name) == "gradients"
    assert len(found) >= 10 and set(found.values()) == {"quantize", "carry"}, found
    assert kind("void at::native::vectorized_elementwise_kernel<4>") == "other"
    assert kind("nvjet_sm90_qqtst_128x256") == "gemm"


def test_a_launch_that_fails_leaves_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, flags: list[str]) -> dict[str, Any]:
        if name == "mxfp4":
            raise RuntimeError(f"{name} failed: out of memory")
        return {"name": name, "ms": 2.0, "ranks": [{"peak_gib": 1.0}]}

    monkeypatch.setattr(training_step, "measure", measure)
    rows = list(training_step.study(["bf16", "mxfp4", "tetrajet"], layers=1, micro=1, batch=1))
    assert [row["name"] for row in rows] == ["bf16", "tetrajet"]
    assert capsys.readouterr().err == "mxfp4 failed: out of memory\n"


def test_kernels_outside_the_linears_are_told_apart() -> None:
    """By the names of this package, of Liger-Kernel 0.8.5, of torch, and of TorchInductor."""
    names = {
        "rotary_kernel": "rotary",
        "_swiglu_fused_gate_up_backward_kernel": "swiglu",
        "_rms_norm_forward_kernel": "norm",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel": "norm",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate": "norm",
        "liger_vocab_parallel_ce_forward_kernel": "cross-entropy",
        "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "triton_poi_fused_mul_silu_split_0": "other",
    }
    assert {name: kind(name) for name in names} == names


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(3, 5)], 2),
        ([(7, 8), (0, 2)], 3),  # apart, in any order
        ([(0, 2), (2, 3)], 3),  # that touch
        ([(0, 4), (3, 6)], 6),  # that overlap
        ([(0, 9), (2, 3), (5, 7)], 9),  # one in another: the end that counts is not the last one's
        ([(0, 9), (2, 3), (8, 12)], 12),
        ([(1, 2), (1, 2), (1, 1)], 1),  # the same, and an empty one
    ],
)
def test_the_length_of_a_union(intervals: list[tuple[float, float]], length: float) -> None:
    assert covered(intervals) == length


def event(name: str, start: float, end: float, **changed: Any) -> Any:
    """An event as torch's profiler tells it; times in microseconds."""
    # The profiler's device types are objects of their own, equal to those of the enumeration.
    usual = {"device_type": DeviceType(DeviceType.CUDA.value), "is_user_annotation": False}
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, **usual | changed)


NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
HIDDEN = [
    event("nvjet_sm90", 0, 4000),
    event(NCCL, 1000, 3000),  # all of it beside the GEMM
    event(NCCL, 3000, 7000),  # beside it to 4000, alone to 6000
    event("adamw_kernel", 6000, 7000),
    event(NCCL, 8000, 9000),  # alone
]


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    assert exposed_ms(HIDDEN) == 3
    assert exposed_ms(HIDDEN[:2]) == 0
    assert exposed_ms([*HIDDEN, event(NCCL, 4500, 8500)]) == 4  # 4000-6000 and 7000-9000


def test_ranges_and_the_host_hide_no_communication() -> None:
    named = event("nccl:reduce_scatter", 4000, 20000, is_user_annotation=True)
    host = event("cudaLaunchKernel", 4000, 20000, device_type=DeviceType.CPU)
    assert exposed_ms([*HIDDEN, named, host]) == exposed_ms(HIDDEN)
    assert exposed_ms([*HIDDEN, event("nvjet_sm90", 4000, 20000)]) == 0  # a kernel does


def test_rows_of_bf16_take_further_flags_too() -> None:
    more = ["--activation-func-fp8-input-store", "--seed", "2"]
    for name in ("bf16", "upstream bf16, graphs", "tetrajet"):
        assert asked(" ".join([name, *more])) == [*asked(name), *more]
