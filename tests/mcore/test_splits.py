"""Every split that is asked for has data, or one line before the first step says what is not."""

import re
from pathlib import Path

import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_fp4.errors import ConfigError
from testing.builders.command_line import dataset, parse
from testing.worlds.launch import torchrun

NULL = "--tokenizer-type NullTokenizer --vocab-size 512".split()


@pytest.fixture
def forty(tmp_path: Path) -> str:
    """The prefix of forty documents of 70 tokens."""
    return dataset(tmp_path, *[[i + 1] * 70 for i in range(40)])


def refused(says: str, *flags: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(*NULL, *flags)


@pytest.mark.parametrize("documents", [2, 3, 7, 40, 99, 100, 101, 333])
def test_the_proposed_split_leaves_none_without(tmp_path: Path, documents: int) -> None:
    """Megatron's default of 969,30,1 leaves none of so few to test."""
    path = ["--data-path", dataset(tmp_path, *[[1, 2]] * documents)]
    with pytest.raises(ConfigError) as told:
        parse(*NULL, *path)
    says = rf"{path[1]} has {documents} documents, .* 969, 30, 1 leaves none .*such as (\S+)\)"
    found = re.search(says, str(told.value))
    assert found
    parse(*NULL, *path, "--split", found[1])


def test_shares_that_come_to_no_document_are_told(forty: str) -> None:
    path = ["--data-path", forty]
    parse(*NULL, *path, "--split", "90,5,5")
    refused("leaves none to validation and test", *path, "--split", "999,0.5,0.5")


def test_upstream_would_count_the_epochs_of_no_tokens_for_ever() -> None:
    """Why that is refused. Negative control: the epochs of some tokens come to an end."""

    class Endless(Exception):
        pass

    class NoTokens(int):
        def __lt__(self, other: int) -> bool:
            return True

        def __add__(self, other: int) -> "NoTokens":
            raise Endless

    class Asked:
        num_samples = 0

        class config:
            sequence_length, add_extra_token_to_sequence = 64, 1

    with pytest.raises(Endless):
        GPTDataset._get_num_epochs(Asked, NoTokens(0))  # type: ignore[arg-type]
    assert GPTDataset._get_num_epochs(Asked, 1) == 1  # type: ignore[arg-type]


def test_one_document_needs_data_for_each_split(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, [1] * 70)
    refused("has 1 document, .* give --train-data-path and --valid", "--data-path", prefix)
    train = Path(prefix).with_name("train_text_document")
    for end in (".bin", ".idx"):
        for name in ("train_text_document", "valid_text_document"):
            train.with_name(name + end).write_bytes(Path(prefix + end).read_bytes())
    beside = f"--valid-data-path {train.with_name('valid_text_document')} in place of"
    refused(re.escape(beside), "--data-path", str(train))


def test_a_member_of_a_blend_counts_by_itself(tmp_path: Path, forty: str) -> None:
    (tmp_path / "few").mkdir()
    few = dataset(tmp_path / "few", [1] * 70, [2] * 70)
    blend = ["--data-path", "0.5", forty, "0.5", few]
    refused(f"{few} has 2 documents", *blend, "--split", "90,10,0")
    parse(*NULL, *blend, "--split", "50,50,0")


def test_training_and_validation_need_data(forty: str) -> None:
    alone = ["--train-data-path", forty]
    refused("no data for --eval-iters 1: give --valid-data-path", *alone)
    refused("no data for --eval-iters 1", "--data-path", forty, "--split", "100,0,0")
    refused("no data for --eval-iters 1", *alone, "--test-data-path", forty)
    refused("no data to train on: give --train-data-path", "--valid-data-path", forty)
    parse(*NULL, *alone, "--eval-iters", "0")
    parse(*NULL, "--data-path", forty, "--split", "100,0,0", "--eval-iters", "0")
    parse(*NULL, "--valid-data-path", forty, "--skip-train")


def test_flags_that_contradict_each_other_are_told(tmp_path: Path, forty: str) -> None:
    both = ["--train-data-path", forty, "--valid-data-path", forty]
    parse(*NULL, *both)
    refused("--split 90,5,5 shares out --data-path alone", *both, "--split", "90,5,5")
    refused("is not three shares", "--data-path", forty, "--split", "1,1,1,1")
    listed = tmp_path / "list"
    listed.write_text(f"1 {forty}")
    refused("--data-args-path needs --split", "--data-args-path", str(listed))


def test_forty_documents_train_with_the_proposed_split(forty: str) -> None:
    flags = ["--data-path", forty, "--split", "97,3,0", *NULL]
    result = torchrun(1, *flags, "--train-iters", "2", "--eval-interval", "2")
    assert result.status == 0 and len(result.losses) == 2 and result.evaluations
