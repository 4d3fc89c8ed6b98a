"""A fork whose layers multiply by torch's linears alone, which follow no recipe."""

from functools import partial
from typing import Any

import torch
from layers import block
from provider import main


class Dense(torch.nn.Linear):
    def __init__(self, inputs: int, outputs: int, *, config: Any, **named: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x: Any) -> Any:
        return super().forward(x), None


if __name__ == "__main__":
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    main(partial(block, **dict.fromkeys(names, Dense)))
