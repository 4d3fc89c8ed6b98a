"""The padded vocabulary is the same in every layout, and a checkpoint of another one stops."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.tokenizers.utils import build_tokenizer
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import compare_numerics
from megatron_fp4.mcore.data import vocabulary
from megatron_fp4.mcore.data.vocabulary import padded_size
from megatron_fp4.mcore.launch.refusals.table import refuse
from megatron_fp4.mcore.launch.refusals.tokenizer import vocabulary as rows_refused
from testing.builders.fp4_arguments import parse
from testing.worlds.launch import torchrun, train

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
VOCABULARY = ("--vocab-size", "600", "--bf16")  # 640 rows; upstream pads to 768 under TP2


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8, 16, 32, 64, 128])
def test_rows_do_not_depend_on_the_tensor_parallel_size(tensor_parallel: int) -> None:
    assert padded_size(50257, 128, tensor_parallel) == 50304  # 393 times 128
    assert padded_size(32000, 128, tensor_parallel) == 32000
    # The control: upstream's does from two on.
    upstream = calculate_padded_vocab_size(600, 128, tensor_parallel, False)
    assert (upstream == padded_size(600, 128, 1)) == (tensor_parallel == 1)


def test_a_size_that_cannot_be_shared_is_padded_further_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args: Any = SimpleNamespace(
        make_vocab_size_divisible_by=128, tensor_model_parallel_size=6, rank=0
    )
    assert vocabulary._padded_for(600, args) == 768  # 384 divides both
    assert "--padded-vocab-size 768" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "pads", "word"),
    [(641, True, "is not a multiple"), (None, False, "give --padded-vocab-size")],
)
def test_rows_that_cannot_be_had_are_one_line(rows: int | None, pads: bool, word: str) -> None:
    args: Any = SimpleNamespace(
        padded_vocab_size=rows, pad_vocab_size=pads, tensor_model_parallel_size=2
    )
    with pytest.raises(ConfigError, match=word):
        refuse(rows_refused(args))


def test_another_padding_stops_a_launch_that_is_checked_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In others Megatron pads as without this package, and resumes."""
    told: list[str] = []
    monkeypatch.setattr(compare_numerics, "print_rank_0", told.append)
    saved, launch = parse(), parse()
    saved.padded_vocab_size, launch.padded_vocab_size = 50304, 50432
    line = "vocabulary is padded to 50304 rows and this launch's to 50432"
    monkeypatch.setattr(build_tokenizer, "vocab_size_with_padding", calculate_padded_vocab_size)
    compare_numerics.compare(saved, launch)
    assert told == [f"megatron-fp4: the checkpoint's {line}"]
    vocabulary.install()  # Negative control.
    with pytest.raises(ConfigError, match=f"{line}: give --padded-vocab-size 50304, or"):
        compare_numerics.compare(saved, launch)
    launch.fp4_load_anyway = True
    compare_numerics.compare(saved, launch)
    assert len(told) == 2


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_layout_and_the_padding_is_kept(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2")
    alone, sharded = train(1, *VOCABULARY, *save), train(2, *VOCABULARY, *TP2)
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-4)
    # The control: with upstream's padding under TP2 the loss is another.
    other = ("--padded-vocab-size", "768")
    assert train(2, *VOCABULARY, *TP2, *other).losses[0] > alone.losses[0] + 0.05

    load = (*VOCABULARY, "--load", str(tmp_path), "--ckpt-step", "2")
    refused = torchrun(1, *load, *other)
    told = "padded to 640 rows and this launch's to 768: give --padded-vocab-size 640, or"
    assert refused.status == 1 and told in refused.output and not refused.losses
    anyway = train(1, *load, *other, "--fp4-load-anyway")
    assert "padded to 640 rows and this launch's to 768" in anyway.output
