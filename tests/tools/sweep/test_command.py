"""The command: what it refuses, in one line, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp4 import ConfigError, get_recipe
from tools import rows
from tools.sweep import __main__, llama, results, tensors
from tools.sweep.axes import Combination
from tools.sweep.stages import STAGES, digits, regression

ROOT = Path(__file__).parents[3]
COMMITTED = __main__.RESULTS.read_bytes().splitlines(keepends=True)


def test_a_second_run_on_a_file_is_refused(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    words = ["run", "products", "--results", str(path), "--work", str(tmp_path), "--number", "1"]
    with rows.alone(path):
        assert __main__.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sweep: another run is writing to {path}: wait for it")
    assert error.count("\n") == 1 and not path.read_bytes()
    assert __main__.main([*words, "--minutes", "1e-9"]) == 75  # once the other has ended
    assert capsys.readouterr().out.endswith("the same command goes on\n")


@pytest.mark.parametrize(
    "which",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
        signal.SIGKILL,
    ],
)
def test_workers_end_with_the_command(which: signal.Signals, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "tools.sweep", "run", "products", "--results", str(path)]
    command += ["--work", str(tmp_path), "--processes", "2"]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 2, run)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.send_signal(which)
    try:
        wait_until(lambda: not any(map(alive, [run.pid, *workers])))
    finally:
        for each in filter(alive, [run.pid, *workers]):
            os.kill(each, signal.SIGKILL)
    said = run.communicate()[0]
    assert run.returncode == (-which if which == signal.SIGKILL else 130)
    if which != signal.SIGKILL:
        count = len(results.read(path))
        assert f"{count} of 2664 have results of products, of which 0 failed: the same co" in said


def wait_until(true: Callable[[], bool], run: subprocess.Popen[str] | None = None) -> None:
    limit = time.monotonic() + (100 if run else 20)
    while not true():
        assert time.monotonic() < limit and (run is None or run.poll() is None)
        time.sleep(0.05)


def workers_of(parent: int) -> list[int]:
    """The processes that a pool has started, by the command of multiprocessing's `spawn`."""
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    own = [each for each in found if (status := status_of(each)) and status[1] == str(parent)]
    return [each for each in own if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def alive(process: int) -> bool:
    status = status_of(process)
    return status is not None and status[0] != "Z"


def status_of(process: int) -> list[str] | None:
    """The state of a process, its parent, and more; None if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def test_bad_words_end_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["try", "digits", "scales=e4m3"]) == 2
    assert capsys.readouterr().err.startswith("sweep: no axis scales: forward, backward")
    assert __main__.main(["try", "digits", "scale=e4m3"]) == 2
    assert "sweep: rule=floor (the default) does not go with scale=e4m3: give rule=nearest or" in (
        capsys.readouterr().err
    )
    for command in (["try", "digits"], ["cost"]):  # where nothing is in FP4 too
        assert __main__.main([*command, "forward=bf16", "backward=bf16", "estimator=dge"]) == 2
        assert "sweep: estimator=dge has no effect with forward=bf16: leave it out, or change" in (
            capsys.readouterr().err
        )
    assert __main__.main(["try", "digits", "scale=e4m3", "scale=e8m0"]) == 2
    assert capsys.readouterr().err == "sweep: scale is given twice: give it once\n"
    # Words may follow options too.
    assert __main__.main(["try", "digits", "--work", "w", "scale=e4m3", "scale=e8m0"]) == 2
    assert capsys.readouterr().err == "sweep: scale is given twice: give it once\n"
    for words in (["try", "digits", "--work", "w", "--foo=1"], ["show", "--page", "p", "a=b"]):
        with pytest.raises(SystemExit, match="2"):
            __main__.main(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err
    assert __main__.main(["cost", "foo=bar"]) == 2
    assert capsys.readouterr().err.startswith("sweep: no axis foo: forward, backward")
    assert __main__.main(["run", "products", "--processes", "0"]) == 2
    assert capsys.readouterr().err == "sweep: --processes is 0: give 1 or more\n"
    for minutes in ("nan", "-1", "0"):
        assert __main__.main(["run", "products", "--minutes", minutes]) == 2
        assert capsys.readouterr().err == f"sweep: --minutes is {minutes}: give more than 0\n"
    assert __main__.main(["show", "--page", "none.md"]) == 2
    assert (
        capsys.readouterr().err == "sweep: none.md: No such file or directory: give another file\n"
    )


def test_a_try_of_bf16_and_of_fp8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 has a score of its own, though nothing is in FP4."""
    monkeypatch.setattr(digits, "STEPS", 5)
    monkeypatch.setattr(digits, "TESTED", 1)
    monkeypatch.setitem(STAGES, "digits", replace(digits.STAGE, seeds=1))
    said = "score: 0, since this is what others are compared with"
    for backward, there in (("bf16", True), ("fp8", False)):
        assert __main__.main(["try", "digits", "forward=bf16", f"backward={backward}"]) == 0
        told = capsys.readouterr().out
        assert (said in told) == there and ("(the loss less that of BF16)" in told) == (not there)
    assert "score: +0.00000" not in told


@pytest.mark.parametrize(
    ("words", "of_what"),
    [
        (["try", "products"], "stage products"),
        (["run", "draws", "--results", "none.jsonl"], "stage draws"),
        (["cost"], "the cost"),
    ],
)
@pytest.mark.parametrize("value", ["optimizer=stable-spam", "loss_scale=65536"])
def test_the_training_around_a_recipe_is_refused_without_training(
    words: list[str], of_what: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main([*words, "block=16", value]) == 2
    assert capsys.readouterr().err == (
        f"sweep: {value} is of the training around a recipe, on which {of_what} does not depend: "
        "leave it out\n"
    )
    axis, _, given = value.partition("=")
    with pytest.raises(ConfigError, match="on which a recipe does not depend: leave it out"):
        get_recipe("tools.sweep.building:combined", **{axis: given})


def test_a_try_prints_one_score(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where BF16 is trained otherwise than what it is compared with."""
    monkeypatch.setattr(regression, "STEPS", 5)
    for values in ([], ["loss_scale=65536"], ["optimizer=stable-spam"]):
        words = ["try", "regression", "forward=bf16", "backward=bf16", *values]
        assert __main__.main(words) == 0
        assert capsys.readouterr().out.count("score: ") == 1


def test_a_directed_run(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The product of the values; E8M0 has no tensor scale. E4M3 has its own first rules."""
    path = tmp_path / "mine.jsonl"
    run = ["run", "products", "--work", str(tmp_path), "--processes", "1"]
    values = ["scale=e8m0,e4m3", "outer_scale=none,tensor", "block=16"]
    assert __main__.main([*run, *values, "--results", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sweep: left out 1 of 4, whose values contradict each other; the first: outer_scale=tensor "
        "does not go with scale=e8m0 (the default): give outer_scale=none or row",
        "sweep: 3 of 3 have results of products, of which 0 failed",
    ]
    found = {Combination(**row["combination"]) for row in results.read(path)}
    e4m3 = {"scale": "e4m3", "rule": "nearest", "backward_rule": "nearest"}
    outer = [e4m3 | {"outer_scale": each} for each in ("none", "tensor")]
    assert found == {Combination(block="16", **each) for each in ({}, *outer)}
    assert __main__.main(["show", "--results", str(path)]) == 0
    assert "`block=16`" in capsys.readouterr().out
    refusals = {
        ("scale=e8m0", "rule=up"): (
            "these values contradict each other: rule=up does not go with scale=e8m0 (the default)"
            ": give rule=floor or ceil or mse or nearest"
        ),
        ("scale=e8m0,e9m0",): "scale has no value 'e9m0': e8m0, e4m3, ue5m3, fp32",
        ("scale=e8m0", "--seed", "3"): (
            "--number and --seed are of a sample: leave them out, or axis=value"
        ),
    }
    for wrong, says in refusals.items():
        assert __main__.main([*run, *wrong, "--results", str(path)]) == 2
        assert capsys.readouterr().err == f"sweep: {says}\n"
    assert __main__.main([*run, *values]) == 2  # the default file
    assert capsys.readouterr().err == (
        f"sweep: {__main__.RESULTS} has results of a sample: give --results with another file\n"
    )


def written_without(path: Path, stage: str, left_out: int) -> str:
    """The committed results without the last ones of a stage; the path of the file."""
    word = f'"stage": "{stage}"'.encode()
    own = [number for number, line in enumerate(COMMITTED) if word in line]
    gone = set(own[len(own) - left_out :])
    path.write_bytes(b"".join(line for n, line in enumerate(COMMITTED) if n not in gone))
    return str(path)


def test_a_stage_needs_all_results_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"

    def refusal(words: list[str], stage: str, left_out: int) -> str:
        words = [*words, "--results", written_without(path, stage, left_out)]
        before = path.read_bytes()
        assert __main__.main(words) == 2 and path.read_bytes() == before
        return capsys.readouterr().err

    assert refusal(["run", "digits"], "products", 1) == (
        "sweep: 2663 of 2664 have results of products: run it first, or give the --number and "
        "--seed that it had\n"
    )
    assert refusal(["run", "diffusion"], "digits", 3) == (
        "sweep: 596 of 599 have results of digits: run it first\n"
    )
    matrix = tmp_path / "sweep.yaml"
    words = ["llama", "--out", str(matrix)]
    assert refusal(words, "diffusion", 410).startswith("sweep: 0 of 404 have results of diffusion")
    assert not matrix.exists()
    run = ["run", "diffusion", "--results", written_without(path, "diffusion", 0)]
    assert __main__.main([*run, "--minutes", "1e-9"]) == 0  # of the committed results all are there
    assert __main__.main([*words, "--results", str(path)]) == 0 and matrix.exists()


def test_the_best_need_all_results_of_the_last_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, matrix = tmp_path / "study.jsonl", tmp_path / "best.yaml"
    words = ["best", "--study", str(study), "--out", str(matrix)]
    assert __main__.main(words) == 2
    lines = llama.RESULTS.read_text().splitlines(keepends=True)
    study.write_text("".join(lines[1:]))
    assert __main__.main(words) == 2 and not matrix.exists()
    assert capsys.readouterr().err == (
        "sweep: 0 of 259 have results of llama: run it first\n"
        "sweep: 258 of 259 have results of llama: run it first\n"
    )
    failed = json.loads(lines[0]) | {"status": "failed"}  # a result too
    study.write_text("".join([*lines[1:], json.dumps(failed) + "\n"]))
    assert __main__.main(words) == 0 and matrix.exists()


def test_the_committed_study_is_of_the_committed_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake: a table of `llama` from results that have no run of it."""
    path = tmp_path / "mine.jsonl"
    own = [line for line in COMMITTED if b'"stage": "regression"' in line]
    plain = [line for line in own if b'{"forward": "bf16", "backward": "bf16"' in line]
    path.write_bytes(b"".join([*own[:5], *plain]))
    show = ["show", "--results", str(path)]
    for study, last in ([], "regression"), (["--study", str(llama.RESULTS)], llama.NAME):
        assert __main__.main([*show, *study]) == 0
        assert f"No combination is better in `{last}`" in capsys.readouterr().out
    matrix = tmp_path / "best.yaml"
    assert __main__.main(["best", "--results", str(path), "--out", str(matrix)]) == 2
    assert not matrix.exists() and capsys.readouterr().err == (
        f"sweep: {path} has no runs of the last stage: give --study with theirs\n"
    )


def test_losses_are_no_scores_before_bf16_has_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake: a table of losses under the head "score"."""
    path, picture = tmp_path / "mine.jsonl", tmp_path / "p.svg"
    products, regression = (
        [line for line in COMMITTED if f'"stage": "{stage}"'.encode() in line][:5]
        for stage in ("products", "regression")
    )
    show = ["show", "--results", str(path), "--picture", str(picture)]
    path.write_bytes(b"".join([*products, *regression]))
    assert __main__.main(show) == 0 and "score of products" in picture.read_text()
    told = capsys.readouterr().out
    says = "Left out of the tables below: `regression`. BF16, less which scores are, has no results"
    assert told.count("| score |") == told.count("in `products` and needs") + 1 == 3
    assert f"\n\n{says} there yet.\n\n" in told and "in `regression`" not in told
    picture.unlink()
    path.write_bytes(b"".join(regression))
    assert __main__.main(show) == 2 and not picture.exists()
    told, error = capsys.readouterr()
    assert says in told and "| score |" not in told
    assert error == f"sweep: {path} has no scores to draw: run a stage to its end\n"


def test_bad_files_end_the_command_in_one_line(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, study = tmp_path / "r.jsonl", tmp_path / "study.jsonl"
    row = json.loads(COMMITTED[0])
    rows.append(path, row)
    show = ["show", "--results", str(path), "--study", str(study)]
    rows.append(path, row | {"combination": {"speed": "high"}})
    assert __main__.main(show) == 2
    assert capsys.readouterr().err.startswith(f"sweep: {path}:2: no axis speed: forward, backward")
    path.write_bytes(COMMITTED[0])
    run = json.loads(llama.RESULTS.read_text().partition("\n")[0])
    del run["configuration"]["flags"]
    rows.append(study, run)
    assert __main__.main(show) == 2
    assert capsys.readouterr().err == f"sweep: {study}:1 lacks flags: delete the line\n"
    written.write_bytes(written.read_bytes()[:3000])
    assert __main__.main(["try", "products", "--work", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert not told.out  # no recipe before the refusal
    assert told.err == (
        f"sweep: {written} has no recorded tensors: delete it, and they are recorded again\n"
    )


@pytest.mark.parametrize("ends", [True, False])
def test_a_recording_is_whole_or_not_there(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], log: Path) -> None:
        Path(next(word for word in command if word.startswith(str(tmp_path)))).write_text("tensors")
        if not ends:
            raise KeyboardInterrupt

    monkeypatch.setattr(tensors.runs, "run", run)
    monkeypatch.setattr(tensors.installed_text, "prepare", lambda *_: None)
    with nullcontext() if ends else pytest.raises(KeyboardInterrupt):
        tensors.record(tmp_path)
    assert (tmp_path / "tensors.pt").exists() == ends


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "tools.sweep", "cost", "tetrajet"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 128 + signal.SIGPIPE
