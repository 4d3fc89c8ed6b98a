"""Claims on a part of a paper's recipe: the recipe beside the same recipe without that part."""

from __future__ import annotations

from benchmarks.study import papers
from benchmarks.study.recipe_paths import ablation
from benchmarks.study.verdicts import Claim, Pair

LARGE, SMALL = "ablations", "ablations-3M"  # the matrices: 26M with one seed, 3M with three
GROUPS = "quartet-2,hadamard=64"  # its groups of 128 do not divide the linears of 3M

CLAIMS_OF_PARTS = [
    Claim(
        papers.TETRAJET,
        "its backward pass alone loses less than its forward pass alone",
        Pair(ablation("tetrajet-backward"), ablation("tetrajet-forward-codes"), LARGE),
    ),
    Claim(
        papers.TETRAJET,
        "double quantization lowers the loss, beside a quantized backward pass",
        Pair("tetrajet", "tetrajet,double_quantization=false", LARGE),
    ),
    Claim(
        papers.TETRAJET,
        "the same beside a backward pass in BF16",
        Pair(ablation("tetrajet-forward-codes"), ablation("tetrajet-forward"), LARGE),
    ),
    Claim(
        papers.TETRAJET,
        "stochastic rounding of all operands, with double quantization, loses less than nearest",
        Pair("tetrajet", "tetrajet,backward_rounding=nearest", LARGE),
    ),
    Claim(
        papers.TETRAJET,
        "without double quantization, stochastic rounding loses more than nearest does with it",
        Pair("tetrajet,double_quantization=false", "tetrajet,backward_rounding=nearest", LARGE),
        expects="higher",
    ),
    Claim(
        papers.TETRAJET,
        "scales that never clip lose less than those that may, in all passes",
        Pair("tetrajet", "tetrajet,rule=floor", LARGE),
    ),
    Claim(
        papers.MXFP4,
        "stochastic rounding, with the factor 3/4, lowers the loss in the whole recipe",
        Pair("mxfp4-rht-sr", "mxfp4-rht-sr,stochastic=false", LARGE),
    ),
    Claim(
        papers.MXFP4,
        "the transform lowers the loss in the whole recipe",
        Pair("mxfp4-rht-sr", "mxfp4-rht-sr,hadamard=0", LARGE),
    ),
    Claim(
        papers.DGE,
        "DGE of W lowers the loss",
        Pair("dge-occ", "dge-occ,dge=false", LARGE),
    ),
    Claim(
        papers.DGE,
        "the clamp of outliers, with compensation, lowers the loss",
        Pair("dge-occ", "dge-occ,occ=false", LARGE),
    ),
    Claim(
        papers.NVFP4,
        "square blocks of W lower the loss",
        Pair("nvfp4-nvidia", "nvfp4-nvidia,square_weights=false", SMALL),
    ),
    Claim(
        papers.NVFP4,
        "a Hadamard transform of wgrad lowers the loss",
        Pair("nvfp4-nvidia", "nvfp4-nvidia,hadamard=0", SMALL),
    ),
    Claim(
        papers.NVFP4,
        "stochastic rounding of dY lowers the loss",
        Pair("nvfp4-nvidia", "nvfp4-nvidia,stochastic=false", SMALL),
    ),
    Claim(
        papers.NVFP4,
        "higher precision in the last part of training lowers the loss, after `four-over-six` "
        "(evaluated in FP8 and in FP4)",
        Pair(ablation("four-over-six-then-fp8"), "four-over-six", LARGE),
    ),
    Claim(
        papers.QUARTET,
        "its four-over-six scales lower the loss",
        Pair(GROUPS, f"{GROUPS},four_over_six=false", SMALL),
    ),
    Claim(
        papers.QUARTET,
        "scales to a gain of 1 (MS-EDEN) lower the loss",
        Pair(GROUPS, f"{GROUPS},unit_gain=false", SMALL),
    ),
    Claim(
        papers.AVERIS,
        "the mean of X multiplied apart lowers the loss",
        Pair(ablation("tetrajet-x-mean"), "tetrajet", LARGE),
    ),
]
