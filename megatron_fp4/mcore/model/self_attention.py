"""Megatron's SelfAttention whose rotary embedding can be one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

if TYPE_CHECKING:
    from megatron_fp4.mcore.model.rotary import Rotation


class Unsplit(NamedTuple):
    """QKV as the projection writes it.

    mixed: [sequence, batch, groups, (n + 2) * d]. Each group has n query heads, then a key head,
    then a value head. d: the elements of a head.
    """

    mixed: Tensor
    d: int

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value), [sequence, batch, heads, d] each, as upstream splits it."""
        mixed, d = self.mixed, self.d
        query, key, value = torch.split(mixed, [mixed.shape[-1] - 2 * d, d, d], dim=3)
        return query.reshape(*query.shape[:2], -1, d), key, value


class RotatingSelfAttention(SelfAttention):
    """SelfAttention that rotates query and key by `rotation`, if that is set.

    rotation: None: upstream splits QKV and rotates query and key by several of torch's kernels.

    Parameters and checkpoints are upstream's.
    """

    rotation: Rotation | None = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Upstream's, or (Unsplit, None, None) where `rotation` is to split QKV as it rotates.

        Upstream passes all three on to `_adjust_key_value_for_inference`, and to nothing else.
        """
        upstream = super().get_query_key_value_tensors
        if not split_qkv or output_gate or not self._rotates_as_it_splits():
            return upstream(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, sizes = upstream(hidden_states, key_value_states, output_gate, split_qkv=False)
        return Unsplit(mixed, sizes[-1]), None, None

    def _rotates_as_it_splits(self) -> bool:
        """Whether nothing else is done to the heads between the split and the rotation."""
        if self.rotation is None or self.config.test_mode or self.config.flash_decode:
            return False
        if self.config.num_query_groups < self.world_size:  # a rank has some heads of a group
            return False
        norms = self.q_layernorm, self.k_layernorm
        return all(norm is None or isinstance(norm, IdentityOp) for norm in norms)

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: Any,
        key: Any,
        value: Any,
        rotary_pos_emb: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        # Upstream's forward calls this between the split of QKV and the rotary embedding, which it
        # leaves out if this returns no angles.
        length = len(query.mixed if isinstance(query, Unsplit) else query)
        angles = self._angles(inference_context, rotary_pos_emb, length)
        if angles is not None:
            query, key, value = self._rotated(query, key, value, angles)
            rotary_pos_emb = None
        elif isinstance(query, Unsplit):
            query, key, value = query.split()
        return super()._adjust_key_value_for_inference(
            inference_context, query, key, value, rotary_pos_emb, *others, **named
        )

    def _angles(self, inference_context: Any, rotary_pos_emb: Any, length: int) -> Tensor | None:
        """The angles by which `rotation` rotates query and key; None if it does not rotate them.

        length: of the sequence.
        """
        if self.rotation is None or inference_context is not None or rotary_pos_emb is None:
            return None
        of_query, of_key = rotary_pos_emb
        if of_query is None or of_query is not of_key:
            return None
        # Packed sequences, which attention refuses later, have fewer angles.
        return of_query if len(of_query) == length else None

    def _rotated(
        self, query: Any, key: Any, value: Any, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.rotation is not None
        scale = self._yarn_concentration_factor
        if isinstance(query, Unsplit):
            return self.rotation.split(query.mixed, query.d, angles, scale)
        # The value is a part of the projection's output, which lives as long as it does. A copy of
        # it frees the rest.
        query, key = (self.rotation.heads(each, angles, scale) for each in (query, key))
        return query, key, value.contiguous()
