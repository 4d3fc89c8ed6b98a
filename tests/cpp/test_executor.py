"""The executor in C++: what autograd, Megatron's hooks and memory see of it.

On a CPU, where recipe fp8 is made and multiplied by operators of PyTorch. That the bits are those
of the executor in Python is compared in test_bits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.cpp import extension, following
from megatron_fp4.cpp.executor import KINDS, CppExecutor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.linear import execute_by, in_python, quantized_linear
from megatron_fp4.monitor import NonFiniteMonitor

pytestmark = pytest.mark.slow  # the first test of a machine builds the extension
TOKENS, INPUTS, OUTPUTS = 32, 64, 96


@pytest.fixture
def loaded() -> Iterator[Any]:
    found = extension.load()
    execute_by(CppExecutor(found, on_cpu=True))
    yield found
    execute_by(in_python)


@dataclass
class Linear:
    """A linear whose calls are recorded, and then run in C++."""

    weight: Tensor
    site: Site

    def __call__(self, x: Tensor, step: int = 0) -> Tensor:
        call = Call(Key(1, step))
        return quantized_linear(x, self.weight, None, get_recipe("fp8"), self.site, call)

    @property
    def in_python(self) -> int:
        """How many calls ran in Python."""
        return sum(kind.calls for kind in self.site.kinds.values())

    @property
    def passes(self) -> int:
        """How many passes are recorded."""
        return sum(each is not None for kind in self.site.kinds.values() for each in kind.passes)


def linear(fuses: bool = False, **others: Any) -> Linear:
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16().requires_grad_()
    if fuses:
        weight.main_grad = torch.zeros(OUTPUTS, INPUTS)  # type: ignore[attr-defined]
    return Linear(weight, Site("fc1", fuses=fuses, **others))


def matrix(tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, INPUTS).bfloat16().requires_grad_()


def warm(layer: Linear, x: Callable[[], Tensor] = matrix) -> None:
    """Calls the linear until it is recorded."""
    for _ in range(2):
        y = layer(x())
        torch.autograd.backward(y, torch.ones_like(y))
    layer.weight.grad = None


def gradients(layer: Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Y, dX and dW of one call."""
    y = layer(x)
    torch.autograd.backward(y, dy)
    found = [y.detach(), x.grad, layer.weight.grad]
    x.grad = layer.weight.grad = None
    return found  # type: ignore[return-value]


def expected(layer: Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """As `gradients`, in Python."""
    return gradients(Linear(layer.weight, Site("fc1")), x, dy)  # its first call is in Python


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_third_call_runs_in_cpp(loaded: Any) -> None:
    layer, x = linear(), matrix()
    for i, calls in enumerate((1, 2, 2, 2)):
        y = layer(x)
        assert (layer.in_python, "LinearFunction" in y.grad_fn.name()) == (calls, i < 2)  # type: ignore[union-attr]
        torch.autograd.backward(y, torch.ones_like(y))
    assert layer.passes == 2


def test_hooks_see_what_is_saved(loaded: Any) -> None:
    layer, seen = linear(), list[Tensor]()
    warm(layer)
    x, dy = matrix(), torch.randn(TOKENS, OUTPUTS).bfloat16()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients(layer, x, dy)
    assert layer.in_python == 2 and seen
    assert equal(found, expected(layer, x, dy))
    # What a hook returns is what backward reads.
    with torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda tensor: tensor):
        assert not equal(gradients(layer, x, dy), found)


def test_a_second_derivative_is_refused(loaded: Any) -> None:
    layer, x = linear(), matrix()
    warm(layer)
    [dx] = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    assert layer.in_python == 2
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


def test_y_and_the_gradients_own_their_storage(loaded: Any) -> None:
    """Megatron frees Y's storage under pipeline parallelism (`deallocate_pipeline_outputs`)."""
    layer = linear()
    warm(layer)
    x, dy = matrix(), torch.randn(TOKENS, OUTPUTS).bfloat16()
    wanted = expected(layer, x, dy)
    y = layer(x)
    assert y.untyped_storage().size() == y.numel() * 2
    y.data = torch.empty(1, dtype=y.dtype)  # as upstream's deallocate_output_tensor
    y_grad = dy.clone()
    torch.autograd.Variable._execution_engine.run_backward(  # as its custom_backward
        tensors=(y,), grad_tensors=(y_grad,), keep_graph=False, create_graph=False, inputs=(),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
    assert equal([x.grad, layer.weight.grad], wanted[1:])  # type: ignore[list-item]
    for each in (x.grad, layer.weight.grad):
        assert each is not None and each.untyped_storage().size() == each.numel() * 2


@pytest.mark.parametrize("form", ["strided", "expanded"])
def test_a_gradient_that_is_not_contiguous_goes_to_python(loaded: Any, form: str) -> None:
    layer, x = linear(), matrix()
    warm(layer)
    dy = torch.randn(OUTPUTS, TOKENS).bfloat16().t()
    if form == "expanded":
        dy = torch.ones((), dtype=torch.bfloat16).expand(TOKENS, OUTPUTS)
    assert equal(gradients(layer, x, dy), expected(layer, x, dy.contiguous()))
    assert layer.in_python == 2  # the forward pass ran in C++


def test_other_inputs_are_other_kinds(loaded: Any) -> None:
    layer = linear()
    warm(layer)
    warm(layer, lambda: matrix(2 * TOKENS))
    assert len(layer.site.kinds) == 2 and layer.passes == 4
    with torch.no_grad():
        y = layer(matrix())
    assert not y.requires_grad and len(layer.site.kinds) == 3
    strided = torch.randn(INPUTS, TOKENS).bfloat16().t().requires_grad_()
    before = layer.in_python
    y = layer(strided)
    assert torch.equal(y, layer(strided.detach().contiguous().requires_grad_()))
    assert layer.in_python == before  # the strided one is of no kind
    for tokens in range(1, 2 * KINDS):
        layer(matrix(tokens))
        layer(matrix())  # it is never the least recently used
    assert len(layer.site.kinds) == KINDS
    before = layer.in_python
    layer(matrix())
    assert layer.in_python == before


def test_an_input_at_another_address_goes_to_python(loaded: Any) -> None:
    """Kernels are compiled for pointers that are multiples of 16 bytes."""
    layer = linear()
    warm(layer)
    room = torch.randn(TOKENS * INPUTS + 4).bfloat16()
    for start, calls in ((0, 2), (4, 3)):
        x = room[start : start + TOKENS * INPUTS].view(TOKENS, INPUTS).requires_grad_()
        dy = torch.randn(TOKENS, OUTPUTS).bfloat16()
        assert equal(gradients(layer, x, dy), expected(layer, x, dy))
        assert layer.in_python == calls


def test_inputs_that_share_memory_are_not_recorded(loaded: Any) -> None:
    """A recording knows memory by its address: it would take X for W in all later calls."""
    layer = linear()
    same = layer.weight.detach().requires_grad_()
    warm(layer, lambda: same)
    assert layer.passes == 1  # backward, whose inputs share nothing
    x, dy = matrix(OUTPUTS), torch.randn(OUTPUTS, OUTPUTS).bfloat16()
    for passes in (2, 2):
        assert equal(gradients(layer, x, dy), expected(layer, x, dy))
        assert layer.passes == passes
    assert layer.in_python == 3


def test_megatrons_hooks_are_told(loaded: Any) -> None:
    layer, told = linear(fuses=True), list[bool]()

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None  # as under overlap of gradients
        told.append(weight.grad_added_to_main_grad)  # type: ignore[attr-defined]
        weight.grad, weight.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]

    layer.weight.register_post_accumulate_grad_hook(hook)
    for call in range(4):
        y = layer(matrix())
        torch.autograd.backward(y, torch.ones_like(y))
        assert told == [True] * (call + 1)
    assert layer.in_python == 2
    layer.weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    grads = list[Tensor]()
    layer.weight.register_hook(grads.append)
    y = layer(matrix())
    torch.autograd.backward(y, torch.ones_like(y))
    assert not grads[0].any()


def test_main_grad_may_be_another_tensor_in_each_call(loaded: Any) -> None:
    layer = linear(fuses=True)
    warm(layer)
    x, dy = matrix(), torch.randn(TOKENS, OUTPUTS).bfloat16()
    weight: Any = layer.weight
    weight.main_grad = torch.ones(OUTPUTS, INPUTS)
    gradients(layer, x, dy)
    plain = Linear(layer.weight, Site("fc1", fuses=True))
    found, weight.main_grad = weight.main_grad, torch.ones(OUTPUTS, INPUTS)
    gradients(plain, x, dy)
    assert layer.in_python == 2 and torch.equal(found, weight.main_grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(loaded: Any, reentrant: bool) -> None:
    layer, x = linear(), matrix()
    dy = torch.randn(TOKENS, OUTPUTS).bfloat16()
    wanted = expected(layer, x, dy)
    for _ in range(5):
        y = checkpoint(layer, x, use_reentrant=reentrant)
        torch.autograd.backward(y, dy)
        assert equal([y.detach(), x.grad, layer.weight.grad], wanted)  # type: ignore[list-item]
        x.grad = layer.weight.grad = None
    assert layer.in_python <= 4  # two of each kind


def test_a_graph_may_be_kept(loaded: Any) -> None:
    layer, x = linear(), matrix()
    warm(layer)
    dy = torch.randn(TOKENS, OUTPUTS).bfloat16()
    y = layer(x)
    first = torch.autograd.grad(y, (x, layer.weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, layer.weight), dy)
    assert equal(list(first), list(second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, layer.weight), dy)


def test_y_may_be_changed_in_place(loaded: Any) -> None:
    layer, x = linear(), matrix()
    warm(layer)
    dy = torch.randn(TOKENS, OUTPUTS).bfloat16()
    wanted = expected(layer, x, dy)
    y = layer(x)
    y += 1
    torch.autograd.backward(y, dy)
    assert equal([y.detach() - 1, x.grad, layer.weight.grad], [wanted[0] + 1 - 1, *wanted[1:]])  # type: ignore[list-item]


@pytest.mark.parametrize("calls", [0, 2])
def test_what_was_saved_may_not_be_changed_in_place(loaded: Any, calls: int) -> None:
    """W, which backward reads. calls: 0 runs in Python."""
    layer = linear()
    for _ in range(calls):
        torch.autograd.backward(y := layer(matrix()), torch.ones_like(y))
    y = layer(matrix())
    assert layer.in_python == max(calls, 1)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y, torch.ones_like(y))


def test_the_monitor_has_all_tallies_in_order(loaded: Any) -> None:
    monitor = NonFiniteMonitor()
    monitor.from_cpp = loaded.Tallies()

    def observe(gemm: str, letter: str, tally: Tensor) -> None:
        monitor.observe("fc1", gemm, letter, tally)

    layer = linear(observe=observe, tallies=monitor)
    labels, steps = list[Any](), 4
    for step in range(steps):
        x = matrix()
        if step == 3:
            with torch.no_grad():
                x[5, 7] = float("nan")
        monitor.start_step(step)
        y = layer(x)
        torch.autograd.backward(y, torch.ones_like(y))
        monitor.observe("other", "fprop", "x", torch.zeros(2, dtype=torch.int32))
        labels.append(list(monitor._labels))
    assert layer.in_python == 2
    assert labels[0] == labels[1] == labels[2] == labels[3]
    assert [each[0] for each in labels[3]] == ["fc1"] * 6 + ["other"]
    seen = monitor.look()
    assert seen is not None and (seen.step, seen.gemm, seen.operand) == (3, "fprop", "x")


def test_what_draws_by_pytorch_stays_in_python(
    loaded: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_told", set[str]())
    site, x = Site("fc1"), matrix(64)
    weight = torch.randn(64, INPUTS).bfloat16().requires_grad_()
    for step in range(3):
        y = quantized_linear(x, weight, None, get_recipe("tetrajet"), site, Call(Key(1, step)))
        torch.autograd.backward(y, torch.ones_like(y))
    [kind] = site.kinds.values()
    assert kind.calls == 3 and kind.problem == "PyTorch draws the random bits of w in dgrad"
    line = f"megatron-fp4: fc1 and others like it stay in Python, which is slower: {kind.problem}\n"
    assert capsys.readouterr().err == line


def test_fixed_signs_are_constants_of_what_is_recorded(loaded: Any) -> None:
    """The transform of fprop too, which backward undoes; random signs stay in Python."""
    q, results = Quantizer(), {}
    for signs in ("fixed", "random"):
        turned = GemmRecipe(q, q, Hadamard(32, signs))  # type: ignore[arg-type]
        recipe = Recipe("turned", "", turned, turned, turned, backward="forward")
        for executor in (CppExecutor(loaded, on_cpu=True), in_python):
            execute_by(executor)
            site, found = Site("fc1"), []
            torch.manual_seed(3)
            weight = torch.randn(64, INPUTS).bfloat16()
            for step in range(4):
                w, x = weight.clone().requires_grad_(), matrix()
                y = quantized_linear(x, w, None, recipe, site, Call(Key(1, step)))
                torch.autograd.backward(y, torch.ones_like(y))
                assert x.grad is not None and w.grad is not None
                found += [y.detach(), x.grad, w.grad]
            results[signs, executor is in_python] = found, site
    for signs in ("fixed", "random"):
        in_cpp, expected = (results[signs, python][0] for python in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(in_cpp, expected, strict=True))
        [kind] = results[signs, False][1].kinds.values()
        assert (kind.problem is None, kind.calls) == ((True, 2) if signs == "fixed" else (False, 4))


def test_tensors_of_a_captured_graph_stay_in_python(loaded: Any) -> None:
    layer, x = linear(), matrix()
    warm(layer)
    call = Call(Key(1, torch.tensor(3)))
    quantized_linear(x, layer.weight, None, get_recipe("fp8"), layer.site, call)
    assert len(layer.site.kinds) == 1


class Looking:
    """A Watch that looks when it is told to."""

    looking = True

    def looks(self, makes_w: bool) -> bool:
        return self.looking

    def made(self, *given: Any) -> None:
        assert self.looking

    def carried(self, *given: Any) -> None:
        assert self.looking


def test_who_watches_operands_sees_them(loaded: Any) -> None:
    watch = Looking()
    layer = linear(watch=watch)
    warm(layer)
    assert not layer.site.kinds
    watch.looking = False
    # A recorded pass shows nothing to anybody; see the class.
    object.__setattr__(layer, "site", Site("fc1", watch=None))
    warm(layer)
    layer(matrix())
    assert layer.in_python == 2
