"""integrity.json: files that changed since they were saved are not trained on, whichever rank reads
them; and what a launch says that finds no checkpoint, or one that it does not fit."""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import (
    _verify_integrity_manifest_impl,
    save_integrity_manifest,
)

from megatron_fp4.mcore.checkpoints import folders, integrity
from testing.worlds.checkpoints import ENDS, TORCH, TP2_SP, TRACKER, good, run_in_turn, saving, told
from testing.worlds.launch import Result, torchrun, train

MANIFEST = "integrity.json"
LAST = "iter_0000004"


def flip(path: Path, size: int = 4096) -> None:
    """Inverts up to `size` bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    start = max(0, len(data) // 2 - size)
    data[start : start + size] = bytes(255 - byte for byte in data[start : start + size])
    path.write_bytes(data)


def randomize(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def loading(run: Path, flags: str = "") -> str:
    return f"{TP2_SP} --load {run} {flags}"


ANEW = "--train-iters 5 --override-opt_param-scheduler"
TRUSTING = "--no-verify-integrity"


@functools.cache
def loaded(folder: Path) -> dict[str, Result]:
    """What tells the most."""
    run = folder / "whole"
    good_end(run_in_turn(2, {"": f"{TP2_SP} {saving(run)}"})[""])
    damaged(run, "flipped", lambda last: flip(last / "__1_0.distcp"))
    return run_in_turn(
        2,
        {
            "whole": loading(run, ANEW),
            "flipped": loading(folder / "flipped"),
            "flipped, trusted": loading(folder / "flipped", f"{TRUSTING} {ANEW}"),
            "nothing": loading(folder / "nothing", "--train-iters 1"),
            "one": loading(run / LAST),
            "longer": loading(run, "--train-iters 5"),
            "other optimizer": loading(run, "--optimizer sgd"),
        },
    )


@functools.cache
def loaded_otherwise(folder: Path) -> dict[str, Result]:
    loaded(folder)
    run, other = folder / "whole", folder / "torch"
    saves = {
        "torch": f"{TP2_SP} {TORCH} {saving(other)}",
        "bare": f"{TP2_SP} {ENDS} {TRUSTING} {saving(folder / 'bare')}",
    }
    assert all(good_end(result) for result in run_in_turn(2, saves).values())
    shard = "mp_rank_01/model_optim_rng.pt"
    damaged(run, "reworded", lambda last: (last / "metadata.json").open("a").write(" "))
    damaged(run, "random", lambda last: randomize(last / "__0_0.distcp"))
    damaged(other, "torch-flipped", lambda last: flip(last / shard))
    damaged(other, "torch-random", lambda last: randomize(last / shard))
    at_parsing = f"{TRUSTING} --use-checkpoint-args"
    return run_in_turn(
        2,
        {
            "torch": loading(other, f"{TORCH} {ANEW}"),
            "torch_dist as torch": loading(run, TORCH),
            "bare": loading(folder / "bare", ENDS),
            "reworded": loading(folder / "reworded"),
            "random, trusted": loading(folder / "random", TRUSTING),
            "random at parsing": loading(folder / "random", at_parsing),
            "torch-flipped": loading(folder / "torch-flipped", TORCH),
            "torch-random, trusted": loading(folder / "torch-random", f"{TORCH} {TRUSTING}"),
            "nothing, needed": loading(folder / "nothing", "--exit-on-missing-checkpoint"),
            "file": loading(run / TRACKER),
            "other schedule": loading(run, "--lr 2e-3 --min-lr 1e-5 --weight-decay 0.1"),
            "other rate": loading(run, f"--lr 2e-3 --min-lr 1e-5 {ANEW}"),
            "other decay": loading(run, "--lr-decay-style linear --lr-warmup-iters 1"),
            "new optimizer": loading(run, f"--optimizer sgd --no-load-optim {ANEW}"),
            "other model": loading(run, "--hidden-size 128"),
        },
    )


def good_end(result: Result) -> Result:
    assert result.status == 0, result.output[-4000:]
    return result


def damaged(run: Path, name: str, harm: Callable[[Path], object]) -> None:
    """Copies a run under another name and harms the copy's last checkpoint."""
    shutil.copytree(run, run.parent / name)
    harm(run.parent / name / LAST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("integrity")


# --- files that changed --------------------------------------------------------------------------


def test_a_checkpoint_that_did_not_change_is_loaded(folder: Path) -> None:
    is_loaded(folder / "whole", loaded(folder)["whole"])


def test_a_file_that_changed_is_named_with_what_to_do(folder: Path) -> None:
    is_told(folder / "flipped", "__1_0.distcp", loaded(folder)["flipped"])


def test_unverified_it_trains_on(folder: Path) -> None:
    """The control: nothing else notices the 4 KiB."""
    output = good(loaded(folder)["flipped, trusted"]).output
    assert "verified" not in output and re.search(r"iteration +5/", output)


@pytest.mark.slow
def test_the_format_torch_and_the_small_files_are_verified_too(folder: Path) -> None:
    runs = loaded_otherwise(folder)
    is_loaded(folder / "torch", runs["torch"])
    is_told(folder / "reworded", "metadata.json", runs["reworded"])
    is_told(folder / "torch-flipped", "mp_rank_01/model_optim_rng.pt", runs["torch-flipped"])


def is_loaded(run: Path, result: Result) -> None:
    output, last = good(result).output, run / LAST
    assert "at iteration 4" in output and "verified" not in output
    manifest = json.loads((last / MANIFEST).read_text())
    files = {str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()}
    assert files == {*manifest["files"], MANIFEST}


def is_told(run: Path, file: str, result: Result) -> None:
    line = told(result)
    assert f"{run / LAST} is damaged: {file} has changed since it was saved" in line
    assert f"write 2 into {run / TRACKER} to go on from the last complete one" in line


@pytest.mark.slow
def test_a_checkpoint_without_a_manifest_is_loaded_with_a_line(folder: Path) -> None:
    lines = good(loaded_otherwise(folder)["bare"]).output.splitlines()
    assert not (folder / "bare" / "iter_0000002" / MANIFEST).exists()
    said = [line for line in lines if "was not verified: it has no integrity.json" in line]
    assert len(said) == 1 and str(folder / "bare" / "iter_0000002") in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random, trusted", "random at parsing", "torch-random, trusted"])
def test_torchs_advice_to_run_what_a_damaged_file_holds_is_never_given(
    folder: Path, name: str
) -> None:
    result = loaded_otherwise(folder)[name]
    assert "cannot be" in told(result) and "weights_only" not in result.output


def test_megatrons_own_manifest_is_read_and_ours_by_megatron(tmp_path: Path) -> None:
    for name in (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__10_0.distcp"):
        (tmp_path / name).write_bytes(os.urandom(5000))
    integrity.write(tmp_path)
    ours = json.loads((tmp_path / MANIFEST).read_text())
    _verify_integrity_manifest_impl(str(tmp_path))
    save_integrity_manifest(str(tmp_path))
    assert json.loads((tmp_path / MANIFEST).read_text()) == ours
    assert integrity.flaw_of(tmp_path) is None
    flip(tmp_path / "common.pt")
    with pytest.raises(CheckpointingException):
        _verify_integrity_manifest_impl(str(tmp_path))
    assert "common.pt has changed" in str(integrity.flaw_of(tmp_path))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "two files": (
        lambda path: list(map(flip, path.glob("*.distcp"))),
        "__0_0.distcp has changed since it was saved (by its SHA-256), and 1 more",
    ),
    "a manifest cut short": (
        lambda path: (path / MANIFEST).write_text('{"files": {'),
        f"{MANIFEST} is damaged",
    ),
    "a manifest of something else": (lambda path: (path / MANIFEST).write_text("[]"), "is damaged"),
    "another hash": (
        lambda path: (path / MANIFEST).write_text('{"algorithm": "crc32", "files": {}}'),
        "is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_manifest_finds(tmp_path: Path, damage: str) -> None:
    for name in ("metadata.json", "__0_0.distcp", "__10_0.distcp"):
        (tmp_path / name).write_bytes(os.urandom(5000))
    integrity.write(tmp_path)
    assert integrity.flaw_of(tmp_path) is None
    harm, found = DAMAGES[damage]
    harm(tmp_path)
    assert found in str(integrity.flaw_of(tmp_path))


def test_a_rank_hashes_what_it_wrote() -> None:
    names = ["metadata.json", ".metadata", *(f"__{rank}_0.distcp" for rank in range(12))]
    ordered = sorted(names, key=integrity._order)
    assert ordered[:12] == [f"__{rank}_0.distcp" for rank in range(12)]


# --- what a launch says --------------------------------------------------------------------------


def test_where_there_is_no_checkpoint_it_says_that_it_starts_anew(folder: Path) -> None:
    result = good_end(loaded(folder)["nothing"])
    line = f"megatron-fp4: no checkpoint in {folder / 'nothing'}: starts from random weights"
    assert result.output.splitlines().count(line) == 1


def test_what_does_not_go_together_is_told_with_its_flags(folder: Path) -> None:
    runs = loaded(folder)
    assert f"give --load {folder / 'whole'} --ckpt-step 4" in told(runs["one"])
    line = told(runs["longer"])
    assert "--train-iters was 4 and is 5; add --override-opt_param-scheduler" in line
    line = told(runs["other optimizer"])
    assert "--optimizer was adam and is sgd; give what was, or add --no-load-optim" in line


@pytest.mark.slow
def test_other_paths_are_told(folder: Path) -> None:
    runs = loaded_otherwise(folder)
    needed = told(runs["nothing, needed"])
    assert f"no checkpoint in {folder / 'nothing'}: give --load" in needed
    assert f"{TRACKER} is a file: give --load the folder" in told(runs["file"])
    assert "leave out --ckpt-format torch" in told(runs["torch_dist as torch"])


@pytest.mark.slow
def test_another_schedule_is_told_with_its_flags_and_what_to_add(folder: Path) -> None:
    runs = loaded_otherwise(folder)
    schedule, decay = told(runs["other schedule"]), told(runs["other decay"])
    assert "--lr was 0.001 and is 0.002; --min-lr was 0.0001 and is 1e-05" in schedule
    assert "--weight-decay (or --start-weight-decay) was 0.01 and is 0.1" in schedule
    assert "--lr-decay-style was cosine and is linear; --lr-warmup-iters was 0 and is 1" in decay
    assert all("--override-opt_param-scheduler" in text for text in (schedule, decay))
    rate = re.search(r"learning rate: (\S+)", good(runs["other rate"]).output)
    assert rate and float(rate[1]) == pytest.approx(1.005e-3)  # half of ten steps of the cosine


@pytest.mark.slow
def test_another_decay_of_a_wsd_schedule_is_told(tmp_path: Path) -> None:
    """Megatron saves and compares all of a schedule but that."""
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters"
    train(1, *f"{wsd} 4 --save {tmp_path} --save-interval 4".split())
    again, other = f"{wsd} 4 --load {tmp_path}".split(), f"{wsd} 2 --load {tmp_path}".split()
    assert torchrun(1, *again).status == 0
    assert "--lr-wsd-decay-iters was 4 and is 2; add --override-opt" in told(torchrun(1, *other))
    assert torchrun(1, *other, "--override-opt_param-scheduler").status == 0


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_its_flag(folder: Path) -> None:
    runs = loaded_otherwise(folder)
    assert "at iteration 4" in good(runs["new optimizer"]).output
    assert "--hidden-size was 64 and is 128; " in told(runs["other model"])


def test_a_folder_of_someone_else_is_told(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("2")
    assert "does not exist" in str(folders.problem_in(tmp_path))
    tmp_path.chmod(0)
    try:
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may read everything
        problem = str(folders.problem_in(tmp_path))
    finally:
        os.seteuid(os.getuid())
        tmp_path.chmod(0o700)
    assert "cannot be read (Permission denied): give --load another folder" in problem
