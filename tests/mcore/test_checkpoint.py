"""Checkpoints in Megatron's own loop: a run goes on from one bit for bit, in another layout with
the same state, and never from one that is not whole or was made with other numerics."""

import argparse
import functools
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.training import checkpointing

import megatron_fp4
from megatron_fp4 import list_recipes
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import checkpoint
from megatron_fp4.mcore.checkpoint import compare, flaw_of, problem_in
from tests.mcore.launch import MOCK_DATA, ROOT, TINY, Result, spawn, train
from tests.mcore.test_fp4_training import weights
from tests.mcore.test_options import parse

RELAY = ROOT / "tests" / "mcore" / "relay.py"
SIZES = "--ffn-hidden-size 128 --bf16 --eval-iters 0"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
TETRAJET = "--fp4-recipe tetrajet"
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
ENDS = "--train-iters 2 --override-opt_param-scheduler"  # its schedule is another's beginning
TRACKER = "latest_checkpointed_iteration.txt"
OTHERS = [name for name in list_recipes() if name != "tetrajet"]


def relay(processes: int, trainings: dict[str, str]) -> dict[str, Result]:
    """Each training's flags, run one after the other in one world (relay.py)."""
    common = shlex.join([*TINY, *MOCK_DATA]) + f" {SIZES} "
    jobs = [re.sub(r"^(\w+=\w+ )?", rf"\1{common}", flags) for flags in trainings.values()]
    done = spawn(processes, RELAY, *jobs)
    *outputs, rest = re.split(r"\n=== ended with (-?\d+)\n", done.stdout)
    ended = zip(outputs[::2], outputs[1::2], strict=True)
    results = [Result(int(status), [], [], output) for output, status in ended]
    if len(results) < len(trainings):  # its last one was killed
        results.append(Result(done.returncode, [], [], rest))
    assert len(results) == len(trainings), done.stdout[-4000:]
    return dict(zip(trainings, results, strict=True))


def told(result: Result) -> str:
    """The one line of a launch that stopped without having trained."""
    lines = [line for line in result.output.splitlines() if "megatron-fp4: error:" in line]
    assert result.status == 1 and len(lines) == 1 and not result.has_traceback, result.output[
        -4000:
    ]
    assert "before the start of training step" not in result.output
    return lines[0]


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same weights and optimizer state, bit for bit."""
    a, b = weights(one), weights(other)
    assert any("exp_avg_sq" in name for name in a)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saving(folder: Path, step: int = 2) -> str:
    return f"--save {folder} --save-interval {step}"


def again(folder: Path, step: int = 2) -> str:
    """Loads the iteration and, where none is left to train, saves it as it was loaded."""
    return f"--load {folder} --ckpt-step {step} --save-interval 1000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def on_two(folder: Path) -> dict[str, Result]:
    whole, sharded = folder / "whole", folder / "sharded"
    tp2, ends = f"{TETRAJET} {TP2_SP}", ENDS
    return relay(
        2,
        {
            "whole": f"{tp2} {saving(whole)}",
            "resumed": f"{tp2} {saving(folder / 'resumed')} --load {whole} --ckpt-step 2",
            "pp2": f"{TETRAJET} {PP2} {ends} {again(whole)} --save {folder / 'pp2'}",
            "sharded": f"{TETRAJET} {SHARDED} {ends} {saving(sharded)}",
            "sharded pp2": f"{TETRAJET} {SHARDED} {PP2} {ends} {again(sharded)} "
            f"--save {folder / 'sharded-pp2'}",
            "dp": f"{TETRAJET} --use-distributed-optimizer {ends} {saving(folder / 'dp')}",
            "dp pp2": f"{TETRAJET} --use-distributed-optimizer {PP2} --load {folder / 'dp'}",
            "other seed": f"{tp2} --fp4-seed 7 {again(whole)}",
            "killed": f"dies=step {tp2} {saving(folder / 'killed')} --load {folder / 'killed'}",
        },
    )


@functools.cache
def on_one(folder: Path) -> dict[str, Result]:
    on_two(folder)
    whole, ends = folder / "whole", ENDS
    for name in ("torn", "untold"):
        shutil.copytree(whole, folder / name)
    truncate(folder / "torn" / "iter_0000004" / "__1_0.distcp")
    (folder / "untold" / TRACKER).write_text("")
    trainings = {
        "alone": f"{TETRAJET} {ends} {again(whole)} --save {folder / 'alone'}",
        "sharded": f"{TETRAJET} {SHARDED} {ends} {again(folder / 'sharded')} "
        f"--save {folder / 'sharded-alone'}",
        "to bf16": f"{ends} {again(whole)} --save {folder / 'bf16'}",
        "from bf16": f"{TETRAJET} {ends} {again(folder / 'bf16')} --save {folder / 'from-bf16'}",
        "torn": f"{TETRAJET} --load {folder / 'torn'}",
        "untold": f"{TETRAJET} --load {folder / 'untold'}",
        "other model": f"{TETRAJET} --load {whole} --hidden-size 128",
        "stock Adam": f"without=adam {TETRAJET} {SHARDED} {ends} --load {folder / 'sharded'}",
    }
    for name in OTHERS:
        kept, recipe = folder / name, f"--fp4-recipe {name}"
        trainings[name] = f"{recipe} {saving(kept)}"
        trainings[f"{name} resumed"] = (
            f"{recipe} {again(kept)} {saving(folder / f'{name}-resumed')}"
        )
    # The control: with other noise the resumed run must not end where the whole one did.
    trainings["anyway"] = f"{recipe} {again(kept)} {saving(folder / 'anyway')} --fp4-seed 7"
    trainings["anyway"] += " --fp4-load-anyway"
    return relay(1, trainings)


def good(result: Result) -> Result:
    assert result.status == 0 and "successfully loaded checkpoint" in result.output, result.output[
        -4000:
    ]
    return result


# --- the same run ------------------------------------------------------------------------------


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


def test_with_other_noise_it_ends_elsewhere(folder: Path) -> None:
    output = good(on_one(folder)["anyway"]).output
    assert "megatron-fp4: goes on from other numerics: --fp4-seed was 1234 and is 7" in output
    kept = folder / OTHERS[-1] / "iter_0000004"
    assert not same(kept, folder / "anyway" / "iter_0000004")


@pytest.mark.parametrize(
    ("saved", "loaded", "run"),
    [
        ("whole", "pp2", lambda folder: on_two(folder)["pp2"]),
        ("whole", "alone", lambda folder: on_one(folder)["alone"]),
        ("sharded", "sharded-pp2", lambda folder: on_two(folder)["sharded pp2"]),
        ("sharded", "sharded-alone", lambda folder: on_one(folder)["sharded"]),
        ("whole", "bf16", lambda folder: on_one(folder)["to bf16"]),
        ("bf16", "from-bf16", lambda folder: on_one(folder)["from bf16"]),
    ],
    ids=["TP2 to PP2", "TP2 to one", "DP2 to PP2", "DP2 to DP1", "to BF16", "from BF16"],
)
def test_another_layout_or_precision_loads_the_same_state(
    folder: Path, saved: str, loaded: str, run: Callable[[Path], Result]
) -> None:
    good(run(folder))
    assert same(folder / saved / "iter_0000002", folder / loaded / "iter_0000002")


def test_upstreams_distributed_adam_cannot_load(folder: Path) -> None:
    """The control: without the mend in compat.py, torch's Adam has no state to load into."""
    assert "AssertionError" in told(on_one(folder)["stock Adam"])


def test_a_change_between_fp4_and_bf16_is_told(folder: Path) -> None:
    runs = on_one(folder)
    there, back = good(runs["to bf16"]).output, good(runs["from bf16"]).output
    assert "the checkpoint was trained with tetrajet, this launch has none" in there
    assert "the checkpoint was trained with no recipe, this launch has tetrajet" in back


# --- what stops --------------------------------------------------------------------------------


def test_a_launch_that_cannot_go_on_says_so_once(folder: Path) -> None:
    two, one = on_two(folder), on_one(folder)
    assert "--fp4-seed was 1234 and is 7" in told(two["other seed"])
    assert "--dist-ckpt-optim-fully-reshardable" in told(two["dp pp2"])
    assert "__1_0.distcp has" in told(one["torn"])
    assert "names no iteration" in told(one["untold"])
    assert "cannot be loaded: " in told(one["other model"])


WAS = "--fp4-recipe tetrajet --seed 5"
YAML = "base: tetrajet\n"


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        ("--fp4-recipe mxfp4 --seed 5", "--fp4-recipe was tetrajet and is mxfp4 (backward was f"),
        (f"{WAS} --fp4-recipe-option rule=floor", "is tetrajet rule=floor (dgrad.a.rule was ceil"),
        (f"{WAS} --fp4-seed 6", "--fp4-seed was 5 and is 6"),
        (f"{WAS} --fp4-bf16-after 0.5", "--fp4-bf16-after was none and is 0.5"),
        (
            f"{WAS} --fp4-bf16-after 0.5 --fp4-bf16-gemms wgrad",
            "--fp4-bf16-gemms was fprop dgrad wgrad and is wgrad",
        ),
        (f"{WAS} --first-last-layers-bf16", "--first-last-layers-bf16 was none and is True"),
        (f"{WAS} --fp4-module-recipe mlp=mxfp4", "--fp4-module-recipe was none and is mlp=mxfp4"),
    ],
)
def test_other_numerics_are_named_with_what_was_and_what_is(flags: str, difference: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compare(parse(*WAS.split()), parse(*flags.split()))
    message = str(raised.value)
    assert difference in message and "--fp4-load-anyway" in message and "\n" not in message
    compare(parse(*WAS.split()), parse(*flags.split(), "--fp4-load-anyway"))


def test_another_version_of_the_numerics_is_named() -> None:
    saved, launch = parse(*WAS.split()), parse(*WAS.split())
    saved.fp4_numerics_version = 0
    with pytest.raises(ConfigError, match="numerics version was 0 and is "):
        compare(saved, launch)


def test_what_counts_of_a_recipe_is_its_content(tmp_path: Path) -> None:
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for path in paths:
        path.write_text(YAML)
    one, two = (parse("--fp4-recipe", str(path), "--seed", "5") for path in paths)
    compare(one, two)
    compare(parse(*WAS.split()), two)
    paths[1].write_text(YAML + "wgrad: {a: mxfp4, b: mxfp4}\n")
    with pytest.raises(ConfigError, match="two.yaml and is .*two.yaml .wgrad.a.ro.* was stoch"):
        compare(two, parse("--fp4-recipe", str(paths[1]), "--seed", "5"))


def test_what_counts_of_a_modules_recipe_is_its_content(tmp_path: Path) -> None:
    def launched(recipe: str) -> argparse.Namespace:
        return parse(*WAS.split(), "--fp4-module-recipe", f"*.linear_fc1={recipe}")

    path = tmp_path / "own.yaml"
    path.write_text("base: mxfp4\n")
    saved = launched(str(path))
    compare(saved, launched("mxfp4"))
    for other in ("bf16", "tetrajet"):
        with pytest.raises(ConfigError, match=rf"own.yaml and is .*_fc1={other} \("):
            compare(saved, launched(other))
    path.write_text("base: mxfp4\nwgrad: {a: mxfp4-ceil-sr, b: mxfp4-ceil-sr}\n")
    with pytest.raises(ConfigError, match=r"own.yaml and is .*own.yaml \(wgrad.a.rounding was ne"):
        compare(saved, launched(str(path)))


def test_another_version_of_the_plugin_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    saved = parse(*WAS.split())
    saved.fp4_plugin_version = "0.0.1"
    compare(saved, parse(*WAS.split()))
    line = f"version 0.0.1 saved the checkpoint, this is {megatron_fp4.__version__}\n"
    assert capsys.readouterr().out == f"megatron-fp4: {line}"


def test_a_run_without_a_recipe_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compare(parse("--seed", "5"), parse("--seed", "6"))
    assert not capsys.readouterr().out


# --- what a killed run leaves ------------------------------------------------------------------


def test_a_rank_killed_and_a_save_killed_are_gone_on_from(folder: Path) -> None:
    """Killed in the third step; launched again and killed with half of the fourth's checkpoint
    written; launched again, it writes over that and ends where the uninterrupted run does."""
    killed = folder / "killed"
    assert on_two(folder)["killed"].status != 0 and (killed / TRACKER).read_text() == "2"
    flags = f"{TETRAJET} {TP2_SP} {saving(killed)} --load {killed}"
    died = relay(2, {"died": f"dies=save {flags}"})["died"]
    assert died.status != 0 and "at iteration 2" in died.output
    assert (killed / TRACKER).read_text() == "2" and problem_in(killed) is None
    assert "its save did not end" in str(flaw_of(killed / "iter_0000004"))
    assert "--ckpt-step 2" in str(problem_in(killed, 4))
    assert "at iteration 2" in train(2, *SIZES.split(), *flags.split()).output
    assert same(killed / "iter_0000004", folder / "whole" / "iter_0000004")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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


@pytest.mark.parametrize("damage", [*DAMAGES, *LAST])
def test_what_is_not_whole_is_named_with_what_to_do(
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


def test_a_first_launch_finds_nothing_and_a_first_save_killed_neither(tmp_path: Path) -> None:
    assert problem_in(tmp_path) is None
    (tmp_path / "iter_0000002").mkdir()
    assert problem_in(tmp_path) is None
    (tmp_path / TRACKER).write_text("2")
    assert "none there is whole" in str(problem_in(tmp_path))


def test_upstream_ends_well_where_the_tracker_says_nothing(tmp_path: Path) -> None:
    """The control: status 0 and nothing trained, which a script takes for success."""
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(SystemExit) as ended:
        checkpointing.read_metadata(str(tmp_path / TRACKER))
    assert not ended.value.code


def test_a_save_over_an_older_one_leaves_no_mixture(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its first byte, it leaves no checkpoint rather than the older one's metadata."""
    for name in ("metadata.json", ".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / name).write_text("of the older")
    found: list[Path] = []
    save = checkpoint._from_nothing(lambda *_: found.extend(tmp_path.iterdir()))
    save({}, str(tmp_path))
    assert not found
