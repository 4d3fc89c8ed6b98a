"""pretrain_gpt.py with pretended CUDA graphs on a CPU. Each rank prints a digest of each step."""
from __future__ import annotations

import hashlib
import sys
from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    import torch
    from megatron.training import training
    from testing.kernels import pretend_graphs

    pretend_graphs.install()
    upstream = training.train_step

    def train_step(forward_step: Any, iterator: Any, model: Any, *others: Any, **named: Any) -> Any:
        found = upstream(forward_step, iterator, model, *others, **named)
        digest = hashlib.sha256()
        for chunk in model:
            for weight in chunk.parameters():
                digest.update(weight.detach().view(torch.uint8).numpy().tobytes())
        step = training.get_args().curr_iteration + 1
        sys.stderr.write(f"weights of step {step} on rank {torch.distributed.get_rank()}: {digest.hexdigest()[:16]}\n")
        return found

    training.train_step = train_step
    pretrain.main()


if __name__ == "__main__":
    main()
