"""What benchmarks.parallel_step counts of a step is what the layout must send."""

import json
from pathlib import Path

import pytest

from benchmarks.parallel_step import LAYOUTS, Row, compare, grouped, row_of, summed_up, table
from tools.stamp import resumed

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH, BATCH = 1, 64, 64, 2, 4
MODEL = f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size 192 --num-attention-heads 4
    --num-query-groups 2 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
    --vocab-size 512 --micro-batch-size {MICRO_BATCH}
""".split()
CODES = (4 + 8 / 32) / 16  # MXFP4's bits, over BF16's


def gathered(share: float) -> int:
    """What a rank sends under TP2 with sequence parallelism, where linears gather this share of
    BF16's bits: its half of the tokens, as often as they are gathered."""
    # qkv and fc1 gather X both ways. proj and fc2 gather dY: once, or as two sets of codes.
    layer = 4 + (2 if share == 1 else 4)
    head_and_embedding = 3  # X of the head in both directions, and the embedding's dY
    part = SEQUENCE // 2 * MICRO_BATCH * HIDDEN * 2
    return int(BATCH // MICRO_BATCH * part * (LAYERS * layer * share + head_and_embedding))


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {recipe: row_of(("tp2-sp", recipe), MODEL, BATCH) for recipe in ("bf16", "mxfp4")}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "share"), [("bf16", 1.0), ("mxfp4", CODES)])
def test_gathers_are_counted(rows: dict[str, Row], recipe: str, share: float) -> None:
    assert rows[recipe]["sent"]["all-gather"] == gathered(share)


@pytest.mark.slow
def test_the_count_tells_codes_from_bf16(rows: dict[str, Row]) -> None:
    assert rows["mxfp4"]["sent"]["all-gather"] != gathered(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_sums_are_counted(rows: dict[str, Row], recipe: str) -> None:
    part = SEQUENCE // 2 * MICRO_BATCH * HIDDEN * 2
    sums = LAYERS * 4 + 2  # Y of proj and fc2, dX of qkv and fc1; the embedding's Y, the head's dX
    assert rows[recipe]["sent"]["reduce-scatter"] == BATCH // MICRO_BATCH * part * sums


def test_rows_are_compared_with_bf16_and_with_one_gpu() -> None:
    speeds = {("tp2-sp", "mxfp4"): 6.0, ("tp2-sp", "bf16"): 4.0, ("one", "mxfp4"): 8.0}
    rows = [{"layout": k[0], "name": k[1], "tokens/s a GPU": v} for k, v in speeds.items()]
    compare(rows)
    assert [row["layout"] for row in rows] == ["one", "tp2-sp", "tp2-sp"]
    assert [row.get("ratio") for row in rows] == [None, 1.5, 1.0]
    assert [row.get("scaling") for row in rows] == [1.0, 0.75, None]


def test_a_ratio_is_to_the_fastest_bf16() -> None:
    speeds = {"bf16": 4.0, "upstream bf16, graphs": 5.0, "tetrajet": 6.0}
    rows = [{"layout": "one", "name": name, "tokens/s a GPU": v} for name, v in speeds.items()]
    compare(rows)
    assert [row["ratio"] for row in rows] == [0.8, 1.0, 1.2]


@pytest.mark.slow
def test_what_a_graph_sends_is_left_open(rows: dict[str, Row]) -> None:
    counted, open_ = table([rows["bf16"]])[-1], table([rows["bf16"] | {"sent": None}])[-1]
    assert counted.split("|")[-5:-1] != open_.split("|")[-5:-1] == ["  "] * 4


def test_a_result_is_resumed_where_all_else_is_the_same(tmp_path: Path) -> None:
    out, result = tmp_path / "out.json", {"stamp": {"commit": "a"}, "layers": 8, "rows": []}
    assert resumed(out, result) == []
    out.write_text(json.dumps(result | {"rows": [{"name": "bf16"}]}))
    assert resumed(out, result) == [{"name": "bf16"}]
    with pytest.raises(SystemExit, match="measured elsewhere"):
        resumed(out, result | {"stamp": {"commit": "b"}})


def test_layouts_that_run_at_one_time_have_gpus_of_their_own() -> None:
    cases = [(name, "bf16") for name in LAYOUTS]
    groups = grouped(cases, 8)
    assert sorted(case for group in groups for case in group) == sorted(cases)
    assert max(sum(LAYOUTS[name].gpus for name, _ in group) for group in groups) == 8
    assert len(groups) == 6  # seven GPUs' worth, two layouts of four, one, and three of eight


@pytest.mark.slow
def test_a_table_has_a_line_for_each_row(rows: dict[str, Row]) -> None:
    lines = table(list(rows.values()))
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


def columns(rows: list[Row]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows)]


def test_kinds_that_a_row_sends_have_columns(rows: dict[str, Row]) -> None:
    plain = rows["bf16"] | {"sent": {"reduce-scatter": 4 * 10**9, "broadcast": 10**6}}
    exchanging = rows["mxfp4"] | {"sent": {"all-to-all": 10**9, "broadcast": 12 * 10**6}}
    head, *_ = columns([plain])
    assert head[-1] == "send MB"  # the few tokens that are broadcast have no column
    head, _, *lines = columns([plain, exchanging])
    assert head[-2:] == ["all-to-all MB", "broadcast MB"]
    assert [line[-2:] for line in lines] == [["0", "1"], ["1,000", "12"]]


def test_exposed_time_is_a_mean_over_ranks_and_a_column_where_it_is_known(
    rows: dict[str, Row],
) -> None:
    each = {"gpu_ms": {}, "sent": {}, "peak_gib": 1.0, "largest": []}
    row = summed_up([each | {"exposed_ms": ms} for ms in (2.0, 7.0)])
    assert row["exposed_ms"] == 4.5
    new, old = rows["bf16"] | {"exposed_ms": 31.4}, dict(rows["mxfp4"])
    del old["exposed_ms"]  # as in results from before it was measured
    head, _, *lines = columns([new, old])
    assert [line[head.index("exposed")] for line in lines] == ["31", ""]
    assert "exposed" not in columns([old])[0]
