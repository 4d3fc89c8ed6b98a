"""What a training step of Megatron changes, as copies that can be put back.

C stands for megatron/core, T for megatron/training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_fp4.arithmetic.ramping_adamw import Snapshot
from megatron_fp4.mcore.loop.rewinding import rewinding_iterators
from megatron_fp4.mcore.model.optimizers import stepping_optimizers


class LoopState:
    """The state of a run between two training steps, which `restore` brings back.

    It has the main weights and all that the optimizers keep, the model's buffers, the random state,
    loss scales, the learning rate's step, and the data's position: what is drawn from the data
    after this moment is drawn again after `restore`. Gradients are not part of it.
    """

    def __init__(
        self,
        model: list[MegatronModule],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        data: Any,
        offload: bool = False,
    ) -> None:
        """data: what Megatron passes to train_step as data_iterator. offload: whether the
        copies of weights and optimizer state are kept in the host's memory."""
        self._model, self._scheduler = model, scheduler
        self._optimizers = stepping_optimizers(optimizer)
        self._snapshots = [Snapshot(each.optimizer, offload) for each in self._optimizers]
        scalers = [getattr(each, "grad_scaler", None) for each in self._optimizers]
        self._scales = [(each, each.state_dict()) for each in scalers if each is not None]
        # A MoE router counts tokens in buffers. DDP has an attribute `buffers` of its own.
        buffers = [each for chunk in model for each in torch.nn.Module.buffers(chunk)]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._random = _random_state()
        self._steps = scheduler.num_steps
        self._iteration = get_rerun_state_machine().current_iteration
        self._logged = {key: values.clone() for key, values in _logged()}
        self._iterators = rewinding_iterators(data)
        for iterator in self._iterators:
            iterator.start()

    @torch.no_grad()
    def restore(self) -> None:
        """Brings the state back. Every rank must call it."""
        for snapshot in self._snapshots:
            snapshot.restore()
        for each in self._optimizers:
            # The model's weights are the main weights, rounded. An FP32Optimizer's are the same.
            if hasattr(each, "_copy_main_params_to_model_params"):
                each._copy_main_params_to_model_params()
        gather_weights(self._model)
        for scaler, state in self._scales:
            scaler.load_state_dict(state)
        for buffer, values in self._buffers:
            buffer.copy_(values)
        _set_random_state(self._random)
        self._scheduler.num_steps = self._steps
        self._scheduler.step(0)  # sets the rates of the groups
        get_rerun_state_machine().current_iteration = self._iteration
        for key, values in _logged():
            if key in self._logged:
                values.copy_(self._logged[key])
            else:
                values.zero_()
        for iterator in self._iterators:
            iterator.rewind()


def gather_weights(model: list[MegatronModule]) -> None:
    """Gathers the model's weights from the ranks that update parts of them, and waits.

    With the distributed optimizer and --overlap-param-gather Megatron gathers them in the next
    forward pass, and not at all in the first iteration after a start.
    """
    for chunk in model:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _logged() -> Iterator[tuple[str, Tensor]]:
    """(key, sums) of the sums over microbatches that Megatron logs after a step."""
    for name, entry in get_moe_metrics_tracker().metrics.items():
        yield f"experts:{name}", entry.values
    for name, values in MTPLossLoggingHelper.tracker.items():
        if isinstance(values, Tensor):
            yield f"prediction:{name}", values


def _random_state() -> dict[str, Any]:
    """The generators that T/checkpointing.py:get_rng_state saves too."""
    states = get_cuda_rng_tracker().get_states()
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: _copy(state) for name, state in states.items()},
    }


def _set_random_state(saved: dict[str, Any]) -> None:
    random.setstate(saved["random"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    torch.cuda.set_rng_state(saved["cuda"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in saved["tracker"].items():
        if isinstance(states[name], torch.Generator):  # CUDA graphs may have captured it
            states[name].set_state(state)
        else:
            states[name] = state.clone()
    tracker.set_states(states)


def _copy(state: Any) -> Tensor:
    found: Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return found.clone()
