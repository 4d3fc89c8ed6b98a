"""`Linear`, an nn.Linear in a recipe's precision for any PyTorch model, and `name_layers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.weight_states import OptimizerStep
from megatron_fp4.caller import warn_caller
from megatron_fp4.errors import ConfigError
from megatron_fp4.linear import linear, warn_of_training
from megatron_fp4.plan.sizes import check_sizes
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replay import Replay
from megatron_fp4.replicas import own_replica, replica_placements
from megatron_fp4.streams import check_streams


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in the recipe's precision.

    in_features, out_features, bias, device, dtype: as for nn.Linear.
    recipe: a Recipe or anything `get_recipe` takes; see the property `recipe`.
    seed, name: part of the key of the random bits. Layers that share both draw the same random
        bits, which causes a warning; `name_layers` gives every layer of a model its own name.
    replica: the index of this process among the data-parallel replicas; see `linear`. None: the
        rank in torch.distributed's default group.
    steps: the number of forward passes in training mode. Each is a step with different random bits.
        The count is part of the state dict (extra state, int64 []). Loading a state dict without
        it, such as nn.Linear's, leaves the count unchanged, and so does one that was converted to
        a floating-point dtype with the count in it, which causes a warning. Before a CUDA graph
        captures the layer, set it to an int64 tensor [] of its own on the weight's device: each
        replay increases it.
    average: the moving average towards which the recipe rounds W (Q-EMA): a float32 buffer [out,
        in], whatever the dtype of the layer; None where the recipe keeps none. It starts as the
        weight of the last forward pass before the first `update_averages`, or as the weight in that
        call if there was none. `update_averages` updates it after each optimizer step.
    Raises ConfigError if in_features or out_features is not a multiple of a block or Hadamard
    group, for an invalid seed or replica, for an input that `linear` refuses, and where a captured
    graph would repeat the random bits of one step.
    """

    steps: int | Tensor
    replica: int | None
    average: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        seed: int = 0,
        name: str = "linear",
        replica: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.seed, self.name, self.steps = Key(seed).seed, name, 0
        self.register_buffer("average", None)
        self._has_started = False  # whether the average is more than a copy of the weight
        self._is_copied = False  # whether it is a copy that a forward pass has made
        self.recipe = recipe  # type: ignore[assignment]  # the setter takes a name too
        self.replica = replica
        if replica is not None:
            replica_placements(replica)  # raises ConfigError for an invalid one
        self._replay = Replay()

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layer.

        It can be set to a Recipe or to anything `get_recipe` takes, and then holds from the next
        forward pass on. Setting it raises ConfigError for an unknown name, and for a layer whose
        sizes are not multiples of the recipe's blocks. Warns as `linear` does.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        followed = recipe if isinstance(recipe, Recipe) else get_recipe(recipe)
        warn_of_training(followed)
        check_sizes(followed, None, self.in_features, self.out_features, self.name)
        self._recipe = followed
        if followed.weight_average is None:
            self.average = None
        elif self.average is None:
            self.average = self.weight.detach().float().clone()
            self._has_started = self._is_copied = False

    def forward(self, input: Tensor) -> Tensor:
        product = _out_of_graphs if torch.compiler.is_compiling() else Linear._product
        return product(self, input)

    def _product(self, input: Tensor) -> Tensor:
        if self.training and self.recipe.draws:
            _claim_name(self)
        step = self._replay.take(self._next_step)
        if self.average is not None and not self._has_started:
            self._start_average(self.average)
        return linear(
            input,
            self.weight,
            self.bias,
            recipe=self.recipe if self.training else self.recipe.in_evaluation,
            seed=self.seed,
            step=step,
            name=self.name,
            replica=self.replica,
            average=self.average,
        )

    @torch.no_grad()
    def _start_average(self, average: Tensor) -> None:
        if self._is_captured():
            raise ConfigError(
                f"{self.name}: a CUDA graph would start its average anew whenever it runs: call "
                "megatron_fp4.update_averages once before the capture"
            )
        average.copy_(self.weight)
        self._is_copied = True

    def _next_step(self) -> int | Tensor:
        step = self.steps
        if isinstance(step, Tensor):
            step = step.clone()
        elif self.training and self.recipe.draws and self._is_captured():
            raise ConfigError(
                f"{self.name}: a CUDA graph would repeat step {step} whenever it runs; set the "
                "layer's steps to an int64 tensor on its GPU"
            )
        self.steps += self.training
        return step

    def _is_captured(self) -> bool:
        return self.weight.is_cuda and torch.cuda.is_current_stream_capturing()

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        whole = not hasattr(self.weight, "full_tensor")  # FSDP2 shards it
        if self.average is not None and not self._has_started and whole:
            self._start_average(self.average)  # the weight may have been loaded since
        super()._save_to_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Tensor:
        steps = self.steps
        return steps.detach() if isinstance(steps, Tensor) else torch.tensor(steps, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        if state.is_floating_point():
            warn_caller(
                f"{self.name}: the state dict has the count of steps in {state.dtype}, which "
                "rounds it, and the layer keeps its own: convert floating-point tensors alone"
            )
        elif isinstance(self.steps, Tensor):
            self.steps.copy_(state)  # in place: a captured graph reads this memory
        else:
            self.steps = int(state)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: list[str],
    ) -> None:
        args = state_dict, prefix, local_metadata, strict, missing_keys, *others
        super()._load_from_state_dict(*args)  # type: ignore[arg-type]
        average = f"{prefix}average"
        # State dicts of nn.Linear and of layers with another recipe load strictly too.
        for key in (f"{prefix}_extra_state", average):
            for keys in (missing_keys, others[0]):
                if key in keys:
                    keys.remove(key)
        if self.average is not None:
            self.average = self.average.float()  # assign=True takes the dtype of the state dict
            self._has_started, self._is_copied = average in state_dict, False

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        average = self.average
        super()._apply(fn, recurse)
        if average is not None and self.average is not None and self.average.dtype != average.dtype:
            self.average = average.to(self.average.device)  # .bfloat16() leaves it in float32
        return self

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise ConfigError(
            f"{self.name}: nn.DataParallel would lose the count of steps; use "
            "DistributedDataParallel"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        raise ConfigError(f"{self.name}: torch.jit.script cannot compile it; use torch.compile")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


# torch.compile must not trace the Python code that counts steps and replays.
_out_of_graphs = torch._disable_dynamo(Linear._product)


def name_layers(model: nn.Module) -> nn.Module:
    """Give each `Linear` of a model its qualified name ("layers.0.fc1") and return the model.

    Call it before DistributedDataParallel or torch.compile wraps the model, because a wrapper's
    name becomes part of the qualified names. Call it in every launch of a run: other names mean
    other random bits. Raises ConfigError where the random streams of two layers collide
    (`check_streams`).
    """
    named = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    check_streams(named)
    for name, layer in named.items():
        layer.name = name or layer.name  # "" is the model itself: it keeps its name
    return model


@torch.no_grad()
def update_averages(model: nn.Module, step: int, steps: int, rate: float = 1.0) -> None:
    """Update the moving averages of all `Linear`s of a model. Call it after each optimizer step.

    step: the number of the optimizer step, from 1. steps: the number of steps of the training.
    rate: the step's learning rate as a share of the schedule's largest, for averages that follow
    it. Weights that FSDP2 shards (fully_shard) are gathered one after the other, so every rank must
    call it. Megatron's optimizers do this by themselves. Raises ConfigError for a step below 1.
    """
    if step < 1:
        raise ConfigError(f"step is the number of an optimizer step, from 1, not {step}")
    time = OptimizerStep(step, steps, rate)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.average is not None:
            assert layer.recipe.weight_average is not None
            weight = layer.weight
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            if not (layer._has_started or layer._is_copied):
                layer.average.copy_(whole)
            layer.recipe.weight_average.update(layer.average, whole, time)
            layer._has_started = True


# By (seed, name): the layer that last drew the random bits of this key.
_drawing: WeakValueDictionary[tuple[int, str], Linear] = WeakValueDictionary()


def _claim_name(layer: Linear) -> None:
    """Warn if another layer that still exists draws the same random bits as this one."""
    key = layer.seed, layer.name
    other = _drawing.get(key)
    if other is layer:
        return
    _drawing[key] = layer
    if other is not None and (other.seed, other.name) == key and own_replica() == 0:
        warn_caller(
            f"two layers are called {layer.name!r} and draw the same random bits: give each a "
            "name of its own, or call megatron_fp4.name_layers(model); give a second model another "
            "seed=",
        )
