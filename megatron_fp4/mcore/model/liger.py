"""Liger-Kernel's autograd functions, for tensors as Megatron lays them out.

Import this module only where the package liger_kernel is installed. Its kernels are Triton's, and
each computes in FP32 and rounds its result once, except that `swiglu` rounds SiLU of the gate too.
"""

from __future__ import annotations

from weakref import ref

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction
from torch import Tensor
from torch.distributed import ProcessGroup

_NOT_IGNORED = -100  # a target that Liger leaves out; Megatron masks such losses itself


class _Tables:
    """Cosine and sine, float32 [tokens, rotated / 2] each, of the angles that were asked for last.

    All layers of a model rotate by the same tensor of angles, and so compute and save them once.
    """

    def __init__(self) -> None:
        self._angles: ref[Tensor] | None = None
        self._form: tuple[int | float, ...] = ()
        self._made: tuple[Tensor, Tensor]

    def of(
        self, angles: Tensor, sequence: int, batch: int, rotated: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """For [sequence, batch] tokens. The other arguments are those of `rotate`."""
        # What is made in inference mode has no version, and cannot be saved for a backward pass.
        if angles.is_inference() or torch.is_inference_mode_enabled():
            return self._computed(angles, sequence, batch, rotated, scale)
        form = angles._version, sequence, batch, rotated, scale
        if self._angles is not None and self._angles() is angles and self._form == form:
            return self._made
        made = self._computed(angles, sequence, batch, rotated, scale)
        # The memory of a captured graph is used again by its other replays.
        if not (angles.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._angles, self._form, self._made = ref(angles), form, made
        return made

    @staticmethod
    def _computed(
        angles: Tensor, sequence: int, batch: int, rotated: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        halves = angles[..., 0, : rotated // 2].float().expand(sequence, batch, -1).flatten(0, 1)
        return torch.cos(halves) * scale, torch.sin(halves) * scale


_tables = _Tables()


def rotate(query: Tensor, key: Tensor, freqs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(query, key) with rotary embedding in the first `freqs.shape[-1]` elements of each head.

    query: [sequence, batch, heads, d]. key: [sequence, batch, groups, d]. freqs: the angles,
    [sequence, batch or 1, 1, rotated elements], whose two halves are equal: element i is rotated
    with the element half of them further. scale: of cosine and sine.

    A contiguous query or key is overwritten, as are their gradients in backward. The caller must
    not need them.
    """
    (sequence, batch), rotated = query.shape[:2], freqs.shape[-1]
    # Liger takes the distance between tokens from the stride of its second axis of tokens, which
    # torch may set to anything where that axis has one element. So all tokens are on that axis.
    tables = _tables.of(freqs, sequence, batch, rotated, scale)
    heads = [t.flatten(0, 1).transpose(0, 1).unsqueeze(0) for t in (query, key)]
    turned = LigerRopeFunction.apply(*heads, *tables, None, 1, rotated)
    # The backward pass of an index such as t[0] would copy the gradient to zeros, in another order.
    made = [t.squeeze(0).transpose(0, 1).unflatten(0, (sequence, batch)) for t in turned]
    return made[0], made[1]


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
