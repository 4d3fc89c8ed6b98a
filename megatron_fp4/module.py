"""nn.Linear in a recipe's precision, for any PyTorch model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_fp4.errors import ConfigError
from megatron_fp4.linear import linear
from megatron_fp4.philox import Key
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replay import Replay


class Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in the recipe's precision.

    Each training forward pass is a step of its own: `steps` counts them and keys the noise. Set it
    when training resumes, and to an int64 tensor [] of its own beside the weight before a CUDA
    graph captures the layer: replays count in it. name: tells its noise from other layers'; give
    each layer its own. Raises ConfigError where a block does not divide in_features or
    out_features, for a seed that does not fit, and where a graph would repeat a step.
    """

    steps: int | Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        seed: int = 0,
        name: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = recipe if isinstance(recipe, Recipe) else get_recipe(recipe)
        self.recipe.check_linear(None, in_features, out_features, name)
        self.seed, self.name, self.steps = Key(seed).seed, name, 0
        self._replay = Replay()

    def forward(self, input: Tensor) -> Tensor:
        product = _out_of_graphs if torch.compiler.is_compiling() else Linear._product
        return product(self, input)

    def _product(self, input: Tensor) -> Tensor:
        step = self._replay.take(self._next_step, self.training)
        return linear(
            input,
            self.weight,
            self.bias,
            recipe=self.recipe,
            seed=self.seed,
            step=step,
            name=self.name,
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

    def __prepare_scriptable__(self) -> nn.Module:
        raise ConfigError(f"{self.name}: torch.jit.script cannot compile it; use torch.compile")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


# Steps and replays are Python's to count, not for torch.compile to trace.
_out_of_graphs = torch._disable_dynamo(Linear._product)
