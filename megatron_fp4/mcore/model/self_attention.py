"""Megatron's SelfAttention whose rotary embedding can be one kernel."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class RotatingSelfAttention(SelfAttention):
    """SelfAttention that hands query and key to `rotate` together, if that is set.

    rotate: (query, key, freqs, scale) -> (query, key), as `liger.rotate`; None: upstream rotates
        each of them by several of torch's kernels. It may overwrite them: they are this module's
        own, and no other operation keeps the query or the key before it is rotated.

    Parameters and checkpoints are upstream's.
    """

    rotate: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        # Upstream's forward calls this between the split of QKV and the rotary embedding, which it
        # leaves out if this returns no angles.
        if self.rotate is not None and inference_context is None and rotary_pos_emb is not None:
            of_query, of_key = rotary_pos_emb
            if of_query is of_key and of_query is not None:
                scale = self._yarn_concentration_factor
                query, key = self.rotate(query, key, of_query, scale)
                # The value is a part of the projection's output, which lives as long as it does.
                # Query and key have memory of their own by now, so that a copy of the value frees
                # the rest.
                value = value.contiguous()
                rotary_pos_emb = None
        return super()._adjust_key_value_for_inference(
            inference_context, query, key, value, rotary_pos_emb, *others, **named
        )
