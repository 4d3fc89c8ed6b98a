"""What benchmarks.training_step says of a GPU's time."""

import re
from pathlib import Path

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
