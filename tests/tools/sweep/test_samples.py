"""A result file has one sample, or combinations that were chosen, and not both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import rows
from tools.sweep import __main__
from tools.sweep.axes import Combination
from tools.sweep.results import BF16
from tools.sweep.running import FAILED, Task
from tools.sweep.sampling import DIRECTED, sample

NOTHING = ["--minutes", "1e-9", "--processes", "1"]  # ends before anything is evaluated
ANOTHER = "{} has results of another sample: give the --number and --seed that it had, or --results"
ANOTHER += " with another file"
CHOSEN = "{} has results of values that were chosen: give --results with another file"
SAMPLED = "{} has results of a sample: give --results with another file"
BLOCK_16 = {Combination(block="16"): DIRECTED}
PLAIN = {each: each.key for each in BF16.values()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


def write(path: Path, stage: str, stars: Mapping[Combination, str], tensors: Path | None) -> None:
    for each, star in stars.items():
        task = Task(stage, each, star, tensors)
        row = {"hash": task.hash, "star": star, **task.configuration, "status": FAILED}
        rows.append(path, row | {"seeds": {}, "seconds": 0.0})


def run(path: Path, *words: str) -> int:
    files = ["--results", str(path), "--work", str(path.parent)]
    return __main__.main(["run", *words, *files, *NOTHING])


def refusal(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> str:
    """What `run` says on stderr as it refuses the file, which stays as it is."""
    before = path.read_bytes()
    assert run(path, *words) == 2 and path.read_bytes() == before
    told = capsys.readouterr()
    assert not told.out
    return told.err


def test_another_sample_is_refused(
    path: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the stages after the first too, and in files of before. The mistake: promotion from two
    samples as if they were one."""
    write(path, "products", sample(40, 9), written)
    says = f"sweep: {ANOTHER.format(path)}\n"
    for stage in ("products", "regression"):
        assert refusal(capsys, path, stage, "--number", "40", "--seed", "10") == says
        assert refusal(capsys, path, stage, "--number", "1", "--seed", "9") == says


def test_a_larger_sample_of_the_same_seed_extends_it(
    path: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, "products", sample(1, 9), written)
    assert run(path, "products", "--number", "1", "--seed", "9") == 0
    assert run(path, "products", "--number", "60", "--seed", "9") == 75
    count, every = len(sample(1, 9)), len(sample(60, 9))
    assert f"sweep: {count} of {every} have results of products" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["products", "regression"])
def test_a_sample_and_chosen_values_are_not_mixed(
    stage: str, path: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = written if stage == "products" else None
    write(path, stage, BLOCK_16, tensors)
    assert refusal(capsys, path, "products") == f"sweep: {CHOSEN.format(path)}\n"
    path.write_bytes(b"")
    write(path, stage, {Combination(block="16"): "0123"}, tensors)
    for other in ("products", "regression"):
        assert refusal(capsys, path, other, "scale=e8m0") == f"sweep: {SAMPLED.format(path)}\n"


def test_chosen_values_are_added_to_others(path: Path, written: Path) -> None:
    """BF16, which each stage that trains a model has, is of both."""
    write(path, "regression", BLOCK_16 | PLAIN, None)
    assert run(path, "regression", "block=16,32") == 75
    assert run(path, "regression", "block=16") == 0
    assert run(path, "products", "block=16") == 75
