"""Lists what the recorded passes of a linear run on a GPU, beside kernels and products.

    python -m testing.scripts.recorded_steps [CAPABILITY [RECIPE...]]

CAPABILITY: of the GPU, 9.0 by default, Hopper's. No GPU is needed: see `host_calls.pretend_gpu`.
Each operator of PyTorch in a recording is called through the dispatcher whenever C++ repeats the
pass, which takes the host longer than a launch.

Prints JSON: for each recipe and pass the number of launches, of products by cuBLASLt, and the names
of the operators of PyTorch. The passes are those that make W's operands, and then those that read
held ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.cpp.recorder import Called, Launched, Multiplied, Recording, record_pass
from megatron_fp4.execution.autograd import LinearFunction
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.weights import HeldWeight
from testing.scripts.host_calls import pretend_gpu

SIZE = 256


@dataclass
class Noting:
    """A `execution.follow.Follower` that keeps the recordings of both passes."""

    held: HeldWeight
    recordings: list[Recording] = field(default_factory=list)

    def forward(
        self, run: Callable[[Site], Any], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        return self._followed(run, [x, weight, bias, *_tensors(self.held)])

    def backward(
        self,
        run: Callable[[Site], Any],
        held: HeldWeight | None,
        dy: Tensor,
        main_grad: Tensor | None,
        saved: Sequence[Tensor | None],
    ) -> Any:
        return self._followed(run, [dy, main_grad, *saved, *_tensors(self.held)])

    def _followed(self, run: Callable[[Site], Any], inputs: Sequence[Tensor | None]) -> Any:
        site = Site("fc1", keeps_w="packed", fuses=True, observe=_unobserved)
        with record_pass(inputs) as recording:
            found = run(site)
        assert recording.problem is None, recording.problem
        self.recordings.append(recording)
        return found


def _unobserved(gemm: str, letter: str, tally: Tensor) -> None:
    pass


def _tensors(held: HeldWeight) -> list[Tensor]:
    return [tensor for gemm in held.made for tensor in held.tensors(gemm)]


def steps(recording: Recording) -> dict[str, Any]:
    """What a pass runs; see the top of this file."""
    kinds = [type(step) for step in recording.steps]
    operators = [str(step.function) for step in recording.steps if isinstance(step, Called)]
    return {
        "launches": kinds.count(Launched),
        "products": kinds.count(Multiplied),
        "operators": [name.removeprefix("aten.") for name in operators],
    }


def passes(name: str) -> dict[str, Any]:
    """The steps of two calls of a linear of this recipe, as Megatron's layers call it.

    No call came before them. Under pipeline parallelism several forward passes precede the first
    backward pass, which is then recorded though nothing that it caches exists.
    """
    x, w = (torch.zeros(SIZE, SIZE).bfloat16().requires_grad_() for _ in range(2))
    dy, recipe = torch.zeros(SIZE, SIZE).bfloat16(), get_recipe(name)
    w.main_grad = torch.zeros(SIZE, SIZE)  # type: ignore[attr-defined]
    site, found = Site("fc1", keeps_w="packed", fuses=True), dict[str, Any]()
    held = HeldWeight()
    for words in ("makes W", "reads W"):
        noting = Noting(held)
        y = LinearFunction.apply(x, w, None, recipe, site, Call(Key(1, 2)), held, True, noting)
        torch.autograd.backward(y, dy)
        for direction, recording in zip(("forward", "backward"), noting.recordings, strict=True):
            found[f"{direction}, {words}"] = steps(recording)
    return found


def main() -> None:
    capability, *names = sys.argv[1:] or ["9.0"]
    major, minor = map(int, capability.split("."))
    pretend_gpu((major, minor))
    names = names or ["tetrajet", "fp8", "dge-occ", "nvfp4-nvidia"]
    print(json.dumps({name: passes(name) for name in names}))


if __name__ == "__main__":
    main()
