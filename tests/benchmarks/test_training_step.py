"""What benchmarks.training_step says of a GPU's time, and of launches that fail."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_step
from benchmarks.training_step_worker import kind

KERNELS = Path(__file__).parents[2] / "megatron_fp4/kernels"


def test_every_kernel_of_the_package_is_told_apart() -> None:
    found = {
        name: kind(name)
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found.pop("product_kernel") == "other"  # a GEMM on Blackwell, which has no such profile
    # Of averages of weights, of Q-Ramping, of moments in few bits.
    for name in ("blend_kernel", "ramp_kernel", "adamw_kernel"):
        assert found.pop(name) == "optimizer"
    for name in ("swiglu_kernel", "swiglu_gradient_kernel"):  # where no quantize kernel does it
        assert found.pop(name) == "swiglu"
    for name in [name for name in found if name.startswith("rms_norm")]:
        assert found.pop(name) == "norm"
    assert found.pop("rotary_kernel") == "rotary"
    for name in ("encode_kernel", "sum_kernel"):  # of gradients on their way between ranks
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
