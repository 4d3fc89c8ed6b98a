"""Claims on a part of a paper's recipe: the recipe beside the same recipe without that part."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.study import papers
from benchmarks.study.verdicts import Claim, Expected, Pair

FOLDER = "benchmarks/study/ablations"
LARGE, SMALL = "ablations", "ablations-3M"  # the matrices: 26M with one seed, 3M with three
GROUPS = "quartet-2,hadamard=64"  # its groups of 128 do not divide the linears of 3M


@dataclass(frozen=True)
class Part:
    """A claim on a part of a recipe, which runs of the matrices LARGE and SMALL test.

    recipe, against: the two recipes of a `Pair`. studies: the matrices that have both.
    """

    paper: str
    text: str
    recipe: str
    against: str
    expects: Expected = "lower"
    studies: tuple[str, ...] = (LARGE,)

    def claims(self) -> list[Claim]:
        """One claim for each matrix."""
        return [
            Claim(self.paper, self.text, Pair(self.recipe, self.against, study), self.expects)
            for study in self.studies
        ]


def ablation(name: str) -> str:
    """The recipe file of an ablation."""
    return f"{FOLDER}/{name}.yaml"


PARTS = [
    Part(
        papers.TETRAJET,
        "its backward pass alone loses less than its forward pass alone",
        ablation("tetrajet-backward"),
        ablation("tetrajet-forward-codes"),
    ),
    Part(
        papers.TETRAJET,
        "double quantization lowers the loss, beside a quantized backward pass",
        "tetrajet",
        "tetrajet,double_quantization=false",
    ),
    Part(
        papers.TETRAJET,
        "the same beside a backward pass in BF16",
        ablation("tetrajet-forward-codes"),
        ablation("tetrajet-forward"),
    ),
    Part(
        papers.TETRAJET,
        "stochastic rounding of all operands, with double quantization, loses less than nearest",
        "tetrajet",
        "tetrajet,backward_rounding=nearest",
    ),
    Part(
        papers.TETRAJET,
        "without double quantization, stochastic rounding loses more than nearest does with it",
        "tetrajet,double_quantization=false",
        "tetrajet,backward_rounding=nearest",
        "higher",
    ),
    Part(
        papers.TETRAJET,
        "scales that never clip lose less than those that may, in all passes",
        "tetrajet",
        "tetrajet,rule=floor",
    ),
    Part(
        papers.MXFP4,
        "stochastic rounding, with the factor 3/4, lowers the loss in the whole recipe",
        "mxfp4-rht-sr",
        "mxfp4-rht-sr,stochastic=false",
    ),
    Part(
        papers.MXFP4,
        "the transform lowers the loss in the whole recipe",
        "mxfp4-rht-sr",
        "mxfp4-rht-sr,hadamard=0",
    ),
    Part(papers.DGE, "DGE of W lowers the loss", "dge-occ", "dge-occ,dge=false"),
    Part(
        papers.DGE,
        "the clamp of outliers, with compensation, lowers the loss",
        "dge-occ",
        "dge-occ,occ=false",
    ),
    Part(
        papers.NVFP4,
        "square blocks of W lower the loss",
        "nvfp4-nvidia",
        "nvfp4-nvidia,square_weights=false",
        studies=(SMALL,),
    ),
    Part(
        papers.NVFP4,
        "a Hadamard transform of wgrad lowers the loss",
        "nvfp4-nvidia",
        "nvfp4-nvidia,hadamard=0",
        studies=(SMALL,),
    ),
    Part(
        papers.NVFP4,
        "stochastic rounding of dY lowers the loss",
        "nvfp4-nvidia",
        "nvfp4-nvidia,stochastic=false",
        studies=(SMALL,),
    ),
    Part(
        papers.NVFP4,
        "higher precision in the last part of training lowers the loss, after `four-over-six`",
        ablation("four-over-six-then-fp8"),
        "four-over-six",
    ),
    Part(
        papers.QUARTET,
        "its four-over-six scales lower the loss",
        GROUPS,
        f"{GROUPS},four_over_six=false",
        studies=(SMALL,),
    ),
    Part(
        papers.QUARTET,
        "scales to a gain of 1 (MS-EDEN) lower the loss",
        GROUPS,
        f"{GROUPS},unit_gain=false",
        studies=(SMALL,),
    ),
    Part(
        papers.AVERIS,
        "the mean of X multiplied apart lowers the loss",
        ablation("tetrajet-x-mean"),
        "tetrajet",
    ),
]
CLAIMS_OF_PARTS = [claim for part in PARTS for claim in part.claims()]
