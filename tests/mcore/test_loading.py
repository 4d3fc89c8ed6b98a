"""Errors while a checkpoint is loaded: those of the checkpoint in one line, others as they are."""

import argparse
import json
from typing import Any

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints import loading


def of_user(text: str) -> Any:
    """What a user's own layer does when Megatron asks it for its state."""
    states: dict[str, Any] = {}
    return states[text]


@pytest.mark.parametrize(("raises", "told"), [(of_user, KeyError), (json.loads, ConfigError)])
def test_an_error_of_the_user_s_own_code_keeps_its_traceback(
    raises: Any, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """json.loads stands in for a library that cannot read what the checkpoint has."""
    monkeypatch.setattr(loading, "get_args", lambda: argparse.Namespace(load="there"))
    load_checkpoint = loading._in_one_line(lambda **_: raises("no JSON"))
    with pytest.raises(told, match="no JSON" if told is KeyError else "there cannot be loaded"):
        load_checkpoint()
