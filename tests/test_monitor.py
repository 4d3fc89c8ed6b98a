"""The monitor: the first of what is not finite, no false alarm, and no waiting for the device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp4 import list_quantizers, monitor, quantize
from megatron_fp4.monitor import CarrierRounding, NonFinite, NonFiniteMonitor

BAD = [float("nan"), float("inf"), float("-inf")]


def tally(value: float = 0.0, at: int = 5, scale: str = "mxfp4", rounded: int = 0) -> Tensor:
    """Of a matrix with such an element."""
    x = torch.linspace(-3, 3, 64 * 96).view(64, 96)
    x.view(-1)[at] = value
    return quantize(x, scale).tally() + torch.tensor([rounded, 0])


@pytest.mark.parametrize("scale", list_quantizers())
@pytest.mark.parametrize("value", BAD)
def test_one_bad_element_is_seen_wherever_it_stands(value: float, scale: str) -> None:
    for at in (0, 95, 3000, 64 * 96 - 1):
        watching = NonFiniteMonitor()
        watching.observe("layer", "dgrad", "dy", tally(value, at, scale.removesuffix("-sr")))
        assert watching.look() == NonFinite(0, "layer", "dgrad", "dy")


@pytest.mark.parametrize("scale", ["mxfp4", "nvfp4", "vector"])
def test_huge_finite_operands_are_no_false_alarm(scale: str) -> None:
    huge = torch.full((64, 64), torch.finfo(torch.bfloat16).max)
    watching = NonFiniteMonitor()
    for operand in (huge, -huge, 0 * huge):
        watching.observe("layer", "fprop", "x", quantize(operand, scale).tally())
    assert watching.look() is None


@pytest.mark.parametrize("fold", [1, 2, 7, 1024])
def test_the_first_in_the_order_of_use_is_named(fold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_FOLD", fold)
    watching = NonFiniteMonitor()
    for i in range(20):
        bad = BAD[i % 3] if i in (11, 12, 19) else 0.0
        watching.observe(f"layer {i}", "fprop", "w", tally(bad, rounded=i % 18))
    assert watching.look() == NonFinite(0, "layer 11", "fprop", "w")
    lost = sum(i % 18 for i in range(20))
    assert watching.rounding == CarrierRounding(0, lost, ("layer 17", "fprop", "w"), 17)
    assert watching.look() is None


def test_a_step_is_told_when_its_results_have_come() -> None:
    watching = NonFiniteMonitor()
    told = []
    for step in range(4):
        told.append(watching.start_step(step))
        watching.observe("layer", "fprop", "x", tally(BAD[0] if step == 1 else 0.0))
    assert told == [None, None, None, NonFinite(1, "layer", "fprop", "x")]
    assert watching.look() is None


def test_looking_names_the_earlier_of_two_steps() -> None:
    watching = NonFiniteMonitor()
    for step in (5, 6):
        watching.start_step(step)
        watching.observe("layer", "fprop", "x", tally(BAD[1]))
    assert watching.look() == NonFinite(5, "layer", "fprop", "x")
    assert watching.look() is None  # it was told, and its consequences need not be


def test_looking_tells_of_what_the_last_two_steps_rounded() -> None:
    for lost in ((5, 0), (0, 7), (5, 7)):
        watching = NonFiniteMonitor()
        for step, elements in enumerate(lost):
            watching.start_step(step)
            watching.observe("layer", "wgrad", "x", tally(rounded=elements))
        assert watching.look() is None and watching.rounding is not None
        assert watching.rounding.elements == (lost[1] or lost[0])


class Waits(TorchDispatchMode):
    """Counts the operations that bring a value to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


def test_the_host_reads_a_step_s_result_one_whole_step_later() -> None:
    watching = NonFiniteMonitor()
    with Waits() as counted:
        watching.start_step(0)
        for _ in range(3000):
            watching.observe("layer", "fprop", "x", torch.zeros(2, dtype=torch.int32))
        watching.start_step(1)
        assert counted.count == 0
        watching.start_step(2)
        assert counted.count == 1
