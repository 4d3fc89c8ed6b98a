"""Peers that cannot be measured are told of, and the comparison of numerics sees a difference."""

from dataclasses import replace

import pytest

from benchmarks.peers import row_of, table
from benchmarks.peers_worker import LINEARS, Quantizing, equal, sample
from megatron_fp4 import quantize

OWN = Quantizing("", "", "mxfp4", lambda x: quantize(x, "mxfp4"), lambda codes: codes.dequantize())


def test_equal_numerics_are_seen_and_others_too() -> None:
    x = sample(64, 256, "cpu")
    assert equal(OWN, x) == 1.0
    other = equal(replace(OWN, ours="mxfp4-ceil"), x)
    assert other is not None and other < 1.0
    assert equal(replace(OWN, values=None), x) is None


def test_a_peer_that_is_not_there_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINEARS, "nobody", replace(LINEARS["mxfp4"], package="no-such-package"))
    row = row_of("nobody")
    assert row["absent"] == "not installed"
    assert "absent: not installed" in "\n".join(table([row]))


@pytest.mark.slow
def test_a_peer_that_raises_is_told_of_by_its_line() -> None:
    row = row_of("mxfp4", "--check")  # it is no peer, and so has no such check
    assert row["raises"] == "AssertionError: this package's own" and "found" not in row
    assert "raises: AssertionError" in "\n".join(table([row]))
