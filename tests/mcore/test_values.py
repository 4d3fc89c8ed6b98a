"""Values that no flag takes: each is told in a line."""

import argparse
import re
from pathlib import Path

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.launch.flags import add_flags
from megatron_fp4.mcore.launch.refusals import values
from megatron_fp4.mcore.launch.refusals.packages import needed
from megatron_fp4.mcore.launch.refusals.table import refuse
from testing.builders.command_line import parse
from testing.worlds.launch import MOCK_DATA

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


@pytest.mark.parametrize(
    "flag",
    "--fp4-recipe --fp4-recipe-option --fp4-module-recipe --load --save --tensorboard-dir".split(),
)
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_none(flag: str, value: str) -> None:
    """As --load "$UNSET" gives it, which would start from random weights."""
    with pytest.raises(ConfigError, match=f"^{flag} has an empty value") as error:
        parse(*MOCK_DATA, flag, value)
    assert ("--fp4-recipe off trains without" in str(error.value)) == (flag == "--fp4-recipe")


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--train-iters -5", "--train-iters -5: give a number of at least 0"),
        ("--lr nan", "--lr nan: give a finite number"),
        ("--lr inf", "--lr inf: give a finite number"),
        ("--lr -0.001", "at least 0"),
        ("--clip-grad nan", "finite"),
        ("--init-method-std inf", "finite"),
        ("--lr-warmup-fraction 2", "--lr-warmup-fraction 2.0: give .* at least 0 and below 1"),
        ("--save-interval -1", r"at least 1 \(leaving out --save saves nothing\)"),
        ("--eval-interval 0", r"at least 1 \(--eval-iters 0 leaves evaluation out\)"),
        ("--eval-interval -3", "at least 1"),
        ("--eval-iters -1", "at least 0"),
        ("--log-interval 0", "at least 1"),
        ("--exit-interval -1", "at least 1"),
        ("--adam-eps 0", "a number above 0"),
        ("--hidden-dropout 1", "below 1"),
        ("--moe-aux-loss-coeff 0.1 -0.1", "--moe-aux-loss-coeff -0.1: give"),
        ("--num-attention-heads 0", "at least 1"),
        ("--micro-batch-size 0", "at least 1"),
    ],
)
def test_a_number_out_of_range_is_told_with_the_range(flags: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse(*MOCK_DATA, *flags.split())


def test_what_the_ranges_name_is_megatrons_or_the_plugins() -> None:
    parser = add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    numbers = {action.dest: action for action in parser._actions if action.type in (int, float)}
    assert set(values._RANGE_OF) <= set(numbers)
    for name, range_ in values._RANGE_OF.items():  # what is not given is no mistake
        default = numbers[name].default
        assert isinstance(default, list) or default is None or default in range_ or default == 0


# --- optional packages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (
            "--tensorboard-dir {folder}",
            "needs the package tensorboard, .*: pip install tensorboard$",
        ),
        ("--wandb-project x --wandb-exp-name y", "pip install wandb$"),
        ("--log-energy", "pip install nvidia-ml-py$"),
        ("--enable-ft-package", "pip install nvidia-resiliency-ext$"),
        ("--enable-msc", "pip install multi-storage-client$"),
        ("--one-logger-run-name x", "needs the package one_logger"),
        ("--optimizer muon --bf16", "pip install emerging-optimizers$"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model own/name",
            "HuggingFaceTokenizer needs transformers: pip install transformers$",
        ),
        (
            "--tokenizer-type TikTokenizer --tokenizer-model {folder}",
            "TikTokenizer needs tiktoken: pip install tiktoken$",
        ),
    ],
)
def test_a_flag_whose_package_is_missing_is_not_dropped(
    flags: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = flags.format(folder=tmp_path).split()
    monkeypatch.setattr(machine, "installed", lambda package: False)
    with pytest.raises(ConfigError, match=f"^{words[0]} .*{remedy}"):
        parse(*MOCK_DATA, *words)


def test_the_memory_of_a_gpu_is_logged_by_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse(*MOCK_DATA)
    given.log_device_memory_used = True  # without a GPU the flag is refused for that
    monkeypatch.setattr(machine, "installed", lambda package: False)
    with pytest.raises(ConfigError, match="^--log-device-memory-used .*nvidia-ml-py$"):
        refuse(needed(given))


@pytest.mark.parametrize(
    "flags",
    [
        "--transformer-impl transformer_engine",
        "--use-precision-aware-optimizer",
        "--use-transformer-engine-op-fuser",
        "--te-rng-tracker",
        "--te-precision-config-file some.yaml",
        "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel",
        "--cpu-offloading-num-layers 1",
        "--moe-permute-fusion --num-experts 4",
        "--moe-router-fusion --num-experts 4",
        "--use-flash-attn",
        "--attention-backend flash",
        "--attention-backend fused",
        "--cross-entropy-fusion-impl te --cross-entropy-loss-fusion",
        "--recompute-modules layernorm",
    ],
)
def test_what_acts_in_transformer_engine_alone_names_its_installation(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "HAVE_TE", False)
    remedy = re.escape("pip install 'transformer-engine[pytorch]'; or leave it out")
    with pytest.raises(ConfigError, match=f"^{flags.split()[0]} .*{remedy}$"):
        parse(*MOCK_DATA, *flags.split())
    monkeypatch.setattr(machine, "HAVE_TE", True)
    parse(*MOCK_DATA, *flags.split())  # with it, what remains is Megatron's to judge


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--wandb-exp-name y", "logs nothing without --tensorboard-dir"),
        ("--tensorboard-dir {folder}", "needs --wandb-exp-name NAME: add it"),
        ("--tensorboard-dir {folder} --wandb-exp-name y", "needs --wandb-save-dir DIR, or --save"),
    ],
)
def test_wandb_logs_only_with_the_flags_that_megatron_reads(
    flags: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda package: True)
    project = ("--wandb-project", "x")
    words = flags.format(folder=tmp_path).split()
    with pytest.raises(ConfigError, match=f"^--wandb-project {remedy}"):
        parse(*MOCK_DATA, *project, *words)
    whole = ("--tensorboard-dir", str(tmp_path), "--wandb-exp-name", "y")
    parse(*MOCK_DATA, *project, *whole, "--wandb-save-dir", str(tmp_path / "wandb"))
