"""What the pages say of parts of recipes is in the committed results of the matrix `ablations`."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.study import comparison, matrix, tables
from benchmarks.study.claims_of_parts import CLAIMS_OF_PARTS, LARGE, SMALL
from benchmarks.study.entries import BF16
from benchmarks.study.gaps import gap
from benchmarks.study.recipe_paths import ablation, candidate
from benchmarks.study.verdicts import NOISE
from tests.benchmarks.study.prose import prose, recipes_prose, rows_of

STUDY, RECIPES = prose("docs/study.md"), recipes_prose()
Losses = dict[str, float]  # the held-out loss at the end by recipe, of seed 1; means over rounding


@pytest.fixture(scope="module")
def losses() -> Losses:
    found: dict[str, list[float]] = {}
    for row in rows_of(LARGE):
        found.setdefault(row["configuration"]["recipe"], []).append(row["held_out"][-1][1])
    assert {name for name, own in found.items() if len(own) > 1} == {"tetrajet"}
    assert len(found["tetrajet"]) == 3
    return {recipe: statistics.mean(own) for recipe, own in found.items()}


def test_what_the_parts_of_tetrajet_gain(losses: Losses) -> None:
    double, nearest, floor = (
        losses[f"tetrajet,{option}"] - losses["tetrajet"]
        for option in ("double_quantization=false", "backward_rounding=nearest", "rule=floor")
    )
    assert (
        f"it ends {double:.3f} higher without double quantization, and {nearest:.3f} higher with "
        f"rounding to nearest in the backward pass. With rule `floor`, which clips, it ends "
        f"{floor:.3f} higher, which is near the noise of one run."
    ) in STUDY
    assert double > nearest / 2 > 1.5 * NOISE and NOISE < floor < 1.2 * NOISE
    assert (
        f"Here it ends {nearest - double:.3f} lower than rounding to nearest with double "
        "quantization."
    ) in STUDY
    assert f"They lower its loss by {double:.3f} and {nearest:.3f} (one seed each)." in RECIPES
    assert f"lower it by {floor:.3f}, which is near the noise of one run" in RECIPES


def test_one_pass_of_tetrajet_alone(losses: Losses) -> None:
    alone = [ablation(f"tetrajet-{name}") for name in ("backward", "forward", "forward-codes")]
    above = [losses[name] - losses[BF16] for name in (*alone, "tetrajet")]
    back, forward, codes, whole = (f"{gap:.3f}" for gap in above)
    assert f"with fprop in BF16, ends {back} above BF16, and the whole recipe {whole}." in STUDY
    assert (
        f"in BF16, ends {forward} above if the backward pass multiplies the unquantized W and X, "
        f"and {codes} above if it multiplies what fprop did"
    ) in STUDY
    gain = above[1] - above[2]
    assert f"So the loss is {gain:.3f} lower where both passes multiply the same W" in STUDY
    assert f"and the backward pass of `tetrajet` alone {back} (one seed)" in RECIPES
    assert gain > 2 * NOISE
    assert (
        f"That of `tetrajet` alone costs {back}, and the forward pass of `tetrajet` alone {forward}"
    ) in STUDY
    assert f"`tetrajet`'s alone {back} at 26M" in prose("docs/design-space.md")


def test_an_evaluation_in_bf16(losses: Losses) -> None:
    plain = losses["tetrajet --fp4-eval-forward bf16"]
    above, whole = plain - losses[BF16], losses["tetrajet"] - losses[BF16]
    assert (
        f"of the same kind, with `--fp4-eval-forward bf16`, ends {above:.3f} above BF16." in STUDY
    )
    assert f"Evaluated in MXFP4 it ends {whole:.3f} above BF16; a second training" in STUDY


def test_the_parts_of_dge_occ(losses: Losses) -> None:
    whole, plain = losses["dge-occ"], losses["dge-occ,dge=false"]
    cost, gain = whole - plain, losses["dge-occ,occ=false"] - whole
    assert f"DGE costs `dge-occ` {cost:.3f}, and the clamp of outliers gains {gain:.3f}." in STUDY
    above, six = (f"{loss - losses[BF16]:.3f}" for loss in (plain, losses["four-over-six"]))
    assert f"Without DGE it is {above} above BF16, as `four-over-six` is ({six})." in STUDY
    with_dge = f"{whole - losses[BF16]:.3f}"
    assert f"it ends {above} above BF16, and not {with_dge} (one seed)" in RECIPES
    found = comparison.read()
    on_tetrajet = gap(found.rows, found.cells[0], candidate("tetrajet-dge"), "tetrajet")
    assert on_tetrajet is not None
    says = (
        f"It costs {on_tetrajet.mean:.3f} on `tetrajet` and {cost:.3f} in `dge-occ` (one seed each)"
    )
    assert says in RECIPES


def test_a_last_phase_after_an_nvfp4_recipe(losses: Losses) -> None:
    ended = losses[ablation("four-over-six-then-fp8")]
    lower, above = losses["four-over-six"] - ended, ended - losses[BF16]
    found = comparison.read()
    then, own = (
        paired.by_seed[1]
        for name in (candidate("tetrajet-then-fp8"), "tetrajet-fp8")
        if (paired := found.gap(name)) is not None
    )
    assert (
        f"`four-over-six` ends {lower:.3f} lower, at {above:.3f} above BF16. `tetrajet-then-fp8` "
        f"with that seed is at {then:.3f} and `tetrajet-fp8` at {own:.3f}."
    ) in STUDY
    assert (
        f"`four-over-six` ends {above:.3f} above BF16, where `tetrajet-fp8` is at {own:.3f} with "
        f"that seed: {own - above:.3f} lower, which is the noise of single runs."
    ) in RECIPES
    assert round(own - above, 3) == NOISE < lower


def test_what_is_below_the_noise_of_one_run(losses: Losses) -> None:
    lower = losses["mxfp4-rht-sr"] - losses["mxfp4-rht-sr,stochastic=false"]
    higher = losses[ablation("tetrajet-x-mean")] - losses["tetrajet"]
    plain = losses["mxfp4-rht-sr"] - losses["mxfp4-rht-sr,hadamard=0"]
    turned = losses[ablation("tetrajet-forward-hadamard")] - losses["tetrajet"]
    assert all(0 < each < NOISE for each in (lower, plain, higher, turned))
    assert f"`mxfp4-rht-sr` ends {lower:.3f} lower with rounding to nearest, which is" in STUDY
    assert f"clips, and {plain:.3f} lower without the transform." in STUDY
    assert f"`tetrajet` ends {higher:.3f} higher with the mean of X multiplied apart" in STUDY
    assert f"by less than the noise of one run ({higher:.3f} higher)" in RECIPES
    assert f"and {turned:.3f} higher with a Hadamard transform of the forward pass too" in STUDY
    assert f"leaves it {turned:.3f} higher, which is also below that noise." in RECIPES


def test_the_parts_at_3m_decide_nothing_yet() -> None:
    rows = rows_of(SMALL)
    [cell] = tables.cells(rows)
    gaps = {name: gap(rows, cell, name, BF16) for name in tables.recipes(rows) if name != BF16}
    found = {name: each.by_seed for name, each in gaps.items() if each is not None}
    spread = max(max(own.values()) - min(own.values()) for own in found.values())
    whole = {name: own for name, own in found.items() if [*own] == [1, 2, 3]}
    parts = {name: [*own.items()] for name, own in found.items() if name not in whole}
    changes = {}
    for name, [(seed, loss)] in parts.items():
        stem = name.rpartition("/")[2]
        of = max((each for each in whole if stem.startswith(each)), key=len)
        assert seed == (1 if of == "tetrajet" else 3)
        changes[name] = abs(loss - whole[of][seed])
    most = max(changes, key=changes.__getitem__)
    assert most == ablation("tetrajet-backward") and changes[most] < spread
    assert (
        f"the differences of one recipe from BF16 are up to {spread:.3f} apart over the seeds. The "
        f"largest difference of a part is {changes[most]:.3f} (`tetrajet` without its forward "
        "pass)."
    ) in STUDY


def test_what_fp8_s_exact_scales_gain(losses: Losses) -> None:
    found = comparison.read()
    plain, hot = (
        paired.by_seed[1]
        for name in ("fp8-scales", "fp8-scales-hot")
        if (paired := found.gap(candidate(name))) is not None
    )
    whole, nearest = (
        losses[name] - losses[BF16] for name in ("tetrajet", "tetrajet,backward_rounding=nearest")
    )
    error = "0.57 times the error of `tetrajet`"
    assert f"have {error}'s forward pass" in RECIPES
    assert error in prose("docs/notes/fp8-scales.md")
    assert (
        f"forward pass and end at {plain:.3f}, where `tetrajet` is at {whole:.3f} with that seed: "
        "no difference above the noise."
    ) in RECIPES
    assert f"and `tetrajet` with that rounding is at {nearest:.3f}." in RECIPES
    assert f"in addition lower {plain:.3f} to {hot:.3f}, by less than the noise" in RECIPES
    assert abs(plain - whole) < NOISE and 0 < plain - hot < NOISE < nearest - plain


def test_both_recipes_of_a_claim_are_in_its_matrix() -> None:
    entries = {
        name: {point.recipe for point in matrix.read(name).points()} for name in (LARGE, SMALL)
    }
    for claim in CLAIMS_OF_PARTS:
        assert claim.pair is not None
        assert {claim.pair.recipe, claim.pair.against} <= entries[claim.pair.study]
