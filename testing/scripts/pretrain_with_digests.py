"""pretrain_gpt.py with all ranks on one GPU, over gloo, and with or without a known mistake.

    torchrun ... pretrain_on_one_gpu.py MISTAKE FLAGS ... --distributed-backend gloo

Each rank writes one line with a digest of its weights after each step. On a GPU torch's operators
are deterministic, so that two runs can be compared bit for bit.

none: no mistake. one-clock: the backward pass of a captured layer reads the step and the microbatch
of the latest forward pass.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.utils import deterministic

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu
from testing.worlds import one_gpu, weights


def main() -> None:
    mistake = sys.argv.pop(1)
    if torch.cuda.is_available():
        _be_deterministic()
    if "gloo" in sys.argv:
        cpu.install_in_torch()
        one_gpu.install()
    cpu.install()
    from megatron_fp4.mcore.model import graphs

    if mistake == "one-clock":
        graphs.Clock.read = lambda self: tuple(self._words[:, 0])  # type: ignore[method-assign]
    else:
        assert mistake == "none"
    weights.tell()
    pretrain.main()


def _be_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Attention by plain products. The other backends sum gradients in any order.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


if __name__ == "__main__":
    main()
