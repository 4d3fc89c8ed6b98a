"""Damaged and foreign checkpoints: one line, nothing is written, and no code of theirs runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_fp4.convert.command import main
from megatron_fp4.convert.torch_dist import COMMON, COMMON_FILE, Checkpoint
from megatron_fp4.convert.torch_dist_writer import INTEGRITY
from testing.builders.checkpoints import small, without_manifest

STEP = "iter_0000003"
RESHARD = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("good") / "run")


def refused(words: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line of a command; asserts that there is one."""
    capsys.readouterr()
    status = main([str(word) for word in words])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert status == 1 and len(lines) == 1, (status, lines)
    return lines[0]


# --- no code runs -------------------------------------------------------------------------------


class Creates:
    """A pickle of it creates a file when Python's own unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def with_metadata(run: Path, harm: Any) -> None:
    """Puts an object into .metadata, which stays valid otherwise."""
    file = run / STEP / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = harm
    file.write_bytes(pickle.dumps(metadata))


def with_common_state(run: Path, harm: Any) -> None:
    stream = io.BytesIO()
    torch.save({"args": harm, "iteration": 3}, stream)
    (run / STEP / COMMON_FILE).write_bytes(stream.getvalue())


@pytest.mark.parametrize("harm", [with_metadata, with_common_state])
def test_a_foreign_pickle_runs_no_code(
    good: Path, tmp_path: Path, harm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run", tmp_path / "created"
    shutil.copytree(good, run)
    without_manifest(run / STEP)
    harm(run, Creates(file))
    for words in (
        ["show", run, "--layers"],
        ["compare", run, good],
        ["reshard", run, "--output", tmp_path / "a", *RESHARD],
        ["strip", run, "--output", tmp_path / "b"],
        ["average", run, good, "--output", tmp_path / "c"],
    ):
        main([str(word) for word in words])
        assert not file.exists()
    capsys.readouterr()
    # The control: Python's own unpickler creates it.
    if harm is with_metadata:
        pickle.loads((run / STEP / ".metadata").read_bytes())
    else:
        torch.load(run / STEP / COMMON_FILE, weights_only=False)
    assert file.exists()


# --- damage -------------------------------------------------------------------------------------


def commands(run: Path, good: Path, target: Path, more: list[str]) -> list[list[object]]:
    return [
        ["show", run, "--layers", *more],
        ["compare", run, good, *more],
        ["reshard", run, "--output", target, *RESHARD, *more],
        ["strip", run, "--output", target, *more],
        ["average", run, good, "--output", target, *more],
    ]


FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json", INTEGRITY]


@pytest.mark.parametrize("name", FILES)
def test_truncated_files_are_told(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, draw = tmp_path / "run", random.Random(name)
    shutil.copytree(good, run)
    file = run / STEP / name
    data = file.read_bytes()
    for size in (0, 1, len(data) - 1, *(draw.randrange(len(data)) for _ in range(5))):
        file.write_bytes(data[:size])
        for words in commands(run, good, tmp_path / "target", []):
            line = refused(words, capsys)
            assert len(line) < 400 and name.split(".json")[0] in line
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", FILES[:-1])  # integrity.json itself has no SHA-256
def test_flipped_bytes_are_found_by_their_sha256(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, draw = tmp_path / "run", random.Random(name)
    shutil.copytree(good, run)
    file = run / STEP / name
    data = file.read_bytes()
    for _ in range(12):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        words = draw.choice(commands(run, good, tmp_path / "target", []))
        refused(words, capsys)
        assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_flipped_bytes_that_are_not_verified_end_in_no_traceback(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is read then is data, or a line: main would raise any other exception."""
    run, draw = tmp_path / "run", random.Random(name)
    shutil.copytree(good, run)
    file = run / STEP / name
    data = file.read_bytes()
    found = {0: 0, 1: 0}
    for _ in range(100):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        words = draw.choice(commands(run, good, tmp_path / "target", ["--no-verify"]))
        writes = ["--force"] if "--output" in words else []
        found[main([str(word) for word in [*words, *writes]])] += 1
    capsys.readouterr()
    assert min(found.values()) > 10


def test_without_verification_a_flipped_weight_is_read(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: only the SHA-256 finds it."""
    run = tmp_path / "run"
    shutil.copytree(good, run)
    key = "decoder.final_layernorm.weight"
    weight = Checkpoint(run / STEP).tensor(key).view(torch.uint8).numpy().tobytes()
    file = run / STEP / "__0_0.distcp"
    data = file.read_bytes()
    assert data.count(weight) == 1
    file.write_bytes(data.replace(weight, bytes([weight[0] ^ 64]) + weight[1:]))
    assert "has changed since it was saved" in refused(["compare", run, good], capsys)
    assert main(["compare", str(run), str(good), "--json", "--no-verify"]) == 1
    assert list(json.loads(capsys.readouterr().out)["tensors"]["different"]) == [key]


def changed(run: Path, change: Any) -> None:
    file = run / STEP / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _with_place(metadata: Metadata, **fields: Any) -> None:
    place = metadata.storage_data[MetadataIndex(COMMON)]
    for name, value in fields.items():
        setattr(place, name, value)


def _entry(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _without_chunk(metadata: Metadata) -> None:
    _entry(metadata).chunks.clear()


def _with_larger_chunk(metadata: Metadata) -> None:
    entry = _entry(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])


MISMATCHES = {
    "a path": (lambda m: _with_place(m, relative_path="../x"), "names a file outside its folder"),
    "no file": (lambda m: _with_place(m, relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    "an end": (lambda m: _with_place(m, length=1 << 40), " bytes of "),
    "a negative offset": (lambda m: _with_place(m, offset=-1), "damaged (a size)"),
    "text for a size": (lambda m: _with_place(m, length="7"), "damaged (a size)"),
    "no chunk": (_without_chunk, "damaged (the chunks of decoder.final_layernorm.weight)"),
    "a size that no file has": (_with_larger_chunk, "damaged (the size of"),
    "no place": (lambda m: m.storage_data.clear(), "damaged"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_metadata_that_contradict_the_files_are_told(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    change, text = MISMATCHES[name]
    changed(run, change)
    assert text in refused(["show", run], capsys)


OTHERS = {
    "nothing": (lambda run: None, "is not a folder"),
    "an empty folder": (lambda run: run.mkdir(), "has no latest_checkpointed_iteration.txt"),
    "a tracker that leads elsewhere": (
        lambda run: (run.mkdir(), (run / "latest_checkpointed_iteration.txt").write_text("../x")),
        "names no iteration but '../x'",
    ),
    "an object of another kind": (
        lambda run: (
            run.mkdir(),
            (run / "metadata.json").write_text('{"sharded_backend": "torch_dist"}'),
            (run / ".metadata").write_bytes(pickle.dumps([1])),
        ),
        "is not that of a checkpoint",
    ),
    "another format": (
        lambda run: (
            run.mkdir(),
            (run / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        ),
        "is of the format 'zarr', not torch_dist",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_checkpoint_is_told(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, text = OTHERS[name]
    make(tmp_path / "run")
    assert text in refused(["show", tmp_path / "run"], capsys)


def test_the_tools_run_where_megatron_is_not_installed() -> None:
    code = (
        "import sys, megatron_fp4.convert.command\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
