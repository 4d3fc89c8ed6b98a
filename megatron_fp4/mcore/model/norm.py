"""RMSNorm and LayerNorm with sequence parallelism, without Transformer Engine or apex.

Megatron's own fallback, WrappedTorchNorm (megatron/core/transformer/torch_norm.py), supports
neither sequence parallelism nor zero-centered gains.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.execution.norm import before_linear
from megatron_fp4.mcore.launch.refusals import model as refusals
from megatron_fp4.mcore.launch.refusals.table import refuse


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, chosen by `config.normalization`.

    The input is [..., hidden_size] in any floating-point dtype. The norm is computed in FP32 and
    rounded once, to the dtype of the parameters. That differs from the input's dtype only under
    --fp32-residual-connection. With `config.layernorm_zero_centered_gamma` the gain is 1 + weight.
    Under sequence parallelism each rank has a part of the tokens. The attribute `sequence_parallel`
    of the parameters makes Megatron sum their gradients over the tensor-parallel ranks.

    fused: an RMSNorm in one kernel that takes (x, weight, eps, offset), as `liger.rms_norm`; None:
        torch's kernels. It is called for inputs in the dtype of the parameters.
    linear_follows: where the linear behind the norm computes it (`joined_norms`), whether that
        linear follows its recipe in the next forward pass; None elsewhere.

    The arguments are those of Megatron's LayerNormBuilder. Raises ConfigError if
    `config.normalization` is neither RMSNorm nor LayerNorm.
    """

    fused: Callable[[Tensor, Tensor, float, float], Tensor] | None = None
    linear_follows: Callable[[], bool] | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        refuse(refusals.norm(config))
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.full((hidden_size,), float(not self.zero_centered)))
        self.bias = (
            nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMSNorm, and not a LayerNorm."""
        return self.bias is None

    @property
    def rms_norm(self) -> RmsNorm:
        """The norm, if it is an RMSNorm, for a linear that computes it."""
        return RmsNorm(self.weight, self.eps, self.zero_centered)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x. Where the linear computes it: what stands for it, and the residual, which
        Megatron's TransformerLayer takes in this form; see `before_linear`."""
        if self.linear_follows is not None and self.linear_follows():
            return before_linear(x, self.rms_norm)
        return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        if self.fused is not None and x.dtype == self.weight.dtype:
            return self.fused(x, self.weight, self.eps, float(self.zero_centered))
        if x.is_cuda and x.dtype == self.weight.dtype and not self.zero_centered:
            return self._norm(x, self.weight, self.bias)  # torch's CUDA kernel computes in FP32
        gain = widen(self.weight)
        gain = gain + 1 if self.zero_centered else gain
        bias = None if self.bias is None else widen(self.bias)
        return self._norm(widen(x), gain, bias).to(self.weight.dtype)

    def _norm(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, gain.shape, gain, self.eps)
        return F.layer_norm(x, gain.shape, gain, bias, self.eps)
