"""Compares the executor in C++ with the one in Python: all results must have the same bits.

    python testing/scripts/compare_executors.py RECIPE...
    torchrun --nproc-per-node 2 testing/scripts/compare_executors.py RECIPE...

On a CPU operators of PyTorch make and multiply the operands. With TRITON_INTERPRET=1 they run as on
a Hopper GPU (testing/kernels/pretend_gpu.py). On a GPU they run there. Several ranks shard the
linear by sequence parallelism, as a column-parallel and as a row-parallel linear.

--mlps adds, on one rank, MLPs whose linears compute the norm before and the SwiGLU between them.
What goes through the SwiGLU is kept in BF16 or E4M3.
--remade: nothing is kept of W's operands, whose codes the backward pass makes again.
--sent: in the passes in C++ W comes as codes, and is not read. Without kernels the backward pass
rounds to nearest then: where PyTorch draws random bits nothing runs in C++.
--mistake NAME makes a known mistake in the executor in C++. Prints JSON: for each case whether the
results are equal, how many forward and backward passes ran in C++, and why not all did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fp4.arithmetic.philox import Key, Placement
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.cpp import extension, lowering
from megatron_fp4.cpp.executor import CppExecutor
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.execution.norm import before_linear
from megatron_fp4.execution.weights import HeldWeight, WeightCache
from megatron_fp4.linear import (
    execute_by,
    in_python,
    linear_after_swiglu,
    linear_before_swiglu,
    quantized_linear,
)
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.monitor import NonFiniteMonitor
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import KeepsW, column_parallel, holds, row_parallel
from testing.builders.small_recipes import small_recipe

TOKENS, INPUTS, OUTPUTS = 64, 64, 64  # on each rank
HIDDEN = 256  # the columns of a SwiGLU, which kernels take
# MLPs, with `Site.kept_y`.
MLPS = {"mlp": None, "mlp with Y in E4M3": torch.float8_e4m3fn}
STEPS, MICROBATCHES = 3, 2
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What is held of W's operands, and whether dW is added to main_grad. The interpreter is slow.
FORMS: list[tuple[KeepsW | None, bool]] = [("packed", True)]
if not INTERPRETED:
    FORMS += [(None, True), ("packed", False), ("fprop", True)]
REMADE: list[tuple[KeepsW | None, bool]] = [("remade", True)]


def no_words(self: Any, word: int, argument: int) -> bool:
    return False


def no_last_use(self: Any) -> dict[int, tuple[int, int]]:
    first = _uses(self)
    return {memory: (begin, begin) for memory, (begin, _) in first.items()}


_uses = lowering._Lowering._uses


class Unflagged:
    """A parameter that is never told that dW was added to its main_grad."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __getattr__(self, name: str) -> Any:  # what is set stays in this object
        return getattr(self._weight, name)


def leave_out_flag(loaded: Any) -> None:
    """Megatron then adds the gradient that autograd has, memory that nobody should read."""
    call = loaded.Call

    def wrong(passes: Any, *given: Any) -> Any:
        *others, weight, unread = given[:6]
        if weight is not None:
            weight = Unflagged(weight)
            unread.fill_(1.0)  # it is uninitialized, and may happen to be zeros
        return call(passes, *others, weight, unread, *given[6:])

    loaded.Call = wrong


def replace_in_lowering(name: str, wrong: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda loaded: setattr(lowering._Lowering, name, wrong)


# Each is called with the extension.
MISTAKES: dict[str, Callable[[Any], None]] = {
    "a step that stays": replace_in_lowering("_is_word", no_words),
    "memory that is used again too early": replace_in_lowering("_uses", no_last_use),
    "grad_added_to_main_grad left out": leave_out_flag,
}


@dataclass
class Weights:
    """A Watch that looks at no pass: it takes fprop's operands of W, decoded, by linear and step.

    step: that of the passes that run now.
    """

    step: int = 0
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def looks(self, holds_w: bool) -> bool:
        return False

    def made(
        self, site: Site, call: Call, operand: Any, matrix: Any, given: Any, made: Any
    ) -> None:
        if (operand.gemm, operand.letter) == ("fprop", "w"):
            self._take(site, made.operand)

    def held(self, site: Site, w: Tensor, held: HeldWeight) -> None:
        held.to_python()
        self._take(site, held.made["fprop"].operand if "fprop" in held.made else w)

    def carried(self, site: Site, operand: Any, carriers: Any) -> None:
        pass

    def _take(self, site: Site, w: Any) -> None:
        if (site.name, self.step) not in self.values:
            values = w.dequantize() if isinstance(w, QuantizedTensor) else w.detach().clone()
            self.values[site.name, self.step] = values


@dataclass
class Case:
    """One linear, or an MLP: an RMSNorm, and two linears with a SwiGLU between them.

    kind: "alone", "column", "row", or one of MLPS. held: what is held of W for the
    microbatches of a step. fuses: whether dW is added to main_grad. has_bias: of the linear.
    sent: whether W comes as codes (`Site.sent_w`) in the passes in C++.
    """

    recipe: str
    kind: str
    held: KeepsW | None
    fuses: bool
    has_bias: bool
    device: str
    sent: bool = False

    def __str__(self) -> str:
        held = [] if self.held is None else ["held", self.held]
        rest = [*["fused"] * self.fuses, *["sent"] * self.sent]
        return " ".join([self.recipe, self.kind, *held, *rest])

    def site(
        self, monitor: NonFiniteMonitor, watch: Weights, average: Tensor | None, name: str = "fc"
    ) -> Site:
        parallel, places = None, {}
        if self.kind in ("column", "row"):
            sharded = column_parallel if self.kind == "column" else row_parallel
            ranks, group = dist.get_world_size(), dist.group.WORLD
            assert group is not None
            parallel = TensorParallel(group, sharded(ranks, sequence_parallel=True))
            places = {"w": Placement(first_row=OUTPUTS * dist.get_rank())}

        def observe(gemm: str, letter: str, tally: Tensor) -> None:
            monitor.observe(name, gemm, letter, tally)

        return Site(
            name, places, parallel, self.held, kept_y=MLPS.get(self.kind), fuses=self.fuses,
            average=average, observe=observe, tallies=monitor,
            watch=watch if holds(self.held) else None,
        )  # fmt: skip


@dataclass
class Found:
    """What a linear computed.

    tensors: Y and all gradients of all passes, and fprop's operand of W in each step where it is
    held. tallies: of the monitor. kinds: what the executor in C++ knows of its calls.
    """

    tensors: list[Tensor] = field(default_factory=list)
    tallies: list[Any] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)


class SentW:
    """W as its owners send it, in buffers that keep their addresses."""

    def __init__(self, weight: Tensor, recipe: Recipe, average: Tensor | None) -> None:
        self._recipe, self._average = recipe, average
        self.codes = self._quantized(weight)

    def _quantized(self, weight: Tensor) -> QuantizedTensor:
        quantizer = self._recipe.fprop.b
        assert quantizer is not None
        return quantize_matrix(weight, quantizer, axis=1, average=self._average)

    def send(self, weight: Tensor) -> None:
        new = self._quantized(weight)
        self.codes.codes.copy_(new.codes)
        self.codes.scales.copy_(new.scales)


def reduced(weight: Any) -> Tensor:
    """main_grad after what Megatron does with a gradient before it reduces main_grad, with
    overlap (C/distributed/distributed_data_parallel.py, the hook after a backward pass)."""
    assert weight.grad is not None
    if not getattr(weight, "grad_added_to_main_grad", False):
        weight.main_grad += weight.grad
    weight.grad, weight.grad_added_to_main_grad = None, False
    return weight.main_grad.clone()  # type: ignore[no-any-return]


def run(case: Case, executor: Callable[..., Any], tallies: Any) -> Found:
    """Trains nothing: runs the passes of some steps, with other data in each."""
    execute_by(executor)
    random = torch.Generator(case.device).manual_seed(_rank())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=case.device).bfloat16()

    options = {"backward_rounding": "nearest"} if case.sent and not INTERPRETED else {}
    recipe = small_recipe(case.recipe, **options)
    monitor, cache = NonFiniteMonitor(), WeightCache()
    monitor.from_cpp = tallies
    weight = normal(OUTPUTS, INPUTS).requires_grad_()
    weight.main_grad = torch.zeros(OUTPUTS, INPUTS, device=case.device)  # type: ignore[attr-defined]
    bias = normal(OUTPUTS).requires_grad_() if case.has_bias else None
    average = None if recipe.weight_average is None else weight.detach().float() * 1.01
    watch, found = Weights(), Found()
    site = case.site(monitor, watch, average)
    w, sent = weight.detach().clone(), None
    if case.sent and tallies is not None:
        sent = SentW(w, recipe, average)
        site = replace(site, sent_w=sent.codes)
        weight.detach().fill_(torch.nan)
    ranks = 1 if case.kind == "alone" else dist.get_world_size()
    tokens = TOKENS * (ranks if case.kind == "row" else 1)
    for step, i in itertools.product(range(1, STEPS + 1), range(MICROBATCHES)):
        microbatch = (step + i) % MICROBATCHES  # not that of the call that was recorded
        held, watch.step = cache.at(step) if holds(case.held) else None, step
        if case.sent and i == 0:  # W of another step
            w *= -1.125
            sent.send(w) if sent is not None else weight.detach().copy_(w)
        rows = torch.arange(TOKENS * ranks, device=case.device) + 1000 * microbatch
        x = normal(tokens // 4, 4, INPUTS).requires_grad_()
        call = Call(Key(2**40 + 7, step), microbatch, 0, rows)
        y = quantized_linear(x, weight, bias, recipe, site, call, held)
        torch.autograd.backward(y, normal(*y.shape))
        found.tensors += [y.detach(), x.grad, reduced(weight)]  # type: ignore[list-item]
        if bias is not None:
            found.tensors.append(bias.grad)  # type: ignore[arg-type]
            bias.grad = None
    found.tensors += watch.values.values()
    monitor._close()
    assert monitor._last_step is not None
    found.tallies = [monitor._last_step.labels, monitor._last_step.tallies.tolist()]
    found.kinds = list(site.kinds.values())
    return found


def run_mlp(case: Case, executor: Callable[..., Any], tallies: Any) -> Found:
    """As `run`, for an MLP whose linears compute what stands beside them."""
    execute_by(executor)
    random = torch.Generator(case.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=case.device).bfloat16()

    recipe, monitor = small_recipe(case.recipe), NonFiniteMonitor()
    watch, found = Weights(), Found()
    monitor.from_cpp = tallies
    weights = [(normal(*shape) / 8).requires_grad_() for shape in ((2 * HIDDEN, 64), (64, HIDDEN))]
    averages = [None if recipe.weight_average is None else w.detach().float() for w in weights]
    for w in weights:
        w.main_grad = torch.zeros(w.shape, device=case.device)  # type: ignore[attr-defined]
    names = ("fc1", "fc2")
    sites = [case.site(monitor, watch, a, name) for a, name in zip(averages, names, strict=True)]
    gain = normal(64).requires_grad_()
    norm = RmsNorm(gain, 1e-5)
    sites[0] = replace(sites[0], norm=norm)
    caches = [WeightCache(), WeightCache()]
    for step, i in itertools.product(range(1, STEPS + 1), range(MICROBATCHES)):
        microbatch = (step + i) % MICROBATCHES
        held, watch.step = [cache.at(step) if holds(case.held) else None for cache in caches], step
        x = normal(TOKENS // 4, 4, 64).requires_grad_()
        rows = torch.arange(TOKENS, device=case.device) + 1000 * microbatch
        call = Call(Key(2**40 + 7, step), microbatch, 0, rows)
        taken, residual = before_linear(x, norm)
        between = linear_before_swiglu(taken, weights[0], recipe, sites[0], call, held[0])
        y = StorageWeakRef(between.y.untyped_storage())
        z = linear_after_swiglu(between, weights[1], recipe, sites[1], call, held[1]) + residual
        del between
        assert y.expired() == (sites[0].kept_y is not None)  # nothing else keeps Y itself
        torch.autograd.backward(z, normal(*z.shape))
        found.tensors += [z.detach(), x.grad, gain.grad]  # type: ignore[list-item]
        gain.grad = None
        gain.data *= 1.125  # which a recorded pass must read again
        found.tensors += [reduced(w) for w in weights]
    found.tensors += watch.values.values()
    monitor._close()
    assert monitor._last_step is not None
    found.tallies = [monitor._last_step.labels, monitor._last_step.tallies.tolist()]
    found.kinds = [kind for site in sites for kind in site.kinds.values()]
    return found


def compared(case: Case, loaded: Any) -> dict[str, Any]:
    runs = run_mlp if case.kind in MLPS else run
    expected = runs(case, in_python, None)
    executor = CppExecutor(loaded, on_cpu=True)
    found = runs(case, executor, loaded.Tallies())
    passes = STEPS * MICROBATCHES * (2 if case.kind in MLPS else 1)
    pairs = list(zip(expected.tensors, found.tensors, strict=True))
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs) and expected.tallies == found.tallies,
        "passes": passes,
        "in C++": passes - sum(kind.calls for kind in found.kinds),
        "recorded": [sum(each is not None for each in kind.passes) for kind in found.kinds],
        "problems": [kind.problem for kind in found.kinds if kind.problem is not None],
    }


def cases(recipes: list[str], mlps: bool, sent: bool, remade: bool) -> list[Case]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = ["column", "row"] if dist.is_initialized() else ["alone", *(MLPS if mlps else ())]
    forms = REMADE if remade else [*FORMS, ("decoded", True)] if sent else FORMS
    return [
        Case(recipe, kind, held, fuses, has_bias=not held, device=device, sent=sent)
        for recipe in recipes
        for kind in kinds
        for held, fuses in forms
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--mistake", choices=MISTAKES)
    parser.add_argument("--mlps", action="store_true", help="MLPs too")
    parser.add_argument("--sent", action="store_true", help="W comes as codes")
    parser.add_argument("--remade", action="store_true", help="W's codes are made again")
    args = parser.parse_args()
    if "RANK" in os.environ:
        gloo.use_one_worker()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if INTERPRETED:
        from testing.kernels import pretend_gpu

        pretend_gpu.install()
    loaded = extension.load()
    if args.mistake is not None:
        MISTAKES[args.mistake](loaded)
    found = {
        str(case): compared(case, loaded)
        for case in cases(args.recipes, args.mlps, args.sent, args.remade)
    }
    if not _rank():
        json.dump(found, sys.stdout)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
