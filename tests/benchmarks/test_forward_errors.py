"""The errors of Y by quantizer, and the page that has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import forward_errors
from benchmarks.forward_errors import CASES, errors, multiplied, total
from testing.oracles import normal
from tools.sweep.tensors import Recorded

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/forward_errors.json").read_text())
PAGE = (ROOT / "docs/notes/fp8-scales.md").read_text()
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """x [rows, K], in blocks with these scales, rounded to E2M1 (no ties)."""
    blocks = x.reshape(*scales.shape, -1)
    distances = np.abs(np.abs(blocks)[..., None] / scales[..., None, None] - GRID)
    return (np.sign(blocks) * GRID[distances.argmin(-1)] * scales[..., None]).reshape(x.shape)


def ceil(x: np.ndarray) -> np.ndarray:
    """In blocks of 32, with the smallest powers of two that clip nothing."""
    maxima = np.abs(x.reshape(len(x), -1, 32)).max(-1)
    return nearest(x, 2 ** np.ceil(np.log2(maxima / 6)))


def test_an_error_is_that_of_a_composition_in_numpy() -> None:
    x, w = normal((64, 128), 1).bfloat16(), normal((32, 128), 2).bfloat16()
    one, other = x.double().numpy(), w.double().numpy()
    exact = one @ other.T
    wanted = ((ceil(one) @ ceil(other).T - exact) ** 2).sum() / (exact**2).sum()
    recorded = [Recorded("a.linear_qkv", x, w, normal((64, 32), 3).bfloat16())]
    name = "E8M0, `ceil`, 32 (`tetrajet`)"
    assert errors(CASES[name], recorded)["a.linear_qkv"] == pytest.approx(wanted, rel=0.02)


def test_what_hopper_multiplies_in() -> None:
    in_bf16 = {name for name, recipe in CASES.items() if multiplied(recipe) == "BF16"}
    assert in_bf16 == {"NVFP4", "NVFP4, `four-over-six`"}


def test_the_page_has_the_result() -> None:
    rows = RESULT["rows"]
    assert [row["case"] for row in rows] == list(CASES)
    assert "\n".join(forward_errors.table(rows)) in PAGE
    means = {row["case"]: total(row) for row in rows}
    best, hot = "UE5M3, `mse-fp8`, 16", "UE5M3, `mse-fp8`, 16, hot channels"
    plain, six = means["E8M0, `ceil`, 32 (`tetrajet`)"], means["NVFP4, `four-over-six`"]
    assert f"has {means[best] / plain:.2f} times the error of `tetrajet`, less than NVFP4" in PAGE
    assert means[best] < means["NVFP4"] and means[hot] < six
    assert f"{means[best] / six:.2f} times that of `four-over-six`" in PAGE
    assert f"lower it to {means[hot] / plain:.2f} times `tetrajet`'s, below that of `four" in PAGE


def test_the_page_has_the_measured_linears() -> None:
    found = json.loads((ROOT / "benchmarks/results/linear-formats.json").read_text())
    rows = {(row["in"], row["out"], row["recipe"]): row for row in found["rows"]}
    shapes = list(dict.fromkeys(key[:2] for key in rows))
    folder = "benchmarks/study/candidates"
    for recipe, name in {
        "tetrajet": "`tetrajet`",
        "fp8": "`fp8`",
        f"{folder}/fp8-scales.yaml": "UE5M3, `mse-fp8`, 16; backward E8M0, 16",
        f"{folder}/sweep-e8m0-dge.yaml": "E8M0, `ceil`, 16, with DGE",
        **{each: f"`{each}`" for each in ("nvfp4-nvidia", "ue5m3", "four-over-six", "quartet-2")},
    }.items():
        cells = [f"{rows[(*shape, recipe)]['ratio']:.2f}" for shape in shapes]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    slower, of_fp8 = (
        [rows[(*at, f"{folder}/fp8-scales.yaml")]["ms"] / rows[(*at, less)]["ms"] for at in shapes]
        for less in ("tetrajet", "fp8")
    )
    assert f"take {min(slower):.2f} to {max(slower):.2f} times as long as those of `tet" in PAGE
    assert f"and {min(of_fp8):.2f} to {max(of_fp8):.2f} times as long as those of `fp8`" in PAGE


def test_the_page_has_the_linears_before_and_after_the_present_kernels() -> None:
    found = [
        {
            (row["recipe"], row["in"], row["out"]): row
            for row in json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
        }
        for name in ("linear-block-scales-before", "linear-block-scales")
    ]
    shapes = [at[1:] for at in found[1] if at[0] == "bf16"]
    for name in ("nvfp4-nvidia", "four-over-six", "ue5m3", "quartet-2"):
        ratios = [[rows[(name, *shape)]["ratio"] for rows in found] for shape in shapes]
        cells = [f"{before:.2f}, {after:.2f}" for before, after in ratios]
        assert f"| `{name}` | {' | '.join(cells)} |" in PAGE
