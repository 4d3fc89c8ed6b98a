"""A training of two ranks whose linears run in C++."""

from __future__ import annotations

import pytest

from testing.worlds.checkpoints import SMALL
from testing.worlds.launch import ROOT, SCRIPTS, result_of, spawn, tiny_on_mock_data

FLAGS = (
    f"{SMALL} --bf16 --fp4-recipe mxfp4 --global-batch-size 2 --train-iters 30 "
    "--ffn-hidden-size 128 --tensor-model-parallel-size 2 --sequence-parallel"
)


@pytest.mark.slow
def test_two_ranks_train_as_in_python() -> None:
    """A pass that held the GIL while it waits for the other rank would hang: gloo's threads take
    the GIL too."""
    words = tiny_on_mock_data(*FLAGS.split())
    found, wanted = (
        result_of(spawn(2, script, *words))
        for script in (SCRIPTS / "pretrain_in_cpp.py", ROOT / "pretrain_gpt.py")
    )
    assert found.status == wanted.status == 0, found.output[-4000:]
    assert "forward passes in Python: 16" in found.output  # of 240: two of each linear
    assert found.losses == wanted.losses and len(found.losses) == 30
