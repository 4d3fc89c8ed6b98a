"""Launch commands, and what is read from Megatron's log."""

import shlex
import sys
from pathlib import Path

import pytest

from tools import runs

STEP = (
    " [2026-01-02 03:04:05.678901] iteration {:8d}/     300 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 97.5 | learning rate: 3.000000E-04 | "
    "global batch size:    16 |{} loss scale: 1.0 | grad norm: 0.731 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)
HELD_OUT = " validation loss at iteration {} | lm loss value: {} | lm loss PPL: 5.459815E+01 | "


def read(*lines: str) -> runs.Log:
    log = runs.Log()
    for line in lines:
        log.read(line + "\n")
    return log


def test_a_step_and_an_evaluation() -> None:
    log = read(
        "> building train, validation, and test datasets ...",
        STEP.format(80, " lm loss: 5.125000E+00 |"),
        HELD_OUT.format("150", "4.250000E+00"),
        HELD_OUT.format("300 on validation set", "4.000000E+00"),
    )
    assert log.train == [(80, 5.125)]
    assert log.held_out == [(150, 4.25), (300, 4.0)]
    assert log.grad_norms == [(80, 0.731)]
    assert (log.step, log.steps, log.milliseconds) == (80, 300, 97.5)


def test_two_ranks_output_on_one_line() -> None:
    line = "[rank0]: noise" + STEP.format(7, " lm loss: 5.000000E+00 | moe loss: 1.0E-02 |")
    assert read(line).train == [(7, 5.0)]


def test_a_step_without_a_finite_loss_counts_as_a_step() -> None:
    log = read(STEP.format(9, ""))
    assert log.step == 9 and log.train == []


def test_lines_that_say_nothing() -> None:
    assert not runs.Log().read("training ... iteration 3 of 4, lm loss\n")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_run_returns_what_the_log_said(tmp_path: Path) -> None:
    lines = [STEP.format(step, " lm loss: 5.0E+00 |") for step in (1, 2)]
    text = "\n".join([*lines, HELD_OUT.format("2", "4.5E+00")])
    seen = []
    path = tmp_path / "new" / "run.log"
    log = runs.run(python(f"print({text!r})"), path, lambda log: seen.append(log.step))
    assert log.held_out == [(2, 4.5)] and seen == [1, 2, 2]
    assert path.read_text() == text + "\n"


@pytest.mark.parametrize(
    ("code", "expected", "status"),
    [
        ("print('x\\n' * 99); print('the reason'); raise SystemExit(3)", "the reason", 3),
        (
            "print('the reason')\nprint('E0102 03:04:05 7 torch/distributed/x] failed')",
            "the reason",
            0,
        ),
        (
            "print('the reason\\nE0102 03:04:05 7 .venv/lib/torch/distributed/x] failed'); exit(1)",
            "the reason",
            1,
        ),
        ("print('[rank1]: the reason\\n[rank0]: gone: rank 1'); exit(1)", "[rank1]: the reason", 1),
        (
            "print('the reason\\n[rank0]:[W1125 09:51:22 x.cpp:7] Warning: y'); exit(1)",
            "the reason",
            1,
        ),
    ],
    ids=["status", "no evaluation", "launcher in a folder", "two ranks", "a warning after it"],
)
def test_a_failed_launch_shows_the_reason(
    code: str, expected: str, status: int, tmp_path: Path
) -> None:
    with pytest.raises(runs.RunFailed) as failure:
        runs.run(python(code), tmp_path / "run.log")
    *tail, closing = str(failure.value).splitlines()
    assert tail[-1] == expected and len(tail) <= 15
    assert closing == f"The launch failed (exit status {status}); its log: {tmp_path / 'run.log'}"


def test_the_command_shown_is_the_command_run() -> None:
    flags = runs.Model().flags() + runs.Training(steps=100).flags() + runs.data_flags(Path("a b"))
    command = runs.launch(2, flags)
    words = shlex.split(runs.shown(command).replace("\\\n", ""))
    settings = [f"{name}={value}" for name, value in runs.ENVIRONMENT.items()]
    assert words == settings + command
    assert command[1:7] == shlex.split(
        "--standalone --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2"
    )


def test_no_evaluation_falls_on_the_last_step() -> None:
    for steps in (20, 37, 100, 250):
        flags = runs.Training(steps=steps).flags()
        interval = int(flags[flags.index("--eval-interval") + 1])
        assert steps % interval and steps // interval <= runs.Training.evaluations


def test_every_linears_dimensions_fit_a_block_after_sharding() -> None:
    model = runs.Model()
    head = model.hidden // model.heads
    query_key_value = model.hidden + 2 * head * model.query_groups
    for dimension in (model.hidden, query_key_value, model.ffn):
        assert dimension // 2 % 64 == 0
