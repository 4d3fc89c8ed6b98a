"""FP4 pretraining of language models with Megatron-core, or with any PyTorch model.

`linear` and `Linear` run the three GEMMs of a linear layer in the precision of a recipe; `quantize`
gives the codes and scales of a tensor. docs/numerics.md defines the results bit by bit; they do not
depend on the device.
"""

from megatron_fp4.arithmetic.quantize import quantize
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer, list_quantizers
from megatron_fp4.errors import ConfigError
from megatron_fp4.linear import linear
from megatron_fp4.module import Linear, name_layers, update_averages
from megatron_fp4.recipe import GemmRecipe, Phase, Recipe
from megatron_fp4.recipes import get_recipe, list_recipes, recipe_options

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "GemmRecipe",
    "Linear",
    "Phase",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "get_quantizer",
    "get_recipe",
    "linear",
    "list_quantizers",
    "list_recipes",
    "name_layers",
    "quantize",
    "recipe_options",
    "update_averages",
]
