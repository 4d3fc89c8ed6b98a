"""TetraJet with FP8 at the ends: this project's own recipe, which `auto` names.

The first and the last decoder layer, and all layers in the last part of training, follow the recipe
`fp8`. docs/notes/tetrajet-fp8.md has what this gains on small models, and what else was tried.
"""

from dataclasses import replace

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Layers, Phase, Recipe
from megatron_fp4.recipes.fp8 import fp8
from megatron_fp4.recipes.registry import register
from megatron_fp4.recipes.tetrajet import tetrajet


@register("tetrajet-fp8")
def tetrajet_fp8(*, fp8_layers: int = 1, fp8_after: float = 0.8) -> Recipe:
    """`tetrajet`, and `fp8` in the first and last layers and at the end of training.

    fp8_layers: the number of layers at each end of the decoder that are in `fp8` throughout.
    fp8_after: the share of training, in [0, 1], after which all linears are; 1: they never are,
        and the recipe has no phases.
    """
    if fp8_layers < 0:
        raise ConfigError(f"fp8_layers is 0 or more, not {fp8_layers}")
    if not 0 <= fp8_after <= 1:
        raise ConfigError(f"fp8_after is a share of training, from 0 to 1, not {fp8_after:g}")
    other = fp8()
    ends = (Layers(other, first=fp8_layers), Layers(other, last=fp8_layers)) if fp8_layers else ()
    late = (Phase(fp8_after, other),) if fp8_after < 1 else ()
    return replace(tetrajet(), name="tetrajet-fp8", paper="", phases=late, layers=ends)
