"""The papers' claims of docs/paper-claims.md: what each says of a recipe's loss, and the runs of
this project that test it."""

from __future__ import annotations

from benchmarks.study import papers
from benchmarks.study.claims_of_parts import CLAIMS_OF_PARTS
from benchmarks.study.recipe_paths import candidate
from benchmarks.study.verdicts import Claim, Pair

BLOCKS_32 = "tools.sweep.building:combined,rule=ceil,backward_rule=ceil"
UE5M3 = (
    "tools.sweep.building:combined,scale=ue5m3,block=16,rule=nearest,backward_rule=inflated,"
    "outer_scale=tensor"
)
# Stochastic rounding of all operands of the backward pass, and of dY alone; neither requantizes the
# X and W of fprop.
SR, SR_OF_DY = ",rounding=backward", ",rounding=gradients"
TRANSFORM = ",hadamard=backward,group=32"
OFTEN = "tetrajet-ramping,ramping_interval_share=0.1"  # calibrates after every tenth of a run
RAMPING = f"{OFTEN},ramping_calibration=10"
SPACE, OSCILLATION = "design-space.md", "notes/oscillation.md"


# Rows of design-space.md: in which formats of scales a change is made.
_ANY, _SCALED = "E8M0, E4M3, UE5M3", "E4M3, UE5M3, tensor scale"
_EMA = "Q-EMA lowers the loss"
_RAMPING = "Q-Ramping lowers the loss"
_SAME = "FP4 in dgrad and wgrad alone, transformed and rounded stochastically, costs 0.02 at 345M"
_WHOLE = (
    "the whole method ends 0.06 above BF16 at 1.3B parameters (training losses; 0.10 at 7B, 0.09 "
    "at 13B)"
)
_BITS = "dge-occ --fp4-grad-comm fp8", "dge-occ --fp4-optimizer-state m=fp8,v=fp16"

_WHOLE_RECIPES_AND_EFFECTS = [
    Claim(papers.TETRAJET, "TetraJet loses less than plain MXFP4", Pair("tetrajet", "mxfp4")),
    Claim(
        papers.TETRAJET,
        "a BF16 forward pass loses less (the two differ in the backward pass too)",
        Pair("mxfp4-rht-sr", "tetrajet"),
    ),
    Claim(
        papers.TETRAJET,
        "most of the loss is of the forward pass",
        effects=(f"fprop in BF16 | {_ANY}", f"dgrad and wgrad in BF16 | {_ANY}"),
        verdict="held for fprop in 300 steps, not decided for dgrad and wgrad",
    ),
    Claim(
        papers.TETRAJET,
        "stochastic rounding of all operands, with double quantization, loses less than nearest",
        Pair(candidate("tetrajet-then-fp8"), candidate("nearest-then-fp8")),
    ),
    Claim(
        papers.TETRAJET,
        "stochastic rounding of all operands, from the original W and X, loses more than nearest",
        Pair(BLOCKS_32 + SR, BLOCKS_32, "backward-3M"),
        expects="higher",
    ),
    Claim(
        papers.TETRAJET,
        "double quantization lowers the loss (here beside stochastic rounding of dY alone)",
        effects=(f"the backward pass with the X and W of fprop | {_ANY}",),
    ),
    Claim(
        papers.TETRAJET,
        "without double quantization, scales of the backward pass that may clip lose less than "
        "those that never do",
        effects=("rule floor of the backward pass in place of ceil | E8M0",),
    ),
    Claim(
        papers.TETRAJET,
        "scales that never clip lose less than those that may, in the forward pass",
        effects=("rule floor of fprop in place of ceil | E8M0",),
        expects="higher",
    ),
    Claim(
        papers.TETRAJET,
        "Q-EMA and Q-Ramping lower r(W_Q)",
        seen="r(W_Q) is 0.0199, 0.0151 and 0.0188 for `tetrajet`, `tetrajet-ema` and "
        "`tetrajet-ramping`",
        page=OSCILLATION,
        verdict="held",
    ),
    Claim(papers.TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet")),
    Claim(papers.TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "recipes-3M")),
    Claim(papers.TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "oscillation-3M", 1e-3)),
    Claim(papers.TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "oscillation-3M", 4e-3)),
    Claim(papers.TETRAJET, _RAMPING, Pair("tetrajet-ramping", "tetrajet")),
    Claim(papers.TETRAJET, _RAMPING, Pair(OFTEN, "tetrajet")),
    Claim(papers.TETRAJET, _RAMPING, Pair(RAMPING, "tetrajet", "oscillation-3M", 1e-3)),
    Claim(papers.TETRAJET, _RAMPING, Pair(RAMPING, "tetrajet", "oscillation-3M", 4e-3)),
    Claim(papers.MXFP4, _SAME, Pair("mxfp4-rht-sr", "bf16"), "equal", 0.02),
    Claim(papers.MXFP4, _SAME, Pair("mxfp4-rht-sr", "bf16", "recipes-3M"), "equal", 0.02),
    Claim(
        papers.MXFP4,
        "the same costs no loss in models of 1.3B parameters and more",
        seen="no model of that size was trained",
        page="recipes.md",
        verdict="not decided",
    ),
    Claim(
        papers.MXFP4,
        "the transform of the backward pass lowers the loss, where all is rounded to nearest",
        Pair(BLOCKS_32 + TRANSFORM, BLOCKS_32, "backward-3M"),
    ),
    *(
        Claim(papers.MXFP4, f"the same {where}", Pair(other + TRANSFORM, other, "backward-3M"))
        for where, other in (
            ("beside stochastic rounding", BLOCKS_32 + SR),
            ("beside stochastic rounding of dY alone", BLOCKS_32 + SR_OF_DY),
            ("under UE5M3 scales", UE5M3),
            ("under UE5M3 scales, beside stochastic rounding", UE5M3 + SR),
            ("under UE5M3 scales, beside stochastic rounding of dY alone", UE5M3 + SR_OF_DY),
        )
    ),
    Claim(
        papers.MXFP4,
        "stochastic rounding lowers the loss beside the transform",
        Pair(BLOCKS_32 + SR + TRANSFORM, BLOCKS_32 + TRANSFORM, "backward-3M"),
    ),
    Claim(
        papers.MXFP4,
        "the same of dY alone",
        Pair(BLOCKS_32 + SR_OF_DY + TRANSFORM, BLOCKS_32 + TRANSFORM, "backward-3M"),
    ),
    Claim(
        papers.MXFP4,
        "a larger group of the transform loses less: 64 against 32",
        effects=(f"groups of 64 in place of 32 | {_ANY}, Hadamard",),
    ),
    Claim(
        papers.MXFP4,
        "16, less than the paper has, loses more than 32",
        effects=(f"groups of 16 in place of 32 | {_ANY}, Hadamard",),
        expects="higher",
    ),
    Claim(
        papers.MXFP4,
        "values times 3/4, which do not clip, lose less than those that may",
        effects=(
            "rule three-quarters of the backward pass in place of ceil | E8M0",
            "rule floor of the backward pass in place of ceil | E8M0",
        ),
        verdict="not decided",
    ),
    Claim(papers.DGE, "DGE of W lowers the loss", Pair(candidate("tetrajet-dge"), "tetrajet")),
    Claim(
        papers.DGE,
        "DGE of W lowers the loss",
        Pair(
            candidate("mse-16-nearest-dge-then-fp8"),
            candidate("mse-16-nearest-then-fp8"),
        ),
    ),
    Claim(
        papers.DGE,
        "DGE of W lowers the loss",
        seen="it lowers the loss by 0.016 after 5M tokens of the 3M model, in part because it "
        "trains linears at a lower rate",
        page=SPACE,
        verdict="held in 300 steps",
    ),
    Claim(
        papers.DGE,
        "DGE is for W alone: for X, or for both, it raises the loss",
        effects=(f"DGE of x in place of W | {_ANY}", f"DGE of both in place of W | {_ANY}"),
        expects="higher",
    ),
    Claim(papers.DGE, _WHOLE, Pair("dge-occ", "bf16"), "equal", 0.06),
    Claim(papers.DGE, _WHOLE, Pair("dge-occ", "bf16", "few-bits"), "equal", 0.06),
    Claim(papers.DGE, _WHOLE, Pair("dge-occ", "bf16", "recipes-3M"), "equal", 0.06),
    Claim(
        papers.DGE, "gradients in FP8 cost no loss", Pair(_BITS[0], "dge-occ", "few-bits"), "equal"
    ),
    Claim(
        papers.DGE,
        "Adam's moments in FP8 and FP16 cost no loss",
        Pair(_BITS[1], "dge-occ", "few-bits"),
        "equal",
    ),  # fmt: skip
    Claim(
        papers.SPACE,
        "the format of block scales matters most",
        effects=tuple(
            f"scales in {name} under a tensor scale | in place of E8M0"
            for name in ("E4M3", "UE5M3")
        ),
        verdict="not decided: it matters, and other parts as much",
    ),
    Claim(
        papers.SPACE,
        "unquantized scales lose less than E8M0",
        effects=("scales in float32 | in place of E8M0",),
    ),
    Claim(
        papers.SPACE,
        "blocks of 16 lose less than blocks of 32, under E8M0",
        effects=("The scale's format is the bottleneck: blocks of 16 help E8M0",),
    ),
    Claim(
        papers.SPACE,
        "UE5M3 is better than E4M3",
        effects=("scales in UE5M3 | in place of E4M3, tensor scale",),
    ),
    Claim(
        papers.SPACE,
        "UE5M3 needs a tensor scale",
        seen="without it the loss is 1.15 higher; a loss scale of 65536 does the same as one",
        page=SPACE,
        verdict="held where the loss is not scaled",
    ),
    Claim(
        papers.SPACE,
        "loss scaling, an axis of the paper, lowers the loss",
        effects=(
            "a loss scale of 65536 | UE5M3",
            "a loss scale of 65536 | UE5M3, tensor scale",
        ),
        stage="diffusion",
        seen="the language model was not trained with it",
        verdict="held in a small model without a tensor scale",
    ),
    Claim(
        papers.SPACE,
        "UE5M3 needs stochastic rounding in dgrad and wgrad",
        Pair(UE5M3 + SR, UE5M3, "backward-3M"),
    ),
    Claim(
        papers.SPACE,
        "the same beside a Hadamard transform",
        Pair(UE5M3 + SR + TRANSFORM, UE5M3 + TRANSFORM, "backward-3M"),
    ),
    Claim(
        papers.SPACE,
        "a straight-through estimator suffices",
        seen="`spline` and `sigmoid` harm; DGE lowers the loss in a short run and raises it in a "
        "longer one",
        page=SPACE,
        verdict="held, but for short runs with DGE",
    ),
    Claim(
        papers.SPACE,
        "a Hadamard transform, a tensor scale and stochastic rounding together are a best trade",
        seen="the four such combinations are -0.0018 to +0.0060 from a faster one, within the "
        "spread of the seeds",
        page=SPACE,
        verdict="not decided",
    ),
    Claim(papers.NVFP4, "NVFP4 loses less than MXFP4", Pair("nvfp4-nvidia", "tetrajet")),
    Claim(
        papers.NVFP4, "NVFP4 loses less than MXFP4", Pair("nvfp4-nvidia", "tetrajet", "recipes-3M")
    ),
    Claim(
        papers.NVFP4,
        "higher precision in the last part of training lowers the loss (evaluated in FP8 and in "
        "FP4)",
        Pair(candidate("tetrajet-then-fp8"), "tetrajet"),
    ),
    Claim(
        papers.NVFP4,
        "higher precision of some layers at the ends lowers the loss",
        Pair("tetrajet-fp8", candidate("tetrajet-then-fp8")),
    ),
    Claim(
        papers.NVFP4,
        "the same beside rule `mse` in blocks of 16",
        Pair(candidate("mse-16-ends-then-fp8"), candidate("mse-16-then-fp8")),
    ),
    Claim(
        papers.NVFP4,
        "square blocks of W lower the loss",
        effects=(f"square blocks of W | {_ANY}",),
    ),
    Claim(
        papers.NVFP4,
        "a Hadamard transform of wgrad lowers the loss",
        effects=(f"a Hadamard transform of wgrad | {_ANY}",),
    ),
    Claim(
        papers.NVFP4,
        "one fixed vector of signs does as well as random ones",
        effects=(f"signs fixed | {_ANY}, Hadamard",),
        expects="equal",
    ),
    Claim(
        papers.NVFP4,
        "stochastic rounding of dY lowers the loss",
        effects=("Under a tensor scale stochastic rounding of dY helps",),
    ),
    Claim(
        papers.NVFP4,
        "the same in longer runs, under E8M0 scales in blocks of 32",
        Pair(BLOCKS_32 + SR_OF_DY, BLOCKS_32, "backward-3M"),
    ),
    Claim(
        papers.NVFP4,
        "the same in longer runs, under UE5M3 scales",
        Pair(UE5M3 + SR_OF_DY, UE5M3, "backward-3M"),
    ),
    Claim(
        papers.FOUR_OVER_SIX,
        "four-over-six loses less than NVFP4",
        Pair("four-over-six", "nvfp4-nvidia"),
    ),
    Claim(
        papers.FOUR_OVER_SIX,
        "four-over-six loses less than NVFP4",
        Pair("four-over-six", "nvfp4-nvidia", "recipes-3M"),
    ),
    Claim(
        papers.FOUR_OVER_SIX,
        "its rule for scales lowers the loss by itself",
        effects=(f"rule four-over-six of fprop in place of nearest | {_SCALED}",),
    ),
    Claim(
        papers.QUARTET,
        "Quartet II loses less than four-over-six with NVIDIA's backward pass",
        Pair("quartet-2", "four-over-six"),
    ),
    Claim(
        papers.QUARTET,
        "the same with a transform in groups of 64",
        Pair("quartet-2,hadamard=64", "four-over-six", "recipes-3M"),
    ),
    Claim(
        papers.QUARTET,
        "MS-EDEN is unbiased, with less variance than stochastic rounding",
        seen="it has 0.41 to 0.45 of the variance of dX and dW",
        page=SPACE,
        verdict="held",
    ),
    Claim(
        papers.AVERIS,
        "the mean of X multiplied apart lowers the loss",
        effects=(f"the mean of X subtracted | {_ANY}",),
        seen="evaluation keeps the mean ([recipe-files.md](recipe-files.md#the-mean-of-x)); the "
        "training loss changes by +0.0006",
    ),
    Claim(
        papers.CHON,
        "hot channels in high precision lower the loss",
        Pair(candidate("fp8-scales-hot"), candidate("fp8-scales")),
    ),
]
# By paper, in the order of PAPERS.
CLAIMS = sorted(
    [*_WHOLE_RECIPES_AND_EFFECTS, *CLAIMS_OF_PARTS],
    key=lambda claim: list(papers.PAPERS).index(claim.paper),
)
