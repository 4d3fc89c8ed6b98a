"""Modules whose random streams collide are refused."""

import pytest
from torch import nn

from megatron_fp4 import ConfigError, Linear, name_layers, streams

COLLISION = r"streams of (\S+) and (?!\1)\S+ collide"


def test_a_model_of_400_modules_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"decoder.layers.{i}.{n}" for i in range(200) for n in ("mlp.fc1", "attention.qkv")]
    streams.check_streams(names)
    monkeypatch.setattr(streams, "stream_id", lambda label: len(label))
    with pytest.raises(ConfigError, match=COLLISION):
        streams.check_streams(names)


def test_name_layers_gives_no_names_that_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(Linear(32, 32, recipe="tetrajet", name=name) for name in "ab"))
    monkeypatch.setattr(streams, "stream_id", lambda label: len(label))
    with pytest.raises(ConfigError, match=COLLISION):
        name_layers(model)
    assert [layer.name for layer in model] == ["a", "b"]
