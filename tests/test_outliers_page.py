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


@pytest.mark.parametrize("sizes", [(4096, 4096), (4096, 14336), (14336, 4096)])
def test_what_a_sparse_product_could_save(sizes: tuple[int, int]) -> None:
    bf16 = measured()[*sizes, "bf16"]["ms"]
    fp8 = measured()[*sizes, "tetrajet"]["products ms"]
    dense = bf16 * 2 / 3
    cells = [bf16, fp8, dense, fp8 + dense, bf16 / (fp8 + dense), (bf16 - fp8) / dense]
    line = f"| {sizes[0]} × {sizes[1]} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
    assert line in PAGE


@pytest.mark.parametrize("recipe", ["dge-occ", "fp8"])
def test_what_was_gained(recipe: str) -> None:
    shapes = (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192)
    cells = [
        ", ".join(f"{measured(file)[*shape, recipe]['ratio']:.2f}" for shape in shapes)
        for file in ("linear-fp8", "linear-rows")
    ]
    assert f"| {recipe} | {cells[0]} | {cells[1]} |" in PAGE


def outliers(features: int) -> int:
    """The elements of a token beyond its quantiles 0.01 and 0.99."""
    below, _, _ = ranks(0.99, features)
    return 2 * (features - 1 - below)


def test_the_ways_to_multiply_it() -> None:
    dense = measured()[SIZE, SIZE, "bf16"]["ms"] / 3e3
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
    # Four rows in four places: the most in one place, over all ways to place them.
    most = [max(map(places.count, places)) for places in product(range(4), repeat=4)]
    conflicts = sum(most) / len(most)
    assert (
        f"{conflicts:.1f} at a time on average: then it is {shared / dense * conflicts:.1f}" in PAGE
    )


def test_sparsity_and_fp8() -> None:
    row = measured()[SIZE, SIZE, "bf16"]["ms"], measured()[SIZE, SIZE, "tetrajet"]["products ms"]
    assert f"{row[0] / (row[1] + row[0] / 3):.2f} times as fast" in PAGE
    assert f"{row[1] * 5 / 3 / row[0]:.2f} of BF16's time at 4096 × 4096" in PAGE
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


def test_what_is_not_explained() -> None:
    later = measured("linear-te")
    took = later[SIZE, SIZE, "dge-occ"]["ms"]

    def rest(run: dict[tuple[int, int, str], dict[str, float]]) -> tuple[float, float, float]:
        """(products, all that is counted, what of `took` is left)."""
        bf16 = run[SIZE, SIZE, "bf16"]["ms"]
        products = run[SIZE, SIZE, "tetrajet"]["products ms"] + bf16 * 2 / 3
        counted = products + 0.45 + 0.08  # bytes and clamping, of which other tests are
        return products, counted, took - counted

    products, counted, left = rest(later)
    earlier, _, more = rest(measured())
    for text in (
        f"the linear takes {took:.2f} ms",
        f"from the same run, take {products:.2f} ms",
        f"sums to {counted:.2f} ms, so {left:.2f} ms are not explained. With the {earlier:.2f} ms "
        f"of the table above they are {more:.2f} ms",
    ):
        assert text in PAGE
    issued, elements = 1.05e12, TOKENS * SIZE  # warp instructions a second; a warp has 32 threads
    assert f"at least {80 * elements / 32 / issued * 1e3:.2f} and" in PAGE


def test_bytes_beside_the_products() -> None:
    elements = {"X": TOKENS * SIZE, "W": SIZE * SIZE, "dY": TOKENS * SIZE, "Y": TOKENS * SIZE}
    elements["dW"] = elements["W"]
    for column in (2, 3):
        total = 0.0
        for name, count in elements.items():
            starts = f"| {name} |", f"| {name},"
            [line] = [each for each in PAGE.splitlines() if each.startswith(starts)]
            total += float(line.split("|")[column]) * count
        assert f"{total / 1e9:.2f}" in PAGE and f"{total / 4.27e9:.2f}" in PAGE
