"""Rotary embedding that splits QKV, in Megatron's attention. `rotary.py`'s kernel has tests in
tests/kernels."""

from __future__ import annotations

import pickle
from argparse import Namespace
from copy import deepcopy
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_fp4.kernels import rotary
from megatron_fp4.mcore.model.attention import SdpaAttention
from megatron_fp4.mcore.model.rotary import Rotation, _Tables
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention, Unsplit
from testing.builders import small_gpt
from testing.builders.small_gpt import losses_and_gradients

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}


class TorchRotation(Rotation):
    """By torch's operators, as Megatron rotates. seen: the method of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def split(
        self, mixed: Tensor, d: int, angles: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append("split")
        query, key, value = Unsplit(mixed, d).split()
        turned = [_apply_rotary_pos_emb_bshd(t, angles, mscale=scale) for t in (query, key)]
        return turned[0], turned[1], value.contiguous()

    def heads(self, t: Tensor, angles: Tensor, scale: float) -> Tensor:
        self.seen.append("heads")
        return _apply_rotary_pos_emb_bshd(t, angles, mscale=scale)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # of Megatron's embedding


def built(**options: Any) -> MegatronModule:
    plain = dict(num_query_groups=2, hidden_dropout=0.0, attention_dropout=0.0)
    return small_gpt.build(small_gpt.config(**SIZES | plain | options), 96, 16)


def give(model: MegatronModule, rotation: Rotation) -> None:
    for module in model.modules():
        if isinstance(module, RotatingSelfAttention):
            module.rotation = rotation


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, ["split"] * 2),
        ({"num_query_groups": 4}, ["split"] * 2),
        ({"qk_layernorm": True}, ["heads"] * 4),  # what is normed was split before
    ],
)
def test_a_model_learns_what_it_does_without(
    options: dict[str, Any], seen: list[str], one_rank: None
) -> None:
    model, rotation = built(**options), TorchRotation()
    for weight in model.parameters():
        weight.data.mul_(3)  # so that scores differ
    wanted = losses_and_gradients(model)
    give(model, rotation)
    found = losses_and_gradients(model)
    assert rotation.seen == seen
    for each, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, expected)
    # Negative control: a key that is not rotated.
    give(model, OfQueries())
    assert not torch.allclose(losses_and_gradients(model)[0], wanted[0])


class OfQueries(TorchRotation):
    """A known mistake: it rotates no key."""

    def split(
        self, mixed: Tensor, d: int, angles: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = super().split(mixed, d, angles, scale)[0]
        return query, *super().split(mixed, d, 0 * angles, scale)[1:]

    def heads(self, t: Tensor, angles: Tensor, scale: float) -> Tensor:
        return super().heads(t, angles * (t.shape[2] == 4), scale)  # a query has four heads


def test_what_is_not_rotated_is_split_as_upstream_splits_it(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is an inference context, or angles of query and of key."""
    model, rotation = built(), TorchRotation()
    wanted = losses_and_gradients(model)
    give(model, rotation)
    monkeypatch.setattr(RotatingSelfAttention, "_angles", lambda self, *given: None)
    assert all(map(torch.equal, losses_and_gradients(model), wanted))
    assert not rotation.seen


def test_only_equal_angles_in_training_are_rotated_by() -> None:
    attention = RotatingSelfAttention.__new__(RotatingSelfAttention)
    angles, other = torch.ones(2), torch.ones(2)
    same = angles, angles
    assert attention._angles(None, same, 2) is None
    attention.__dict__["rotation"] = TorchRotation()
    assert attention._angles(None, same, 2) is angles
    for context, given, length in (
        (object(), same, 2),
        (None, (angles, other), 2),
        (None, (None, None), 2),
        (None, None, 2),
        (None, same, 3),  # packed sequences
    ):
        assert attention._angles(context, given, length) is None


def test_what_changes_heads_before_their_rotation_splits_qkv() -> None:
    class Norm:
        pass

    def splits(**values: Any) -> bool:
        attention = RotatingSelfAttention.__new__(RotatingSelfAttention)
        config = dict(test_mode=False, flash_decode=False, num_query_groups=4)
        found = dict(rotation=TorchRotation(), world_size=4, q_layernorm=None, k_layernorm=None)
        found |= {name: value for name, value in values.items() if name in found}
        config |= {name: value for name, value in values.items() if name in config}
        attention.__dict__.update(found | {"config": Namespace(**config)})
        return not attention._rotates_as_it_splits()

    assert not splits() and not splits(q_layernorm=IdentityOp(), k_layernorm=IdentityOp())
    assert splits(rotation=None) and splits(q_layernorm=Norm()) and splits(k_layernorm=Norm())
    assert splits(test_mode=True) and splits(flash_decode=True)
    assert splits(num_query_groups=2)  # a rank has some heads of a group


def test_a_rotation_leaves_nothing_of_the_projection(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention keeps for backward has no other memory than its own."""
    seen: list[tuple[int, int]] = []

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any
    ) -> Any:
        seen.extend((t.untyped_storage().nbytes(), t.nbytes) for t in (query, key, value))
        return attend(self, query, key, value, *args, **named)

    attend = SdpaAttention.forward
    monkeypatch.setattr(SdpaAttention, "forward", forward)
    monkeypatch.setattr(rotary, "_run", lambda *given, **named: None)
    for options in ({}, {"qk_layernorm": True}):
        model = built(**options)
        seen.clear()
        losses_and_gradients(model)
        assert any(held > own for held, own in seen)  # without a rotation the value is a part
        seen.clear()
        give(model, Rotation())
        losses_and_gradients(model)
        assert len(seen) == 6 and all(held == own for held, own in seen)


@pytest.mark.parametrize("options", [{"rotary_percent": 0.5}, {"position_embedding_type": "none"}])
def test_other_angles_of_a_model(options: dict[str, Any], one_rank: None) -> None:
    config = small_gpt.config(
        **SIZES, num_query_groups=2, hidden_dropout=0.0, attention_dropout=0.0
    )
    model, rotation = small_gpt.build(config, 96, 16, **options), TorchRotation()
    wanted = losses_and_gradients(model)
    give(model, rotation)
    for each, expected in zip(losses_and_gradients(model), wanted, strict=True):
        torch.testing.assert_close(each, expected)
    assert rotation.seen == ["split"] * 2 * ("rotary_percent" in options)


def test_a_model_that_has_rotated_can_be_pickled_and_copied(one_rank: None) -> None:
    rotation = Rotation()
    angles = torch.randn(6, 1, 1, 8)
    cosines = rotation._tables.of(angles, 6, 2, 1.0)[0]
    for copy in (pickle.loads(pickle.dumps(rotation)), deepcopy(rotation)):
        assert torch.equal(copy._tables.of(angles, 6, 2, 1.0)[0], cosines)


def test_layers_share_the_tables_of_an_angle() -> None:
    tables, angles = _Tables(), torch.randn(6, 1, 1, 8)
    found = tables.of(angles, 6, 2, 1.0)
    assert tables.of(angles, 6, 2, 1.0)[0] is found[0]
    for other in ((6, 1, 1.0), (6, 2, 0.5)):
        assert tables.of(angles, *other)[0] is not found[0]
    with torch.inference_mode():
        assert tables.of(angles, 6, 2, 1.0)[0].is_inference()
        assert tables.of(torch.ones(6, 1, 1, 8), 6, 2, 1.0)[0].is_inference()
    assert not tables.of(angles, 6, 2, 1.0)[0].is_inference()
    angles.mul_(2)
    doubled = tables.of(angles, 6, 2, 1.0)
    assert torch.equal(doubled[0], torch.cos(angles[:, 0, 0, :4]).repeat_interleave(2, 0))
    angles = torch.randn(6, 1, 1, 8)
    assert not torch.equal(tables.of(angles, 6, 2, 1.0)[0], doubled[0])
