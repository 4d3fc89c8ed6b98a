"""Writes the logits of a model that pretrain_gpt.py builds and loads, instead of training it.

    torchrun ... logits.py TOKENS.pt LOGITS.pt <the flags of a launch>

TOKENS.pt: int64 [batch, sequence]. LOGITS.pt: float32 [batch, sequence, rows of the embedding], of
a forward pass in evaluation, whose codes are training's: no dropout, and no step of training that
this package would wait for. One pipeline stage.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    tokens, target = torch.load(sys.argv.pop(1)), Path(sys.argv.pop(1))
    cpu.install()
    from megatron.core import tensor_parallel
    from megatron.training import training

    def write(forward_step: Any, model: list[Any], *others: Any, **more: Any) -> None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        with torch.no_grad():
            device = next(model[0].eval().parameters()).device
            logits = model[0](tokens.to(device), positions.to(device), None)
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        if torch.distributed.get_rank() == 0:
            torch.save(logits.float().cpu(), target)
        raise SystemExit(0)

    training.train = write
    pretrain.main()


if __name__ == "__main__":
    main()
