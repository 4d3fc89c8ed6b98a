"""The figures of docs/notes/outliers.md follow from the committed result and from its counts."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from megatron_fp4.arithmetic.outliers import ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/notes/outliers.md").read_text()
TOKENS, SIZE = 8192, 4096
L2 = 5.5e12  # bytes a second, as the page states


def measured(file: str = "linear-fp8") -> dict[tuple[int, int, str], dict[str, float]]:
    rows = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())["rows"]
    return {(row["in"], row["out"], row["recipe"]): row for row in rows}


SHAPES = (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192)
Shape = tuple[int, int]


def kernels(shape: Shape) -> list[tuple[str, float]]:
    """The kernels of `dge-occ` in their order, and microseconds; last is the time between them."""
    rows = json.loads((ROOT / "benchmarks/results/linear_kernels-others.json").read_text())["rows"]
    chosen = [r for r in rows if r["recipe"] == "dge-occ" and (r["in"], r["out"]) == shape]
    return [(row["what"], row["us"]) for row in chosen]


def groups(shape: Shape) -> dict[str, float]:
    """The microseconds of the rows of the first table."""
    found = dict.fromkeys(("FP8 GEMMs", "BF16 GEMMs", "split", "all other"), 0.0)
    for name, us in kernels(shape):
        if "nvjet" in name:  # cuBLASLt's; q is an 8-bit operand
            group = "FP8 GEMMs" if "sm90_q" in name else "BF16 GEMMs"
        else:
            group = "split" if "split" in name else "all other"
        found[group] += us
    linears = measured("linear-formats-before")
    return found | {
        "sum": sum(found.values()),
        "the linear": linears[*shape, "dge-occ"]["ms"] * 1e3,
        "BF16 linear": linears[*shape, "bf16"]["ms"] * 1e3,
    }


def both_gemms(us: dict[str, float]) -> float:
    return (us["FP8 GEMMs"] + us["BF16 GEMMs"]) / us["BF16 linear"]


def with_a_free_residual(us: dict[str, float]) -> float:
    return us["BF16 linear"] / (us["sum"] - us["BF16 GEMMs"])


def may_take(us: dict[str, float]) -> float:
    return (us["BF16 linear"] - us["FP8 GEMMs"]) / us["BF16 GEMMs"]


def test_the_table_of_the_kernels() -> None:
    found = [groups(shape) for shape in SHAPES]
    rows = {name: [f"{us[name]:,.0f}" for us in found] for name in found[0]}
    for what, share in (
        ("all GEMMs, in BF16 linears", both_gemms),
        ("speed without the BF16 GEMMs, times BF16's", with_a_free_residual),
        ("the BF16 GEMMs may take, times dense", may_take),
    ):
        rows[what] = [f"{share(us):.2f}" for us in found]
    for what, cells in rows.items():
        assert f"| {what} | {' | '.join(cells)} |" in PAGE


def test_what_the_table_says() -> None:
    found = [groups(shape) for shape in SHAPES]
    both, free = [both_gemms(us) for us in found], [with_a_free_residual(us) for us in found]
    explained = [us["sum"] / us["the linear"] for us in found]
    commits = [
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["stamp"]["commit"]
        for name in ("linear_kernels-others", "linear-formats-before")
    ]
    assert commits[0] == commits[1]  # "at the same commit"
    for text in (
        f"alone take {min(both):.2f} to {max(both):.2f} times as long as the BF16 linear",
        f"{free[1]:.2f} and {free[3]:.2f} times as fast as BF16 at 4096 × 14336 and 8192 × 8192, "
        f"and {free[0]:.2f} and {free[2]:.2f} times at 4096 × 4096 and 14336 × 4096",
        f"add up to {min(explained):.2f} to {max(explained):.2f} of the linear's time",
    ):
        assert text in PAGE
    assert min(both) > 1  # "cannot be as fast"


def test_hopper_says_the_same() -> None:
    found = [groups(shape) for shape in SHAPES]
    both, free = [both_gemms(us) for us in found], [with_a_free_residual(us) for us in found]
    page = " ".join((ROOT / "docs/hopper.md").read_text().split())
    assert f"take {min(both):.2f} to {max(both):.2f} times as long as BF16's whole linear" in page
    assert f"would be {min(free):.2f} to {max(free):.2f} times as fast as BF16" in page


@pytest.mark.parametrize("recipe", ["dge-occ", "fp8"])
def test_what_was_gained(recipe: str) -> None:
    cells = [
        ", ".join(f"{measured(file)[*shape, recipe]['ratio']:.2f}" for shape in SHAPES)
        for file in ("linear-fp8", "linear-rows")
    ]
    assert f"| {recipe} | {cells[0]} | {cells[1]} |" in PAGE


def outliers(features: int) -> int:
    """The elements of a token beyond its quantiles 0.01 and 0.99."""
    below, _, _ = ranks(0.99, features)
    return 2 * (features - 1 - below)


def product_of_y(element: str = "t") -> float:
    """The microseconds of the product for Y in BF16 (t), or in FP8 (q)."""
    return next(us for name, us in kernels((SIZE, SIZE)) if f"nvjet_sm90_{element}" in name)


def test_the_ways_to_multiply_it() -> None:
    dense = product_of_y() / 1e6
    assert f"times of the dense product ({dense * 1e6:.0f} µs, measured)" in PAGE
    assert outliers(SIZE) == 82
    gathered = TOKENS * outliers(SIZE) * SIZE * 2
    assert f"from L2 | {gathered / 1e9:.1f} GB | {gathered / L2 / dense:.2f} |" in PAGE
    shared = gathered / (128 * 132 * 1.755e9)
    assert f"{gathered / 1e9:.1f} GB from shared memory | {shared / dense:.2f} |" in PAGE
    for tile in (16, 64, 128):
        share = 1 - 0.98**tile
        read = TOKENS / tile * share * SIZE * SIZE * 2
        assert f"{read / 1e9:.1f} GB from L2 | {read / L2 / dense:.2f} |" in PAGE
        assert f"{share:.0%}" in PAGE
    most = may_take(groups((SIZE, SIZE))) * dense / (TOKENS / 128 * SIZE * SIZE * 2 / L2)
    assert f"below {most:.0%} of the columns of a tile of 128 tokens" in PAGE
    # Four rows in four places: the most in one place, over all ways to place them.
    worst = [max(map(places.count, places)) for places in product(range(4), repeat=4)]
    conflicts = sum(worst) / len(worst)
    assert (
        f"{conflicts:.1f} at a time on average: then it is {shared / dense * conflicts:.1f}" in PAGE
    )


def test_sparsity_and_fp8() -> None:
    us = groups((SIZE, SIZE))
    halved = us["BF16 linear"] / (us["FP8 GEMMs"] + us["BF16 GEMMs"] / 2)
    assert f"would be {halved:.2f} times as fast" in PAGE
    share = product_of_y("q") / product_of_y()
    assert f"| 4 products of {share:.2f} of its time | {4 * share:.1f} |" in PAGE
    five = [us["FP8 GEMMs"] * 5 / 3 / us["BF16 linear"] for us in map(groups, SHAPES[:2])]
    assert (
        f"would take {five[0]:.2f} of BF16's time at 4096 × 4096, and {five[1]:.2f} at 4096 × 14336"
    ) in PAGE
    crowded = 4 * 0.02**3 * 0.98 + 0.02**4
    assert round(1 / crowded, -3) == 32_000 and "32,000" in PAGE


def test_the_table_of_a_training_step() -> None:
    found = json.loads((ROOT / "benchmarks/results/fused-step-others.json").read_text())["rows"]
    rows = {row["name"]: row for row in found}
    bf16, ours = rows["bf16"], rows["dge-occ"]
    largest = {name: ms for ms, _, name in ours["largest"]}
    fp8 = sum(ms for name, ms in largest.items() if "nvjet_sm90_q" in name)
    named = [largest[f"{name}_kernel"] for name in ("split", "cast", "factor")]
    gemm, plain = ours["gpu_ms"]["gemm"], bf16["gpu_ms"]["gemm"]
    made = ours["gpu_ms"]["quantize"] + ours["gpu_ms"]["carry"]
    around = [sum(row["gpu_ms"].values()) for row in (bf16, ours)]
    left = around[0] - plain
    for what, *cells in (
        ("GEMMs in FP8", 0, fp8),
        ("GEMMs in BF16", plain, gemm - fp8),
        ("`split_kernel`", 0, named[0]),
        ("`cast_kernel`", 0, named[1]),
        ("`factor_kernel`", 0, named[2]),
        ("other kernels that quantize, and carriers", 0, made - sum(named)),
        ("all else", left, around[1] - gemm - made),
        ("the step", bf16["ms"], ours["ms"]),
    ):
        [line] = [each for each in PAGE.splitlines() if each.startswith(f"| {what}")]
        assert line.endswith(f" | {cells[0]:.0f} | {cells[1]:.0f} |"), what
    bound = gemm + left
    assert f"would take {bound:,.0f} ms: {bf16['ms'] / bound:.2f} times BF16's speed" in PAGE


def test_clamping() -> None:
    issued = 1.05e12  # warp instructions a second; a warp has 32 threads
    least = [
        count * TOKENS * features / 32 / issued * 1e3
        for count, features in ((80, SIZE), (96, 14336))
    ]
    assert f"at least {least[0]:.2f} and {least[1]:.2f} ms" in PAGE
    took = [groups(shape)["split"] / 1e3 for shape in (SHAPES[0], SHAPES[2])]
    times = [us / bound for us, bound in zip(took, least, strict=True)]
    assert (
        f"It takes {took[0]:.2f} and {took[1]:.2f} ms (measured), {times[0]:.1f} and "
        f"{times[1]:.1f} times that" in PAGE
    )


def test_bytes_beside_the_products() -> None:
    elements = {"X": TOKENS * SIZE, "W": SIZE * SIZE, "dY": TOKENS * SIZE, "Y": TOKENS * SIZE}
    elements["dW"] = elements["W"]
    before = measured()[SIZE, SIZE, "dge-occ"]["ms"]
    assert f"the linear took {before:.2f} ms at 4096 × 4096" in PAGE
    for column in (2, 3):
        total = 0.0
        for name, count in elements.items():
            starts = f"| {name} |", f"| {name},"
            [line] = [each for each in PAGE.splitlines() if each.startswith(starts)]
            total += float(line.split("|")[column]) * count
        assert f"{total / 1e9:.2f}" in PAGE and f"{total / 4.27e9:.2f}" in PAGE
    # GEMMs write Y and dW in float32, read them again, and write the sums.
    total -= 12 * (elements["Y"] + elements["dW"])
    us = groups((SIZE, SIZE))
    idle = dict(kernels((SIZE, SIZE)))["between kernels"]
    beside = us["split"] + us["all other"] - idle
    assert (
        f"The other kernels move {total / 1e9:.2f} GB, which takes {total / 4.27e9:.2f} ms at this "
        f"bandwidth; they take {beside / 1e3:.2f} ms" in PAGE
    )
    assert f"Between kernels {idle / 1e3:.2f} ms pass" in PAGE
