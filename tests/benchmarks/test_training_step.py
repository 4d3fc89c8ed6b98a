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
    for name in ("blend_kernel", "ramp_kernel"):  # of averages of weights, of Q-Ramping
        assert found.pop(name) == "optimizer"
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
