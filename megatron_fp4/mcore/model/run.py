"""The state of a training run: its recipes, step and microbatch, and the rows of its tokens."""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_fp4.arithmetic.philox import Key, Placement
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.call import Site, Watch
from megatron_fp4.execution.communication import TensorParallel
from megatron_fp4.mcore.arguments.steps import steps_of
from megatron_fp4.mcore.model import graphs
from megatron_fp4.mcore.model.run_log import RunLog
from megatron_fp4.mcore.model.sent_weights import SentWeights
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.monitor import NonFiniteMonitor
from megatron_fp4.plan.owned_codes import Times, times_of, times_of_launch
from megatron_fp4.recipe import OPERANDS, Recipe
from megatron_fp4.setting import KeepsW, fastest_of, keeps_w_of

CALIBRATION = 2**31  # the first step whose random bits calibrations draw; trainings are shorter
MOST_PADDING = 1024  # more tokens than any block or Hadamard group holds
_Shape = tuple[int, int, torch.device]  # of a microbatch: length of a sequence, sequences, device


@dataclass(frozen=True)
class Counters:
    """The step and the microbatch of a forward pass, which random bits depend on.

    A recomputed forward pass uses those of its first pass.

    step: the training iteration, from 0.
    microbatch: the index of the microbatch in the global batch, over the microbatches of all
        data-parallel ranks, so that each draws different random bits.
    Both are integers or, in a CUDA graph, int64 tensors [] that kernels read.
    """

    step: int | Tensor
    microbatch: int | Tensor


class Run:
    """An FP4 training run, as one process sees it.

    recipe: the recipe of all linears that no glob in `module_recipes` matches.
    args: Megatron's arguments, from which the current step is read too.
    module_recipes: (glob for global module names, recipe or None for BF16) for the recipe's
        `layers` and each --fp4-module-recipe; the last glob that matches decides.
    """

    def __init__(
        self,
        recipe: Recipe,
        args: argparse.Namespace,
        module_recipes: Sequence[tuple[str, Recipe | None]] = (),
    ) -> None:
        self.recipe = recipe
        self.module_recipes = module_recipes
        self.args = args
        self.monitor = NonFiniteMonitor()
        self.weight_states = WeightStates()
        self.sent_weights = SentWeights()
        self.watch: Watch | None = None  # of the sites that are made from now on
        self.linears: list[str] = []  # the global names of all linears that follow a recipe
        self.start_table = ""  # as rank 0 prints it
        self.passes = 0  # calls of forward_step so far: one for each microbatch and model chunk
        self.awaits_steps = False  # whether training needs a call of forward_step first
        self.epoch = 0  # changes whenever the optimizer may have changed the weights
        self.drop_graphs: Callable[[], None] = lambda: None  # frees the CUDA graphs of all layers
        self._training = True
        self._calibration: int | None = None  # the step of a calibration that runs now, from 0
        self._counts: dict[int | None, int] = defaultdict(int)
        self._step = -1
        self._phases_begun: list[int] | None = None  # of each recipe
        self._microbatch = 0
        self._first_rows: dict[_Shape, Tensor] = {}  # the token rows of microbatch 0
        self._rows: dict[_Shape, tuple[int, Tensor]] = {}  # the latest microbatch, its token rows
        self._clock: graphs.Clock | None = None
        self._log = RunLog(args)

    @property
    def recipes(self) -> list[Recipe]:
        """The launch's recipe, then those of `module_recipes`."""
        return [self.recipe, *(own for _, own in self.module_recipes if own is not None)]

    @property
    def kept(self) -> list[str]:
        """The names of the states that recipes keep beside weights, on whichever rank."""
        return sorted({name for recipe in self.recipes for name in recipe.kept_dtypes})

    # --- time -------------------------------------------------------------------------------

    def counting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """`forward_step`, wrapped so that the run counts the microbatches.

        Megatron calls it once for each microbatch and each model chunk of this rank. Within a chunk
        the calls come in the order of the microbatches, under every pipeline schedule.
        """

        @functools.wraps(forward_step)
        def counted(data_iterator: Any, model: Any, *others: Any, **named: Any) -> Any:
            chunk = unwrap_model(model)
            self._start_microbatch(
                getattr(chunk, "vp_stage", None), getattr(chunk, "training", True)
            )
            return forward_step(data_iterator, model, *others, **named)

        return counted

    def _start_microbatch(self, vp_stage: int | None, training: bool) -> None:
        # With --skip-train Megatron sets no current step, and sets it to 0 where the checkpoint is
        # that of the last step. The last one of the checkpoint is taken.
        step = max(getattr(self.args, "curr_iteration", 0), self.args.iteration - 1)
        self.passes += 1
        self.awaits_steps = False
        if step != self._step or training != self._training:
            self.epoch += 1
            self._training = training
            self.weight_states.gather()
            self.sent_weights.refresh(self._gathers_codes(step))
        if step != self._step:
            self._start_step(step)
        # Modulo, because upstream may run a step again to tell faulty hardware from a real NaN.
        local = self._counts[vp_stage] % get_num_microbatches()
        self._counts[vp_stage] += 1
        self._microbatch = local * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
        if self._clock is not None:
            self._clock.set(self._drawn(max(self._step, 0)), self._microbatch)

    def _start_step(self, step: int) -> None:
        """Begins training step `step`, from 0, and logs the NaN, Inf and rounded elements that the
        monitor has counted in earlier steps."""
        # Megatron's log counts steps from 1.
        self._log.nonfinite(self.monitor.start_step(step + 1))
        self._log.rounding(self.monitor.rounding)
        self._step = step
        self._counts.clear()
        self._recapture_in_a_new_phase()
        if self._training:
            self._log.phases(self.recipes, max(step, 0), self._steps)

    def _recapture_in_a_new_phase(self) -> None:
        """Drops the CUDA graphs of layers when a phase begins: they repeat the recipe before it."""
        progress = max(self._step, 0) / self._steps
        begun = [recipe.phases_begun(progress) for recipe in self.recipes]
        if self._phases_begun not in (None, begun):
            self.drop_graphs()
            self.monitor.forget_graphs()
        self._phases_begun = begun

    def refuse_uncounted(self) -> NoReturn:
        """Raises ConfigError for a forward pass that trains, in a script whose steps are not
        counted: random bits and weights that are held over a step would be those of the first step
        in all of them."""
        raise ConfigError(
            f"recipe {self.recipe.name} counts the steps of megatron.training's pretrain, and this "
            "script trains in a loop of its own: train by pretrain"
        )

    def calibrate(self, number: int | None) -> None:
        """Begins step `number`, from 0, of a calibration of Q-Ramping; None ends the calibration.

        Each step draws random bits of its own, which no step of the training draws. The tallies of
        a calibration are not reported.
        """
        if self._calibration is not None:
            self.monitor.drop()
        self._calibration = number
        self.epoch += 1
        self._counts.clear()

    @property
    def ramping(self) -> Ramping | None:
        """How weights are updated at periods of their own, for all recipes that do; None: none."""
        return next((recipe.ramping for recipe in self.recipes if recipe.ramping), None)

    def now(self) -> Counters:
        """The counters of the forward pass that runs now."""
        if self._clock is not None and graphs.captures():
            return Counters(*self._clock.read())
        return Counters(max(self._step, 0), self._microbatch)

    def in_force(self, recipe: Recipe, counters: Counters) -> Recipe:
        """`recipe`, or that of its phase that these counters are in.

        In a CUDA graph it is that of the step that captures the layer; see `drop_graphs`.
        """
        step = max(self._step, 0) if isinstance(counters.step, Tensor) else counters.step
        return recipe.at(step / self._steps) if recipe.phases else recipe

    @property
    def _steps(self) -> int:
        """The steps of the whole training."""
        # With --skip-train Megatron does not derive the steps from --train-samples.
        return max(self.args.train_iters or steps_of(self.args) or 1, 1)

    @property
    def is_training(self) -> bool:
        """Whether the forward passes that run now are of training, and not of an evaluation or of
        a calibration."""
        return self._training and self._calibration is None

    def key(self, counters: Counters) -> Key:
        """The key of the random bits. In a CUDA graph the clock has the step that is drawn."""
        step = counters.step
        if self._calibration is not None and not isinstance(step, Tensor):
            step = self._drawn(step)
        return Key(self.args.fp4_seed, step)

    def _drawn(self, step: int) -> int:
        """The step whose random bits step `step` draws; see docs/numerics.md, Random bits."""
        return step if self._calibration is None else CALIBRATION + step + self._calibration

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
        sent_w: QuantizedTensor | None = None,
    ) -> Site:
        """The Site of the linear with this global name; see `execution.call.Site`.

        average: float32 [out, in], the moving average of W that the recipe reads, or None.
        sent_w: what `SentWeights.add` returned, or None.
        """
        return Site(
            name=name,
            placements=placements,
            parallel=parallel,
            keeps_w=self.keeps_w,
            packs_x=self.packs_x,
            fastest=self.fastest,
            fuses=self.fuses_wgrad,
            average=average,
            sent_w=sent_w,
            observe=partial(self._observe, name),
            tallies=self.monitor,
            watch=self.watch,
        )

    # --- what is kept, and in which form ------------------------------------------------------

    @property
    def keeps_w(self) -> KeepsW | None:
        """What is kept of W's operands (--fp4-weight-cache); see `Setting.keeps_w`."""
        return keeps_w_of(self.args.fp4_weight_cache)

    def sends(self, weight: Tensor, recipe: Recipe) -> bool:
        """Whether the owners of this weight send it as codes and scales, at the times at which the
        launch gathers codes (--fp4-param-gather).

        recipe: that of its linear.
        """
        # Without an optimizer nothing is gathered, and every rank has the whole weight.
        gathers = self.args.fp4_gathers_codes and not self.args.skip_train
        times = self.times_of_codes
        agrees = any(codes for _, codes in times) and times_of(recipe) == times
        return bool(gathers and weight.requires_grad and agrees)

    @cached_property
    def times_of_codes(self) -> Times:
        """When the ranks gather weights as codes, under --fp4-param-gather."""
        return times_of_launch(self.recipes)

    def _gathers_codes(self, step: int) -> bool:
        """Whether the ranks gather weights as codes for step `step`, from 0."""
        progress = max(step, 0) / self._steps
        return [codes for after, codes in self.times_of_codes if progress >= after][-1]

    @property
    def packs_x(self) -> bool:
        """Whether X is saved for backward as wgrad's codes (--fp4-saved-x); see `Setting`."""
        return self.args.fp4_saved_x == "packed"

    @property
    def fastest(self) -> str | None:
        """The fastest multiplier that may run GEMMs (--fp4-multiplier); None: any may."""
        return fastest_of(self.args.fp4_multiplier)

    @property
    def fuses_wgrad(self) -> bool:
        """Whether linears add dW to main_grad themselves (gradient accumulation fusion).

        dW is then not rounded to the model's dtype first.
        """
        return self.args.fp4_wgrad_fusion

    def main_grad(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of the main_grad to which linears add dW; None if they do not add it.

        dtype: the dtype of the model's weights.
        """
        if not self.fuses_wgrad:
            return None
        return torch.float32 if self.args.accumulate_allreduce_grads_in_fp32 else dtype

    # --- tokens -----------------------------------------------------------------------------

    def token_rows(
        self, counters: Counters, sequence: int, batch: int, device: torch.device
    ) -> Tensor:
        """The rows of a microbatch's tokens in the global batch: int64 [sequence * batch].

        The row of a token is (index of its sequence in the global batch) * sequence + position. The
        result is in Megatron's [sequence, batch] order. All linears of a microbatch share one
        tensor, and save it for backward. In a CUDA graph each linear computes its own.
        """
        shape = (sequence, batch, device)
        if shape not in self._first_rows:
            position = torch.arange(sequence, device=device)[:, None]
            sample = torch.arange(batch, device=device)[None, :]
            self._first_rows[shape] = (sample * sequence + position).flatten()
        first, tokens = self._first_rows[shape], batch * sequence
        if isinstance(counters.microbatch, Tensor):
            return torch.add(first, counters.microbatch, alpha=tokens)
        if shape not in self._rows or self._rows[shape][0] != counters.microbatch:
            self._rows[shape] = counters.microbatch, first + counters.microbatch * tokens
        return self._rows[shape][1]

    def expert_rows(
        self, counters: Counters, tokens: int, device: torch.device
    ) -> tuple[int | Tensor, Tensor]:
        """(index of the microbatch, rows int64 [tokens]) of the tokens that an expert received.

        The rows are consecutive numbers in the order of the tokens. They are different for each
        microbatch and for each data-parallel copy of the expert.
        """
        copies = mpu.get_expert_data_parallel_world_size()
        local = counters.microbatch // mpu.get_data_parallel_world_size()
        microbatch = local * copies + mpu.get_expert_data_parallel_rank()
        # The most tokens that an expert can receive: each rank that dispatches to it sends each of
        # its tokens at most once.
        senders = mpu.get_expert_model_parallel_world_size()
        senders *= mpu.get_expert_tensor_parallel_world_size()
        most = self.args.micro_batch_size * self.args.seq_length * senders + MOST_PADDING
        return microbatch, microbatch * most + torch.arange(tokens, device=device)

    # --- CUDA graphs ------------------------------------------------------------------------

    def prepare_graphs(self, linears: int, device: torch.device) -> None:
        """Allocates what CUDA graphs read and write in GPU memory. Call it before any capture.

        linears: how many FP4 linears this rank has, for the monitor's counts.
        """
        self._clock = graphs.Clock(device)
        self.monitor.expect(linears * sum(map(len, OPERANDS.values())), device)

    # --- NaN and rounded elements -----------------------------------------------------------

    def _observe(self, module: str, gemm: str, operand: str, tally: Tensor) -> None:
        """Passes the tally of a linear's operand to the monitor.

        In a capture, each replay will add the tally to the monitor's totals. A warm-up runs on
        uninitialized memory, so its tallies are dropped. tally: see `operands.Decoded.tally`.
        """
        if not graphs.captures():
            self.monitor.observe(module, gemm, operand, tally)
        elif not graphs.warms_up():
            self.monitor.add(module, gemm, operand, tally)

    def report(self) -> None:
        """Reports a NaN or Inf that was not reported yet, and rounded elements. Waits for the GPU.

        Call it when training ends: during training the tallies of a step are read one step later.
        """
        self._log.nonfinite(self.monitor.look())
        self._log.rounding(self.monitor.rounding)
