"""What examples/launch.sh refuses before it starts anything."""

import subprocess
from pathlib import Path

import pytest

from testing.launches import EXAMPLES, MODELS, environment, with_stand_ins
from testing.worlds.checkpoints import TRACKER

LAUNCH = EXAMPLES / "launch.sh"


def launched(folder: Path, *words: str) -> tuple[int, list[str]]:
    """(status, lines of stderr) of a launch. torchrun is stood in for, and completes the run."""
    body = 'mkdir "$RUN_DIR/checkpoints"; echo 9 > "$RUN_DIR/checkpoints/$TRACKER"'
    own = {"TORCHRUN": body, "TRACKER": TRACKER, "TRAIN_ITERS": "9"}
    env = environment(with_stand_ins(folder), LAUNCH) | own
    done = subprocess.run(["bash", LAUNCH, *words], env=env, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 5", "--train-iters is set by TRAIN_ITERS: set that variable"),
        ("--lr 1e-4 --train-iters=5", "--train-iters is set by TRAIN_ITERS: set that variable"),
        ("--train-samples 100", "--train-samples does not go with TRAIN_ITERS"),
        ("--save elsewhere", "--save is set by RUN_DIR: set that variable"),
        ("--load=elsewhere", "--load is set by RUN_DIR: set that variable"),
        ("--finetune", "--finetune begins at step 0 again after each requeue: give the weights by"),
        ("--skip-train", "--skip-train never reaches step TRAIN_ITERS"),
    ],
)
def test_flags_that_would_requeue_a_job_for_ever_are_refused(
    tmp_path: Path, flags: str, message: str
) -> None:
    status, [line] = launched(tmp_path, "gpt_345m", *flags.split())
    assert status == 2 and line.startswith(f"examples/launch.sh: {message}")
    assert not (tmp_path / "run" / "words").exists()


def test_flags_of_similar_names_are_taken(tmp_path: Path) -> None:
    flags = "--save-interval 3 --lr-decay-iters 5 --no-load-optim"
    assert launched(tmp_path, "gpt_345m", *flags.split()) == (0, [])


@pytest.mark.parametrize("words", [(), ("gpt_3",), ("--help",)])
def test_a_model_that_is_not_there(tmp_path: Path, words: tuple[str, ...]) -> None:
    status, [line] = launched(tmp_path, *words)
    assert status == 2 and f"give one of {' '.join(MODELS)} first" in line
    assert f"'{' '.join(words)}' is no model" in line
