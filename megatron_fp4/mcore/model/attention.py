"""Core attention that calls torch's scaled_dot_product_attention.

Without Transformer Engine, Megatron uses its DotProductAttention, which writes the
[sequence, sequence] scores to memory several times.
"""

import math

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch.refusals import model as refusals
from megatron_fp4.mcore.launch.refusals.table import refuse

_CUDNN_FIRST = (9, 10)  # major compute capabilities on which torch prefers cuDNN's kernels


class SdpaAttention(MegatronModule):
    """Causal or masked attention, also with grouped queries, for Megatron's SelfAttention.

    It replaces DotProductAttention and computes the same, except for the order of floating-point
    sums. The softmax is always computed in FP32. The output of a query that may attend to no key is
    zero, where upstream's is the average of all values. Dropout draws from Megatron's random state
    for tensor parallelism.

    The arguments are those of DotProductAttention. Raises ConfigError for context parallelism,
    sliding windows, softmax offsets, packed sequences and attention biases.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        refuse(refusals.attention(config, layer_number))
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling needs no code here. With it upstream divides the scores by
        # the layer number to keep them in the range of FP16, and multiplies them again in FP32.
        # Here the scores are in FP32 from the start.
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """The attention's output, [sq, batch, heads * d].

        query: [sq, batch, heads, d]. key, value: [sk, batch, groups, d].
        attention_mask: bool, broadcast to [batch, heads, sq, sk]; True where a query must not
            attend to a key. It is not combined with a causal mask: for causal attention it must
            contain the causal mask. None: causal, or no mask, as `attn_mask_type` says.
        attn_mask_type: replaces the type that was given to the constructor.
        Raises ConfigError if attention_bias or packed_seq_params is given.
        """
        if attention_bias is not None:
            raise ConfigError(refusals.without_te("attention bias"))
        if packed_seq_params is not None:
            raise ConfigError(refusals.without_te("packed sequences"))
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        is_causal = mask_type == AttnMaskType.causal and attention_mask is None and len(query) > 1
        dropout = self.dropout if self.training else 0.0
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=query.size(1) != key.size(1),
            )

        # Under sequence parallelism Megatron already runs the whole layer in the forked state.
        if dropout and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                context = attend()
        else:
            context = attend()
        return torch.flatten(context.permute(2, 0, 1, 3), start_dim=2)


def cudnn_problem() -> str | None:
    """Why torch cannot take cuDNN's attention on this GPU; None if it can, or would not anyway.

    The attention of Hopper and data-center Blackwell GPUs is fastest in cuDNN's kernels. torch
    takes them if the cuDNN that the process has loaded is not older than torch's own. Transformer
    Engine, which Megatron imports where it is installed, may have loaded an older one before.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in _CUDNN_FIRST:
        return None
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        return " ".join(str(error).partition(". ")[0].split())
    return None
