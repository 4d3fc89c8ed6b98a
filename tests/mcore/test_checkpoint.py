"""Checkpoints in Megatron's own loop: a run goes on from one bit for bit, in another layout with
the same state, and never from one that is not complete or was made with other numerics."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.training import checkpointing

from megatron_fp4 import list_recipes
from megatron_fp4.mcore.checkpoints import folders
from megatron_fp4.mcore.checkpoints.folders import flaw_of, problem_in
from testing.worlds.checkpoints import (
    LAYOUTS,
    OTHERS,
    SIZES,
    STALE,
    TETRAJET,
    TP2_SP,
    TRACKER,
    good,
    on_one,
    on_two,
    run_in_turn,
    same,
    saving,
    told,
    truncate,
)
from testing.worlds.launch import Result, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


# --- the same run ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list_recipes())
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(folder: Path, recipe: str) -> None:
    if recipe == "tetrajet":
        good(on_two(folder)["resumed"])
        whole, resumed = folder / "whole", folder / "resumed"
    else:
        good(on_one(folder)[f"{recipe} resumed"])
        whole, resumed = folder / recipe, folder / f"{recipe}-resumed"
    assert same(whole / "iter_0000004", resumed / "iter_0000004")
    assert not same(whole / "iter_0000004", whole / "iter_0000002")
    samples = [
        load_common_state_dict(run / "iter_0000004")["args"].consumed_train_samples
        for run in (whole, resumed)
    ]
    assert samples == [16, 16]  # of four steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_in_its_layout_ends_where_the_uninterrupted_one_does(
    folder: Path, layout: str
) -> None:
    good(on_two(folder)[layout])
    assert same(folder / layout / "iter_0000004", folder / f"{layout}-resumed" / "iter_0000004")
    assert not same(folder / layout / "iter_0000004", folder / layout / "iter_0000002")


@pytest.mark.slow
def test_with_other_random_bits_it_ends_elsewhere(folder: Path) -> None:
    output = good(on_one(folder)["anyway"]).output
    assert "megatron-fp4: goes on from other numerics: --fp4-seed was 1234 and is 7" in output
    kept = folder / OTHERS[-1] / "iter_0000004"
    assert not same(kept, folder / "anyway" / "iter_0000004")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "run"),
    [
        ("whole", "tp2-pp2", lambda folder: on_two(folder)["tp2 pp2"]),
        ("whole", "alone", lambda folder: on_one(folder)["alone"]),
        ("sharded", "sharded-pp2", lambda folder: on_two(folder)["sharded pp2"]),
        ("sharded", "sharded-alone", lambda folder: on_one(folder)["sharded"]),
        ("ep2", "ep2-alone", lambda folder: on_one(folder)["ep2 alone"]),
        ("ep2-sharded", "ep2-sharded-alone", lambda folder: on_one(folder)["sharded ep2 alone"]),
        ("ep1", "ep1-ep2", lambda folder: on_two(folder)["ep1 ep2"]),
        ("sharded-ep1", "sharded-ep1-ep2", lambda folder: on_two(folder)["sharded ep1 ep2"]),
        ("whole", "bf16", lambda folder: on_one(folder)["to bf16"]),
        ("bf16", "from-bf16", lambda folder: on_one(folder)["from bf16"]),
    ],
    ids=[
        *("TP2 to PP2", "TP2 to one", "DP2 to PP2", "DP2 to DP1"),
        *("EP2 to one", "sharded EP2 to one", "EP1 to EP2", "sharded EP1 to EP2"),
        *("to BF16", "from BF16"),
    ],
)
def test_another_layout_or_precision_loads_the_same_state(
    folder: Path, saved: str, loaded: str, run: Callable[[Path], Result]
) -> None:
    good(run(folder))
    then, now = (folder / name / "iter_0000002" for name in (saved, loaded))
    assert same(then, now)
    assert settings(then) == settings(now)


def settings(path: Path) -> set[str]:
    """Adam's step count, and each parameter group's settings, of whichever of its optimizers."""
    state = load_common_state_dict(path).get("optimizer", {})
    found = set()
    for one in [state] if "optimizer" in state else state.values():
        for group in one["optimizer"]["param_groups"]:
            group["step"] = float(
                group.get("step", one["optimizer"].get("state", {}).get("common_step", 0))
            )
            found.add(
                str(sorted((key, group[key]) for key in group if key != "is_expert_parallel"))
            )
    assert "('step', 2.0)" in found.copy().pop()
    return found


@pytest.mark.slow
def test_upstreams_distributed_adam_cannot_load(folder: Path) -> None:
    """The control: without the mend, torch's Adam cannot be given its step count."""
    assert "KeyError: 'step'" in told(on_one(folder)["stock Adam"])


@pytest.mark.slow
def test_a_change_between_fp4_and_bf16_is_told(folder: Path) -> None:
    runs = on_one(folder)
    there, back = good(runs["to bf16"]).output, good(runs["from bf16"]).output
    assert "the checkpoint was trained with tetrajet, this launch has none" in there
    assert "the checkpoint was trained with no recipe, this launch has tetrajet" in back


# --- what stops --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_launch_that_cannot_go_on_says_so_once(folder: Path) -> None:
    two, one = on_two(folder), on_one(folder)
    assert "--fp4-seed was 1234 and is 7" in told(two["other seed"])
    assert "--dist-ckpt-optim-fully-reshardable" in told(two["dp pp2"])
    assert "__1_0.distcp has" in told(one["torn"])
    assert "names no iteration" in told(one["untold"])
    assert "cannot be loaded: " in told(one["other model"])
    remedy = "--dist-ckpt-optim-fully-reshardable to change the layout (--expert-model-parallel"
    assert remedy in told(two["dp ep2"])


@pytest.mark.slow
def test_flags_are_judged_beside_a_checkpoint_s_and_when_they_are_met(folder: Path) -> None:
    one = on_one(folder)
    assert "use --step-batch-size-schedule" in told(one["brought"])
    assert "muon" in told(one["late demand"]).lower()


@pytest.mark.slow
def test_a_save_over_another_leaves_nothing_of_it(folder: Path) -> None:
    """In the format torch, which has nothing that says what belongs together."""
    good(on_one(folder)["torch over"])
    saved = folder / "torch-over" / STALE
    assert not saved.exists() and saved.parents[1].is_dir()


@pytest.mark.slow
def test_where_upstream_would_end_well_having_trained_nothing(folder: Path) -> None:
    """Its sys.exit() is status 0, which a script takes for success."""
    one = on_one(folder)
    for name in ("torch torn", "torch torn at parsing"):
        line = told(one[name])
        assert "torch-torn cannot be loaded: " in line and "leave out --load" in line
    assert "no checkpoint in " in told(one["nothing"])


@pytest.mark.slow
def test_the_newest_non_persistent_checkpoint_is_loaded_if_it_is_complete(folder: Path) -> None:
    one = on_one(folder)
    assert "non-persistent iter 6" in good(one["global"]).output
    torn = folder / "global-torn"
    assert f"{torn}/non_persistent/iter_0000006 is not a complete" in told(one["global torn"])


# --- what a killed run leaves ------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_killed_and_a_save_killed_are_gone_on_from(folder: Path) -> None:
    """Killed in the third step; launched again and killed with half of the fourth's checkpoint
    written; launched again, it writes over that and ends where the uninterrupted run does."""
    killed = folder / "killed"
    assert on_two(folder)["killed"].status != 0 and (killed / TRACKER).read_text() == "2"
    flags = f"{TETRAJET} {TP2_SP} {saving(killed)} --load {killed}"
    died = run_in_turn(2, {"died": f"dies=save {flags}"})["died"]
    assert died.status != 0 and "at iteration 2" in died.output
    assert (killed / TRACKER).read_text() == "2" and problem_in(killed) is None
    assert "its save did not end" in str(flaw_of(killed / "iter_0000004"))
    assert "--ckpt-step 2" in str(problem_in(killed, 4))
    assert "at iteration 2" in train(2, *SIZES.split(), *flags.split()).output
    assert same(killed / "iter_0000004", folder / "whole" / "iter_0000004")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tracker empty": (lambda run: (run / TRACKER).write_text(""), "names no iteration but ''"),
    "tracker garbage": (lambda run: (run / TRACKER).write_bytes(b"\xff4"), "names no iteration"),
    "tracker negative": (lambda run: (run / TRACKER).write_text("-1"), "no iteration but '-1'"),
    "tracker ahead": (lambda run: (run / TRACKER).write_text("6"), "it does not exist"),
    "tracker missing": (lambda run: (run / TRACKER).unlink(), f"and no {TRACKER}"),
}
LAST: dict[str, tuple[Callable[[Path], object], str]] = {
    "part short": (lambda last: truncate(last / "__1_0.distcp"), "__1_0.distcp has "),
    "part missing": (lambda last: (last / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "not ended": (lambda last: (last / "metadata.json").unlink(), "its save did not end"),
    "ended in part": (lambda last: (last / "metadata.json").write_text(""), "cannot be read"),
    "no metadata": (lambda last: (last / ".metadata").unlink(), "cannot be read"),
    "metadata short": (lambda last: truncate(last / ".metadata"), "cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", [*DAMAGES, *LAST])
def test_what_is_not_complete_is_named_with_what_to_do(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    on_two(folder)
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    assert problem_in(run) is None
    harm, named = DAMAGES.get(damage) or LAST[damage]
    harm(run if damage in DAMAGES else run / "iter_0000004")
    problem = str(problem_in(run))
    last = 4 if damage in DAMAGES else 2
    assert named in problem and f"write {last} into {run / TRACKER}" in problem
    (run / TRACKER).write_text(str(last))  # as told
    assert problem_in(run) is None


NON_PERSISTENT: dict[str, tuple[dict[str, str], str, str]] = {
    "newest torn": ({"np/iter_0000006/__0_0.distcp": "torn"}, "__0_0.distcp has", "iter_0000004"),
    "newest not ended": ({"np/iter_0000006/metadata.json": ""}, "did not end", "iter_0000004"),
    "tracker empty": ({f"np/{TRACKER}": "torn"}, "no iteration but ''", "np/iter_0000006"),
    "tracker missing": ({f"np/{TRACKER}": ""}, "holds a checkpoint and no", "np/iter_0000006"),
    "other tracker empty": ({TRACKER: "torn"}, "no iteration but ''", "np/iter_0000006"),
    "both torn": (
        {"np/iter_0000006/__0_0.distcp": "torn", "iter_0000004/.metadata": ""},
        "__0_0.distcp has",
        "np/iter_0000002",
    ),
    "persistent torn": (
        {f"np/{TRACKER}": "2", "np/iter_0000006/.metadata": "", "iter_0000004/.metadata": ""},
        "cannot be read",
        "np/iter_0000002",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", NON_PERSISTENT)
def test_the_last_complete_one_may_be_persistent_or_not(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    on_two(folder)
    run, beside = tmp_path / "run", tmp_path / "run" / "np"
    shutil.copytree(folder / "global", run)
    (run / "non_persistent").rename(beside)
    assert problem_in(run, non_persistent=beside) is None
    harms, named, left = NON_PERSISTENT[damage]
    for path, harm in harms.items():
        if harm == "torn":
            truncate(run / path)
        elif harm:
            (run / path).write_text(harm)
        else:
            (run / path).unlink()
    problem = str(problem_in(run, non_persistent=beside))
    assert named in problem and "\n" not in problem
    for step, tracker in re.findall(r"write (\d+) into (\S+)", problem):  # as told
        Path(tracker).write_text(step)
    for tracker in re.findall(r"remove (\S+)", problem):
        Path(tracker).unlink()
    assert problem_in(run, non_persistent=beside) is None
    loads = beside if folders._prefers_non_persistent(beside, run, None) else run
    assert loads / f"iter_{int((loads / TRACKER).read_text()):07d}" == run / left


@pytest.mark.slow
def test_an_iteration_asked_for_is_weighed_against_the_non_persistent_one(
    folder: Path, tmp_path: Path
) -> None:
    on_two(folder)
    run, beside = tmp_path / "run", tmp_path / "run" / "non_persistent"
    shutil.copytree(folder / "global", run)
    (beside / TRACKER).write_text("2")
    assert problem_in(run, 4, beside) is None
    truncate(run / "iter_0000004" / "__0_0.distcp")
    shutil.rmtree(beside / "iter_0000006")
    problem = str(problem_in(run, 4, beside))
    assert problem.endswith("; give --ckpt-step 2 to go on from the last complete one")
    assert problem_in(run, 2, beside) is None


def test_a_first_launch_finds_nothing_and_a_first_save_killed_neither(tmp_path: Path) -> None:
    assert problem_in(tmp_path) is None
    (tmp_path / "iter_0000002").mkdir()
    assert problem_in(tmp_path) is None
    (tmp_path / TRACKER).write_text("2")
    assert "no checkpoint there is complete" in str(problem_in(tmp_path))


def test_a_converted_checkpoint_is_found_in_its_folder(tmp_path: Path) -> None:
    """--ckpt-convert-save writes to a folder in the one that it is given."""
    inner = tmp_path / "torch_dist"
    inner.mkdir()
    assert problem_in(tmp_path) is None  # of a first launch
    (inner / TRACKER).write_text("4")
    problem = problem_in(tmp_path)
    assert problem == f"{tmp_path} has checkpoints in torch_dist: give --load {inner}"


def test_upstream_ends_well_where_the_tracker_says_nothing(tmp_path: Path) -> None:
    """The control: status 0 and nothing trained, which a script takes for success."""
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(SystemExit) as ended:
        checkpointing.read_metadata(str(tmp_path / TRACKER))
    assert not ended.value.code
