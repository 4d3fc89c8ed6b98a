"""Records the passes of a kind of call, and makes Programs of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fp4.cpp.lowering import CannotLower, Outcome, lower
from megatron_fp4.cpp.recorder import is_shared, record_pass
from megatron_fp4.execution.autograd import ForwardContext
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.tensor_lists import TensorList, take_apart
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers import PYTORCH
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipe import Recipe

Words = tuple[int, int, int, int]


@dataclass
class Kind:
    """The calls of one linear that run the same passes.

    recipe: kept here since its id is a part of the kind's key, and no other recipe may get that id.
    calls: how many ran in Python.
    passes: the extension's Pass of each of four passes, or None until it is recorded. At 0 the
        forward pass that makes W's operand, at 1 the forward pass that reads a held one, at 2 and 3
        the backward passes that do so.
    template: the ForwardContext of the call that was recorded, without what differs between calls.
    adds: whether dW is added to main_grad. rebuilds: see `HeldWeight.rebuilds`.
    problem: why its calls run in Python; None if they need not.
    """

    recipe: Recipe
    calls: int = 0
    passes: list[Any] = field(default_factory=lambda: [None] * 4)
    template: ForwardContext | None = None
    adds: bool = False
    rebuilds: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    _owners: list[Any] = field(default_factory=list)  # see `add`

    def add(self, place: int, made: Any, owners: list[Any]) -> None:
        """Stores a recorded pass.

        place: its index in `passes`. made: the extension's Pass. owners: tensors and other objects
        whose memory the Pass has addresses of; they are kept as long as the Pass.
        """
        self.passes[place] = made
        self._owners += owners


class CallRecorder:
    """The Follower of one call: runs its passes in Python, and makes Programs of them."""

    def __init__(
        self, extension: Any, kind: Kind, site: Site, call: Call, held: HeldWeight | None
    ) -> None:
        self._extension, self._kind = extension, kind
        self._site, self._call, self._held = site, call, held

    def forward(
        self, run: Callable[[Site], Any], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        held = self._held
        reads = held is not None and held.has("fprop")

        def outcome(found: tuple[Tensor, ForwardContext, TensorList]) -> Outcome:
            y, context, saved = found
            if (problem := refusal(context.plan)) is not None:
                raise CannotLower(problem)
            self._kind.template = replace(
                context, call=Call(), held=None, shared_w=None, weight=None
            )
            self._kind.adds = context.weight is not None
            return Outcome([y], saved, [] if reads else self._taken("fprop"))

        inputs = [
            x, weight, bias, *other_inputs(self._site, self._call), *self._given("fprop", reads),
        ]  # fmt: skip
        return self._followed(int(reads), run, inputs, outcome)

    def backward(
        self,
        run: Callable[[Site], Any],
        held: HeldWeight | None,
        dy: Tensor,
        main_grad: Tensor | None,
        saved: Sequence[Tensor | None],
    ) -> Any:
        reads = held is not None and held.has("dgrad")

        def outcome(found: tuple[Tensor | None, ...]) -> Outcome:
            dx, dw, db = found
            own = [dx, dw if main_grad is None else None, db]
            return Outcome(own, [], [] if reads else self._taken("dgrad"))

        inputs = [
            dy, main_grad, *saved, *other_inputs(self._site, self._call),
            *self._given("fprop", held is not None), *self._given("dgrad", reads),
        ]  # fmt: skip
        return self._followed(2 + reads, run, inputs, outcome)

    def _followed(
        self,
        place: int,
        run: Callable[[Site], Any],
        inputs: Sequence[Tensor | None],
        outcome: Callable[[Any], Outcome],
    ) -> Any:
        """Runs a pass, and records it unless its kind has it already, or its inputs share memory.

        place: its index in `Kind.passes`. inputs: the tensors that its Program will be given.
        outcome: sorts what `run` returned by use. Raises what `run` raises.
        """
        kind, site = self._kind, self._site
        if kind.problem is not None or kind.passes[place] is not None or is_shared(inputs):
            return run(site)
        labels: list[int] = []
        tallies: list[Tensor] = []

        def observe(gemm: str, letter: str, tally: Tensor) -> None:
            assert site.observe is not None and site.tallies is not None
            with _disable_current_modes():  # what the observer runs is none of the pass
                site.observe(gemm, letter, tally)
            labels.append(site.tallies.label(site.name, gemm, letter))
            tallies.append(tally)

        # The watch does not look at this pass: what it would run is none of the pass.
        followed = replace(site, observe=site.observe and observe, watch=None)
        reads = [
            each
            for placement in site.placements.values()
            for each in (placement.rows, placement.groups)
            if each is not None
        ]
        with record_pass(inputs, reads) as recording:
            found = run(followed)
        try:
            results = outcome(found)
            lowered = lower(
                self._extension, recording, replace(results, tallies=tallies), words(self._call)
            )
        except CannotLower as error:
            kind.problem = str(error)
            _tell(site.name, kind.problem)
            return found
        made = self._extension.Pass(lowered.program, len(results.saved), len(results.held), labels)
        kind.add(place, made, lowered.owners)
        return found

    def _given(self, gemm: str, reads: bool) -> list[Tensor]:
        """The tensors of a held operand, if the pass reads it and it was made."""
        held = self._held
        return held.tensors(gemm) if reads and held is not None and gemm in held.made else []

    def _taken(self, gemm: str) -> list[Tensor]:
        """The tensors of an operand of W that the pass has made, if it is held."""
        held = self._held
        if held is None or gemm not in held.made:
            return []
        self._kind.rebuilds[gemm] = held.rebuild(gemm)
        return held.tensors(gemm)


_told: set[str] = set()


def _tell(name: str, problem: str) -> None:
    """Says on rank 0, once for each problem, that a linear stays in Python."""
    if dist.is_initialized() and dist.get_rank():
        return
    if problem not in _told:
        _told.add(problem)
        sys.stderr.write(
            f"megatron-fp4: {name} and others like it stay in Python, which is slower: {problem}\n"
        )


def words(call: Call) -> Words:
    """The numbers that differ between calls, in the order of `recording.WORDS`."""
    draw = int(call.microbatch) & 0xFFFFFFFF
    return *call.key.signed_words, draw - (draw >> 31 << 32)


def other_inputs(site: Site, call: Call) -> list[Tensor]:
    """The tensors that both passes read beside those of the linear."""
    weight = None if site.norm is None else site.norm.weight.detach()
    sent = [] if site.sent_w is None else take_apart(site.sent_w)[0]
    return [each for each in (call.rows, site.average, weight, *sent) if each is not None]


def refusal(plan: LinearPlan) -> str | None:
    """Why the passes of a plan cannot be recorded; None if they can.

    They cannot where PyTorch's operators draw random bits: these get the step and the microbatch as
    numbers, which a repetition cannot change, so that it would draw the bits of the recorded call.
    """
    for making in plan.makings:
        for operand in making.operands:
            quantizer, hadamard = operand.quantizer, operand.hadamard
            by_pytorch = making.maker is PYTORCH
            if by_pytorch and quantizer is not None and quantizer.draws:
                return f"PyTorch draws the random bits of {operand.letter} in {operand.gemm}"
            if by_pytorch and hadamard is not None and hadamard.signs == "random":
                return f"PyTorch draws the random signs of {operand.letter} in {operand.gemm}"
            fprop = plan.fprop.b if operand.letter == "w" else plan.fprop.a
            transform = fprop.hadamard if operand.source == "decoded" else None
            if transform is not None and transform.signs == "random":
                return "PyTorch draws the random signs of fprop"
    signs = plan.recipe.fprop.hadamard is not None and plan.recipe.fprop.hadamard.signs
    for estimates in (plan.estimates_w, plan.estimates_x):
        if signs == "random" and estimates is not None:
            return "PyTorch draws the random signs of fprop"
    return None
