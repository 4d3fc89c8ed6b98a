"""SwiGLU, the activation of LLaMA's feed-forward blocks (arXiv 2002.05202), and its gradient.

Between the linears fc1 and fc2 it is silu(gate) * up, where gate and up are the left and the right
half of fc1's output and silu(g) = g / (1 + exp(-g)). Both functions compute in float32 and round
once, to the model's dtype; the kernels (kernels/swiglu.py) do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import wide, widen


def swiglu(y: Tensor) -> Tensor:
    """The SwiGLU of y [..., 2 n], of which the left half is the gate: [..., n], in y's dtype."""
    gate, up = widen(y).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(y.dtype)


def swiglu_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    """The gradient of y [..., 2 n], in the dtype of `gradient`.

    gradient: of `swiglu(y)`, [..., n]. y: in the same dtype, or in E4M3.
    """
    given, (gate, up) = widen(gradient), y.to(wide(gradient.dtype)).chunk(2, -1)
    sigmoid = 1 / (1 + torch.exp(-gate))
    slope = sigmoid + gate * sigmoid * (1 - sigmoid)
    return torch.cat([given * up * slope, given * (gate * sigmoid)], -1).to(gradient.dtype)
