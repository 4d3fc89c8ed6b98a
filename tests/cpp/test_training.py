"""Trainings of two ranks whose linears run in C++."""

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


@pytest.mark.slow
def test_gradients_are_reduced_while_backward_runs_in_cpp() -> None:
    """Megatron's hook asks each parameter whether dW is in main_grad already. Where C++ does not
    say so, it adds what autograd has."""
    flags = (
        f"{SMALL} --bf16 --fp4-recipe mxfp4 --global-batch-size 4 --train-iters 8 "
        "--ffn-hidden-size 128 --overlap-grad-reduce --ddp-bucket-size 20000"
    )
    words, in_cpp = tiny_on_mock_data(*flags.split()), SCRIPTS / "pretrain_in_cpp.py"
    wanted = result_of(spawn(2, ROOT / "pretrain_gpt.py", *words))
    found = result_of(spawn(2, in_cpp, *words))
    wrong = result_of(spawn(2, in_cpp, "mistake=no-flag", *words))
    for result in (wanted, found, wrong):
        assert result.status == 0 and len(result.losses) == 8, result.output[-4000:]
    assert found.losses == wanted.losses
    assert wrong.losses[:1] == wanted.losses[:1]  # before the first update
    assert wrong.losses[-1] != wanted.losses[-1]
