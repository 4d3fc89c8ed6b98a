"""On a GPU: Adam's moments in few bits are updated without float32 copies, and resume exactly."""

from pathlib import Path

import pytest
import torch

from megatron_fp4.arithmetic import low_bit
from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW, Update
from testing.low_bit import OPTIONS, owned
from testing.worlds.launch import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FLAGS = "--bf16 --hidden-size 128 --ffn-hidden-size 256 --fp4-recipe tetrajet".split()
LOW = "--fp4-optimizer-state m=fp8,v=fp16".split()
CASES = {
    "alone": "",
    "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fully-reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    "graphs": "--cuda-graph-impl local",
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    flags = (*FLAGS, *LOW, *CASES[name].split(), "--save", str(tmp_path), "--save-interval", "2")
    whole = train(1, *flags)
    again = train(1, *flags, "--load", str(tmp_path), "--ckpt-step", "2")
    assert again.losses == whole.losses[2:] and len(again.losses) == 2
    assert whole.losses != train(1, *FLAGS, *CASES[name].split()).losses


def peak(update: Update) -> int:
    """The bytes that a step of 2^24 elements takes beside weight, gradient and state."""
    weight = torch.nn.Parameter(torch.randn(2**24, device="cuda"))
    optimizer = LowBitAdamW([weight], update=update, **OPTIONS)
    optimizer.place(weight, owned("w"))
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return torch.cuda.max_memory_allocated() - before


def test_a_step_makes_no_moment_in_float32() -> None:
    from megatron_fp4.kernels import low_bit_adamw

    assert peak(low_bit_adamw.step) < 4 * 2**24 / 100
    assert peak(low_bit.step) > 4 * 2**24  # the control: torch's operations
