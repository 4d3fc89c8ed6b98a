"""docs/notes/few-bits.md says of losses what the committed results have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.study import matrix, results, tables
from benchmarks.study.__main__ import default_results
from benchmarks.study.gaps import Gap, gap

ROOT = Path(__file__).parents[3]
FEW_BITS = (ROOT / "docs/notes/few-bits.md").read_text()
TRAINING = (ROOT / "docs/training.md").read_text()
FP8, STATE = "--fp4-grad-comm fp8", "--fp4-optimizer-state m=fp8,v=fp16"
ROOT_OF_V = "--fp4-optimizer-state m=fp8,v=fp8"
BOTH = f"{FP8} {STATE}"  # as in the paper of dge-occ; in the 3M model alone
E5M2 = f"{FP8} --fp4-grad-comm-element e5m2"


def rows_of(name: str) -> list[results.Row]:
    return results.read(ROOT / default_results(matrix.read(name)))


def gaps_of_few_bits(name: str) -> dict[tuple[str, str], Gap]:
    """By recipe and flags: the losses with the flags minus those without, in a study."""
    rows = rows_of(name)
    [cell] = tables.cells(rows)
    asked = [("tetrajet", FP8), ("tetrajet", E5M2), ("dge-occ", FP8)]
    asked += [("tetrajet", STATE), ("dge-occ", STATE), ("tetrajet", ROOT_OF_V), ("dge-occ", BOTH)]
    found = {each: gap(rows, cell, " ".join(each), each[0]) for each in asked}
    return {each: one for each, one in found.items() if one is not None}


@pytest.mark.parametrize("name", ["few-bits", "few-bits-tiny"])
def test_figures_in_running_text_of_few_bits(name: str) -> None:
    found = gaps_of_few_bits(name)
    assert len(found) == 6 + (name == "few-bits")
    assert {each.verdict for each in found.values()} == {"within the spread"}
    mean = {each: f"{one.mean:+.4f}" for each, one in found.items()}
    fp8 = f"of {mean['tetrajet', FP8]} with `tetrajet` (E5M2: {mean['tetrajet', E5M2]})"
    assert fp8 in FEW_BITS
    assert f"and of {mean['dge-occ', FP8]} with `dge-occ`" in FEW_BITS
    state = f"of {mean['tetrajet', STATE]} with `tetrajet` and of {mean['dge-occ', STATE]} with"
    assert state in FEW_BITS
    signs = {each: {loss > 0 for loss in one.by_seed.values()} for each, one in found.items()}
    if name == "few-bits-tiny":
        assert f"{fp8}, higher in each" in FEW_BITS and signs["tetrajet", FP8] == {True}
    else:
        assert all(signs[each] == {True, False} for each in signs if "m=" not in each[1])
        for flags, words in ((STATE, "all four seeds are"), (BOTH, "All four seeds are")):
            higher = found["dge-occ", flags].by_seed.values()
            low, high = f"{min(higher):.4f}", f"{max(higher):.4f}"
            assert f"{words} higher, by {low} to {high}" in FEW_BITS and len(higher) == 4
        lower = found["tetrajet", ROOT_OF_V].by_seed.values()
        assert f"`m=fp8,v=fp8` have a mean of {mean['tetrajet', ROOT_OF_V]} with" in FEW_BITS
        assert sorted(loss > 0 for loss in lower) == [False, False, False, True]  # "three of four"
        rows = rows_of(name)
        [cell] = tables.cells(rows)
        above = gap(rows, cell, f"dge-occ {BOTH}", "bf16")
        assert above is not None
        paper = f"has a mean of {mean['dge-occ', BOTH]} over `dge-occ` alone"
        assert paper in FEW_BITS and f"Its loss is {above.mean:.4f} above BF16's." in FEW_BITS


def test_the_formats_of_moments_that_were_trained() -> None:
    studies = ("few-bits", "few-bits-ddp", "few-bits-tiny")
    names = {
        study: " ".join(row["configuration"]["recipe"] for row in rows_of(study))
        for study in studies
    }
    found = {each: set(re.findall(r"--fp4-optimizer-state (\S+)", names[each])) for each in names}
    both = {"m=fp8,v=fp16", "m=fp8,v=fp8"}
    assert found == {"few-bits": both, "few-bits-ddp": set(), "few-bits-tiny": both}
    assert "Both were trained with `m=fp8,v=fp16` and with `m=fp8,v=fp8`." in TRAINING
    assert "The loss with `m=bf16,v=bf16` was not measured." in TRAINING


def test_figures_of_plain_data_parallelism() -> None:
    rows = rows_of("few-bits-ddp")
    [cell] = tables.cells(rows)
    found = gap(rows, cell, f"tetrajet {FP8}", "tetrajet")
    assert found is not None and len(found.by_seed) == 4
    assert found.verdict == "within the spread"
    assert f"`--fp4-grad-comm fp8` has a mean of {found.mean:+.4f}, within the" in FEW_BITS
    page = (ROOT / "docs/communication.md").read_text()
    assert f"In four seeds of the 3M model the mean is {found.mean:+.4f}, within" in page


def test_figures_of_swiglu_s_input_in_fp8() -> None:
    rows, flag = rows_of("input-store"), "--activation-func-fp8-input-store"
    [cell] = tables.cells(rows)
    means = {}
    for name in ("bf16", "tetrajet"):
        found = gap(rows, cell, f"{name} {flag}", name)
        assert found is not None and len(found.by_seed) == 4
        assert found.verdict == "within the spread"
        assert {loss > 0 for loss in found.by_seed.values()} == {True, False}
        means[name] = f"{found.mean:+.4f}"
    assert f"{means['bf16']} in BF16 and of {means['tetrajet']} with `tetrajet`" in FEW_BITS
    words = f"changes by {means['tetrajet']} with `tetrajet` and by {means['bf16']} in BF16"
    assert words in TRAINING and words in (ROOT / "docs/hopper.md").read_text()


def test_the_intervals_of_few_bits_without_0_are_named() -> None:
    """And no others."""
    named = {}
    for name in ("few-bits", "few-bits-tiny"):
        for each, found in gaps_of_few_bits(name).items():
            assert found.interval is not None
            low, high = found.interval
            if low > 0 or high < 0:
                signs = [loss > 0 for loss in found.by_seed.values()]
                assert min(signs.count(True), signs.count(False)) <= 1
                named[name, *each] = f"{low:+.4f} to {high:+.4f}"
    state, root, both, fp8, e5m2, other, tiny = named.values()
    assert list(named) == [
        ("few-bits", "dge-occ", STATE),
        ("few-bits", "tetrajet", ROOT_OF_V),
        ("few-bits", "dge-occ", BOTH),
        ("few-bits-tiny", "tetrajet", FP8),
        ("few-bits-tiny", "tetrajet", E5M2),
        ("few-bits-tiny", "dge-occ", FP8),
        ("few-bits-tiny", "dge-occ", STATE),
    ]
    for text in (
        f"In the 3M model: moments with `dge-occ`, {state}, gradients and moments together with "
        f"`dge-occ`, {both}, and moments in `m=fp8,v=fp8` with `tetrajet`, {root}.",
        f"with `tetrajet`, {fp8} (E5M2: {e5m2}), and with `dge-occ`, {other}; moments with "
        f"`dge-occ`, {tiny}.",
    ):
        assert text in FEW_BITS


def test_what_four_seeds_of_few_bits_do_not_see() -> None:
    spreads = [one.spread or 0.0 for one in gaps_of_few_bits("few-bits").values()]
    assert f"which is {min(spreads):.4f} to {max(spreads):.4f} for these differences" in FEW_BITS
    rows = rows_of("few-bits")
    [cell] = tables.cells(rows)
    seen, unseen = (gap(rows, cell, recipe, "bf16") for recipe in ("tetrajet", "dge-occ"))
    assert seen is not None and seen.verdict == "higher"
    assert unseen is not None and unseen.verdict == "within the spread"
    assert f"The loss of `tetrajet` itself is {seen.mean:.4f} above BF16's, more than" in FEW_BITS
    assert f"the {unseen.mean:.4f} of `dge-occ` is not" in FEW_BITS
