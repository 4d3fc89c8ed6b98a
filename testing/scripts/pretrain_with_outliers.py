"""pretrain_gpt.py, in whose step 7 some elements of a weight are far larger than the others.

Each block of 32 of the first layer's linear_fc1 has one, which makes most of the others zero.
"""

from __future__ import annotations

from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

STEP = 7
NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def main() -> None:
    cpu.install()
    from megatron.training import training

    upstream = training.train_step

    def train_step(forward_step: Any, iterator: Any, model: Any, *others: Any, **named: Any) -> Any:
        if training.get_args().curr_iteration + 1 == STEP:
            for name, weight in model[0].named_parameters():
                if name.endswith(NAME):
                    weight.data[:, ::32] *= 64
        return upstream(forward_step, iterator, model, *others, **named)

    training.train_step = train_step
    pretrain.main()


if __name__ == "__main__":
    main()
