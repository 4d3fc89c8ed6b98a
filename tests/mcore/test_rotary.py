"""Rotary embedding that splits QKV, in Megatron's attention. `rotary.py`'s kernel has tests in
tests/kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_fp4.kernels import rotary
from megatron_fp4.mcore.model.attention import SdpaAttention
from megatron_fp4.mcore.model.rotary import Rotation, _Tables
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention
from testing.builders import small_gpt

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}


class TorchRotation(Rotation):
    """By torch's operators, as Megatron rotates. seen: the method of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def split(
        self, mixed: Tensor, sizes: Sequence[int], angles: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append("split")
        query, key, value = torch.split(mixed, list(sizes), -1)
        query = query.reshape(*mixed.shape[:2], -1, sizes[-1])
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


def results(model: MegatronModule) -> list[Tensor]:
    """The loss of each token, and the gradients of all parameters."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (2, 16), generator=generator)
    positions = torch.arange(16).expand(2, -1)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    model.zero_grad()
    losses.sum().backward()
    return [losses.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


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
    wanted = results(model)
    give(model, rotation)
    found = results(model)
    assert rotation.seen == seen
    for each, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, expected)
    # Negative control: a key that is not rotated.
    give(model, OfQueries())
    assert not torch.allclose(results(model)[0], wanted[0])


class OfQueries(TorchRotation):
    """A known mistake: it rotates no key."""

    def split(
        self, mixed: Tensor, sizes: Sequence[int], angles: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = super().split(mixed, sizes, angles, scale)[0]
        return query, *super().split(mixed, sizes, 0 * angles, scale)[1:]

    def heads(self, t: Tensor, angles: Tensor, scale: float) -> Tensor:
        return super().heads(t, angles * (t.shape[2] == 4), scale)  # a query has four heads


def test_what_is_not_rotated_is_split_as_upstream_splits_it(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is an inference context, or angles of query and of key."""
    model, rotation = built(), TorchRotation()
    wanted = results(model)
    give(model, rotation)
    monkeypatch.setattr(RotatingSelfAttention, "_angles", lambda self, *given: None)
    assert all(map(torch.equal, results(model), wanted))
    assert not rotation.seen


def test_only_equal_angles_in_training_are_rotated_by() -> None:
    attention = RotatingSelfAttention.__new__(RotatingSelfAttention)
    angles, other = torch.ones(1), torch.ones(1)
    assert attention._angles(None, (angles, angles)) is None
    attention.__dict__["rotation"] = TorchRotation()
    assert attention._angles(None, (angles, angles)) is angles
    for context, given in ((object(), (angles, angles)), (None, (angles, other)), (None, None)):
        assert attention._angles(context, given) is None


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
        results(model)
        assert any(held > own for held, own in seen)  # without a rotation the value is a part
        seen.clear()
        give(model, Rotation())
        results(model)
        assert len(seen) == 6 and all(held == own for held, own in seen)


def test_upstream_s_hooks_are_where_they_were() -> None:
    """`RotatingSelfAttention` replaces two of upstream's methods, which its forward calls."""
    names = SelfAttention.forward.__code__.co_names
    assert {"get_query_key_value_tensors", "_adjust_key_value_for_inference"} <= set(names)


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
