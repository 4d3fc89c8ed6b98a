"""What a comparison of two checkpoints counts as a difference, and what not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.convert import arguments, command
from megatron_fp4.convert.huggingface.settings import UNSUPPORTED
from testing.builders import checkpoints

# Megatron records from where a launch went on, and so what differs between a run that was resumed
# at step 2 and one that was not.
RESUMED: dict[str, Any] = {"iteration": 2, "num_floating_point_operations_so_far": 2e9}
UNBROKEN: dict[str, Any] = {"iteration": 0, "num_floating_point_operations_so_far": 0}


def saved(folder: Path, args: dict[str, Any], step: int = 4) -> Path:
    def values(key: str, shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape)

    return checkpoints.small(folder, step, values=values, args=checkpoints.arguments(**args))


def compared(a: Path, b: Path) -> int:
    return command.main(["compare", str(a), str(b), "--no-verify"])


def test_a_resumed_run_is_equal_to_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken, resumed = saved(tmp_path / "a", UNBROKEN), saved(tmp_path / "b", RESUMED)
    assert compared(unbroken, resumed) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")
    # The controls: another step, and the step of the launch counted as an argument of the training.
    assert compared(unbroken, saved(tmp_path / "c", UNBROKEN, 5)) == 1
    assert "state different: iteration" in capsys.readouterr().out
    monkeypatch.setattr(arguments, "_OF_A_PROCESS", ())
    assert compared(unbroken, resumed) == 1
    assert "  iteration: 0 | 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_changes_the_function_of_a_model_is_an_argument_of_the_model(name: str) -> None:
    """So that weights of two functions are not averaged."""
    only_rounding = name == "apply_query_key_layer_scaling"
    assert arguments.group(name) == ("training" if only_rounding else "model")
