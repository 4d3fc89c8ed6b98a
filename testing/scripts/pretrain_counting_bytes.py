"""pretrain_gpt.py, after which each rank tells the bytes of its weights, gradients and optimizer.

The averages that linears read count as the optimizer's.

torchrun ... pretrain_counting_bytes.py FLAGS ...

Prints a line "rank R has W bytes of weights, G of gradients, O of the optimizer".
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron.training import training

    made: list[Any] = []
    setup = training.setup_model_and_optimizer

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        made.extend(result[:2])
        return result

    training.setup_model_and_optimizer = kept
    pretrain.main()
    chunks, optimizer = made
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    states = [m.fp4 for chunk in chunks for m in chunk.modules() if getattr(m, "fp4", None)]
    copies = [state.site.average for state in states if state.site.average is not None]
    own = size([*optimizer_tensors(optimizer), *copies])
    counts = size(parameters), size([p.main_grad for p in parameters]), own
    words = "rank {} has {} bytes of weights, {} of gradients, {} of the optimizer\n"
    os.write(1, words.format(os.environ["RANK"], *counts).encode())  # in one piece


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The float32 weights and their state, of all optimizers that Megatron chains."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    found: list[Tensor] = []
    for each in chained:
        inner = each.optimizer
        for group in inner.param_groups:
            for weight in group["params"]:
                moments = [x for x in inner.state[weight].values() if isinstance(x, Tensor)]
                found += [weight, *(x for x in moments if x.dim())]  # without the count of steps
    return found


def size(tensors: list[Tensor]) -> int:
    """The bytes of all tensors. Tensors that begin at the same address count once."""
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors}.values())


if __name__ == "__main__":
    main()
