"""The table of papers' claims in docs/recipes.md: what each paper says of a recipe's loss, the runs
of this project that test it, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.study.gaps import ENOUGH, Gap

# Twice the range of three runs of `tetrajet` at 26M that differ in rounding noise alone (0.0051).
NOISE = 0.01
BLOCKS_32 = "tools.sweep.building:combined,rule=ceil,backward_rule=ceil"
UE5M3 = (
    "tools.sweep.building:combined,scale=ue5m3,block=16,rule=nearest,backward_rule=inflated,"
    "outer_scale=tensor"
)
SR, TRANSFORM = ",rounding=backward", ",hadamard=backward,group=32"
FOLDER = "benchmarks/study/candidates"
OFTEN = "tetrajet-ramping,ramping_interval_share=0.1"  # calibrates after every tenth of a run
RAMPING = f"{OFTEN},ramping_calibration=10"
SPACE, OSCILLATION = "design-space.md", "notes/oscillation.md"


@dataclass(frozen=True)
class Pair:
    """The held-out loss of a recipe minus that of another one.

    study: of which results; "" is the page's first comparison. rate: its learning rate, where a
    study has several; of several lengths the longest is meant.
    """

    recipe: str
    against: str
    study: str = ""
    rate: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, a key of PAPERS.

    pair: the comparison that tests it; `expects` is what the paper says of it: "lower", or "equal",
    no difference above `most`, which is what the paper itself saw. Without a pair `seen` is what
    `page` says, and `verdict` what follows.
    """

    paper: str
    text: str
    pair: Pair | None = None
    expects: Literal["lower", "equal"] = "lower"
    most: float = 0.0
    seen: str = ""
    page: str = ""
    verdict: str = ""


def verdict(found: Gap, expects: str, most: float = 0.0) -> str:
    """Whether a paper's claim held, in the words of the table.

    found: the differences of two recipes' held-out losses, by seed. expects: "lower", if the claim
    is that they are below 0, or "equal", if it is that they are not above `most`.
    With a `most` above 0 and ENOUGH seeds the claim held if the whole 95% interval is at or below
    it. Otherwise nothing can be told if the mean differs from `most` by no more than the spread of
    the seeds, or by less than NOISE with fewer seeds than ENOUGH.
    """
    seeds = len(found.by_seed)
    enough = seeds >= ENOUGH
    if most and enough and found.interval is not None and found.interval[1] <= most:
        return "held"
    excess = Gap({seed: gap - most for seed, gap in found.by_seed.items()})
    if excess.verdict == "within the spread":
        is_even = expects == "equal" and not most
        return "no difference above the spread" if is_even else "not told"
    if not enough and abs(excess.mean) < NOISE:
        return "not told"
    held = "not held" if excess.mean > 0 else "held"
    return held + (", one seed" if seeds == 1 else "")


def candidate(name: str) -> str:
    """The recipe file of a candidate."""
    return f"{FOLDER}/{name}.yaml"


_TETRAJET, _MXFP4, _DGE, _SPACE = "2502.20853", "2502.20586", "2501.17116", "2509.17791"
_NVIDIA, _SIX, _QUARTET, _AVERIS, _CHON = (
    "2509.25149", "2512.02010", "2601.22813", "2603.10444", "2602.02047",
)  # fmt: skip
PAPERS = {
    _TETRAJET: "TetraJet",
    _MXFP4: "Training LLMs with MXFP4",
    _DGE: "Optimizing LLM Training Using FP4",
    _SPACE: "Elucidating the Design Space",
    _NVIDIA: "NVFP4",
    _SIX: "Four Over Six",
    _QUARTET: "Quartet II",
    _AVERIS: "Averis",
    _CHON: "Dissecting Outlier Dynamics",
}
_EMA = "Q-EMA lowers the loss"
_RAMPING = "Q-Ramping lowers the loss"
_SAME = "FP4 in dgrad and wgrad alone, transformed and rounded stochastically, costs 0.02 at 345M"
_WHOLE = "the whole method ends 0.06 above BF16, or less (training losses at 1.3B parameters)"
_BITS = "dge-occ --fp4-grad-comm fp8", "dge-occ --fp4-optimizer-state m=fp8,v=fp16"

CLAIMS = [
    Claim(_TETRAJET, "TetraJet loses less than plain MXFP4", Pair("tetrajet", "mxfp4")),
    Claim(
        _TETRAJET,
        "most of the loss is of the forward pass: a BF16 forward pass loses less",
        Pair("mxfp4-rht-sr", "tetrajet"),
    ),
    Claim(
        _TETRAJET,
        "stochastic rounding in dgrad and wgrad, with double quantization, loses less than nearest",
        Pair(candidate("tetrajet-then-fp8"), candidate("nearest-then-fp8")),
    ),
    Claim(
        _TETRAJET,
        "scales that never clip lose less than those that may",
        seen="in the backward pass `floor` raises the loss by 0.0079 (+0.0006 to +0.0153); in the "
        "forward pass it changes -0.0057 (-0.0159 to +0.0045)",
        page=SPACE,
        verdict="held in the backward pass, not told in the forward pass",
    ),
    Claim(
        _TETRAJET,
        "Q-EMA and Q-Ramping lower r(W_Q)",
        seen="r(W_Q) is 0.0199, 0.0151 and 0.0188 for `tetrajet`, `tetrajet-ema` and "
        "`tetrajet-ramping`",
        page=OSCILLATION,
        verdict="held",
    ),
    Claim(_TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet")),
    Claim(_TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "recipes-3M")),
    Claim(_TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "oscillation-3M", 1e-3)),
    Claim(_TETRAJET, _EMA, Pair("tetrajet-ema", "tetrajet", "oscillation-3M", 4e-3)),
    Claim(_TETRAJET, _RAMPING, Pair("tetrajet-ramping", "tetrajet")),
    Claim(_TETRAJET, _RAMPING, Pair(OFTEN, "tetrajet")),
    Claim(_TETRAJET, _RAMPING, Pair(RAMPING, "tetrajet", "oscillation-3M", 1e-3)),
    Claim(_TETRAJET, _RAMPING, Pair(RAMPING, "tetrajet", "oscillation-3M", 4e-3)),
    Claim(_MXFP4, _SAME, Pair("mxfp4-rht-sr", "bf16"), "equal", 0.02),
    Claim(_MXFP4, _SAME, Pair("mxfp4-rht-sr", "bf16", "recipes-3M"), "equal", 0.02),
    Claim(
        _MXFP4,
        "the same costs no loss in models of 1.3B parameters and more",
        seen="no model of that size was trained",
        page="recipes.md",
        verdict="not told",
    ),
    Claim(
        _MXFP4,
        "the transform of the backward pass lowers the loss, where all is rounded to nearest",
        Pair(BLOCKS_32 + TRANSFORM, BLOCKS_32, "backward-3M"),
    ),
    Claim(
        _MXFP4,
        "the same beside stochastic rounding",
        Pair(BLOCKS_32 + SR + TRANSFORM, BLOCKS_32 + SR, "backward-3M"),
    ),
    Claim(
        _MXFP4,
        "stochastic rounding lowers the loss beside the transform",
        Pair(BLOCKS_32 + SR + TRANSFORM, BLOCKS_32 + TRANSFORM, "backward-3M"),
    ),
    Claim(_DGE, "DGE of W lowers the loss", Pair(candidate("tetrajet-dge"), "tetrajet")),
    Claim(
        _DGE,
        "DGE of W lowers the loss",
        Pair(
            candidate("mse-16-nearest-dge-then-fp8"),
            candidate("mse-16-nearest-then-fp8"),
        ),
    ),
    Claim(
        _DGE,
        "DGE of W lowers the loss",
        seen="it lowers the loss by 0.016 after 5M tokens of the 3M model, in part because it "
        "trains linears at a lower rate",
        page=SPACE,
        verdict="held in 300 steps",
    ),
    Claim(_DGE, _WHOLE, Pair("dge-occ", "bf16"), "equal", 0.06),
    Claim(_DGE, _WHOLE, Pair("dge-occ", "bf16", "few-bits"), "equal", 0.06),
    Claim(_DGE, _WHOLE, Pair("dge-occ", "bf16", "recipes-3M"), "equal", 0.06),
    Claim(_DGE, "gradients in FP8 cost no loss", Pair(_BITS[0], "dge-occ", "few-bits"), "equal"),
    Claim(
        _DGE,
        "Adam's moments in FP8 and FP16 cost no loss",
        Pair(_BITS[1], "dge-occ", "few-bits"),
        "equal",
    ),  # fmt: skip
    Claim(
        _SPACE,
        "the format of block scales matters most",
        seen="under a tensor scale E4M3 lowers the loss of E8M0 by 0.014, and UE5M3 by 0.011",
        page=SPACE,
        verdict="not told: it matters, and other parts as much",
    ),
    Claim(
        _SPACE,
        "UE5M3 is better than E4M3",
        seen="whether it is better is not decided",
        page=SPACE,
        verdict="not told",
    ),
    Claim(
        _SPACE,
        "UE5M3 needs a tensor scale",
        seen="without it the loss is 1.15 higher; a loss scale of 65536 does the same as one",
        page=SPACE,
        verdict="held where the loss is not scaled",
    ),
    Claim(
        _SPACE,
        "UE5M3 needs stochastic rounding in dgrad and wgrad",
        Pair(UE5M3 + SR, UE5M3, "backward-3M"),
    ),
    Claim(
        _SPACE,
        "a straight-through estimator suffices",
        seen="`spline` and `sigmoid` harm; DGE lowers the loss in a short run and raises it in a "
        "longer one",
        page=SPACE,
        verdict="held, but for short runs with DGE",
    ),
    Claim(
        _SPACE,
        "a Hadamard transform, a tensor scale and stochastic rounding together are a best trade",
        seen="the four such combinations are -0.0018 to +0.0060 from a faster one, within the "
        "spread of the seeds",
        page=SPACE,
        verdict="not told",
    ),
    Claim(_NVIDIA, "NVFP4 loses less than MXFP4", Pair("nvfp4-nvidia", "tetrajet")),
    Claim(_NVIDIA, "NVFP4 loses less than MXFP4", Pair("nvfp4-nvidia", "tetrajet", "recipes-3M")),
    Claim(
        _NVIDIA,
        "higher precision in the last part of training lowers the loss",
        Pair(candidate("tetrajet-then-fp8"), "tetrajet"),
    ),
    Claim(
        _NVIDIA,
        "higher precision of some layers at the ends lowers the loss",
        Pair("tetrajet-fp8", candidate("tetrajet-then-fp8")),
    ),
    Claim(
        _NVIDIA,
        "the same beside rule `mse` in blocks of 16",
        Pair(candidate("mse-16-ends-then-fp8"), candidate("mse-16-then-fp8")),
    ),
    Claim(
        _NVIDIA,
        "square blocks of W lower the loss",
        seen="they change it by -0.0021 (-0.0058 to +0.0017), in four pairs of 300 steps at 3M",
        page=SPACE,
        verdict="not told",
    ),
    Claim(
        _NVIDIA,
        "one fixed vector of signs does as well as random ones",
        seen="fixed signs change the loss by -0.0062 (-0.0183 to +0.0059), in four such pairs",
        page=SPACE,
        verdict="no difference above the spread",
    ),
    Claim(_SIX, "four-over-six loses less than NVFP4", Pair("four-over-six", "nvfp4-nvidia")),
    Claim(
        _SIX,
        "four-over-six loses less than NVFP4",
        Pair("four-over-six", "nvfp4-nvidia", "recipes-3M"),
    ),
    Claim(
        _QUARTET,
        "Quartet II loses less than four-over-six with NVIDIA's backward pass",
        Pair("quartet-2", "four-over-six"),
    ),
    Claim(
        _QUARTET,
        "the same with a transform in groups of 64",
        Pair("quartet-2,hadamard=64", "four-over-six", "recipes-3M"),
    ),
    Claim(
        _QUARTET,
        "MS-EDEN is unbiased, with less variance than stochastic rounding",
        seen="it has 0.41 to 0.45 of the variance of dX and dW",
        page=SPACE,
        verdict="held",
    ),
    Claim(
        _AVERIS,
        "the mean of X multiplied apart lowers the loss",
        seen="the interval of its effect on the loss contains 0",
        page=SPACE,
        verdict="not told",
    ),
    Claim(
        _CHON,
        "hot channels in high precision lower the loss",
        Pair(candidate("fp8-scales-hot"), candidate("fp8-scales")),
    ),
]
