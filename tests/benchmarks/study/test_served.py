"""What the pages say of models in other precisions is in the results of `served`, `served-3M`."""

from __future__ import annotations

from benchmarks.study import comparison, matrix, tables
from benchmarks.study.entries import BF16
from benchmarks.study.gaps import Gap, evaluated_in, gap, losses, paired
from benchmarks.study.recipe_paths import candidate
from benchmarks.study.verdicts import NOISE
from tests.benchmarks.study.prose import prose, recipes_prose, rows_of

STUDY, RECIPES = prose("docs/study.md"), recipes_prose()
MXFP4, FP8 = "tetrajet", "fp8"
W_ALONE = "benchmarks/study/ablations/w-in-fp4.yaml"
TRAINED = (BF16, FP8, "tetrajet", "tetrajet-fp8")


def above(study: str, recipe: str, entry: str) -> Gap:
    """The loss of the models of a recipe in a precision, minus that of BF16's in BF16."""
    rows = rows_of(study)
    [cell] = tables.cells(rows)
    found = paired(
        losses(rows, cell, recipe, evaluated_in(entry)),
        losses(rows, cell, BF16, evaluated_in(BF16)),
    )
    assert found is not None
    return found


def of_26m(entry: str) -> dict[str, float]:
    return {recipe: above("served", recipe, entry).mean for recipe in TRAINED}


def of_3m(entry: str) -> dict[str, Gap]:
    """The same of the 3M models, with their seeds."""
    found = {recipe: above("served-3M", recipe, entry) for recipe in TRAINED}
    assert all([*each.by_seed] == [1, 2, 3] for each in found.values())
    return found


def differ(found: dict[str, Gap]) -> tuple[float, float]:
    """How far the means are apart, and the most that the seeds of one recipe are."""
    means = [each.mean for each in found.values()]
    return max(means) - min(means), max(each.spread or 0 for each in found.values())


def test_models_of_26m_in_mxfp4_cannot_be_told_apart() -> None:
    found = of_26m(MXFP4)
    low, high, own = (f"{found[name]:.3f}" for name in (BF16, "tetrajet-fp8", "tetrajet"))
    says = f"{low} (BF16) to {high} (`tetrajet-fp8`), and `tetrajet` at {own}."
    assert f"**In MXFP4 the four cannot be told apart**: {says}" in STUDY
    assert (min(found.values()), max(found.values())) == (found[BF16], found["tetrajet-fp8"])
    assert max(found.values()) - min(found.values()) < 1.05 * NOISE < found[BF16]
    assert f"are then {low} to {high} above that of BF16 in BF16 (one seed," in RECIPES


def test_models_of_26m_in_other_precisions() -> None:
    plain, eight, w_alone = (of_26m(entry) for entry in (BF16, FP8, W_ALONE))
    three = (BF16, "tetrajet-fp8", "tetrajet")
    own = [f"{w_alone[name]:.3f}" for name in three]
    assert (
        f"the model of BF16 is at {own[0]}, that of `tetrajet-fp8` at {own[1]} and that of "
        f"`tetrajet` at {own[2]}."
    ) in STUDY
    assert (
        f"the model of `tetrajet` is at {plain['tetrajet']:.3f} and that of `tetrajet-fp8` at "
        f"{plain['tetrajet-fp8']:.3f}."
    ) in STUDY
    added = sorted(eight[name] - plain[name] for name in TRAINED)
    assert f"`fp8` adds {added[0]:.3f} to {added[-1]:.3f} to each of the four." in STUDY
    exported = [f"{of_26m(MXFP4)[name] - plain[name]:.3f}" for name in three]
    assert (
        f"MXFP4 of W and X adds {exported[0]} to the model of BF16, {exported[1]} to that of "
        f"`tetrajet-fp8` and {exported[2]} to that of `tetrajet`."
    ) in STUDY
    weights = [f"{w_alone[name] - plain[name]:.3f}" for name in three]
    assert f"W alone adds {weights[0]}, {weights[1]} and {weights[2]}." in STUDY
    assert f"in BF16 its loss is {exported[2]} lower than in MXFP4 (one seed," in RECIPES
    assert (
        f"over its loss in BF16, MXFP4 of W and X adds {exported[1]}, and of W alone {weights[1]} "
        "(one seed)."
    ) in RECIPES


def apart(study: str) -> tuple[str, str, str]:
    """How far the models of `tetrajet` are above those of `tetrajet-fp8`: evaluated as each trains,
    and in FP8; the verdict on the latter."""
    rows = rows_of(study)
    [cell] = tables.cells(rows)
    as_trained = gap(rows, cell, "tetrajet", "tetrajet-fp8")
    in_fp8 = gap(rows, cell, "tetrajet", "tetrajet-fp8", evaluated_in(FP8))
    assert as_trained is not None and in_fp8 is not None
    assert 0.4 < in_fp8.mean / as_trained.mean < 0.6  # "about half"
    return f"{as_trained.mean:.3f}", f"{in_fp8.mean:.3f}", in_fp8.verdict


def test_half_of_what_fp8_at_the_end_gains_is_the_evaluation() -> None:
    whole, trained, _ = apart("served")
    assert (
        f"in MXFP4 and in `fp8`, they are {whole} apart. With both evaluated in `fp8` they are "
        f"{trained} apart."
    ) in STUDY
    assert (
        f"`tetrajet-fp8` ends {whole} below `tetrajet` there; with both evaluated in `fp8` it is "
        f"{trained} below."
    ) in RECIPES
    small, small_trained, verdict = apart("served-3M")
    assert (
        f"In the 3M model these are {small} and {small_trained} (three seeds), the second {verdict}"
    ) in RECIPES
    assert (
        f"are {small} apart as each trains, and {small_trained} with both evaluated in `fp8`, "
        f"which is {verdict}"
    ) in STUDY
    own, plain = (of_26m(FP8)[name] for name in ("tetrajet-fp8", "tetrajet"))
    in_bf16, in_mxfp4 = (of_26m(entry)["tetrajet"] for entry in (BF16, MXFP4))
    assert (
        f"That of `tetrajet` is then {plain:.3f} or {in_bf16:.3f} above BF16, and {in_mxfp4:.3f} "
        "in MXFP4, in which it trained (one seed)."
    ) in RECIPES
    assert f"in `fp8` they are {own:.3f} and {plain:.3f} above BF16 (one seed," in RECIPES


def test_the_model_of_tetrajet_in_fp8_beside_a_last_phase_in_fp8() -> None:
    found = comparison.read().gap(candidate("tetrajet-then-fp8"))
    assert found is not None
    plain, then = of_26m(FP8)["tetrajet"], found.by_seed[1]
    assert abs(plain - then) < NOISE
    assert (
        f"is {plain:.3f} above BF16 when it is evaluated in `fp8`, and `tetrajet-then-fp8` is at "
        f"{then:.3f} with that seed."
    ) in RECIPES


def test_what_an_export_costs() -> None:
    plain = of_26m(BF16)
    both, weights = (
        [f"{found[name] - plain[name]:.3f}" for name in (BF16, "tetrajet-fp8", "tetrajet")]
        for found in (of_26m(MXFP4), of_26m(W_ALONE))
    )
    page = prose("docs/huggingface.md")
    assert (
        f"lose {both[0]} more than in BF16 if BF16 trained them, {both[1]} after `tetrajet-fp8`, "
        f"and {both[2]} after `tetrajet`."
    ) in page
    assert f"lose {weights[0]}, {weights[1]} and {weights[2]} more (one seed," in page


def test_models_of_3m_in_mxfp4_cannot_be_told_apart() -> None:
    found = of_3m(MXFP4)
    bf16, fp8, plain, own = (f"{found[recipe].mean:.3f}" for recipe in TRAINED)
    assert (
        f"With three seeds the models in MXFP4 are at {bf16} (BF16), {fp8} (`fp8`), {plain} "
        f"(`tetrajet`) and {own} (`tetrajet-fp8`)."
    ) in STUDY
    apart, spread = differ(found)
    assert f"The seeds of one recipe are up to {spread:.3f} apart" in STUDY
    assert apart < spread


def test_models_of_3m_with_w_alone_in_mxfp4() -> None:
    found = of_3m(W_ALONE)
    means = [f"{each.mean:.3f}" for each in found.values()]
    assert (
        f"With W alone in MXFP4 they are at {', '.join(means[:-1])} and {means[-1]}, in the order "
        "of 26M but for `fp8`, and also within the spread of the seeds."
    ) in STUDY
    apart, spread = differ(found)
    assert apart < spread
    large = of_26m(W_ALONE)
    orders = [
        sorted((name for name in TRAINED if name != FP8), key=at.__getitem__)
        for at in (large, {name: each.mean for name, each in found.items()})
    ]
    assert orders[0] == orders[1]
    assert found[FP8].mean < found[BF16].mean and large[FP8] > large[BF16]


def test_the_precisions_are_those_of_the_matrices() -> None:
    for name in ("served", "served-3M"):
        found = matrix.read(name)
        assert found.evaluate_in == [BF16, FP8, MXFP4, W_ALONE]
        assert {point.recipe for point in found.points()} == set(TRAINED)
