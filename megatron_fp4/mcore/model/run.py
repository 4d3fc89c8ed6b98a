"""Where a training run stands: its recipe, seed, step and microbatch, and the tokens at hand."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_fp4.arithmetic.philox import Key, Placement
from megatron_fp4.execution.call import Site
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.mcore.model import graphs
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.mcore.runtime.ranks import once
from megatron_fp4.monitor import NonFiniteMonitor, Rounding, Sighting
from megatron_fp4.recipe import OPERANDS, Recipe

MOST_PADDING = 1024  # more tokens than any block or Hadamard group holds
_Shape = tuple[int, int, torch.device]  # of a microbatch: sequence, samples


@dataclass(frozen=True)
class Moment:
    """What a forward pass takes from the clock, and its recomputation takes again.

    step: the training iteration. microbatch: its index among the global batch's, counted over
    microbatches and data-parallel ranks, so that no two share noise. In a CUDA graph both are read
    from memory: int64 [].
    """

    step: int | Tensor
    microbatch: int | Tensor


class Run:
    """One process's view of an FP4 training run.

    recipe: what linears follow. modules: (glob on global module names, another recipe or None for
    BF16); the last that matches counts. args: Megatron's, read for the step and the seed.
    """

    def __init__(
        self,
        recipe: Recipe,
        args: argparse.Namespace,
        modules: Sequence[tuple[str, Recipe | None]] = (),
    ) -> None:
        self.recipe = recipe
        self.modules = modules
        self.args = args
        self.monitor = NonFiniteMonitor()
        self.weight_states = WeightStates()
        self.passes = 0  # forward passes of microbatches through chunks so far
        self.epoch = 0  # changes whenever the optimizer may have changed the weights
        self._training = True
        self._counts: dict[int | None, int] = defaultdict(int)
        self._step = -1
        self._microbatch = 0
        self._first_rows: dict[_Shape, Tensor] = {}  # of the first microbatch
        self._rows: dict[_Shape, tuple[int, Tensor]] = {}  # of the latest one
        self._clock: graphs.Clock | None = None
        self._ended: set[Recipe] = set()  # whose schedule is known to have ended
        self._last_sighting = -2  # the step of it; -2 is not the one before any

    @property
    def recipes(self) -> list[Recipe]:
        """The launch's, then those that some modules have."""
        return [self.recipe, *(own for _, own in self.modules if own is not None)]

    # --- time -------------------------------------------------------------------------------

    def counting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """`forward_step` that tells the run of each microbatch as it starts.

        Megatron calls it for every microbatch of every model chunk of this rank, in order, under
        every schedule.
        """

        def counted(data_iterator: Any, model: Any) -> Any:
            chunk = get_attr_wrapped_model(model, "vp_stage", return_model_obj=True)
            self._start_microbatch(chunk.vp_stage, getattr(chunk, "training", True))
            return forward_step(data_iterator, model)

        return counted

    def _start_microbatch(self, vp_stage: int | None, training: bool) -> None:
        # With --skip-train no step is current, and the checkpoint's last one is evaluated.
        step = getattr(self.args, "curr_iteration", self.args.iteration - 1)
        self.passes += 1
        if step != self._step or training != self._training:
            self.epoch += 1
            self._training = training
            self.weight_states.gather()
        if step != self._step:
            self._tell(self.monitor.start_step(step + 1))  # as Megatron's log counts
            self._tell_of(self.monitor.rounding)
            self._step = step
            self._counts.clear()
            self._tell_of_schedules(training)
        # Modulo, since upstream may run a step twice to tell a broken machine from a NaN.
        local = self._counts[vp_stage] % get_num_microbatches()
        self._counts[vp_stage] += 1
        self._microbatch = local * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
        if self._clock is not None:
            self._clock.set(max(self._step, 0), self._microbatch)

    def now(self) -> Moment:
        if self._clock is not None and graphs.captures():
            return Moment(self._clock.step, self._clock.microbatch)
        return Moment(max(self._step, 0), self._microbatch)

    def in_force(self, recipe: Recipe, moment: Moment) -> Recipe:
        """What is left of a recipe at a moment: its schedule may have ended."""
        if recipe.bf16_after is None:
            return recipe
        assert isinstance(moment.step, int)  # refusals/cuda_graphs.py
        return recipe.at(moment.step / max(self.args.train_iters or 1, 1))

    def key(self, moment: Moment) -> Key:
        return Key(self.args.fp4_seed, moment.step)

    @property
    def evaluates_in_fp4(self) -> bool:
        """Whether evaluation runs the forward pass that training runs (--fp4-eval-forward)."""
        return self.args.fp4_eval_forward == "fp4"

    def site(
        self,
        name: str,
        placements: Mapping[str, Placement],
        parallel: TensorParallel | None,
        average: Tensor | None = None,
    ) -> Site:
        """Of a linear by its global name; see `call.Site`."""
        return Site(
            name=name,
            placements=placements,
            parallel=parallel,
            keeps_w=self.keeps_weights,
            packs_x=self.packs_x,
            fuses=self.fuses_wgrad,
            average=average,
            observe=partial(self._observe, name),
        )

    # --- what is kept, and where --------------------------------------------------------------

    @property
    def keeps_weights(self) -> Literal["packed", "decoded"] | None:
        """In which form W's operands are kept over a step's microbatches, "packed" or "decoded"
        (--fp4-weight-cache); None: they are made anew."""
        kept = self.args.fp4_weight_cache
        return None if kept == "off" else kept

    @property
    def packs_x(self) -> bool:
        """Whether X is kept for backward as codes, where wgrad quantizes it (--fp4-saved-x)."""
        return self.args.fp4_saved_x == "packed"

    @property
    def fuses_wgrad(self) -> bool:
        """Whether dW is added to the FP32 main_grad without being rounded first."""
        return self.args.fp4_wgrad_fusion

    def main_grad(self, dtype: torch.dtype) -> torch.dtype | None:
        """Of weights of a model in `dtype`, where dW is added to it; None where it is not."""
        if not self.fuses_wgrad:
            return None
        return torch.float32 if self.args.accumulate_allreduce_grads_in_fp32 else dtype

    # --- tokens -----------------------------------------------------------------------------

    def token_rows(self, moment: Moment, sequence: int, batch: int, device: torch.device) -> Tensor:
        """Global indices of a microbatch's tokens in Megatron's [sequence, batch] order:
        int64 [sequence * batch], sample * sequence + position. All linears of the microbatch hold
        the same tensor until its backward pass; in CUDA graphs each computes its own."""
        shape = (sequence, batch, device)
        if shape not in self._first_rows:
            position = torch.arange(sequence, device=device)[:, None]
            sample = torch.arange(batch, device=device)[None, :]
            self._first_rows[shape] = (sample * sequence + position).flatten()
        start = moment.microbatch * (batch * sequence)
        if isinstance(moment.microbatch, Tensor):
            return self._first_rows[shape] + start
        if shape not in self._rows or self._rows[shape][0] != moment.microbatch:
            self._rows[shape] = moment.microbatch, self._first_rows[shape] + start
        return self._rows[shape][1]

    def expert_rows(self, moment: Moment, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        """(microbatch, rows) of the tokens that a router sent to an expert, in the order in which
        they came: int64 [tokens]. No two microbatches or copies of the expert share any."""
        assert isinstance(moment.microbatch, int)  # refusals/cuda_graphs.py
        copies = mpu.get_expert_data_parallel_world_size()
        local = moment.microbatch // mpu.get_data_parallel_world_size()
        microbatch = local * copies + mpu.get_expert_data_parallel_rank()
        # A token goes to an expert once; it comes from a rank that dispatches to it.
        senders = mpu.get_expert_model_parallel_world_size()
        senders *= mpu.get_expert_tensor_parallel_world_size()
        most = self.args.micro_batch_size * self.args.seq_length * senders + MOST_PADDING
        return microbatch, microbatch * most + torch.arange(tokens, device=device)

    # --- CUDA graphs ------------------------------------------------------------------------

    def prepare_graphs(self, linears: int, device: torch.device) -> None:
        """Before so many are captured."""
        self._clock = graphs.Clock(device)
        self.monitor.expect(linears * sum(map(len, OPERANDS.values())), device)

    # --- health -----------------------------------------------------------------------------

    def _observe(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Show the monitor an operand of a linear: at once, or whenever the graph runs that is
        being captured. A graph's warm-up runs on arbitrary memory, and shows nothing."""
        if not graphs.captures():
            self.monitor.observe(module, gemm, operand, tally)
        elif not graphs.warms_up():
            self.monitor.add(module, gemm, operand, tally)

    def report(self) -> None:
        """Say where a NaN or Inf first stood, if one did since the step began."""
        self._tell(self.monitor.look())
        self._tell_of(self.monitor.rounding)

    def _tell_of_schedules(self, training: bool) -> None:
        """In the first step of this run that a recipe's schedule has returned to high precision."""
        if not training:
            return
        now = self.now()
        for recipe in self.recipes:
            ended = self.in_force(recipe, now) is not recipe
            if ended and recipe not in self._ended and once(f"schedule:{recipe.name}"):
                plain = "BF16" if self.args.bf16 else "FP16" if self.args.fp16 else "FP32"
                gemms = ", ".join(recipe.bf16_gemms)
                print(
                    f"megatron-fp4: {gemms} of recipe {recipe.name} run in {plain} from step "
                    f"{self._step + 1} on, after {recipe.bf16_after:.4g} of training",
                    flush=True,
                )
            self._ended |= {recipe} if ended else set()

    def _tell_of(self, rounding: Rounding | None) -> None:
        """As often as Megatron logs, and for each pipeline stage."""
        if rounding is None or rounding.step % self.args.log_interval:
            return
        stage = mpu.get_pipeline_model_parallel_rank()
        if once(f"rounded:{rounding.step}:{stage}"):
            sys.stderr.write(f"megatron-fp4: {rounding} (pipeline stage {stage})\n")

    def _tell(self, seen: Sighting | None) -> None:
        if seen is None:
            return
        # A run that is not stopped stays NaN: only the first of a row of bad steps is news.
        is_news, self._last_sighting = seen.step != self._last_sighting + 1, seen.step
        # Once for each pipeline stage: its other ranks saw the same or its consequences.
        stage = mpu.get_pipeline_model_parallel_rank()
        if is_news and once(f"nonfinite:{seen.step}:{stage}"):
            where = f"pipeline stage {stage}, rank {torch.distributed.get_rank()}"
            sys.stderr.write(f"megatron-fp4: {seen} ({where})\n")  # at once: stages speak together
