"""A preprocessing command that is killed or runs beside another makes the same data."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.mcore.data.corpus import parts, preparing
from megatron_fp4.mcore.data.preprocess import main
from testing.builders.corpus import (
    megatrons_dataset,
    megatrons_tokenizer,
    sentencepiece_model,
)
from testing.builders.preprocessing import TEXTS, TRAIN, VALID, failure, files, run, write_corpus

ROOT = Path(__file__).parents[3]


def start(*words: object) -> Any:
    """Starts a command in a process of its own."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=lambda: sys.exit(main([str(word) for word in words])))
    process.start()
    return process


@pytest.mark.parametrize(
    "kind",
    ["lines", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gz", "parquet"))],
)
def test_a_command_that_is_killed_goes_on(
    kind: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parts.write

    def slow_write(*given: Any) -> None:
        time.sleep(0.02)
        write(*given)

    # Slowed down, so that a kill meets every stage; workers are forked and have this too.
    monkeypatch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", slow_write)
    write_corpus(tmp_path / "text", kind)
    command = (
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--held-out-share",
        "0.2",
        "--workers",
        2,
    )
    run(*command, "--output", tmp_path / "whole")
    rng, kills, progress, timed = random.Random(kind), 0, set(), 5

    def finished_parts() -> int:
        return len(list((tmp_path / "data").glob(".parts/part-*")))

    while True:
        # Killed after one or two more parts, so that each try makes progress on a machine of any
        # speed; and some times after a while, which can be at the start or while parts are merged.
        goal = finished_parts() + rng.randint(1, 2)
        end = time.monotonic() + (rng.uniform(0.05, 0.4) if timed else 60)
        process = start(*command, "--output", tmp_path / "data")
        while process.is_alive() and finished_parts() < goal and time.monotonic() < end:
            time.sleep(0.002)
        if not process.is_alive():
            process.join()
            break
        timed -= timed > 0 and finished_parts() < goal
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        progress.add(finished_parts())
        assert kills < 200
    assert process.exitcode == 0 and kills > 2 and len(progress) > 2
    for part in (TRAIN, VALID):
        assert files(tmp_path / "data", part) == files(tmp_path / "whole", part)
    assert sorted(os.listdir(tmp_path / "data")) == sorted(os.listdir(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_workers_end_with_their_process(
    number: int, status: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(*_: Any) -> None:
        time.sleep(60)

    monkeypatch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", never_ends)
    write_corpus(tmp_path / "text", "lines")
    model = ("--tokenizer-model", models / "sp.model")
    process = start(tmp_path / "text", *model, "--output", tmp_path / "data", "--workers", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    while len(pids := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # the workers sleep in the middle of a block
    assert len(pids) == 2
    os.kill(process.pid, number)
    process.join(20)
    ended_with = process.exitcode
    process.kill()
    assert ended_with == status
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("script", ["preprocess.py", "prepare_data.py", "checkpoint.py"])
def test_an_interruption_of_the_imports_is_quiet(script: str, tmp_path: Path) -> None:
    """Where torch is imported, which can lose a KeyboardInterrupt."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise RecursionError\n"
    )
    command = [sys.executable, str(ROOT / "tools" / script), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def interrupted(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: object
) -> Path:
    """An output folder with some parts: the fourth block fails."""
    write = parts.write

    def fails(folder: Path, part: parts.Part) -> None:
        if part.header.number == 3:
            raise OSError(28, "No space left on device", str(folder))
        write(folder, part)

    with monkeypatch.context() as patch:
        patch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", fails)
        assert (
            main(
                [
                    str(it)
                    for it in (
                        tmp_path / "text",
                        "--tokenizer-model",
                        models / "sp.model",
                        "--output",
                        tmp_path / "data",
                        *words,
                    )
                ]
            )
            == 1
        )
    assert len(list((tmp_path / "data" / ".parts").glob("part-*"))) >= 3
    return tmp_path / "data"


def test_a_full_disk_is_one_line_and_the_command_goes_on(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path / "text", "lines")
    output = interrupted(models, tmp_path, monkeypatch)
    said = capsys.readouterr().err
    assert f"cannot write {output}/.parts: No space left on device; free space" in said
    run(tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", output)
    assert "Data: going on after " in capsys.readouterr().out
    tokenizer = megatrons_tokenizer(models / "sp.model")
    assert files(output) == megatrons_dataset(TEXTS, tokenizer, tmp_path / "megatrons")


def test_another_command_does_not_go_on_with_the_work(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_corpus(tmp_path / "text", "lines")
    output = interrupted(models, tmp_path, monkeypatch)
    command = (tmp_path / "text", "--tokenizer-model", models / "sp.model", "--output", output)
    other = sentencepiece_model(tmp_path / "other.model")
    other.write_bytes((models / "sp.model").read_bytes() + b"\x12\x00")
    remedy = f"delete {output}/.parts to start anew"
    for words, changed in (
        ((*command, "--held-out-share", "0.1"), "options"),
        ((paths[0], *command[1:]), "text"),
        ((tmp_path / "text", "--tokenizer-model", other, "--output", output), "tokenizer"),
    ):
        said = failure(capsys, *words)
        assert f"of another command ({changed} was not the same)" in said and remedy in said
    os.utime(paths[1])
    assert "text was not the same" in failure(capsys, *command)


def test_text_that_changes_meanwhile_is_noticed(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = write_corpus(tmp_path / "text", "lines")
    tokenize = preparing._tokenize

    def meanwhile(*given: Any) -> Any:
        made = tokenize(*given)
        os.utime(paths[0])
        return made

    monkeypatch.setattr(preparing, "_tokenize", meanwhile)
    said = failure(
        capsys,
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    assert f"{paths[0]} changed while it was read" in said
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_killed_worker_is_one_line(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "megatron_fp4.mcore.data.corpus.encoding.write",
        lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    )
    write_corpus(tmp_path / "text", "lines")
    said = failure(
        capsys,
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    assert "a worker was killed" in said and "fewer --workers" in said


def test_two_processes_do_not_write_to_one_folder(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path / "text", "lines")
    command = (
        tmp_path / "text",
        "--tokenizer-model",
        models / "sp.model",
        "--output",
        tmp_path / "data",
    )
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fp4.mcore.data.corpus.encoding.write", lambda *_: time.sleep(60))
        process = start(*command)
        while not (tmp_path / "data" / ".parts" / "job.json").exists():
            time.sleep(0.02)
    assert f"another process is writing to {tmp_path / 'data'}" in failure(capsys, *command)
    process.kill()
    process.join()
    run(*command)
