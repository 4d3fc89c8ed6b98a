"""Site identifies a linear of a model, and Call one call of it.

Together they give the random bits of each operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import FIXED_SIGNS, FixedSigns
from megatron_fp4.arithmetic.philox import (
    WHOLE,
    Key,
    Noise,
    Placement,
    Signs,
    rounding_label,
    stream_id,
    stream_label,
)
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers.base import NOTHING, Given, OperandPlan
from megatron_fp4.operands import Carriers, Made, Matrix
from megatron_fp4.plan.cache import plan_for, tokens_of_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.owned_codes import reads_codes
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import UNSHARDED, KeepsW, Sharding, SwigluPlace


class Call(NamedTuple):
    """One call of a linear, among all calls of a training run.

    key: seed and step.
    microbatch: the index of the microbatch in the global batch, a number or an int64 tensor [].
        Each has different Hadamard signs in wgrad.
    repeat: how often the linear was already called in this microbatch. Each call has different
        random bits for X and dY.
    rows: int64 [tokens], the global row of each token of the microbatch, with the tokens of all
        ranks of a sequence-parallel group; None: as `Site.placements` says.
    """

    key: Key = Key(0)
    microbatch: int | Tensor = 0
    repeat: int = 0
    rows: Tensor | None = None


class Beside(NamedTuple):
    """Where a call of a linear stands beside a SwiGLU: fc1 before it, fc2 after it.

    place: see `setting.SwigluPlace`.
    y: what goes through the SwiGLU, [..., 2 in], if the place is "after"; else None.
    """

    place: SwigluPlace = ""
    y: Tensor | None = None


ALONE, BEFORE = Beside(), Beside("before")


class Tallies(Protocol):
    """Takes tallies from C++; see `Site.tallies`.

    from_cpp: an object of the extension in C++ that collects them; None if there is no extension.
    """

    from_cpp: Any

    def label(self, module: str, gemm: str, operand: str) -> int:
        """A number for an operand of a linear, by which `from_cpp` knows it."""
        ...


class Watch(Protocol):
    """Sees the operands of a linear; see `Site.watch`."""

    def looks(self, holds_w: bool) -> bool:
        """Whether it has to see the operands of the pass that begins now, which must then run in
        Python. holds_w: whether W's operands are held for the step, so that `held` shows them."""
        ...

    def made(
        self,
        site: Site,
        call: Call,
        operand: OperandPlan,
        matrix: Matrix,
        given: Given,
        made: Made,
    ) -> None:
        """Called right after an operand was made.

        matrix, given: what the maker made it from; see `makers.base.Maker.make`.
        """
        ...

    def held(self, site: Site, w: Tensor, held: HeldWeight) -> None:
        """Called after a forward pass, in C++ or in Python, for which fprop's operand of W was not
        yet held: in most cases once a step.

        w: W in the dtype of X. held: has the operand now, if fprop quantizes W. The executor in
        Python (`linear.in_python`) does not call this.
        """
        ...

    def carried(self, site: Site, operand: OperandPlan, carriers: Carriers) -> None:
        """Called when an operand is multiplied in FP8 carriers, with the tokens of all ranks."""
        ...


@dataclass(frozen=True)
class Site:
    """One linear of a model: what all its calls have in common, beside its plan.

    name: the global name of the module, part of the key of its random bits.
    placements: where "x", "w" and "dy" lie in the unsharded tensors; the default is WHOLE.
    parallel: the ranks over which it is sharded; None if it is not sharded.
    keeps_w, packs_x, kept_y, fastest: see `setting.Setting`.
    fuses: whether dW is added to weight.main_grad, if the weight has one.
    average: float32 [out, in], the moving average towards which rounding ema rounds W. It is
        updated in place between steps. None: W itself, or the recipe reads no average.
    sent_w: fprop's operand of W, which the ranks that own parts of W quantize and send. It keeps
        its addresses, and is written in place between steps. None, and in phases whose recipe
        reads more of W (`owned_codes.reads_codes`): the linear quantizes W.
    norm: an RMSNorm of what the linear takes, whose result is X; None: it takes X.
    observe: called with (gemm, letter, tally) for each quantized operand when it is multiplied, to
        watch for NaN and rounded elements; see `operands.Decoded.tally`.
    tallies: where passes that run in C++ add tallies, in place of calls of `observe`; None: where
        there is `observe`, passes run in Python.
    watch: sees each operand when it was made and when it is multiplied; None: nobody looks.
    kinds: what cpp/executor.py knows of the calls of this linear.
    """

    name: str = "linear"
    placements: Mapping[str, Placement] = field(default_factory=dict)
    parallel: TensorParallel | None = None
    keeps_w: KeepsW | None = None
    packs_x: bool = True
    kept_y: torch.dtype | None = None
    fastest: str | None = None
    fuses: bool = False
    average: Tensor | None = None
    sent_w: QuantizedTensor | None = None
    norm: RmsNorm | None = None
    observe: Callable[[str, str, Tensor], None] | None = None
    tallies: Tallies | None = None
    watch: Watch | None = None
    kinds: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    # The stream of operands in calls that are no repeats, and their placement without rows.
    _streams: dict[OperandPlan, tuple[int, Placement]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def sharding(self) -> Sharding:
        """How the linear is sharded."""
        return UNSHARDED if self.parallel is None else self.parallel.sharding

    def plan(
        self,
        recipe: Recipe,
        tokens: int,
        weight: Tensor,
        dtype: torch.dtype,
        main_grad: torch.dtype | None,
        dx: bool,
        dw: bool,
        has_bias: bool,
        swiglu: SwigluPlace,
    ) -> LinearPlan:
        """The plan of the linear under `recipe`, on the device of `weight` [out, in].

        tokens: on this rank, under sequence parallelism of its part. dtype: of X. The others are as
        in `setting.Setting`.
        """
        # Not by the property `sharding`: this runs in each call, and host time counts.
        sharding = UNSHARDED if self.parallel is None else self.parallel.sharding
        return plan_for(
            recipe, tokens_of_plan(recipe, tokens), weight.shape, dtype, weight.device,
            weight.dtype, sharding, main_grad, dx, dw, has_bias, self.keeps_w, self.packs_x,
            swiglu, self.norm is not None, self.kept_y, self._reads_sent_w(recipe), self.fastest,
        )  # fmt: skip

    def _reads_sent_w(self, recipe: Recipe) -> bool:
        """Whether `recipe`, which may be that of a phase, takes W from `sent_w`."""
        return self.sent_w is not None and reads_codes(recipe, self.sent_w.quantizer)

    def given(
        self, operand: OperandPlan, call: Call, fold: Tensor | None, largest: Tensor | None
    ) -> Given:
        """What an operand's maker is given in one call. fold, largest: see Given."""
        noise = signs = average = None
        quantizer = operand.quantizer
        if quantizer is not None:
            if quantizer.draws:
                noise = self._noise(operand, call)
            elif quantizer.rounding == "ema":
                average = self.average
        if operand.hadamard is not None:
            signs = self.signs(operand.gemm, operand, call)
        if fold is largest is noise is signs is average is None:
            return NOTHING
        return Given(fold, largest, noise, signs, average)

    def signs(self, gemm: str, operand: OperandPlan, call: Call) -> Signs | FixedSigns | None:
        """The signs of a GEMM's Hadamard transform; None where it has none."""
        if operand.hadamard is None or operand.hadamard.signs == "none":
            return None
        if operand.hadamard.signs == "fixed":
            return FIXED_SIGNS
        # W is quantized once a step. The signs that X or dY shares with it therefore stay the same
        # for all microbatches of a step.
        draw = call.microbatch if gemm == "wgrad" else None
        return Signs(call.key, stream_id(stream_label(self.name, gemm)), draw)

    def label(self, operand: OperandPlan, call: Call) -> str:
        """The name of the operand in this call; see `stream_label`."""
        return stream_label(self._called(operand, call), operand.gemm, operand.letter)

    def _called(self, operand: OperandPlan, call: Call) -> str:
        """The name of the linear for this call of the operand."""
        # W is quantized once a step, whichever call comes first.
        repeats = call.repeat and operand.letter != "w"
        return f"{self.name}#{call.repeat}" if repeats else self.name

    def _noise(self, operand: OperandPlan, call: Call) -> Noise:
        """The key of the operand's random bits in this call."""
        if call.repeat:
            stream = _stream(self._called(operand, call), operand)
            return Noise(call.key, stream, self.placement(operand, call))
        if operand not in self._streams:
            placement = self.placements.get(operand.letter, WHOLE)
            self._streams[operand] = _stream(self.name, operand), placement
        stream, placement = self._streams[operand]
        if call.rows is not None:
            placement = self.placement(operand, call)
        return Noise(call.key, stream, placement)

    def placement(self, operand: OperandPlan, call: Call) -> Placement:
        """Where the operand lies in the unsharded tensor, in this call."""
        placement, rows = self.placements.get(operand.letter, WHOLE), call.rows
        if operand.letter == "w" or rows is None:
            return placement
        if operand.is_part and self.parallel is not None:
            rows = self.parallel.part(rows)
        return placement._replace(rows=rows)


def _stream(name: str, operand: OperandPlan) -> int:
    """The number of the random stream from which an operand of the linear `name` draws the bits of
    its stochastic rounding; see `rounding_label`."""
    return stream_id(rounding_label(name, operand.gemm, operand.letter))
