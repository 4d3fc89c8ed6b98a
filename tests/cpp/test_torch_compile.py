"""torch.compile around linears that run in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fp4 import Linear
from megatron_fp4.cpp import extension
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.linear import _site, execute_by, in_python

pytestmark = pytest.mark.slow  # the first test of a machine builds the extension
NAMES = ("compiled fc1", "compiled fc2")


@pytest.fixture
def cpp() -> Iterator[None]:
    torch._dynamo.reset()  # what another test compiled of this code would be taken again
    execute_by(CppExecutor(extension.load(), on_cpu=True))
    yield
    execute_by(in_python)


class Mlp(nn.Module):
    """Two linears, with something to compile before, between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"recipe": "fp8", "dtype": torch.bfloat16}
        self.fc1 = Linear(64, 96, name=NAMES[0], **options)
        self.fc2 = Linear(96, 64, name=NAMES[1], **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x * 2).relu()) + 1  # type: ignore[no-any-return]


def trained(module: Any, seed: int) -> list[Tensor]:
    """Y, dX and the gradients of the parameters, of one call."""
    torch.manual_seed(seed)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    y = module(x)
    y.backward(torch.randn(32, 64).bfloat16())
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [y.detach(), *(each.clone() for each in gradients if each is not None)]


def test_the_linears_stay_out_of_compiled_graphs_and_run_in_cpp(cpp: None) -> None:
    """There are three graphs; the results are those in Python."""
    graphs = list[torch.fx.GraphModule]()

    def taken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Mlp(), backend=taken)
    found = [trained(compiled, seed) for seed in range(5)]
    for name in NAMES:
        calls = [kind.calls for kind in _site(name, 0).kinds.values()]
        assert calls == [2]  # of five: the others ran in C++
    assert len(graphs) == 3
    execute_by(in_python)
    plain = Mlp()
    for seed, results in enumerate(found):
        expected = trained(plain, seed)
        assert len(expected) == 6
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_there_is_no_graph_with_a_linear_in_it(cpp: None) -> None:
    whole = torch.compile(Mlp(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        trained(whole, 0)
