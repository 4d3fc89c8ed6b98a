"""--fp4-optimizer-state on the command line: its values, what is refused, what is told."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_fp4 import __main__
from megatron_fp4.mcore.checkpoints.compare_numerics import compare
from megatron_fp4.mcore.launch import fused_kernels
from megatron_fp4.mcore.model import start_lines
from testing.builders.fp4_arguments import parse, refusal
from testing.worlds.checkpoints import SIZES, told
from testing.worlds.launch import torchrun
from testing.worlds.own_megatron import changing, run

TETRAJET = ("--fp4-recipe", "tetrajet")
FLAG = ("--fp4-optimizer-state", "m=fp8,v=fp16")


def test_values_are_settled() -> None:
    assert parse(*TETRAJET).fp4_optimizer_state is None
    for given, settled in {
        "v=fp16,m=fp8": "m=fp8,v=fp16",
        "m=bf16": "m=bf16,v=fp16",
        "v=fp8,round=stochastic": "m=fp8,v=fp8",
        "round=nearest,m=fp8": "m=fp8,v=fp16,round=nearest",
    }.items():
        assert parse(*TETRAJET, FLAG[0], given).fp4_optimizer_state == settled


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((*TETRAJET, FLAG[0], "fp8"), "given as m=FORMAT,v=FORMAT, such as m=fp8,v=fp16"),
        ((*TETRAJET, FLAG[0], "m=fp16"), "m is stored in one of fp32, bf16, fp8, not 'fp16'"),
        ((*TETRAJET, FLAG[0], "v=e4m3"), "v is stored in one of fp32, bf16, fp16, fp8, not 'e4m3'"),
        ((*TETRAJET, FLAG[0], "round=up"), "round is stochastic or nearest, not 'up'"),
        (FLAG, "needs a recipe: add --fp4-recipe, or leave it out"),
        ((*TETRAJET, *FLAG, "--optimizer", "sgd"), "not those of --optimizer sgd: use adam"),
        ((*TETRAJET, *FLAG, "--optimizer", "muon"), "not those of --optimizer muon: use adam"),
        ((*TETRAJET, *FLAG, "--use-precision-aware-optimizer"), "leave out one"),
        ((*TETRAJET, *FLAG, "--optimizer-cpu-offload"), "leave out --optimizer-cpu-offload"),
        (("--fp4-recipe", "tetrajet-ramping", *FLAG), "recipe tetrajet-ramping, whose optimizer"),
        ((*TETRAJET, "--fp4-module-recipe", "*fc1=tetrajet-ramping", *FLAG), "leave out one"),
        ((*TETRAJET, *FLAG, "--use-torch-fsdp2"), "use --use-distributed-optimizer"),
        ((*TETRAJET, *FLAG, "--use-megatron-fsdp"), "use --use-distributed-optimizer"),
        ((*TETRAJET, *FLAG, "--optimizer-cuda-graph"), "the optimizer runs without one"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_refusal_is_one_line(flags: tuple[str, ...], says: str) -> None:
    line = refusal(*flags)
    assert says in line
    if "round" not in says:
        assert "--fp4-optimizer-state" in line or "does not support" in line


def test_a_refused_launch_is_one_line() -> None:
    result = torchrun(2, *SIZES.split(), *TETRAJET, *FLAG, "--optimizer", "sgd")
    assert "not those of --optimizer sgd: use adam" in told(result)


COUPLED = """
make = training.get_megatron_optimizer
def coupled(config, *given, **named):
    config.decoupled_weight_decay = False
    return make(config, *given, **named)
training.get_megatron_optimizer = coupled
"""


def test_adam_without_decoupled_weight_decay_is_an_error(tmp_path: Path) -> None:
    result = run(changing(tmp_path, COUPLED), 1, *SIZES.split(), *TETRAJET, *FLAG)
    assert "set decoupled_weight_decay of the optimizer's configuration" in told(result)


def test_what_is_not_refused() -> None:
    for flags in (TETRAJET, ("--fp4-recipe", "tetrajet-ema"), ("--fp4-recipe", "dge-occ")):
        for more in ((), ("--use-distributed-optimizer", "--bf16"), ("--ckpt-format", "torch")):
            parse(*flags, *FLAG, *more)
    parse(*TETRAJET, "--optimizer", "sgd")  # without the flag


def test_another_format_is_told_and_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    plain, low = parse(*TETRAJET), parse(*TETRAJET, *FLAG)
    compare(plain, low)
    told = "trained with Adam's moments stored as float32, this launch stores them as m=fp8,v=fp16"
    assert f"{told}, rounded to nearest once, as they are loaded\n" in capsys.readouterr().out
    compare(low, plain)
    assert "as m=fp8,v=fp16, this launch stores them as float32\n" in capsys.readouterr().out
    compare(low, low)
    del plain.fp4_optimizer_state  # of a version that has no such flag
    compare(plain, parse(*TETRAJET))
    assert capsys.readouterr().out == ""


def test_the_start_table_has_a_line_of_bytes() -> None:
    def line(moments: str | None, **others: object) -> str:
        return start_lines.moments(Namespace(fp4_optimizer_state=moments, **others))

    moments = 1 + 1 / 128 + 2 + 1 / 128  # codes, and a scale for each block of 128
    wanted = (
        f"Adam's moments are stored as m=fp8,v=fp16: {moments:.4g} bytes a parameter in place "
        f"of 8, with the main weight {moments + 4:.4g} in place of 12"
    )
    assert line("m=fp8,v=fp16") == wanted
    assert ": 4 bytes a parameter in place of 8, with the main weight 8 in" in line("m=bf16,v=bf16")
    assert line(None) == line("m=fp8,v=fp16", skip_train=True) == start_lines.moments(Namespace())


def test_torch_s_fused_kernel_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(fused_kernels.machine, "HAVE_TE", False)
    monkeypatch.setattr(fused_kernels.machine, "installed", lambda name: False)
    for flags, fused in ((TETRAJET, True), ((*TETRAJET, *FLAG), False)):
        args = parse(*flags)
        fused_kernels.settle(args, is_checked=True)
        assert args.fp4_fused_adamw is fused


def test_the_command_plan_has_the_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["megatron-fp4", "plan", *flags])
        __main__.main()
        return capsys.readouterr().out

    size = (4 + 3 + 2 / 128) * 4096 * 4096 / 1e6
    assert (
        f"moments as m=fp8,v=fp16: {size:.1f} MB, 7.016 bytes a parameter in place of 12"
        in printed("--optimizer-state", "m=fp8,v=fp16")
    )
    assert "optimizer state" not in printed()
    with pytest.raises(SystemExit, match="given as m=FORMAT"):
        printed("--optimizer-state", "fp8")
