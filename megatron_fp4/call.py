"""Call: what tells one call of one linear from all others, and so how its operands are prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from megatron_fp4.backends import Backend, Decoded, Operand, Preparation, choose
from megatron_fp4.communication import TensorParallel
from megatron_fp4.philox import (
    WHOLE,
    Key,
    Noise,
    Placement,
    Signs,
    stream_id,
    stream_label,
)
from megatron_fp4.quantizer import QuantizedTensor
from megatron_fp4.recipe import OPERANDS, Recipe
from megatron_fp4.weights import Kept

# The contracted axis of each operand as the model holds it: X [tokens, in], W [out, in],
# dY [tokens, out].
CONTRACTED = {
    ("fprop", "x"): 1,
    ("fprop", "w"): 1,
    ("dgrad", "dy"): 1,
    ("dgrad", "w"): 0,
    ("wgrad", "dy"): 0,
    ("wgrad", "x"): 0,
}


@dataclass(frozen=True)
class Source:
    """A matrix that one operand of a GEMM is to be made of; one that is quantized already decodes
    to BF16. fold: see Preparation. is_part: it holds this rank's tokens alone, under sequence
    parallelism. at_once: it is multiplied as soon as it is made."""

    gemm: str
    operand: str
    matrix: Tensor | QuantizedTensor
    fold: Tensor | None = None
    is_part: bool = False
    at_once: bool = True


@dataclass(frozen=True)
class Call:
    """What identifies one call of one linear, beside its tensors.

    name: the module's global name; key: seed and step; microbatch: its index in the global batch (a
        number, or where it lies in memory), which makes wgrad's Hadamard signs fresh; repeat: how
        often the linear was called in the microbatch before, which makes noise of X and dY fresh.
    placements: where x, w and dy lie in the unsharded tensors, with all tokens of the microbatch.
    parallel: how the linear is sharded; None where it is not.
    weights: keeps what is made of W for calls with the same W and step: by "<gemm>" the operand and
        what is to be folded into dY, by "<gemm> decoded" (with `decodes`) the operand as the
        backend multiplies it. None: nothing is kept.
    packs_x: keep X for backward as wgrad's 4-bit copy where backward would take X itself.
    fuses: add dW to weight.main_grad, where the weight has one.
    observe: called with (gemm, operand, tally) on each quantized operand as it is multiplied, to
        watch for NaN and for what was rounded; see Decoded.
    """

    name: str = "linear"
    key: Key = field(default_factory=lambda: Key(0))
    microbatch: int | Tensor = 0
    repeat: int = 0
    placements: Mapping[str, Placement] = field(default_factory=dict)
    parallel: TensorParallel | None = None
    weights: Kept | None = None
    decodes: bool = False
    packs_x: bool = True
    fuses: bool = False
    observe: Callable[[str, str, Tensor], None] | None = None

    def has_part(self, operand: str) -> bool:
        """Whether sequence parallelism gives this rank a part of the operand's tokens."""
        return self.parallel is not None and self.parallel.tokens == operand

    def backend(self, recipe: Recipe, gemm: str, like: Tensor) -> Backend:
        """Who runs `gemm` of a model that computes in the dtype of `like`."""
        return choose(recipe.multiplied(gemm), like.device, like.dtype).backend

    def prepare(self, recipe: Recipe, like: Tensor, *sources: Source) -> list[Operand]:
        """The operands of a model that computes in the dtype of `like`. What ranks must agree on
        before they scale (the maximum of a row or tensor that they share) takes one collective."""
        backends = [self.backend(recipe, source.gemm, like) for source in sources]
        preparations = [
            self.preparation(recipe, source, backend)
            for source, backend in zip(sources, backends, strict=True)
        ]
        shared = [
            i
            for i, (source, preparation) in enumerate(zip(sources, preparations, strict=True))
            if self._scale_spans(source, preparation)
        ]
        if shared and self.parallel is not None:
            maxima = [backends[i].absolute_max(sources[i].matrix, preparations[i]) for i in shared]
            for i, widest in zip(shared, self.parallel.maximum(maxima), strict=True):
                preparations[i] = replace(preparations[i], widest=widest)
        operands: list[Operand] = []
        # Copies of one matrix are made together: a backend may read it once.
        alike = groupby(range(len(sources)), lambda i: (id(sources[i].matrix), backends[i]))
        for (_, backend), group in alike:
            places = list(group)
            wanted = [preparations[i] for i in places]
            operands += backend.prepare(sources[places[0]].matrix, *wanted)
        return operands

    def product(
        self,
        recipe: Recipe,
        gemm: str,
        operands: tuple[Operand, Operand],
        like: Tensor,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        """What `gemm` makes of its operands, as `prepare` made them; see `Backend.multiply`. The
        form in which W is multiplied is kept if that is asked for."""
        backend, names = self.backend(recipe, gemm, like), OPERANDS[gemm]
        keeps = names[1] == "w" and self.decodes and isinstance(operands[1], QuantizedTensor)
        kept, decoded = self.weights if keeps else None, f"{gemm} decoded"
        is_there = kept is not None and decoded in kept
        given = [operands[0], kept[decoded][0] if kept and is_there else operands[1]]
        a, b = backend.decode(given, like.dtype, gradient=names[0] == "dy")
        if kept is not None and not is_there:
            kept[decoded] = b, None
        for name, operand, form in zip(names, given, (a, b), strict=True):
            if recipe.quantizer(gemm, name) is not None:  # else fprop's, seen there
                self.watch(gemm, name, operand, form)
        return backend.multiply(a, b, recipe.gemm(gemm).correction, out_dtype, into)

    def watch(self, gemm: str, name: str, operand: Operand, form: Operand | None = None) -> None:
        """Show the tally of a quantized operand, and of the form in which it is multiplied."""
        if self.observe is not None and isinstance(operand, QuantizedTensor):
            counted = form.tally if isinstance(form, Decoded) else None
            self.observe(gemm, name, operand.tally() if counted is None else counted)

    def preparation(
        self, recipe: Recipe, source: Source, backend: Backend | None = None
    ) -> Preparation:
        """What `source` goes through to become an operand, which `backend` may write as it
        multiplies it."""
        gemm, operand = source.gemm, source.operand
        quantizer = recipe.quantizer(gemm, operand)
        # W is prepared once a step, whoever calls first.
        repeats = self.repeat and operand != "w"
        name = f"{self.name}#{self.repeat}" if repeats else self.name
        label = stream_label(name, gemm, operand)
        noise = None
        if quantizer is not None and quantizer.stochastic:
            noise = Noise(self.key, stream_id(label), self._placement(source))
        signs = None
        hadamard = recipe.gemm(gemm).hadamard
        if hadamard is not None and hadamard.signs == "random":
            # W is quantized once a step, so the signs that it shares are fixed within one.
            draw = self.microbatch if gemm == "wgrad" else 0
            signs = Signs(self.key, stream_id(stream_label(self.name, gemm)), draw)
        stays = source.at_once and not source.is_part  # else only codes travel, or are kept
        return Preparation(
            label=label,
            quantizer=quantizer,
            axis=CONTRACTED[gemm, operand],
            fold=source.fold,
            group=hadamard.group if hadamard is not None else 0,
            signs=signs,
            noise=noise,
            carrier=backend.carrier(operand == "dy") if backend and stays else None,
        )

    def _placement(self, source: Source) -> Placement:
        whole = self.placements.get(source.operand, WHOLE)
        if not source.is_part or whole.rows is None or self.parallel is None:
            return whole
        return replace(whole, rows=self.parallel.part(whole.rows))

    def _scale_spans(self, source: Source, preparation: Preparation) -> bool:
        if self.parallel is None or preparation.quantizer is None:
            return False
        sharded = 0 if source.is_part else self.parallel.sharded.get(source.operand)
        return preparation.quantizer.scale_spans(sharded, preparation.axis)
