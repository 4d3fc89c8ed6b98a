"""When a microbatch's loss is checked, and what the check sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.mcore.loop import gpt, loss_check

seen: list[str] = []


class Layer(torch.autograd.Function):
    """The identity, which tells of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        seen.append("backward")
        return gradient


def losses_of(weight: Tensor) -> Tensor:
    return Layer.apply(weight) * 2


def test_a_check_follows_the_backward_pass_of_its_own_microbatch() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    for microbatch in ("first", "second"):
        seen.clear()
        losses = losses_of(weight)
        loss_check.after_backward(losses, lambda name=microbatch: seen.append(name))  # type: ignore[misc]
        loss = losses.sum()
        assert not seen
        loss /= 4  # as the schedule does
        loss.backward()
        assert seen == ["backward", microbatch]
    # Negative control: a hook of the losses alone comes before.
    seen.clear()
    losses = losses_of(weight)
    losses.register_hook(lambda gradient: seen.append("hook"))
    losses.sum().backward()
    assert seen == ["hook", "backward"]


def test_without_a_backward_pass_a_check_is_made_at_once() -> None:
    seen.clear()
    with torch.no_grad():
        loss_check.after_backward(torch.ones(2), lambda: seen.append("check"))
    assert seen == ["check"]


def test_what_a_check_raises_ends_the_backward_pass() -> None:
    def check() -> None:
        raise RuntimeError("found NaN")

    losses = losses_of(torch.ones(2, 3, requires_grad=True))
    loss_check.after_backward(losses, check)
    with pytest.raises(RuntimeError, match="found NaN"):
        losses.sum().backward()


def test_a_copy_is_of_the_time_at_which_it_was_asked_for() -> None:
    value = torch.tensor(2.0)
    copy = loss_check.on_host(value)
    value.zero_()
    assert copy() == 2


def test_all_checks_of_a_loss_are_upstream_s(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, bool, bool]] = []

    class Machine:
        def validate_result(
            self, result: Tensor, rejection_func: Any, message: str, tolerance: float, fatal: bool
        ) -> None:
            told.append((message, float(result), bool(rejection_func(result)), fatal))

        def is_unexpectedly_large(self, result: Tensor, threshold: float, context: str) -> bool:
            return float(result) > threshold

    options = {"check_for_nan_in_loss_and_grad": True, "check_for_spiky_loss": True}
    monkeypatch.setattr(gpt, "get_args", lambda: type("Args", (), options))
    machine = Machine()
    monkeypatch.setattr(gpt, "get_rerun_state_machine", lambda: machine)
    weight = torch.full((2, 3), 4.0, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss, tokens, logged = gpt.loss_function(mask, losses_of(weight))
    assert not told and tokens == 3 and logged["lm loss"].tolist() == [24.0, 3.0]
    loss /= 3  # in place, as the schedule does
    loss.backward()
    nan, inf = (f"found {what} in local forward loss calculation" for what in ("NaN", "Inf"))
    of_all = [(nan, 24.0, False, True), (inf, 24.0, False, True), ("Spiky loss", 24.0, True, False)]
    assert told == of_all
    told.clear()
    with torch.no_grad():
        gpt.loss_function(torch.ones(2, 3), losses_of(weight / 0))
    assert [rejected for _, _, rejected, _ in told] == [False, True, True]
