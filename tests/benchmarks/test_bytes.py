"""What travels and what is kept, counted in a real world of two ranks on a small layer."""

import json
from pathlib import Path

import pytest

from benchmarks.bytes import LINEARS, Case, Record, Shape, count, find

ROOT = Path(__file__).parents[2]
SHAPE = Shape(hidden=256, ffn=512, heads=4, query_groups=2, sequence=64, micro_batch=2)
MXFP4_BITS = 4 + 8 / 32  # a code, and its share of a block's scale
BY_COLUMNS, BY_ROWS = ("qkv", "fc1"), ("proj", "fc2")


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return count(SHAPE)


def gathered(records: list[Record], case: Case, linear: str, way: str) -> int:
    return find(records, case, linear)[way].get("all-gather", 0)


def saved_ratio(records: list[Record], recipe: str, linear: str) -> float:
    ours, base = (find(records, Case(r), linear)["saved"] for r in (recipe, "bf16"))
    return ours / base


@pytest.mark.slow
def test_bf16_travels_as_upstream_says(records: list[Record]) -> None:
    part = SHAPE.sequence // 2 * SHAPE.micro_batch * SHAPE.hidden * 2
    for linear in BY_COLUMNS:  # X twice; dX is summed
        record = find(records, Case("bf16"), linear)
        assert record["forward"] == {"all-gather": part}
        assert record["backward"] == {"all-gather": part, "reduce-scatter": part}
    for linear in BY_ROWS:  # Y is summed, dY comes back
        record = find(records, Case("bf16"), linear)
        assert record["forward"] == {"reduce-scatter": part}
        assert record["backward"] == {"all-gather": part}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4", "tetrajet"])
def test_codes_and_scales_travel(records: list[Record], recipe: str) -> None:
    # X once each way; dY as dgrad's copy and as wgrad's.
    for linears, ways in (
        (BY_COLUMNS, {"forward": 1, "backward": 1}),
        (BY_ROWS, {"backward": 2}),
    ):
        for linear in linears:
            for way, copies in ways.items():
                wide = gathered(records, Case("bf16"), linear, way)
                assert gathered(records, Case(recipe), linear, way) == (
                    wide * copies * MXFP4_BITS / 16
                )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4", "tetrajet"])
@pytest.mark.parametrize("linear", LINEARS)
def test_what_is_saved_is_packed(records: list[Record], recipe: str, linear: str) -> None:
    assert saved_ratio(records, recipe, linear) <= 0.28


@pytest.mark.slow
def test_saved_x_bf16_is_x(records: list[Record]) -> None:
    for linear in LINEARS:
        whole = find(records, Case("bf16"), linear)["saved"]
        assert find(records, Case("mxfp4", saved_x="bf16"), linear)["saved"] == whole


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dge-occ", "mxfp4", "mxfp4-rht-sr", "tetrajet"])
def test_weights_are_quantized_once_a_step(records: list[Record], recipe: str) -> None:
    assert SHAPE.microbatches == 3
    for linear in LINEARS:
        cached = find(records, Case(recipe), linear)
        assert cached["W quantized"] == cached["W operands"] > 0
        off = find(records, Case(recipe, weight_cache="off"), linear)
        assert off["W quantized"] == 3 * off["W operands"]


@pytest.mark.slow
def test_the_count_sees_a_gathered_activation() -> None:
    broken = count(SHAPE, "testing.scripts.bytes_with_gathered_x")
    for recipe in ("mxfp4", "tetrajet"):
        for linear in BY_COLUMNS:
            assert saved_ratio(broken, recipe, linear) == 2 * MXFP4_BITS / 16


def test_the_tables_are_the_committed_result() -> None:
    docs = (ROOT / "docs/communication.md").read_text()
    for name in ("bytes", "bytes-gpu"):
        result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for table, lines in result["table"].items():
            # What is kept of W is the CPU's count, and its GPU made operands by PyTorch.
            if name == "bytes" or table not in ("weights", "times"):
                assert "\n".join(lines) in docs
