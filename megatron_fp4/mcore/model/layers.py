"""Megatron's column- and row-parallel linears, with GEMMs that follow a recipe.

The classes derive from Megatron's. They replace only the GEMMs and their communication under
sequence parallelism (megatron/core/tensor_parallel/layers.py, `_forward_impl`). Parameters,
initialization and checkpoints are upstream's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_fp4.arithmetic.philox import Placement
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.execution.weights import WeightCache
from megatron_fp4.linear import linear_after_swiglu, linear_before_swiglu, quantized_linear
from megatron_fp4.makers.base import Given
from megatron_fp4.mcore.model import graphs, size_checks
from megatron_fp4.mcore.model.run import Counters, Run
from megatron_fp4.mcore.model.shards import (
    column_parallel_placements,
    row_parallel_placements,
    tokens_on_rank,
    whole_sequence,
)
from megatron_fp4.operands import Activated
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import token_multiple
from megatron_fp4.recipe import Recipe
from megatron_fp4.replay import Replay
from megatron_fp4.setting import Sharding, SwigluPlace, column_parallel, holds, row_parallel


@dataclass
class Fp4State:
    """What an FP4 linear has beyond Megatron's linear. `attach` makes it when the model is built.

    run: the training run. recipe: the linear's recipe, with its phases.
    site: its global name, the place of its operands in the unsharded tensors, its ranks.
    is_expert: whether it belongs to an expert of a mixture. Its X is then [tokens, in] with the
        tokens that the router sends, a different number in each call.
    swiglu: the side of the SwiGLU on which the linear stands, if the linears of its MLP compute it;
        else "". See `GatedMLP.join`.
    replay: gives a recomputed forward pass the counters of its first pass.
    cache: W's operands of the current step.

    _pass: the forward pass of the model in which the linear was called last, by Run.passes.
    _repeat: its earlier calls in that pass. Random bits depend on it, so that a linear that is
        called twice in a microbatch draws others.
    """

    run: Run
    recipe: Recipe
    site: Site
    is_expert: bool = False
    swiglu: SwigluPlace = ""
    replay: Replay = field(default_factory=Replay)
    cache: WeightCache = field(default_factory=WeightCache)
    _pass: int = -1
    _repeat: int = 0
    _leaves_swiglu: bool = False

    @contextmanager
    def before_swiglu(self) -> Iterator[None]:
        """In this context the linear returns its Y as an Activated, for a linear that computes the
        SwiGLU of it."""
        self._leaves_swiglu = True
        try:
            yield
        finally:
            self._leaves_swiglu = False

    def take_norm(self, norm: RmsNorm) -> None:
        """From now on the linear is given what goes into `norm`, and computes the norm itself."""
        self.site = replace(self.site, norm=norm)

    def follows(self, training: bool) -> bool:
        """Whether this forward pass follows the recipe.

        training: whether the module is in training mode. If not, this is an evaluation, which runs
        in BF16 with --fp4-eval-forward bf16.
        """
        return training or self.run.evaluates_in_fp4

    def product(
        self, x: Tensor | Activated, weight: Tensor, bias: Tensor | None, training: bool
    ) -> Any:
        """Y = X W^T + bias for a microbatch, by the recipe that is in force now.

        x: [sequence, batch, in], or [tokens, in] in an expert. Y has the same shape, with out
        features. Under sequence parallelism a column-parallel linear takes this rank's part of the
        sequence, and a row-parallel linear returns it. weight: [out, in]. bias: [out] or None.
        After a SwiGLU x is an Activated; in `before_swiglu` the result is one.
        """
        if training and self.run.awaits_steps:
            self.run.refuse_uncounted()
        counters, repeat = self.replay.take(self._now)
        recipe = self.run.in_force(self.recipe, counters)
        if not training:
            recipe = recipe.in_evaluation
        if not self.is_expert:
            return self._product(x, weight, bias, recipe, counters, repeat, training)
        assert isinstance(x, Tensor)
        # Rows of zeros fill the last block. They change no product; a mean of X counts them.
        missing = -len(x) % token_multiple(recipe)
        padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return self._product(padded, weight, bias, recipe, counters, repeat, training)[: len(x)]

    def _product(
        self,
        x: Tensor | Activated,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        counters: Counters,
        repeat: int,
        training: bool,
    ) -> Any:
        microbatch, rows = self._tokens(x.result if isinstance(x, Activated) else x, counters)
        run, held = self.run, None
        if holds(run.keeps_w) and training:
            # Held operands are valid as long as this stamp stays the same. Optimizers can write to
            # parameters without raising their version counter, so the stamp contains the epoch.
            # Evaluation holds nothing: it may run with averaged weights, and nothing in the stamp
            # would change between two evaluations with different averages.
            held = self.cache.at((run.epoch, weight._version, counters.step, id(recipe)))
        call = Call(run.key(counters), microbatch, repeat, rows)
        if isinstance(x, Activated):
            assert bias is None  # Megatron adds that of fc2 later
            return linear_after_swiglu(x, weight, recipe, self.site, call, held)
        if self._leaves_swiglu:
            return linear_before_swiglu(x, weight, recipe, self.site, call, held)
        return quantized_linear(x, weight, bias, recipe, self.site, call, held)

    def _now(self) -> tuple[Counters, int]:
        """(counters, how often this linear was already called in this microbatch)."""
        # A captured layer runs once in a microbatch, though the capture calls it several times.
        if graphs.captures():
            return self.run.now(), 0
        self._repeat = self._repeat + 1 if self._pass == self.run.passes else 0
        self._pass = self.run.passes
        return self.run.now(), self._repeat

    def _tokens(self, x: Tensor, counters: Counters) -> tuple[int | Tensor, Tensor]:
        """(index of the microbatch, int64 [tokens] with the tokens' rows in the global batch)."""
        if self.is_expert:
            return self.run.expert_rows(counters, len(x), x.device)
        sequence = whole_sequence(x.shape[0], self.site.sharding)
        return counters.microbatch, self.run.token_rows(counters, sequence, x.shape[1], x.device)


class _FollowsRecipe:
    """Mixin of both linears: replaces upstream's GEMMs where the linear follows a recipe."""

    training: bool
    weight: Tensor
    bias: Tensor | None
    config: TransformerConfig
    skip_bias_add: bool
    tp_group: torch.distributed.ProcessGroup
    is_expert: bool
    fp4: Fp4State | None = None  # None: this layer stays in high precision
    # Whether the class may compute what stands beside it; see `GatedMLP.join` and `joined_norms`.
    may_join: bool = True

    def attach(
        self,
        name: str,
        run: Run,
        recipe: Recipe,
        average: Tensor | None,
        sent_w: QuantizedTensor | None = None,
    ) -> None:
        """Makes this linear follow `recipe`.

        name: its global module name. average: of its weight, which `WeightStates.add` returns.
        sent_w: what `SentWeights.add` returns for its weight; None: the linear quantizes W.
        Raises ConfigError if the blocks of the recipe, or of one of its phases, do not divide the
        linear's sizes.
        """
        sharding, placements = self._sharded(name, run, recipe)
        for phase in recipe.phases:
            self._sharded(name, run, phase.recipe)
        site = run.site(name, placements, _ranks(self.tp_group, sharding), average, sent_w)
        self.fp4 = Fp4State(run, recipe, site, self.is_expert)

    @abstractmethod
    def _sharded(
        self, name: str, run: Run, recipe: Recipe
    ) -> tuple[Sharding, dict[str, Placement]]:
        """How tensor parallelism shards the linear, and where the rank's parts of its matrices lie.
        Raises ConfigError as `attach` does."""

    def plans(self) -> list[LinearPlan]:
        """The plans of the recipe and of its phases for a microbatch of --micro-batch-size
        sequences.

        In an expert, whose number of tokens varies, those for the smallest number of tokens that
        blocks divide. Requires that `attach` was called.
        """
        assert self.fp4 is not None
        return [self._plan(recipe) for recipe in self.fp4.recipe.in_turn]

    def _plan(self, recipe: Recipe) -> LinearPlan:
        assert self.fp4 is not None
        dtype = self.config.params_dtype
        return self.fp4.site.plan(
            recipe,
            self.tokens(recipe),
            self.weight,
            dtype,
            self.fp4.run.main_grad(dtype),
            dx=True,
            dw=True,
            has_bias=self.bias is not None and not self.skip_bias_add,
            swiglu=self.fp4.swiglu,
        )

    def quantized_weight(self) -> Tensor:
        """W as fprop multiplies it in the step that runs or is about to: float32 [out, in].

        Requires that `attach` was called, and that fprop rounds W to nearest in block scales.
        """
        assert self.fp4 is not None
        run = self.fp4.run
        plan = self._plan(run.in_force(self.fp4.recipe, Counters(run.args.curr_iteration, 0)))
        making = next(making for making in plan.forward if plan.fprop.b in making.operands)
        made = making.maker.make(self.weight.detach(), [plan.fprop.b], [Given()])[0].operand
        assert isinstance(made, QuantizedTensor)
        return made.dequantize(torch.float32)

    def follows(self) -> bool:
        """Whether the next forward pass follows a recipe."""
        return self.fp4 is not None and self.fp4.follows(self.training)

    def tokens(self, recipe: Recipe) -> int:
        """The number of tokens that the plan of a recipe is for; see `Setting.tokens`."""
        assert self.fp4 is not None
        if self.fp4.is_expert:
            return token_multiple(recipe)
        return tokens_on_rank(self.fp4.run.args, self.fp4.site.sharding)

    def _forward_impl(self, input: Any, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.fp4 is None or not self.follows():
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        return self.fp4.product(input, weight, kwargs["bias"], self.training)


class Fp4ColumnParallelLinear(_FollowsRecipe, ColumnParallelLinear):
    """Y = X W^T with the rows of W sharded over the tensor-parallel ranks.

    Under sequence parallelism each rank has a part of X's tokens, and the codes are gathered.
    """

    def _sharded(
        self, name: str, run: Run, recipe: Recipe
    ) -> tuple[Sharding, dict[str, Placement]]:
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        alone = self.explicit_expert_comm  # the token dispatcher communicates, not the linear
        sharding = column_parallel(
            ranks,
            sequence_parallel=self.sequence_parallel and not alone,
            sums_dx=self.allreduce_dgrad and not alone,
        )
        ranges = getattr(self.weight, "partition_stride", 1)
        length = self.output_size_per_partition // ranges
        size_checks.check(run.args, recipe, name, self.input_size, length, sharding, self.is_expert)
        return sharding, column_parallel_placements(rank, ranks, length, ranges, self.weight.device)


class Fp4RowParallelLinear(_FollowsRecipe, RowParallelLinear):
    """Y = X W^T with the columns of W sharded over the tensor-parallel ranks.

    Each rank computes a partial sum of Y. Without sequence parallelism upstream's forward
    all-reduces it. With sequence parallelism `Fp4State.product` reduce-scatters it, so that in
    backward dY arrives as this rank's tokens and can be quantized before it is gathered.
    """

    def _sharded(
        self, name: str, run: Run, recipe: Recipe
    ) -> tuple[Sharding, dict[str, Placement]]:
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        length = self.input_size_per_partition
        sharding = row_parallel(
            ranks,
            sequence_parallel=self.sequence_parallel and not self.explicit_expert_comm,
        )
        size_checks.check(
            run.args, recipe, name, length, self.output_size, sharding, self.is_expert
        )
        return sharding, row_parallel_placements(rank, ranks, length, self.weight.device)

    def forward(self, input_: Tensor | Activated) -> tuple[Tensor, Tensor | None]:
        """(Y, bias), as upstream's forward. The bias is None if it was added to Y.

        input_: [sequence, batch, in / ranks], or [tokens, in / ranks] in an expert.
        """
        state = self.fp4
        if state is None or not state.follows(self.training):
            return super().forward(input_)
        if state.site.sharding.scattered is None:
            return super().forward(input_)
        output = state.product(input_, self.weight, None, self.training)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


def _ranks(group: torch.distributed.ProcessGroup, sharding: Sharding) -> TensorParallel | None:
    """The communication between the ranks that share a linear; None if one rank has all of it."""
    return TensorParallel(group, sharding) if sharding.ranks > 1 else None
