"""nn.Linear in a recipe's precision, for any PyTorch model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.errors import ConfigError
from megatron_fp4.linear import linear
from megatron_fp4.plan.sizes import check_sizes
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replay import Replay
from megatron_fp4.replicas import own_replica, replica_placements
from megatron_fp4.streams import check_streams


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in the recipe's precision.

    name: keys the noise. Layers of a model that have one name and seed draw the same noise, of
        which a warning tells; `name_layers` names all layers of a model by their place in it.
    replica: which data-parallel replica this process is; see `linear`. None: the rank in
        torch.distributed's default group.
    steps: how many forward passes were made in training. Each is a step with noise of its own. The
        count is part of the state dict (as extra state, int64 []); one without it, such as
        nn.Linear's, leaves the count as it is. Set it to an int64 tensor [] of its own beside the
        weight before a CUDA graph captures the layer: replays count in it.
    Raises ConfigError where a block does not divide in_features or out_features, for a seed or a
    replica that does not fit, for an input that nn.Linear would not take either, and where a CUDA
    graph would repeat a step.
    """

    steps: int | Tensor
    replica: int | None

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
        self.recipe = recipe  # type: ignore[assignment]  # the setter takes a name too
        self.replica = replica
        if replica is not None:
            replica_placements(replica)
        self._replay = Replay()

    @property
    def recipe(self) -> Recipe:
        """What the layer follows. It takes a recipe or the name of one, from the next forward pass
        on; raises ConfigError for an unknown name, or for sizes that its blocks do not divide."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        followed = recipe if isinstance(recipe, Recipe) else get_recipe(recipe)
        check_sizes(followed, None, self.in_features, self.out_features, self.name)
        self._recipe = followed

    def forward(self, input: Tensor) -> Tensor:
        product = _out_of_graphs if torch.compiler.is_compiling() else Linear._product
        return product(self, input)

    def _product(self, input: Tensor) -> Tensor:
        if self.training and self.recipe.draws:
            _claim_noise(self)
        step = self._replay.take(self._next_step)
        return linear(
            input,
            self.weight,
            self.bias,
            recipe=self.recipe,
            seed=self.seed,
            step=step,
            name=self.name,
            replica=self.replica,
        )

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

    def get_extra_state(self) -> Tensor:
        steps = self.steps
        return steps.detach() if isinstance(steps, Tensor) else torch.tensor(steps)

    def set_extra_state(self, state: Tensor) -> None:
        if isinstance(self.steps, Tensor):
            self.steps.copy_(state)  # a CUDA graph reads it where it lies
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
        if (steps := f"{prefix}_extra_state") in missing_keys:
            missing_keys.remove(steps)  # what an nn.Linear saved is a whole checkpoint

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise ConfigError(
            f"{self.name}: nn.DataParallel would lose the count of steps; use "
            "DistributedDataParallel"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        raise ConfigError(f"{self.name}: torch.jit.script cannot compile it; use torch.compile")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


# Steps and replays are Python's to count, not for torch.compile to trace.
_out_of_graphs = torch._disable_dynamo(Linear._product)


def name_layers(model: nn.Module) -> nn.Module:
    """Give each `Linear` of a model its qualified name ("layers.0.fc1") and return the model.

    Call it before DistributedDataParallel or torch.compile wraps the model, whose wrappers are part
    of qualified names, and in every launch alike: a run with other names draws other noise. Raises
    ConfigError where the hashes of two names collide.
    """
    named = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    check_streams(named)
    for name, layer in named.items():
        layer.name = name or layer.name  # a model that is one layer has no name for it
    return model


# Which layer draws the noise of a seed and a name.
_drawing: WeakValueDictionary[tuple[int, str], Linear] = WeakValueDictionary()


def _claim_noise(layer: Linear) -> None:
    """Warn if another living layer draws the noise of this one."""
    key = layer.seed, layer.name
    other = _drawing.get(key)
    if other is layer:
        return
    _drawing[key] = layer
    if other is not None and (other.seed, other.name) == key and own_replica() == 0:
        warnings.warn(
            f"two layers are called {layer.name!r} and draw the same noise: give each a name of "
            "its own, or call megatron_fp4.name_layers(model); give a second model another seed=",
            stacklevel=2,
        )
