"""Elements outside the FP8 carriers' window, in a run: against numpy in float64, by layout.

A stand-in multiplies in carriers on the CPU; its window is narrow. That a Hopper GPU's kernel
counts what is outside the true windows is compared with ml_dtypes (tests/kernels).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testing.worlds.checkpoints import SMALL, TP2_SP
from testing.worlds.launch import SCRIPTS, result_of, spawn, tiny_on_mock_data
from testing.worlds.metrics import Whole, kinds, read

SCRIPT = SCRIPTS / "pretrain_in_carriers.py"
FLAGS = f"{SMALL} --bf16 --fp4-recipe tetrajet --fp4-metrics-interval 2 --train-iters 2"
TOKENS = 128  # in a microbatch
# The operands whose contracted axis is that of features which tensor parallelism shards.
SHARDED = {
    "self_attention.linear_proj": ("fprop.x", "fprop.w"),
    "mlp.linear_fc2": ("fprop.x", "fprop.w"),
    "self_attention.linear_qkv": ("dgrad.dy", "dgrad.w"),
    "mlp.linear_fc1": ("dgrad.dy", "dgrad.w"),
}


def rows(whole: dict[str, np.ndarray], linear: str, operand: str) -> list[dict[str, np.ndarray]]:
    """The operand as ranks multiply it, in matrices whose rows are carriers' rows."""
    along_rows = operand in ("fprop.x", "fprop.w", "dgrad.dy")
    turned = {key: value if along_rows else value.T for key, value in whole.items()}
    if operand.startswith("wgrad"):
        cuts = range(TOKENS, turned["scale"].shape[1], TOKENS)
        parts = {key: np.split(value, cuts, axis=1) for key, value in turned.items()}
    elif operand in next(places for name, places in SHARDED.items() if linear.endswith(name)):
        owner = turned["rank"][0]
        own = [owner == rank for rank in np.unique(owner)]
        parts = {key: [value[:, mine] for mine in own] for key, value in turned.items()}
    else:
        parts = {key: [value] for key, value in turned.items()}
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def outside(parts: list[dict[str, np.ndarray]]) -> float:
    """The share of elements whose block has a scale below the row's largest."""
    counts = [
        (part["scale"] < part["scale"].max(1, keepdims=True)) & (part["decoded"] != 0)
        for part in parts
    ]
    return float(sum(count.sum() for count in counts) / sum(count.size for count in counts))


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(1, "", id="one"),
        pytest.param(2, TP2_SP, id="tp2", marks=pytest.mark.outside),
        pytest.param(
            2, "--tensor-model-parallel-size 2", id="tp2-no-sp", marks=pytest.mark.outside
        ),
        pytest.param(2, "", id="dp2", marks=pytest.mark.outside),
    ],
)
def test_a_run_reports_what_carriers_rounded(processes: int, flags: str, tmp_path: Path) -> None:
    words = tiny_on_mock_data(*f"{FLAGS} {flags} --tensorboard-dir {tmp_path}".split())
    result = result_of(spawn(processes, SCRIPT, str(tmp_path / "operands"), *words))
    assert result.status == 0, result.output[-4000:]
    whole, records = Whole(tmp_path / "operands"), kinds(read(tmp_path), "operand")
    assert len(records) == 2 * 4 * 6
    found, of_whole_tensors, unsharded = [], [], []
    for record in records:
        layer, operand = record["layer"], f"{record['gemm']}.{record['operand']}"
        matrix = whole.operands[2, layer, record["gemm"], record["operand"]]
        parts = rows(matrix, layer, operand)
        found.append(record["metrics"]["outside_carrier"])
        assert found[-1] == pytest.approx(outside(parts), rel=1e-12), (layer, operand)
        one_row = [{key: value.reshape(1, -1) for key, value in part.items()} for part in parts]
        of_whole_tensors.append(outside(one_row))
        unsharded.append(outside(rows(matrix | {"rank": 0 * matrix["rank"]}, layer, operand)))
    assert np.count_nonzero(found) >= 40  # a row of one block has none
    # Negative controls: one exponent for a whole operand, and the rows of the unsharded operand.
    assert sum(a != b for a, b in zip(found, of_whole_tensors, strict=True)) > 40
    assert (found != unsharded) == ("tensor" in flags)
