"""What of an estimate was measured, and what is extrapolated."""

from __future__ import annotations

from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import Model
from megatron_fp4.recipe import Recipe

# Measured in training steps with fused kernels and linears in C++, on one GPU (recipes-step.json of
# benchmarks/results; the parts of tetrajet-fp8 each by itself) and on several (parallel-two.json,
# parallel-four.json; gradients and weights in few bits: few-bits-four.json, few-bits-bf16.json).
ON_SEVERAL = ("bf16", "tetrajet", "fp8")
RECIPES = (
    *(*ON_SEVERAL, "tetrajet-fp8", "tetrajet-ema", "tetrajet-ramping", "mxfp4", "mxfp4-rht-sr"),
    *("dge-occ", "ue5m3", "nvfp4-nvidia", "four-over-six", "quartet-2"),
)
MOST_GPUS, MOST_TP, MOST_PP = 4, 4, 2
LAYER = (4096, 14336, 32, 8)  # hidden and FFN size, heads and groups


def extrapolated(model: Model, layout: Layout, recipe: Recipe, gpu: Gpu) -> tuple[str, ...]:
    """What of a layout's estimate was never measured, in words; nothing if all was."""
    spread = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp))
    notes = {
        f"{gpu.name} was never measured: rates of an H200 are scaled by data sheets": (
            gpu.name != MEASURED.name
        ),
        f"measured up to {MOST_GPUS} GPUs of one host; beyond that extrapolated": (
            layout.gpus > MOST_GPUS
        ),
        "TP without CUDA graphs may take longer: GPUs can wait for the slowest host process": (
            layout.tp > 1 and not layout.graphs
        ),
        "the network between hosts was never measured": layout.gpus > layout.node,
        f"TP was measured up to {MOST_TP}": layout.tp > MOST_TP,
        "TP was measured with SP only": layout.tp > 1 and not layout.sp,
        f"PP was measured up to {MOST_PP}": layout.pp > MOST_PP,
        "of TP, PP and DP together only TP2 with PP2 was measured": (
            spread > 1 and (layout.tp, layout.pp, layout.dp) != (2, 2, 1)
        ),
        "virtual pipeline stages were never measured": layout.vpp > 1,
        "experts were never measured": model.experts > 0,
        "converting SwiGLU's input to FP8 takes no time here": model.fp8_input,
        "--fp4-weight-cache off was measured in steps with CUDA graphs alone": (
            layout.keeps_w is None and not layout.graphs and recipe.ever_quantized
        ),
        "--fp4-weight-cache remade was never measured": (
            layout.keeps_w == "remade" and recipe.ever_quantized
        ),
        "quantizing weights for --fp4-param-gather takes no time here": layout.sent_w,
        "converting gradients in BF16 for the optimizer takes no time here": layout.bf16_gradients,
        "recomputation was never measured": layout.recompute,
        "the memory of CUDA graphs was never measured": layout.graphs,
        f"the time is the mean over the phases of {recipe.name}, by their shares of training, the "
        "memory that of the largest": bool(recipe.phases),
        f"all layers are counted as those of {recipe.name} that have no recipe of their own": (
            bool(recipe.layers)
        ),
        f"steps of {recipe.name} were never measured": recipe.name not in RECIPES,
        f"steps of {recipe.name} were measured on one GPU alone": (
            recipe.name in RECIPES and recipe.name not in ON_SEVERAL and layout.gpus > 1
        ),
        "scales that are corrected to a gain of 1 take longer than is estimated": any(
            each.unit_gain for part in recipe.parts for each in part.quantizers
        ),
        "layers of other sizes than LLaMA-8B's were not measured in steps": (
            (model.hidden, model.ffn, model.heads, model.groups) != LAYER
        ),
    }
    return tuple(note for note, is_so in notes.items() if is_so)
