"""Core attention over torch's scaled_dot_product_attention.

Megatron's own without Transformer Engine, DotProductAttention, writes the [sequence, sequence]
scores to memory several times over.
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


class SdpaAttention(MegatronModule):
    """Causal or masked attention with grouped queries, for Megatron's SelfAttention.

    A drop-in for DotProductAttention, equal to it but for the order of floating-point sums; the
    softmax is always in FP32. A query that may see no key at all gets zeros, where upstream gives
    it the average of all values. Dropout draws from the tensor-parallel random stream. Raises
    ConfigError for what it does not do: context parallelism, windows, softmax offsets, packed
    sequences, attention bias.
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
        # apply_query_key_layer_scaling needs nothing here: upstream divides the scores by the layer
        # number, and multiplies them again in FP32, where these scores are from the start.
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
        """[sq, batch, heads, d], twice [sk, batch, groups, d] → [sq, batch, heads·d].

        `attention_mask` is boolean, True where a query must not look, and broadcasts to
        [batch, heads, sq, sk]. A given mask stands alone; a causal one must hold the causal part.
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

        if dropout and not self.config.sequence_parallel:  # with it, the whole layer runs forked
            with get_cuda_rng_tracker().fork():
                context = attend()
        else:
            context = attend()
        return torch.flatten(context.permute(2, 0, 1, 3), start_dim=2)
