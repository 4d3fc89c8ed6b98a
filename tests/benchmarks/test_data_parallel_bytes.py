"""What data-parallel ranks send and hold is what is estimated, and what the start table says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.data_parallel_bytes import (
    ALL,
    CASES,
    GATHER,
    GRADIENTS,
    MEGATRON,
    MICROBATCHES,
    MODEL,
    MOMENTS,
    Case,
    Row,
    a_parameter,
    row_of,
    tables,
)
from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.estimate import traffic
from megatron_fp4.estimate.layout import Layout, parameters, stages
from megatron_fp4.estimate.memory import optimizer_bytes
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named

ROOT = Path(__file__).parents[2]
# By how much messages of --fp4-param-gather, which are padded to the longest, may exceed what is
# estimated of the weights, in the committed result.
PADDED = 0.02
# What Layout has for the flags of a row.
OPTIONS: dict[str, dict[str, Any]] = {
    f"{GRADIENTS} fp8": {"gradients": "e4m3"},
    f"{GRADIENTS} bf16": {"gradients": "bf16"},
    f"{MOMENTS} m=fp8,v=fp16": {"moments": Moments("fp8", "fp16")},
    f"{MOMENTS} m=fp8,v=fp8": {"moments": Moments("fp8", "fp8")},
    GATHER: {"gathers_codes": True},
    "--grad-reduce-in-bf16": {"bf16_gradients": True},
}
# A layer of which each parameter is a bucket of its own, with shards of whole blocks.
ONE_LAYER = """
    --num-layers 1 --hidden-size 512 --ffn-hidden-size 768 --num-attention-heads 8
    --num-query-groups 4 --vocab-size 512 --seq-length 32 --max-position-embeddings 32
    --ddp-bucket-size 1
""".split()
COUNTED = [Case(ALL, "distributed", 2), Case(f"{GRADIENTS} fp8", "plain", 2)]


def committed() -> list[Row]:
    text = (ROOT / "benchmarks/results/data_parallel_bytes.json").read_text()
    found: list[Row] = json.loads(text)["rows"]
    return found


def named(row: Row) -> str:
    return f"{row['optimizer']}-{row['ranks']}-{row['name']}"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row_of(case, ONE_LAYER) for case in COUNTED]


def model_of(flags: list[str]) -> Model:
    names = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads")
    layers, hidden, ffn, heads, groups, vocabulary, sequence = (
        int(flags[flags.index(f"--{name}") + 1])
        for name in (*names, "num-query-groups", "vocab-size", "seq-length")
    )
    return Model(layers, hidden, ffn, heads, groups, hidden // heads, vocabulary, sequence)


def layout_of(row: Row) -> Layout:
    options = [option for flags, option in OPTIONS.items() if flags in row["name"]]
    return Layout(
        row["ranks"],
        batch=MICROBATCHES * row["ranks"],
        sharded=row["optimizer"] == "distributed",
        **{key: value for option in options for key, value in option.items()},
    )


def estimated(model: Model, layout: Layout, row: Row) -> tuple[float, float]:
    """(gradients, weights): the bytes of a parameter that a rank sends."""
    [stage] = stages(model, layout)
    sends = traffic.of_step(model, layout, recipe_named("tetrajet"), stage)
    is_weights = [layout.sharded and one.kind == "all-gather" for one in sends]
    count = parameters(model, layout, stage).total
    gradients, weights = (
        sum(
            one.sent for one, of_weights in zip(sends, is_weights, strict=True) if of_weights is own
        )
        for own in (False, True)
    )
    return gradients / count, weights / count


def sent(row: Row) -> tuple[float, float]:
    gradients, weights = (a_parameter(row, "sent", purpose) for purpose in ("gradients", "weights"))
    return gradients, weights


# --- one layer ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_counted_is_what_is_estimated(rows: list[Row]) -> None:
    for row in rows:
        assert sent(row) == estimated(model_of(ONE_LAYER), layout_of(row), row), row["name"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"gradients": None}, {"gradients": "bf16"}, {"gathers_codes": False}, {"sharded": False}],
    ids=str,
)
def test_the_count_tells_other_flags_apart(rows: list[Row], changed: dict[str, Any]) -> None:
    [row] = [row for row in rows if row["name"] == ALL]
    other = replace(layout_of(row), **changed)
    assert estimated(model_of(ONE_LAYER), other, row) != sent(row)


@pytest.mark.slow
def test_all_that_is_sent_is_of_gradients_or_of_weights(rows: list[Row]) -> None:
    """But for the loss, and the norm of the gradients."""
    for rank in (rank for row in rows for rank in row["each"]):
        assert rank["sent"]["others"].keys() == {"all-reduce"}
        assert 0 < rank["sent"]["others"]["all-reduce"] < 64


# --- the committed result -------------------------------------------------------------------------


def test_the_result_has_all_cases() -> None:
    found = [Case(*(row[key] for key in ("name", "optimizer", "ranks"))) for row in committed()]
    assert found == CASES


@pytest.mark.parametrize("row", committed(), ids=named)
def test_a_result_is_what_is_estimated(row: Row) -> None:
    """But for messages that are padded, and for scales of moments whose blocks are not full."""
    model, layout = model_of(MODEL), layout_of(row)
    gradients, weights = estimated(model, layout, row)
    assert sent(row)[0] == gradients
    assert weights <= sent(row)[1] <= weights * (1 + PADDED * layout.gathers_codes)
    [stage] = stages(model, layout)
    own = parameters(model, layout, stage)
    for key, each in (("main weights", 4), ("moments", layout.moments.bytes)):
        wanted = optimizer_bytes(own, layout, each) / own.total
        assert a_parameter(row, "held", key) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("row", committed(), ids=named)
def test_a_result_is_what_the_start_table_says(row: Row) -> None:
    """A line about each flag of the row, and none about others."""
    layout, said = layout_of(row), "\n".join(row["said"])
    kinds = row["each"][0]["sent"]["gradients"]
    each = [f"{a_parameter(row, 'sent', 'gradients', kind):.2f} by {kind}" for kind in kinds]
    assert (" and ".join(each) in said) is (layout.gradients is not None)
    shards = layout.dp if layout.sharded else 1
    each_moments, each_weight = (
        a_parameter(row, "held", key) * shards for key in ("moments", "main weights")
    )
    moments = (
        f"{each_moments:.3f} bytes a parameter in place of 8, with the main weight "
        f"{each_moments + each_weight:.3f} in place of 12"
    )
    assert (moments in said) is (layout.moments != FLOAT32)
    gathered = re.search(r"[\d,]+ weights .* sends ([\d.]+) MiB a step, not ([\d.]+) MiB", said)
    assert (gathered is not None) is layout.gathers_codes
    if gathered is not None:
        codes, weights = (float(size) * 2**20 for size in gathered.groups())
        saved = (weights - codes) / row["each"][0]["parameters"]
        _, plain = estimated(model_of(MODEL), replace(layout, gathers_codes=False), row)
        assert sent(row)[1] == pytest.approx(plain - saved, rel=PADDED)


def test_the_tables_are_the_committed_result() -> None:
    docs = (ROOT / "docs/communication.md").read_text()
    for lines in tables(committed()).values():
        assert "\n".join(lines) in docs


def test_the_page_s_figures_are_those_of_the_result() -> None:
    docs = (ROOT / "docs/communication.md").read_text()
    found = {(row["name"], row["ranks"]): row for row in committed() if row["optimizer"] != "plain"}
    in_bf16 = []
    for ranks in (2, 4):
        every, plain, low = (found[name, ranks] for name in (ALL, *MEGATRON))
        in_float32 = sum(sent(every)) / sum(sent(plain))
        in_bf16.append(f"{sum(sent(every)) / sum(sent(low)):.2f}")
        moments = a_parameter(every, "held", "moments") / a_parameter(plain, "held", "moments")
        assert f"send {in_float32:.2f} of what Megatron sends with gradients in float32" in docs
        assert f"The moments take {moments:.2f} of theirs" in docs
        said = re.search(r"([\d,]+) weights on a rank", "\n".join(every["said"]))
        assert said is not None
        count, linears = every["each"][0]["parameters"], int(said[1].replace(",", ""))
        assert f"Of its {count:,} parameters, {linears:,} are weights of linears" in docs
        assert f"they are {1 - linears / count:.2f} of this model" in docs
    assert f"and {' to '.join(in_bf16)} of what it sends with gradients in BF16" in docs
    assert f"adds less than {PADDED:.0%} to the weights" in docs
