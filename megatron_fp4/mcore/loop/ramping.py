"""Q-Ramping in Megatron's loop: its optimizers, and its calibrations.

Every so many steps a calibration runs some steps ahead with plain AdamW, on the data that comes
next, and measures how far each weight and its quantized value move. Then it restores the state
before them, and sets the periods at which `RampingAdamW` updates elements from then on.
docs/notes/ramping.md has the reasons. C stands for megatron/core, T for megatron/training.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.core.transformer.module import MegatronModule
from megatron.training import print_rank_0, training
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.ramping import Movement, Ramping, update
from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW, Update
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints.optimizer_compat import init_state
from megatron_fp4.mcore.loop.loop_state import LoopState, gather_weights
from megatron_fp4.mcore.model.kept_states import KeptStates
from megatron_fp4.mcore.model.optimizers import stepping_optimizers
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.runtime.wrapping import wrap_once

# Arguments that make train_step write files in some iterations.
_WRITES = (
    "save_params_interval",
    "save_activations_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
)


def replace_optimizers(optimizer: MegatronOptimizer) -> None:
    """Puts a RampingAdamW, with the same groups of parameters, in the place of each inner AdamW.

    The inner optimizer is torch's, or the FusedAdam of Transformer Engine or apex where one is
    installed. Megatron looks it up at each use. Raises ConfigError for Adam without decoupled
    weight decay.
    """
    for each in stepping_optimizers(optimizer):
        if not each.config.decoupled_weight_decay:
            raise ConfigError(
                "Q-Ramping updates weights by AdamW: set decoupled_weight_decay of the optimizer's "
                "configuration, or leave ramping out of the recipe"
            )
        each.optimizer = RampingAdamW.in_place_of(each.optimizer, _update())
        each.init_state_fn = init_state


def _update() -> Update:
    """The step of an element, as torch's operations or as a kernel."""
    if not torch.cuda.is_available():
        return update
    from megatron_fp4.kernels import ramping  # imports Triton

    return ramping.update


class Calibrations:
    """The calibrations of a run; `Ramping.calibrates_before` says before which steps."""

    def __init__(self, run: Run, ramping: Ramping) -> None:
        self._run, self._ramping = run, ramping

    def install(self) -> None:
        """Hooks into T/training.py:train, which calls train_step for each step. Idempotent."""
        wrap_once(training, "train_step", self._calibrating)

    def _calibrating(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: list[MegatronModule],
            optimizer: MegatronOptimizer,
            opt_param_scheduler: Any,
            *others: Any,
            **named: Any,
        ) -> Any:
            def step() -> Any:
                given = forward_step_func, data_iterator, model, optimizer, opt_param_scheduler
                return upstream(*given, *others, **named)

            if self._is_due():
                offload = self._run.args.fp4_offload_calibration
                before = LoopState(model, optimizer, opt_param_scheduler, data_iterator, offload)
                self._calibrate(step, model, optimizer, before)
            return step()

        return train_step

    def _is_due(self) -> bool:
        args, ramping = self._run.args, self._ramping
        ramping.interval_in(args.train_iters)  # may raise: in the first step, not at the interval
        # Megatron calls train_step for no iteration (from 1) of --iterations-to-skip.
        first = args.curr_iteration
        while first in args.iterations_to_skip:
            first -= 1
        steps = range(first, args.curr_iteration + 1)
        if not any(ramping.calibrates_before(step, args.train_iters) for step in steps):
            return False
        # A step that failed is run again after a restart, and must be the first one then.
        return get_rerun_state_machine().state == RerunState.NOT_RUNNING_YET

    def _calibrate(
        self,
        step: Callable[[], Any],
        model: list[MegatronModule],
        optimizer: MegatronOptimizer,
        before: LoopState,
    ) -> None:
        """Runs a calibration of steps by `step`, restores `before`, and sets the periods."""
        start, run = time.perf_counter(), self._run
        inner = [each.optimizer for each in stepping_optimizers(optimizer)]
        ramped = run.weight_states.ramped
        gather_weights(model)
        movements = [
            Movement.start(*_moved(kept), run.args.fp4_offload_calibration) for kept in ramped
        ]
        for each in inner:
            each.calibrates = True
        with _writing_nothing(run.args), _without_reruns():
            for number in range(self._ramping.calibration):
                run.calibrate(number)
                step()
                gather_weights(model)
                for kept, movement in zip(ramped, movements, strict=True):
                    movement.add(*_moved(kept))
        run.calibrate(None)
        before.restore()
        for each in inner:
            each.calibrates = False
        self._set_periods(ramped, movements, start)

    @torch.no_grad()
    def _set_periods(
        self, ramped: list[KeptStates], movements: list[Movement], start: float
    ) -> None:
        total, longer = self._run.args.train_iters, torch.zeros(2, dtype=torch.float64)
        for kept, movement in zip(ramped, movements, strict=True):
            assert kept.main is not None and isinstance(kept.inner, RampingAdamW)
            periods = self._ramping.periods(movement.ratio(kept.main.device), total)
            kept.inner.set_period(kept.main, periods.view(kept.main.shape))
            longer += torch.tensor([int((periods > 1).sum()), periods.numel()])
        longer = longer.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(longer)
        share = float(longer[0] / longer[1].clamp(min=1))
        iteration, seconds = self._run.args.curr_iteration + 1, time.perf_counter() - start
        print_rank_0(
            f"megatron-fp4: calibrated over {self._ramping.calibration} steps in {seconds:.1f} s, "
            f"before iteration {iteration}: {share:.2%} of the weights' elements have periods "
            "above 1"
        )


def _moved(kept: KeptStates) -> tuple[Tensor, Tensor]:
    """(W, Q(W)) of the part of a weight that this rank updates, as vectors.

    W is the float32 main weight, and Q(W) the model's weight as fprop multiplies it.
    """
    assert kept.main is not None
    quantized = kept.layer.quantized_weight().flatten()[kept.start : kept.end]
    return kept.main.detach().flatten(), quantized


@contextmanager
def _without_reruns() -> Iterator[None]:
    """Without the checks of C/rerun_state_machine.py.

    After a NaN it would run a step of the calibration again, save a checkpoint in the middle of it,
    or end the run. A loss of the calibration would count for what is usual.
    """
    machine = get_rerun_state_machine()
    mode, machine.mode = machine.mode, RerunMode.DISABLED
    machine.validate_result = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        machine.mode = mode
        del machine.validate_result


@contextmanager
def _writing_nothing(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's arguments without those that make train_step write files."""
    given = {name: getattr(args, name) for name in _WRITES if hasattr(args, name)}
    vars(args).update(dict.fromkeys(given))
    try:
        yield
    finally:
        vars(args).update(given)
