"""Liger-Kernel's autograd functions, for tensors as Megatron lays them out.

Import this module only where the package liger_kernel is installed. Its kernels are Triton's, and
each computes in FP32 and rounds its result once, except that `swiglu` rounds SiLU of the gate too.
"""

from __future__ import annotations

from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction
from torch import Tensor
from torch.distributed import ProcessGroup

_NOT_IGNORED = -100  # a target that Liger leaves out; Megatron masks such losses itself


def swiglu(gate_and_up: Tensor) -> Tensor:
    """SiLU(gate) * up, [..., n], of [..., 2 n] whose first half is the gate.

    Backward overwrites `gate_and_up` with its gradient. The caller must not need it then.
    """
    rows = gate_and_up.view(-1, gate_and_up.shape[-1])
    in_place = True
    product: Tensor = LigerFusedGateUpSiLUMulFunction.apply(rows, in_place)
    return product.view(*gate_and_up.shape[:-1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last axis with the gain `offset` + weight. x: of the weight's dtype."""
    everything_in_fp32, in_place = "gemma", False
    y: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, everything_in_fp32, in_place)
    return y


def cross_entropy(group: ProcessGroup, labels: Tensor, logits: Tensor) -> Tensor:
    """The loss of each token, float32 [batch, sequence], for Megatron's language models.

    group: the ranks that share the vocabulary. labels: [batch, sequence], in the whole vocabulary.
    logits: [sequence, batch, this rank's part of the vocabulary].
    """
    smoothing = (0.0, "megatron", "partition")
    losses: Tensor = LigerVocabParallelCEFunction.apply(
        logits, labels.transpose(0, 1).contiguous(), group, _NOT_IGNORED, *smoothing
    )
    return losses.transpose(0, 1).contiguous()
