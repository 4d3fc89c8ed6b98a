"""Written checkpoints: read by torch, complete or not there, and made in little memory."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_fp4.convert import integrity
from megatron_fp4.convert.command import main
from megatron_fp4.convert.torch_dist import TRACKER, Checkpoint, find
from testing.builders.checkpoints import arguments, small
from testing.worlds.checkpoint_contents import contents, weights

RESHARD = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2".split()


def tool(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_reads_what_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch.distributed.checkpoint itself is the reader."""
    run = small(tmp_path / "run", dtype=dtype)
    assert tool("reshard", run, "--output", tmp_path / "new", *RESHARD) == 0
    old, new = (weights(find(path)) for path in (run, tmp_path / "new"))
    assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)
    ours = Checkpoint(find(tmp_path / "new"))
    assert all(torch.equal(ours.tensor(key), old[key]) for key in old)
    assert ours.files == [f"__{rank}_0.distcp" for rank in range(8)]
    objects = [
        {key: value for key, value in contents(find(path)).items() if key not in old}
        for path in (run, tmp_path / "new")
    ]
    assert objects[0] == objects[1] and len(objects[0]) == 2


def test_the_check_at_the_end_finds_a_wrong_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: what is written is not what the source has."""
    from megatron_fp4.convert import rewrite

    run = small(tmp_path / "run")
    chunk = rewrite._chunk

    def wrong(plan: rewrite.Plan, part: rewrite.TensorPart) -> rewrite.Chunk:
        made = chunk(plan, part)
        spoilt = made.load().clone()
        spoilt.view(-1)[0] += 1
        return rewrite.Chunk(made.key, made.info, made.offset, made.shape, lambda: spoilt)

    monkeypatch.setattr(rewrite, "_chunk", wrong)
    assert tool("reshard", run, "--output", tmp_path / "new", *RESHARD) == 1
    assert "is not what was to be" in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_the_integrity_file_is_that_of_the_files(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    assert tool("strip", run, "--output", tmp_path / "new") == 0
    folder = find(tmp_path / "new")
    listed = json.loads((folder / "integrity.json").read_text())["files"]
    files = {file.name for file in folder.iterdir()} - {"integrity.json"}
    assert set(listed) == files and "made_by.json" in files
    for name in files:
        assert listed[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert (tmp_path / "new" / TRACKER).read_text() == "3"


@pytest.mark.parametrize("name", ["release", "renamed"])
def test_the_folder_is_named_as_megatron_names_it(tmp_path: Path, name: str) -> None:
    run = small(tmp_path / "run")
    find(run).rename(run / name)
    assert tool("strip", run / name, "--output", tmp_path / "new") == 0
    expected = "release" if name == "release" else "iter_0000003"
    assert find(tmp_path / "new").name == expected


@pytest.mark.parametrize(
    ("command", "more"),
    [("reshard", RESHARD), ("strip", []), ("average", [])],
    ids=["reshard", "strip", "average"],
)
def test_a_dry_run_writes_nothing_and_a_target_is_not_replaced(
    tmp_path: Path, command: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [small(tmp_path / "run")]
    if command == "average":
        runs.append(small(tmp_path / "other"))
    words = [command, *runs, "--output", tmp_path / "new", *more]
    before = sorted(tmp_path.rglob("*"))
    assert tool(*words, "--dry-run") == 0
    would = capsys.readouterr().out
    assert "would write" in would and sorted(tmp_path.rglob("*")) == before
    assert tool(*words) == 0
    wrote = capsys.readouterr().out
    said = would.splitlines()[-1].removeprefix("would write ")
    assert wrote.splitlines()[-1] == f"wrote {said}; checked"
    assert tool(*words) == 1
    assert "exists: give another --output, or --force" in capsys.readouterr().err
    assert tool(*words, "--force") == 0
    onto = [command, *runs, "--output", runs[0], *more, "--force"]
    assert tool(*onto) == 1
    assert "has what is to be read: give another --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "more", "wrong"),
    [
        ("reshard", RESHARD, ["--pipeline-model-parallel-size", "3"]),
        ("strip", [], ["--keep-average"]),
        ("average", [], ["--weights", "0", "1"]),
    ],
    ids=["reshard", "strip", "average"],
)
def test_all_files_are_read_after_what_is_refused_without(
    tmp_path: Path,
    command: str,
    more: list[str],
    wrong: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(integrity, "verify", lambda path, names: read.append(path))
    runs = [small(tmp_path / "run")]
    if command == "average":
        runs.append(small(tmp_path / "other"))
    words = [command, *runs, "--output", tmp_path / "new", *more]
    assert tool(*words, *wrong) == 1 and not read
    assert tool(*words, "--no-verify") == 0 and not read
    assert tool(*words) == 1 and not read  # the target is there
    assert tool(*words, "--force") == 0
    assert read == [find(run) for run in runs]


def test_sizes_that_do_not_divide_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small(tmp_path / "run")
    for tensor, pipeline, expert, text in (
        (3, 1, 1, "not a multiple of --tensor-model-parallel-size 3"),
        (1, 3, 1, "2 layers are not a multiple of --pipeline-model-parallel-size 3"),
        (1, 1, 2, "1 experts are not a multiple of --expert-model-parallel-size 2"),
        (0, 1, 1, "--tensor-model-parallel-size is 1 or more, not 0"),
    ):
        sizes = (
            *("--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline),
            *("--expert-model-parallel-size", expert),
        )
        assert tool("reshard", run, "--output", tmp_path / "new", *sizes) == 1
        assert text in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


# --- killed -------------------------------------------------------------------------------------

SLOW_WRITER = """
import sys, time
from megatron_fp4.convert import rewrite
from megatron_fp4.convert.command import main
chunk = rewrite._chunk
def slow(plan, part):
    time.sleep(0.05)
    return chunk(plan, part)
rewrite._chunk = slow
sys.exit(main(sys.argv[1:]))
"""


def test_what_is_killed_midway_leaves_no_target(tmp_path: Path) -> None:
    run, target = small(tmp_path / "run"), tmp_path / "new"
    words = [sys.executable, "-c", SLOW_WRITER, "reshard", run, "--output", target, *RESHARD]
    killed = subprocess.Popen([str(word) for word in words], stderr=subprocess.DEVNULL)
    partial = tmp_path / "new.partial" / "iter_0000003"
    while not list(partial.glob("*.distcp")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not target.exists() and partial.exists()
    assert tool("reshard", run, "--output", target, *RESHARD) == 0
    assert not (tmp_path / "new.partial").exists() and find(target).name == "iter_0000003"


# --- memory -------------------------------------------------------------------------------------

PEAK = """
import re, sys, threading, time
from pathlib import Path
from megatron_fp4.convert.command import main
from testing.worlds.checkpoint_contents import weights

def now():  # bytes in memory that are not of files, which the system may drop at any time
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]) * 1024

main(["show", sys.argv[2], "--no-verify"])  # what every command takes: torch, and metadata
before = peak = now()

def watch():
    global peak
    while True:
        peak = max(peak, now())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
if sys.argv[1] == "whole":
    found = weights(Path(sys.argv[2]))
else:
    assert main(sys.argv[1:]) == (sys.argv[1] == "compare")
print("peak", max(peak, now()) - before)
"""
PART = 1 << 25  # bytes of the largest part of a tensor, fc1's moments in one layer
LIMIT = 6 * PART  # of any command: parts of two checkpoints, of the result, and float64 sums
MANY = {
    "embedding.word_embeddings.weight": (2048, 1024),
    "decoder.layers.mlp.linear_fc1.weight": (6, 8192, 1024),
    "decoder.layers.mlp.linear_fc2.weight": (6, 1024, 4096),
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """430 MB of tensors of which no layer has more than 34 MB."""
    args = arguments(num_layers=6)
    values = lambda key, shape: torch.zeros(shape)  # noqa: E731
    return small(tmp_path_factory.mktemp("many") / "run", shapes=MANY, values=values, args=args)


def peak(*words: object) -> int:
    """Bytes that a command's process takes at most, beside those after its imports."""
    command = [sys.executable, "-c", PEAK, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split("peak ")[1])


@pytest.mark.parametrize("command", ["reshard", "whole"])
def test_memory_is_that_of_a_few_tensors(many: Path, tmp_path: Path, command: str) -> None:
    whole = sum(info.bytes for info in Checkpoint(find(many)).tensors.values())
    assert whole > 13 * PART
    if command == "whole":  # the control
        assert peak("whole", find(many)) > 0.9 * whole
        return
    assert peak("reshard", many, "--output", tmp_path / "new", *RESHARD) < LIMIT


@pytest.mark.outside
def test_memory_of_other_commands(many: Path, tmp_path: Path) -> None:
    values = lambda key, shape: torch.ones(shape)  # noqa: E731
    other = small(tmp_path / "b", shapes=MANY, values=values, args=arguments(num_layers=6))
    assert peak("strip", many, "--output", tmp_path / "stripped") < LIMIT
    assert peak("average", many, other, "--output", tmp_path / "mean") < LIMIT
    assert peak("show", many, "--layers") < LIMIT
    assert peak("compare", many, other) < LIMIT
