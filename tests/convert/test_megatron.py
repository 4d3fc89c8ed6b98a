"""What the checkpoint tools write is loaded by Megatron, in torchrun worlds."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fp4.convert import keys, shards
from megatron_fp4.convert.command import main
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.torch_dist import COMMON, TRACKER, Checkpoint, find
from testing.worlds.checkpoint_contents import contents, weights
from testing.worlds.checkpoints import EP2, PP2, SHARDED, TETRAJET, TP2_SP, again, good, told
from testing.worlds.conversions import (
    ALL_EXPERTS,
    EMA,
    GPT2,
    LAST,
    LLAMA,
    MIDDLE,
    TP2_PP2,
    TRAININGS,
    Training,
    launch,
    trained,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversions")


def tool(*words: object) -> int:
    return main([str(word) for word in words])


def reshard(source: Path, target: Path, tensor: int, pipeline: int, expert: int = 1) -> int:
    sizes = (
        *("--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline),
        *("--expert-model-parallel-size", expert),
    )
    return tool("reshard", source, "--step", 2, "--output", target, *sizes)


def bytes_read(output: str) -> dict[int, dict[int, int]]:
    """For each rank, the bytes of tensors that it reads from each file, by the file's number."""
    found: dict[int, dict[int, int]] = {}
    pattern = r"rank (\d+) reads (\d+) bytes of __(\d+)_0.distcp"
    for rank, count, file in re.findall(pattern, output):
        found.setdefault(int(rank), {})[int(file)] = int(count)
    return found


def same_tensors(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- reshard ------------------------------------------------------------------------------------

BF16_TO_PP2 = Training(2, LLAMA, f"--bf16 {TETRAJET} {PP2}")
# name: the checkpoint, sizes of the new layout, the training that loads it.
RESHARDS = {
    "tp2 to pp2": ("tp2", (1, 2), BF16_TO_PP2),
    "fully reshardable dp2 to tp2": (
        "sharded",
        (2, 1),
        Training(2, LLAMA, f"--bf16 {TETRAJET} {SHARDED} {TP2_SP}"),
    ),
    "fp32 to tp2": ("fp32", (2, 1), Training(2, LLAMA, f"{TETRAJET} {TP2_SP}")),
    "fp16 to pp2": (
        "fp16",
        (1, 2),
        Training(2, LLAMA, f"--fp16 --initial-loss-scale 1024 {TETRAJET} {PP2}"),
    ),
    "gpt2 tp2 to pp2": ("gpt2-tp2", (1, 2), Training(2, GPT2, f"--bf16 {PP2}")),
    "averages of weights to tp2": (
        "ema",
        (2, 1),
        Training(2, LLAMA, f"--bf16 {EMA} {SHARDED} {TP2_SP}"),
    ),
    "experts to ep2": (
        "moe",
        (1, 1, 2),
        Training(2, LLAMA, f"--bf16 {TETRAJET} {ALL_EXPERTS} {EP2}"),
    ),
    "ep2 to tp2": (
        "moe-ep2",
        (2, 1),
        Training(2, LLAMA, f"--bf16 {TETRAJET} {ALL_EXPERTS} {SHARDED} {TP2_SP}"),
    ),
}


def check_reshard(folder: Path, name: str) -> dict[str, dict[int, dict[int, int]]]:
    """Asserts that a launch that goes on from the resharded checkpoint and one that goes on from
    the original end with the same losses and tensors; returns what the ranks of both read."""
    saved, sizes, training = RESHARDS[name]
    source, target = trained(folder, saved), folder / name.replace(" ", "-")
    assert reshard(source, target, *sizes) == 0
    assert contents(source / MIDDLE).keys() == contents(target / MIDDLE).keys()
    results, ends = {}, {}
    for age, run in {"old": source, "new": target}.items():
        ends[age] = folder / f"{target.name}-from-{age}" / LAST
        results[age] = good(launch(training, f"{again(run)} --save {ends[age].parent}"))
    assert results["old"].losses == results["new"].losses and len(results["new"].losses) == 2
    assert same_tensors(ends["old"], ends["new"])
    assert not same_tensors(source / MIDDLE, ends["new"])  # the control: two steps change them
    return {age: bytes_read(result.output) for age, result in results.items()}


def test_each_rank_finds_its_part_in_one_file(folder: Path) -> None:
    read = check_reshard(folder, "tp2 to pp2")
    assert {rank: list(files) for rank, files in read["new"].items()} == {0: [0], 1: [1]}
    assert {rank: sorted(files) for rank, files in read["old"].items()} == {0: [0, 1], 1: [0, 1]}


@pytest.mark.outside
@pytest.mark.parametrize("name", [name for name in RESHARDS if name != "tp2 to pp2"])
def test_a_resharded_checkpoint_is_gone_on_from_as_the_original(folder: Path, name: str) -> None:
    read = check_reshard(folder, name)["new"]
    for rank, files in read.items():
        shared = {0} if rank else set()  # norms, routers, the embedding that the head is tied to
        assert set(files) <= {rank, *shared}


@pytest.mark.outside
def test_four_ranks_find_their_parts(folder: Path) -> None:
    source, target = trained(folder, "tp2"), folder / "four"
    assert reshard(source, target, 2, 2) == 0
    training = Training(4, LLAMA, f"--bf16 {TETRAJET} {TP2_PP2}")
    old, new = (good(launch(training, again(run))) for run in (source, target))
    assert old.losses == new.losses
    for rank, files in bytes_read(new.output).items():
        first = rank - rank % 2  # of the stage, which has the norms
        assert set(files) == {rank, first}
        assert files[rank] > 0.9 * sum(files.values())
    read_before = bytes_read(old.output)  # the control: both stages read the same two files
    assert set().union(*read_before.values()) == {0, 1} and len(read_before) == 4


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tp2", (2, 1, 1)),
        pytest.param("pp2", (1, 2, 1), marks=pytest.mark.outside),
        pytest.param("gpt2-tp2", (2, 1, 1), marks=pytest.mark.outside),
        pytest.param("tp2-pp2", (2, 2, 1), marks=pytest.mark.outside),
    ],
)
def test_shards_are_those_of_megatron(folder: Path, name: str, sizes: tuple[int, int, int]) -> None:
    """Without data parallelism each rank of Megatron writes its own shard to its own file."""
    source = Checkpoint(trained(folder, name) / LAST)
    layout = shards.layout_of(source.args(), *sizes)
    found = 0
    for key, info in source.tensors.items():
        for rank, region in shards.shards(key, info, layout):
            assert source.file_of(key, region) == f"__{rank}_0.distcp", (key, region)
            found += 1
        assert len(list(shards.shards(key, info, layout))) == len(source.chunks(key))
    assert found > 36


def test_ranks_are_numbered_by_tensor_then_expert_then_stage() -> None:
    """The gated fc1 [16, 8] of experts, two tensor-parallel ranks by two of experts by two stages:
    a rank has rows of the gate and, 8 rows below them, of the up projection."""
    layout = shards.ParallelSizes(tensor=2, pipeline=2, expert=2, layers=4, gated=True)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    parts = list(shards.shards(key, TensorInfo((4, 4, 16, 8), torch.bfloat16), layout))
    rank_of = {offset: rank for rank, (offset, shape) in parts if shape == (1, 1, 4, 8)}
    assert len(rank_of) == len(parts) == 4 * 4 * 4
    firsts = {(0, 0): 0, (1, 1): 0, (0, 2): 2, (1, 3): 2, (2, 0): 4, (3, 1): 4, (2, 3): 6}
    for (layer, expert), first in firsts.items():
        ranks = [rank_of[layer, expert, row, 0] for row in (0, 4, 8, 12)]
        assert ranks == [first, first + 1, first, first + 1]


@pytest.mark.outside
def test_state_that_only_its_own_layout_can_load_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = trained(folder, "dp2"), folder / "refused"
    assert reshard(source, target, 2, 1) == 1
    assert "save with --dist-ckpt-optim-fully-reshardable, or drop it by strip" in (
        capsys.readouterr().err
    )
    assert not target.exists()
    assert tool("strip", source, "--output", folder / "bare") == 0
    assert tool("reshard", folder / "bare", "--output", target, *"--tensor-model-parallel-size 2"
                " --pipeline-model-parallel-size 1".split()) == 0  # fmt: skip


# --- strip --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stripped_checkpoint_is_loaded_without_optimizer(folder: Path) -> None:
    source, target = trained(folder, "tp2"), folder / "stripped"
    assert tool("strip", source, "--step", 2, "--output", target) == 0
    assert not any("optimizer" in key or "rng" in key for key in contents(target / MIDDLE))
    training, flags = TRAININGS["tp2"], "--no-load-optim --no-load-rng"
    old, new = (good(launch(training, f"--load {run} --ckpt-step 2 {flags}")) for run in
                (source, target))  # fmt: skip
    assert "at iteration 2" in new.output
    assert old.losses == new.losses and len(new.losses) == 2
    refused = told(launch(training, f"--load {target}"))
    assert "was saved with --no-save-optim" in refused and "add --no-load-optim" in refused


@pytest.mark.outside
@pytest.mark.parametrize(
    "words",
    ["dp2", "ema", "ema --keep-average", "fp16", "gpt2", "moe-ep2"],
)
def test_any_stripped_checkpoint_is_finetuned_from(folder: Path, words: str) -> None:
    name, *more = words.split()
    source, target = trained(folder, name), folder / f"{words}-stripped".replace(" ", "")
    assert tool("strip", source, "--output", target, *more) == 0
    states = any(keys.is_average(key) for key in weights(find(target)))
    assert states == ("--keep-average" in more)
    old, new = (good(launch(TRAININGS[name], f"--load {run} --finetune")) for run in
                (source, target))  # fmt: skip
    assert "at iteration 0" in new.output
    assert old.losses == new.losses and len(new.losses) == 4


def test_stripped_arguments_are_those_of_megatron(folder: Path) -> None:
    """Megatron reads them with its own classes: what `pickles` does not know was kept."""
    source, target = trained(folder, "tp2"), folder / "arguments"
    assert tool("strip", source, "--output", target) == 0
    old, new = (load_common_state_dict(run / LAST) for run in (source, target))
    then, now = vars(old["args"]), vars(new["args"])
    assert {name for name in now if then.get(name) != now[name]} == {"no_save_optim", "no_save_rng"}
    assert type(now["attention_backend"]).__module__ == "megatron.core.transformer.enums"
    assert new.keys() == old.keys() - {"optimizer", "opt_param_scheduler", "rerun_state_machine"}
    assert new["iteration"] == 4 and (target / TRACKER).read_text() == "4"


# --- average ------------------------------------------------------------------------------------


@pytest.mark.outside
def test_an_average_of_steps_is_loaded(folder: Path) -> None:
    source, target = trained(folder, "tp2"), folder / "averaged"
    assert tool("average", source, "--steps", 2, 4, "--weights", 1, 3, "--output", target) == 0
    two, four, mean = (weights(run) for run in (source / MIDDLE, source / LAST, target / LAST))
    for key, found in mean.items():
        exact = (two[key].double() + 3 * four[key].double()) / 4
        ulp = 2.0**-8 * exact.abs()  # half a unit of BF16's last place is at most this
        assert ((found.double() - exact).abs() <= ulp).all()
    assert any(not torch.equal(mean[key], four[key]) for key in mean)
    good(launch(TRAININGS["tp2"], f"--load {target} --finetune"))


@pytest.mark.outside
def test_models_that_differ_are_not_averaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, gpt2 = trained(folder, "bf16"), trained(folder, "gpt2")
    assert tool("average", llama, gpt2, "--output", folder / "mixed") == 1
    assert "are of two models: " in capsys.readouterr().err
    assert not (folder / "mixed").exists()


# --- the layout of files up to Megatron-core 0.18 ------------------------------------------------


def legacy(source: Path, target: Path) -> Path:
    """A copy of a checkpoint in which common.pt has the common state, as older versions saved."""
    shutil.copytree(source, target)
    path = find(target)
    common = torch.load(io.BytesIO(Checkpoint(path).raw(COMMON)), weights_only=False)[0]
    torch.save(common, path / "common.pt")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    del metadata.state_dict_metadata[COMMON], metadata.storage_data[MetadataIndex(COMMON)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "integrity.json").unlink()
    return target


@pytest.mark.outside
@pytest.mark.parametrize("command", ["strip", "reshard"])
def test_older_files_are_read_and_stay_as_they_are(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = folder / "common.pt" if command == "strip" else folder / "common.pt-2"
    old, target = legacy(trained(folder, "tp2"), old), folder / f"older-{command}"
    assert tool("show", old) == 0
    assert "recipe tetrajet" in capsys.readouterr().out
    sizes = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1".split()
    assert tool(command, old, "--output", target, *(sizes if command == "reshard" else [])) == 0
    assert "has no integrity.json" in capsys.readouterr().err
    flags = "--no-load-optim" if command == "strip" else ""
    flags += " --train-iters 5 --override-opt_param-scheduler"
    results = [good(launch(TRAININGS["tp2"], f"--load {run} {flags}")) for run in (old, target)]
    assert results[0].losses == results[1].losses and len(results[0].losses) == 1
    has_common = (find(target) / "common.pt").is_file()
    assert has_common and COMMON not in Checkpoint(find(target)).objects


# --- compare, show ------------------------------------------------------------------------------


def test_a_comparison_names_what_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(folder, "tp2")
    assert tool("compare", run, run) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")
    assert tool("compare", run, run, "--steps", 2, 4, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    a, b = weights(run / MIDDLE), weights(run / LAST)
    assert set(found["tensors"]["different"]) == {k for k in a if not torch.equal(a[k], b[k])}
    for key, numbers in found["tensors"]["different"].items():
        x, y = (tensors[key].double().numpy() for tensors in (a, b))
        assert numbers["max_abs"] == np.abs(x - y).max()
        norm = np.linalg.norm(x - y) / np.linalg.norm(x)
        assert numbers["relative_l2"] == pytest.approx(norm, rel=1e-12)


@pytest.mark.outside
def test_a_resumed_run_is_equal_to_the_unbroken_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, resumed = trained(folder, "bf16"), folder / "bf16-resumed"
    good(launch(TRAININGS["bf16"], f"{again(run)} --save {resumed}"))
    assert tool("compare", run, resumed) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")


@pytest.mark.outside
def test_arguments_are_compared_by_what_they_are_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("compare", trained(folder, "tp2"), trained(folder, "bf16")) == 1
    text = capsys.readouterr().out
    assert "fp4_recipe: tetrajet | None" in text
    assert "model arguments: none differ" in text
    assert "tensor_model_parallel_size: 2 | 1" in text


@pytest.mark.outside
def test_what_is_shown_is_what_megatron_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(folder, "moe-ep2")
    assert tool("show", run, "--step", 2, "--layers", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    args = load_common_state_dict(run / MIDDLE)["args"]
    assert (found["step"], found["consumed_samples"]) == (2, args.consumed_train_samples)
    assert found["layout"]["expert_model_parallel_size"] == 2
    assert found["optimizer"] == {"name": "adam", "state": "fully_reshardable"}
    saved = weights(run / MIDDLE)
    model = {key: value for key, value in saved.items() if not key.startswith("optimizer")}
    assert found["sizes"]["parameters"] == sum(value.numel() for value in model.values())
    name = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    experts = model[name.replace(".1.", ".", 1)][1].double()  # of all experts
    row = found["weights"][name]
    assert (row["min"], row["max"]) == (experts.min().item(), experts.max().item())
    assert row["rms"] == pytest.approx(experts.square().mean().sqrt().item(), rel=1e-12)
    assert row["quantized"] == row["elements"] == experts.numel()
    assert row["zeroed"] == zeroed(experts) > 0 and row["clipped"] == 0  # "ceil" never clips
    assert "quantized" not in found["weights"]["decoder.layers.1.mlp.router.weight"]


def zeroed(w: torch.Tensor) -> int:
    """How many elements MXFP4 with scales rounded up sets to zero: a quarter of the scale, which is
    half of the smallest E2M1 number but zero, is a tie, and goes to zero."""
    blocks = w.reshape(-1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / 6)))
    return int(((blocks.abs() <= scale / 4) & (blocks != 0)).sum())
