"""docs/design-space.md says of losses in longer runs and on fresh seeds what the results have."""

from __future__ import annotations

from pathlib import Path

from benchmarks.study import matrix, results, tables
from benchmarks.study.__main__ import default_results
from benchmarks.study.gaps import Gap, gap
from tools.sweep.findings import interval_of_mean, verdict_of

ROOT = Path(__file__).parents[3]
PAGE = " ".join((ROOT / "docs/design-space.md").read_text().split())
WORDS = "tools.sweep.building:combined"
E8M0 = f"{WORDS},rule=ceil,backward_rule=ceil"
UE5M3 = f"{WORDS},scale=ue5m3,block=16,rule=nearest,backward_rule=inflated,outer_scale=tensor"
OF_DY, OF_ALL = ",rounding=gradients", ",rounding=backward"
TURNED = ",hadamard=backward,group=32"


def difference(study: str, recipe: str, other: str) -> Gap:
    """The loss of a recipe minus that of another in a study of one cell."""
    rows = results.read(ROOT / default_results(matrix.read(study)))
    [cell] = tables.cells(rows)
    found = gap(rows, cell, recipe, other)
    assert found is not None
    return found


def longer(recipe: str, other: str) -> Gap:
    return difference("backward-3M", recipe, other)


def interval(found: Gap) -> str:
    sizes = [abs(loss) for loss in found.by_seed.values()]
    return f"{min(sizes):.4f} to {max(sizes):.4f} by seed"


def test_the_backward_pass_under_e8m0_scales() -> None:
    turned, dy = longer(E8M0 + TURNED, E8M0), longer(E8M0 + OF_DY, E8M0)
    beside = longer(E8M0 + OF_DY + TURNED, E8M0 + OF_DY)
    both, of_all = longer(E8M0 + OF_DY + TURNED, E8M0), longer(E8M0 + OF_ALL, E8M0)
    assert (turned.verdict, beside.verdict) == ("lower", "higher")
    assert dy.verdict == of_all.verdict == "within the spread"
    assert all(loss < 0 for loss in dy.by_seed.values())
    assert {loss > 0 for loss in of_all.by_seed.values()} == {True, False}
    for said in (
        f"lowers the loss by {-turned.mean:.4f} where all is rounded to nearest "
        f"({interval(turned)}), and raises it by {beside.mean:.4f} beside stochastic rounding of "
        f"dY ({interval(beside)})",
        f"lowers the loss of E8M0 scales by {-turned.mean:.4f} where all is rounded",
        f"Stochastic rounding of dY lowers it by {-dy.mean:.4f}, in each of three seeds",
        f"both together lower it by {-both.mean:.4f}.",
        f"has no sign: {of_all.mean:+.4f}.",
    ):
        assert said in PAGE, said


def test_the_backward_pass_under_ue5m3_scales() -> None:
    names = [UE5M3 + rounding + turn for rounding in ("", OF_DY, OF_ALL) for turn in ("", TURNED)]
    found = [longer(name, other) for name in names for other in names if name != other]
    assert {each.verdict for each in found} == {"within the spread"}
    dy, of_all = longer(UE5M3 + OF_DY, UE5M3), longer(UE5M3 + OF_ALL, UE5M3)
    turned = longer(UE5M3 + OF_ALL + TURNED, UE5M3 + TURNED)
    assert all(loss > 0 for loss in turned.by_seed.values())
    for said in (
        f"it changes the loss by {dy.mean:+.4f}, and that of all operands of the backward pass by "
        f"{of_all.mean:+.4f}",
        f"raises the loss in each of them, by {turned.mean:.4f}.",
    ):
        assert said in PAGE, said


def told(found: Gap) -> str:
    """The mean, Student's interval over the seeds, and the range of the seeds."""
    losses = list(found.by_seed.values())
    low, high = interval_of_mean(losses)
    assert len(losses) == 3
    seeds = f"by seed {min(losses):+.4f} to {max(losses):+.4f}"
    return f"{found.mean:+.4f} ({low:+.4f} to {high:+.4f}; {seeds})"


def verdict(found: Gap) -> str:
    """The sweep's verdict on the claim that a change lowers the loss. Pairs are the seeds."""
    losses = list(found.by_seed.values())
    return verdict_of(losses, losses)


def test_stochastic_rounding_of_all_operands_as_in_the_paper() -> None:
    needed, beside = longer(UE5M3 + OF_ALL, UE5M3), longer(UE5M3 + OF_ALL + TURNED, UE5M3 + TURNED)
    both, of_e8m0 = (longer(each + OF_ALL + TURNED, each) for each in (UE5M3, E8M0))
    three = longer(UE5M3 + OF_ALL + TURNED, E8M0)
    found = [needed, beside, both, of_e8m0, three]
    assert [verdict(each) for each in found] == ["not decided"] * 5
    for said in (
        f"the longer runs have {told(needed)} without a transform, and {told(beside)} beside a "
        "Hadamard transform. So whether UE5M3 needs it is not decided.",
        f"together change the loss by {told(both)}, and under E8M0 scales by {told(of_e8m0)}.",
        f"UE5M3 scales with all three are at {told(three)}. None of these three is decided.",
    ):
        assert said in PAGE, said
    second = "forward=bf16"  # number 2 of the frontiers
    assert not any(second in recipe for recipe in matrix.read("backward-3M").runs[0].recipes)


def test_seeds_that_differ_little_decide() -> None:
    """The control: the same mean as of all three together, with a tenth of its spread."""
    three = longer(UE5M3 + OF_ALL + TURNED, E8M0)
    near = {seed: 0.9 * three.mean + 0.1 * loss for seed, loss in three.by_seed.items()}
    assert verdict(Gap(near)) == "held"
    assert verdict(Gap({seed: -loss for seed, loss in near.items()})) == "not held"


def test_the_best_trade_on_fresh_seeds() -> None:
    second, *four = [
        name for name in matrix.read("trades").runs[0].recipes if name.startswith(WORDS)
    ]
    found = [difference("trades", name, second) for name in four]
    assert len(found) == 4 and {len(each.by_seed) for each in found} == {4}
    assert {each.verdict for each in found} == {"within the spread"}
    means = sorted(each.mean for each in found)
    assert f"the four are {means[0]:+.4f} to {means[-1]:+.4f} from it, within the" in PAGE


def test_the_recipes_beside_the_best_combinations() -> None:
    rows = results.read(ROOT / default_results(matrix.read("sweep-best")))
    names = [each for each in tables.recipes(rows) if not each.startswith(WORDS) and each != "bf16"]
    gaps = {name: difference("sweep-best", name, "bf16") for name in names}
    order = sorted(names, key=lambda name: gaps[name].mean)
    assert order[:3] == ["dge-occ", "tetrajet-fp8", "fp8"]
    assert not any(each.verdict == "lower" for each in gaps.values())
    above = [name for name in names if gaps[name].verdict == "higher"]
    assert sorted(above) == ["nvfp4-nvidia", "tetrajet"]
    low, own, fp8 = (f"{gaps[name].mean:+.4f}" for name in order[:3])
    said = f"is the lowest ({low}), and `tetrajet-fp8` ({own}) and `fp8` ({fp8}) follow."
    plain, nvfp4 = (f"{gaps[name].mean:+.4f}" for name in ("tetrajet", "nvfp4-nvidia"))
    assert f"{said} `tetrajet` ({plain}) and `nvfp4-nvidia` ({nvfp4}) end above it by more." in PAGE
