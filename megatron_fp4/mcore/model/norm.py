"""RMSNorm and LayerNorm that know sequence parallelism, without Transformer Engine or apex.

Megatron's own fallback, WrappedTorchNorm (megatron/core/transformer/torch_norm.py), refuses to run
under sequence parallelism and does not know zero-centred gains.
"""

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.mcore.launch.refusals import model as refusals
from megatron_fp4.mcore.launch.refusals.table import refuse


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, as `config.normalization` says.

    Takes [..., hidden_size] in any floating-point type, computes in FP32 and rounds once, to the
    parameters' type; the two differ under --fp32-residual-connection alone. With
    `config.layernorm_zero_centered_gamma` the gain is 1 + weight. Under sequence parallelism each
    rank sees a part of the tokens; the parameters' `.sequence_parallel` makes Megatron sum their
    gradients over the tensor-parallel ranks.

    Arguments are those of Megatron's LayerNormBuilder. Raises ConfigError for other norms.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype and not self.zero_centered:
            return self._norm(x, self.weight, self.bias)  # the kernel computes in FP32 itself
        gain = widen(self.weight)
        gain = gain + 1 if self.zero_centered else gain
        bias = None if self.bias is None else widen(self.bias)
        return self._norm(widen(x), gain, bias).to(self.weight.dtype)

    def _norm(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, gain.shape, gain, self.eps)
        return F.layer_norm(x, gain.shape, gain, bias, self.eps)
