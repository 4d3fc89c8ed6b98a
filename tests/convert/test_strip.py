"""Averages of weights, in whole and in stripped checkpoints: what an export of codes needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.convert import keys
from megatron_fp4.convert.command import main
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.torch_dist import COMMON, Checkpoint, find
from megatron_fp4.convert.torch_dist_writer import Chunk, saved, whole, write
from testing.builders.checkpoints import small
from testing.builders.fp4_checkpoint import checkpoint, export, recorded, run
from testing.worlds.checkpoint_contents import weights

EMA = Path(__file__).parents[1] / "mcore" / "ema.yaml"
STATES = ("exp_avg", "fp4_average", "fp4_other")


def with_states(source: Checkpoint, folder: Path, infix: str = "", frozen: str = "-") -> Path:
    """A copy of a checkpoint with states of an optimizer for its matrices; returns its folder.

    infix: in the keys of the states, before the weight's. frozen: in the keys of weights without
    states.
    """
    chunks: list[Chunk] = []
    for key, info in source.tensors.items():
        chunks.append(whole(key, info, partial(source.tensor, key)))
        for state in STATES if len(info.shape) > 1 and frozen not in key else ():
            states = TensorInfo(info.shape, torch.float32)
            name = f"optimizer.state.{state}.{infix}{key}"
            chunks.append(whole(name, states, partial(beside, source, key)))
    objects = {key: source.raw(key) for key in source.objects}
    if COMMON not in objects:
        objects[COMMON] = saved(source.common())
    write(folder, chunks, objects)
    return folder


def beside(source: Checkpoint, key: str) -> torch.Tensor:
    """Values near those of a weight."""
    weight = source.tensor(key).float()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return weight + 0.3 * weight.abs().mean() * noise


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("strip")
    plain = checkpoint(folder, "llama", recorded(get_recipe(str(EMA))))
    return with_states(Checkpoint(find(plain)), folder / "iter_0000003")


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_an_export_of_what_is_stripped_has_the_codes_of_the_whole(
    full: Path, tmp_path: Path, capsys: Any
) -> None:
    run("strip", full, "--output", tmp_path / "kept", "--keep-average")
    exported = files(export(tmp_path / "kept", tmp_path / "a"))
    assert exported and exported == files(export(full, tmp_path / "b"))
    # The controls: without the averages nothing is exported, or, if asked for, other codes.
    run("strip", full, "--output", tmp_path / "bare")
    words = ["export-hf", str(tmp_path / "bare"), "--format", "compressed-tensors"]
    assert main([*words, "--output", str(tmp_path / "c")]) == 1
    refused = capsys.readouterr().err
    assert "an average of W" in refused and "strip with --keep-average" in refused
    anew = export(tmp_path / "bare", tmp_path / "c", "--quantize-as", "mxfp4-ceil")
    assert files(anew) != exported


def test_a_frozen_weight_is_exported_as_training_rounded_it(full: Path, tmp_path: Path) -> None:
    """The optimizer keeps no average of it. Training rounds it to nearest, as its average is the
    weight."""
    run("strip", full, "--output", tmp_path / "bare")
    weights_alone = Checkpoint(find(tmp_path / "bare"))
    frozen = with_states(weights_alone, tmp_path / "iter_0000003", frozen=".linear_fc2.")
    ours = codes(export(frozen, tmp_path / "a"))
    averaged = codes(export(full, tmp_path / "b"))
    nearest = codes(export(tmp_path / "bare", tmp_path / "c", "--quantize-as", "mxfp4-ceil"))
    assert ours.keys() == averaged.keys() == nearest.keys() and len(ours) > 8
    for name, value in ours.items():
        wanted, other = (nearest, averaged) if ".down_proj." in name else (averaged, nearest)
        assert torch.equal(value, wanted[name]) and not torch.equal(value, other[name]), name


def codes(folder: Path) -> dict[str, torch.Tensor]:
    """The FP4 codes of an export, by name."""
    from safetensors.torch import load_file

    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    return {name: value for name, value in found.items() if name.endswith("weight_packed")}


def test_the_averages_are_kept_and_no_other_state(full: Path, tmp_path: Path) -> None:
    run("strip", full, "--output", tmp_path / "kept", "--keep-average")
    before, after = weights(full), weights(find(tmp_path / "kept"))
    dropped = before.keys() - after.keys()
    assert dropped == {key for key in before if ".exp_avg." in key or ".fp4_other." in key}
    assert any(keys.is_average(key) for key in after)
    assert all(torch.equal(after[key], before[key]) for key in after)


@pytest.mark.parametrize(
    ("infix", "says"),
    [(None, "has no average of its weights"), ("dp_group_idx_0.", "not by weight: save with")],
    ids=["none", "sharded in memory"],
)
def test_averages_that_are_not_there_by_weight_are_told(
    infix: str | None, says: str, tmp_path: Path, capsys: Any
) -> None:
    source = find(small(tmp_path / "run"))
    if infix is not None:
        source = with_states(Checkpoint(source), tmp_path / "iter_0000004", infix)
    words = ["strip", str(source), "--output", str(tmp_path / "new"), "--keep-average"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert says in said and "leave out --keep-average" in said and not (tmp_path / "new").exists()
    assert main(words[:-1]) == 0
