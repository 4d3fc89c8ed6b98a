"""The command `python -m tools.choose_layout`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate import huggingface
from megatron_fp4.estimate.command import main, run

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
FLAGS = """
    --num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --vocab-size 32000 --seq-length 4096
""".split()
JOB = "--gpu h200 --gpus 4 --recipe tetrajet --global-batch-size 64 --micro-batch-size 2".split()


def config(folder: Path, **change: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    return str(path)


def test_flags_and_a_hugging_face_config_are_the_same_model(tmp_path: Path) -> None:
    by_flags = json.loads(run([*JOB, *FLAGS, "--json"]))
    hf = ["--hf-config", config(tmp_path), "--seq-length", "4096"]
    assert json.loads(run([*JOB, *hf, "--json"])) == by_flags
    assert by_flags["model"]["groups"] == 8


def test_gradients_in_bf16_take_half() -> None:
    """The optimizer converts them to float32, which takes memory while it runs."""
    job = [*JOB, "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    plain, half = (
        json.loads(run([*job, *FLAGS, "--json", *flags]))["layouts"][0]
        for flags in ((), ("--grad-reduce-in-bf16",))
    )
    assert "--grad-reduce-in-bf16" in half["flags"]
    assert "--grad-reduce-in-bf16" not in str(plain["flags"])
    assert half["memory"]["gradients"] == plain["memory"]["gradients"] / 2
    assert half["seconds"]["communication"] < plain["seconds"]["communication"]


def test_gradients_in_few_bits_send_less() -> None:
    """Their flags are among those to paste."""
    job = [*JOB, "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    plain, fp8, bf16 = (
        json.loads(run([*job, *FLAGS, "--json", *flags]))["layouts"][0]
        for flags in (
            (),
            ("--fp4-grad-comm", "fp8", "--fp4-grad-comm-element", "e5m2"),
            ("--fp4-grad-comm", "bf16"),
        )
    )
    assert "--fp4-grad-comm fp8 --fp4-grad-comm-element e5m2" in fp8["flags"]
    assert "--fp4-grad-comm bf16" in bf16["flags"] and "grad-comm" not in str(plain["flags"])
    sends = [each["seconds"]["communication"] for each in (fp8, bf16, plain)]
    assert sends == sorted(sends)
    converts = [each["seconds"]["other"] - plain["seconds"]["other"] for each in (fp8, bf16)]
    assert converts[0] > converts[1] > 0
    assert 0 < fp8["memory"]["gradients"] - plain["memory"]["gradients"] < 2**28 * 1.02
    with pytest.raises(ConfigError, match="needs --fp4-grad-comm fp8"):
        run([*job, *FLAGS, "--fp4-grad-comm-element", "e5m2"])


def test_json_adds_up() -> None:
    found = json.loads(run([*JOB, *FLAGS, "--json", "--top", "1000"]))
    seconds = [each["seconds"]["total"] for each in found["layouts"]]
    assert seconds == sorted(seconds) and len(seconds) > 20
    for each in found["layouts"]:
        for kind in ("memory", "seconds"):
            parts = dict(each[kind])
            assert parts.pop("total") == pytest.approx(sum(parts.values()))
        assert each["tokens/s"] == pytest.approx(64 * 4096 / each["seconds"]["total"])
        layout = each["layout"]
        assert layout["tp"] * layout["pp"] * layout["dp"] == 4
        assert f"--tensor-model-parallel-size {layout['tp']}" in each["flags"]
        assert "--fp4-recipe tetrajet" in each["flags"]


def test_flags_name_a_recipe_file_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\n")
    job = [str(path) if word == "tetrajet" else word for word in JOB]
    found = json.loads(run([*job, *FLAGS, "--json", "--top", "1"]))
    assert f"--fp4-recipe {path}" in found["layouts"][0]["flags"]


def test_the_command_prints_a_table() -> None:
    command = [sys.executable, "-m", "tools.choose_layout", *JOB, *FLAGS, "--top", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:6] == ["TP", "SP", "PP", "VPP", "DP", "EP"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "flags: --fp4-recipe tetrajet" in done.stdout and "sent by a rank" in done.stdout


def test_dropout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Its masks would take memory that is not estimated."""
    with pytest.raises(SystemExit):
        run([*JOB, *FLAGS, "--hidden-dropout", "0.1"])
    assert "--hidden-dropout: invalid choice: 0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "v100"], "--gpu v100 is not known: give one of a100, h100"),
        (["--gpus", "12"], "--gpus 12 is not a multiple of --gpus-per-node 8"),
        (["--gpus", "0"], "--gpus is 0: give 1 or more"),
        (["--recipe", "no"], "no"),
        (["--recipe", "bf16", "--recipe-option", "a=1"], "bf16 takes no options: leave out a"),
        (
            ["--recipe", "auto", "--recipe-option", "fp8=1"],
            "no option 'fp8'; its options: fp8_l",
        ),
        (["--num-attention-heads", "24"], "give --kv-channels"),
        (["--hf-config", "/no/such"], "/no/such has no config.json"),
        (
            ["--max-position-embeddings", "8192", "--position-embedding-type", "learned_absolute"],
            "--max-position-embeddings 8192 is not --seq-length 4096",
        ),
        (["--max-position-embeddings", "2048"], "is above --max-position-embeddings 2048"),
        (["--hidden-size", "-4096"], "--hidden-size is -4096: give 1 or more"),
        (["--num-attention-heads", "0"], "--num-attention-heads is 0: give 1 or more"),
        (["--micro-batch-size", "0"], "--micro-batch-size is 0: give 1 or more"),
        (["--pipeline-model-parallel-size", "0"], "size is 0: give 1 or more"),
        (["--num-experts", "-8"], "--num-experts is -8: give 0 or more"),
        (["--top", "-1"], "--top is -1: give 1 or more"),
        (["--num-query-groups", "5"], "32 is not a multiple of --num-query-groups 5"),
        (["--num-experts", "2", "--moe-router-topk", "4"], "goes to 4 of 2 experts: lower"),
        (["--expert-model-parallel-size", "2"], "needs a model with experts: give --num-experts"),
        (["--tensor-model-parallel-size", "3"], "no layout runs: TP 3 does not divide"),
        (["--pipeline-model-parallel-size", "3"], "no layout runs: PP 3 times 1 chunks does not"),
        (["--gpus", "1", "--sequence-parallel"], "no layout is left: SP needs TP 2 or more"),
        (
            ["--recipe", "tetrajet-ramping", "--fp4-optimizer-state", "m=fp8,v=fp8"],
            "--fp4-optimizer-state is not defined for recipe tetrajet-ramping",
        ),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["choose_layout", *JOB, *FLAGS, *flags])
    assert main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-fp4: error: ") and message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "2048"], "--hidden-size and --hf-config both describe the model"),
        (["--qk-layernorm"], "--qk-layernorm and --hf-config both describe the model"),
        (["--max-position-embeddings", "4096"], "both describe the model: leave out one of them"),
        (["--seq-length", "16384"], "--seq-length 16384 is above the 8192 positions of"),
    ],
)
def test_flags_that_contradict_a_config_are_refused(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run([*JOB, "--hf-config", config(tmp_path), "--seq-length", "4096", *flags])


def test_a_config_with_another_name_is_refused(tmp_path: Path) -> None:
    found = Path(config(tmp_path)).rename(tmp_path / "llama.json")
    with pytest.raises(ConfigError, match="llama.json: rename it to config.json"):
        run([*JOB, "--hf-config", str(found), "--seq-length", "4096"])


def test_padding_of_a_config_s_vocabulary(tmp_path: Path) -> None:
    given = [*JOB, "--hf-config", config(tmp_path, vocab_size=32001), "--seq-length", "4096"]
    plain, padded = (
        json.loads(run([*given, *flags, "--json"]))["layouts"][0]["memory"]["weights"]
        for flags in ([], ["--make-vocab-size-divisible-by", "65536"])
    )
    assert padded > plain


@pytest.mark.parametrize("recipe", ["tetrajet", "bf16"])
def test_swiglu_s_input_in_fp8_takes_half(recipe: str) -> None:
    flag, output = "--activation-func-fp8-input-store", "output of mlp.linear_fc1"
    plain, found = (
        json.loads(run([*JOB, *FLAGS, "--recipe", recipe, *flags, "--json"]))["layouts"][0]
        for flags in ([], [flag])
    )
    plain, found = ({**each, **each["saved"]["a layer"]} for each in (plain, found))
    assert found[output]["own"] == plain[output]["own"] / 2 == 8192 * 28672
    others = plain.keys() & {name for name in found if "X of" in name}
    assert others and all(found[name] == plain[name] for name in others)
    assert flag in found["flags"] and flag not in plain["flags"]
    assert any("input to FP8 takes no time" in note for note in found["extrapolated"])


def test_what_is_held_of_weights_is_counted() -> None:
    found = {
        kept: json.loads(
            run(
                [*JOB, *FLAGS, "--recipe", "tetrajet", *fixed, "--fp4-weight-cache", kept, "--json"]
            )
        )["layouts"][0]
        for fixed in [["--cuda-graph-impl", "none"]]
        for kept in ("packed", "fprop", "off", "remade")
    }
    held = {kept: each["memory"]["held"] for kept, each in found.items()}
    assert held["fprop"] == held["packed"] / 2 > held["off"] == held["remade"] == 0
    saved = [found[kept]["memory"]["activations"] for kept in ("packed", "off", "remade")]
    assert saved[1] > saved[0] == saved[2]  # codes of W are saved between the passes, or not
    seconds = [each["seconds"]["total"] for each in found.values()]
    assert seconds == sorted(set(seconds))  # what is not held is made more often
    for kept, each in found.items():
        assert (f"--fp4-weight-cache {kept}" in each["flags"]) == (kept != "packed")
        notes = [note for note in each["extrapolated"] if "weight-cache off" in note]
        assert bool(notes) == (kept == "off")
        notes = [note for note in each["extrapolated"] if "weight-cache remade" in note]
        assert bool(notes) == (kept == "remade")


def test_weights_that_are_gathered_as_codes(tmp_path: Path) -> None:
    flag, one = "--fp4-param-gather", "--tensor-model-parallel-size 1".split()
    job = [*JOB, *FLAGS, *one, "--pipeline-model-parallel-size", "1"]
    plain, found = (
        json.loads(run([*job, *flags, "--json"]))["layouts"][0] for flags in ([], [flag])
    )
    # Of 8 layers: qkv, proj, fc1 and fc2. Each of four ranks sends its part three times.
    weights = 8 * 4096 * (6144 + 4096 + 28672 + 14336)
    sent = [sum(each["sent"]["data all-gather"].values()) for each in (plain, found)]
    assert sent[0] - sent[1] == pytest.approx((16 - 4.25) / 8 * weights * 3 / 4)
    assert found["memory"]["held"] == plain["memory"]["held"]  # which has dgrad's operands too
    assert flag in found["flags"] and flag not in plain["flags"]
    assert any(flag in note for note in found["extrapolated"])
    with pytest.raises(ConfigError, match="recipe mxfp4 does not support --fp4-param-gather"):
        run([*job, "--recipe", "mxfp4", flag])
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: auto\noptions: {fp8_layers: 1, fp8_after: 1}\n")
    of_layers = json.loads(run([*job, "--recipe", str(mine), flag, "--json"]))["layouts"][0]
    assert flag in of_layers["flags"]
    # The estimate is of the longest phase.
    of_phases = json.loads(run([*job, "--recipe", "auto", flag, "--json"]))["layouts"][0]
    assert of_phases["sent"] == of_layers["sent"]
    mine.write_text("base: fp8\nphases: [{after: 0.1, recipe: tetrajet}]\n")
    late = json.loads(run([*job, "--recipe", str(mine), flag, "--json"]))["layouts"][0]
    assert sum(late["sent"]["data all-gather"].values()) == sent[1]
    mine.write_text("base: fp8\nphases: [{after: 0.9, recipe: tetrajet}]\n")
    rarely = json.loads(run([*job, "--recipe", str(mine), flag, "--json"]))["layouts"][0]
    assert sum(rarely["sent"]["data all-gather"].values()) == sent[0]


def test_swiglu_s_input_is_that_of_a_swiglu() -> None:
    flags = [flag for flag in FLAGS if flag != "--swiglu"]
    with pytest.raises(ConfigError, match="--activation-func-fp8-input-store needs --swiglu"):
        run([*JOB, *flags, "--activation-func-fp8-input-store"])


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = Path(config(tmp_path, model_type="deepseek_v3"))
    with pytest.raises(ConfigError, match="model_type deepseek_v3 is not known here"):
        huggingface.read(path, 4096)


def test_experts_of_a_config(tmp_path: Path) -> None:
    path = Path(config(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))
    model, flags = huggingface.read(path, 4096)
    assert (model.experts, model.top_k, model.expert_ffn) == (8, 2, 14336)
    assert "--num-experts 8" in " ".join(flags)


def test_flags_of_a_config_have_what_speed_does_not_depend_on(tmp_path: Path) -> None:
    """The flags are to be pasted: the base of rotary positions is missing from no launch."""
    _, flags = huggingface.read(Path(config(tmp_path, rope_theta=500000.0)), 4096)
    assert "--rotary-base 500000" in " ".join(flags)


def test_an_excerpt_in_the_docs_is_what_is_printed() -> None:
    page = (ROOT / "docs/hopper.md").read_text()
    [(flags, excerpt)] = re.findall(
        r"^    python -m tools.choose_layout ((?:.*\\\n)*.*)\n\nAn excerpt.*\n\n((?:    .*\n)+)",
        page,
        re.MULTILINE,
    )
    text = run(flags.replace("\\\n", "").split())
    lines = [line[4:] for line in excerpt.splitlines()]
    assert len(lines) > 8 and all(line in text.splitlines() for line in lines)


def test_what_a_layer_saves_adds_up() -> None:
    """To the activations of a model of one more layer."""
    given = [*JOB[:2], "--gpus", "1", *JOB[4:], *FLAGS, "--recompute-granularity", "none"]
    given += ["--cuda-graph-impl", "none", "--json"]
    [eight] = json.loads(run(given))["layouts"]
    given[given.index("--num-layers") + 1] = "9"
    [nine] = json.loads(run(given))["layouts"]
    tensors = eight["saved"]["a layer"]
    more = nine["memory"]["activations"] - eight["memory"]["activations"]
    assert sum(sizes["own"] for sizes in tensors.values()) == pytest.approx(more)
    tokens = 2 * 4096
    assert tensors["X of mlp.linear_fc2"] == {
        "own": tokens * 14336 * 17 / 32,
        "bf16": tokens * 14336 * 2,
    }
