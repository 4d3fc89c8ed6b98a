"""A user's own script, run by megatron_fp4/run.py, repeats pretrain_gpt.py bit for bit."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import release
from testing.worlds.checkpoint_contents import weights
from testing.worlds.checkpoints import same
from testing.worlds.launch import MOCK_DATA, ROOT, TINY, Result, train
from testing.worlds.own_megatron import ON_A_CPU, OWN, WITH_MISTAKES, run

SIZES = ("--ffn-hidden-size", "128", "--bf16")
TETRAJET = (*SIZES, "--fp4-recipe", "tetrajet")
OFF = ("--fp4-fused-kernels", "off")
TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
SHARDED = ("--use-distributed-optimizer",)
EMA = ("--fp4-recipe", str(Path(__file__).parent / "ema.yaml"))
# What the plugin chooses on a machine without a GPU, Transformer Engine and apex.
ON_CPU = """
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --num-workers 0
""".split()


@functools.cache
def ours(processes: int, *flags: str) -> Result:
    return train(processes, *flags)


def error_of(result: Result) -> str:
    """The one line of a launch that was refused."""
    lines = [line for line in result.output.splitlines() if "megatron-fp4: error:" in line]
    assert result.status == 1 and len(lines) == 1, result.output[-4000:]
    assert not result.has_traceback, result.output[-4000:]
    return lines[0]


# --- the same run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "processes", "layout"),
    [
        ("builder.py", 1, ()),
        pytest.param("te_layers.py", 2, TP2_SP, marks=pytest.mark.slow),
        pytest.param("provider.py", 2, PP2, marks=pytest.mark.slow),
        ("fork.py", 2, TP2_SP),
        pytest.param("provider.py", 2, VPP2, marks=pytest.mark.outside),
        pytest.param("builder.py", 2, VPP2, marks=pytest.mark.outside),
        pytest.param("te_layers.py", 2, PP2, marks=pytest.mark.outside),
        pytest.param("builder.py", 2, TP2_SP, marks=pytest.mark.outside),
        pytest.param("fork.py", 2, SHARDED, marks=pytest.mark.outside),
    ],
)
def test_a_script_repeats_the_losses_of_pretrain_gpt(
    script: str, processes: int, layout: tuple[str, ...]
) -> None:
    # A linear that a fork changes computes neither norm nor SwiGLU, which round otherwise in
    # Megatron. In Transformer Engine's layers the norm is a part of the linear's module.
    has_own = script in ("fork.py", "te_layers.py")
    flags = (*TETRAJET, *layout, *(OFF if has_own else ()))
    own = run(script, processes, *flags)
    assert own.status == 0, own.output[-4000:]
    expected = ours(processes, *flags)
    assert len(own.losses) == 4 and own.losses == expected.losses
    assert own.evaluations == expected.evaluations
    assert "megatron-fp4: recipe tetrajet (arXiv 2502.20853, section 3)" in own.output
    assert ours(processes, *SIZES, *layout).losses != expected.losses  # the recipe shows in them


@pytest.mark.outside
def test_upstreams_own_layers_follow_a_recipe() -> None:
    """Those of --transformer-impl local, whose norm and attention are not pretrain_gpt.py's."""
    own, in_bf16 = run("engine.py", 2, *TETRAJET, *PP2), run("engine.py", 2, *SIZES, *PP2)
    assert own.status == in_bf16.status == 0, own.output[-4000:]
    assert own.losses == pytest.approx(ours(2, *TETRAJET, *PP2).losses, rel=1e-3)
    assert own.losses != in_bf16.losses


def test_state_beside_weights_is_kept() -> None:
    own, expected = run("provider.py", 2, *SIZES, *EMA, *SHARDED), ours(2, *SIZES, *EMA, *SHARDED)
    assert own.status == 0 and own.losses == expected.losses, own.output[-4000:]
    unkept = run("provider.py", 2, *SIZES, *EMA, *SHARDED, by=WITH_MISTAKES, mistake="unkept")
    assert unkept.losses != expected.losses


def test_forward_steps_that_are_not_counted_are_refused() -> None:
    """As in a loop that is not that of pretrain."""
    uncounted = run("provider.py", 2, *TETRAJET, *PP2, by=WITH_MISTAKES, mistake="uncounted")
    assert uncounted.status != 0 and not uncounted.losses
    assert "this script trains in a loop of its own: train by pretrain" in uncounted.output


def test_what_a_fork_changes_in_a_linear_stays() -> None:
    flags = (*TETRAJET, "--fp4-fused-kernels", "off")
    own, scaled = (run("fork.py", 1, *flags, "--own-scale", scale) for scale in ("1", "2"))
    assert own.losses == ours(1, *flags).losses and scaled.status == 0
    assert scaled.losses != own.losses


@pytest.mark.parametrize(
    "script", ["builder.py", pytest.param("provider.py", marks=pytest.mark.outside)]
)
def test_without_a_recipe_a_script_runs_as_without_the_plugin(script: str) -> None:
    own = run(script, 1, *SIZES)
    alone = run(script, 1, *SIZES, *ON_CPU, by=ON_A_CPU)
    assert own.status == alone.status == 0, (own.output + alone.output)[-4000:]
    assert len(own.losses) == 4 and own.losses == alone.losses
    assert own.evaluations == alone.evaluations
    assert "megatron-fp4" not in alone.output


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.outside
def test_checkpoints_are_pretrain_gpts(tmp_path: Path) -> None:
    """Of Transformer Engine's layers too: the norm inside a linear is saved under its key."""
    steps = ("--save-interval", "2", *OFF)
    for name, launch in (("own", functools.partial(run, "te_layers.py")), ("ours", train)):
        saved = launch(2, *TETRAJET, *TP2_SP, *steps, "--save", str(tmp_path / name))
        assert saved.status == 0, saved.output[-4000:]
    own, ours = tmp_path / "own" / "iter_0000004", tmp_path / "ours" / "iter_0000004"
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in weights(own)
    assert same(own, ours)
    assert (own / "integrity.json").exists()

    load = ("--load", str(tmp_path / "ours"), "--ckpt-step", "2", *OFF)
    resumed = run("te_layers.py", 2, *TETRAJET, *TP2_SP, *load)
    assert resumed.losses == train(2, *TETRAJET, *TP2_SP, *load).losses and len(resumed.losses) == 2
    other = run("te_layers.py", 2, *SIZES, "--fp4-recipe", "mxfp4", *TP2_SP, *load)
    assert "--fp4-load-anyway" in error_of(other)


# --- refusals ------------------------------------------------------------------------------------


def test_a_script_in_which_no_linear_would_follow_is_an_error() -> None:
    refusal = error_of(run("no_linear.py", 1, *TETRAJET))
    assert "no linear follows recipe tetrajet: the specification of the layers has no" in refusal
    assert "decoder.layers.*.mlp.linear_fc1" in refusal
    plain = run("no_linear.py", 1, *SIZES)
    assert plain.status == 0 and len(plain.losses) == 4


@pytest.mark.parametrize(
    ("mistake", "refusal"),
    [
        ("unreplaced", "no linear follows recipe tetrajet: the specification"),
        ("unattached", "no linear follows recipe tetrajet: its builder attached no recipe"),
    ],
)
def test_a_model_that_was_not_reached_is_an_error(mistake: str, refusal: str) -> None:
    result = run("builder.py", 1, *TETRAJET, by=WITH_MISTAKES, mistake=mistake)
    assert refusal in error_of(result)


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        ("print('trains nothing')", "the script parsed no arguments of Megatron's"),
        (
            "from megatron.training.arguments import parse_and_validate_args as p; p()",
            "no linear follows recipe tetrajet: the script trained no model",
        ),
    ],
)
def test_a_script_that_trains_nothing_is_an_error(
    source: str, refusal: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert refusal in error_of(run(script, 1, *TETRAJET))


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--own-scales", "2"), "did you mean --own-scale"),
        (("--context-parallel-size", "2"), "does not support --context-parallel-size"),
        (("--num-attention-heads", "6"), "a multiple of --num-attention-heads 6"),
        (("--fp4-module-recipe", "*.nothing=bf16"), "no linear has such a name"),
    ],
)
def test_a_mistake_is_one_line(flags: tuple[str, ...], refusal: str) -> None:
    assert refusal in error_of(run("provider.py", 1, *TETRAJET, *flags))


# --- which Megatron ------------------------------------------------------------------------------


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_fp4.run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_command_needs_a_script() -> None:
    for words, refusal in (((), "no script: torchrun"), (("no.py",), "no script no.py: give the")):
        ended = alone(*words)
        assert ended.returncode == 1 and ended.stderr.startswith("megatron-fp4: error:")
        assert refusal in ended.stderr and ended.stderr.count("\n") == 1


def megatron_called(name: str, folder: Path) -> Path:
    """A folder megatron/ in `folder` that says that it is this release."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(.*)", name)
    assert parts is not None
    (core / "package_info.py").write_text(
        f"MAJOR = {parts[1]}\nMINOR = {parts[2]}\nPATCH = {parts[3]}\nPRE_RELEASE = {parts[4]!r}\n"
    )
    return core.parent


def test_the_megatron_beside_a_script_is_the_one_that_counts(tmp_path: Path) -> None:
    """As with `python SCRIPT`: the checkout's, whatever wheel is installed."""
    folder = megatron_called("0.20.0rc0", tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    ended = alone(str(tmp_path / "script.py"))
    assert ended.returncode == 1 and ended.stderr == (
        f"megatron-fp4: error: Megatron-core 0.20.0rc0 in {folder} is not supported: the "
        "constructors of its linears have changed; use 0.19.0 to 0.19.2\n"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("0.16.1", "its wheel has no megatron.training;"),
        ("0.17.1", "has no megatron.training.models;"),
        ("0.18.2", "it has no GPTModelConfig"),
        ("1.0.0", "it is unknown;"),
        ("0.19.2", None),
        ("0.19.7", None),
    ],
)
def test_another_series_is_refused_by_its_name(
    name: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = megatron_called(name, tmp_path)
    monkeypatch.setattr(release, "installed", lambda: folder)
    if reason is None:
        assert release.checked_release() == f"Megatron-core {name} in {folder}"
        return
    with pytest.raises(ConfigError, match=f"Megatron-core {re.escape(name)} in .*: .*{reason}"):
        release.checked_release()


@pytest.mark.skipif(torch.cuda.is_available(), reason="its flags are a CPU's")
def test_help_has_the_flags_of_the_script_and_of_the_plugin() -> None:
    shown = alone(str(OWN / "provider.py"), *TINY, *MOCK_DATA, "--help").stdout
    assert "-m megatron_fp4.run provider.py [flags]" in shown
    assert "--fp4-recipe RECIPE" in shown and "--own-scale" in shown and "--num-layers" in shown
