"""What import-hf and export-hf refuse: one line, before anything is written."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.convert import command
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.torch_dist_writer import saved, whole, write
from testing.builders.fp4_checkpoint import checkpoint
from testing.builders.small_hf import save

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line with which the command ends. Asserts that it is one line, without a traceback."""
    assert command.main([str(word) for word in words]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    [line] = [line for line in error if "megatron-fp4-checkpoint" in line]
    assert line == error[-1] and "Traceback" not in "".join(error)
    return line.removeprefix("megatron-fp4-checkpoint: error: ")


def configured(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def retensored(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, {"format": "pt"})

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def sharded_outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "../y.safetensors"}}'
    )


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no config": ("llama", lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "bad config": (
        "llama",
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "another family": ("llama", configured(model_type="opt"), "model_type opt is not known here"),
    "pickled": ("llama", pickled, "pickled weights, which could run code"),
    "no weights": (
        "llama",
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no model.safetensors",
    ),
    "a file outside": ("llama", sharded_outside, "names a file outside its folder"),
    "cut": ("llama", cut, "is damaged or incomplete"),
    "a tensor less": ("llama", retensored(lambda t: t.pop(NORM)), f"has no {NORM}"),
    "a tensor more": (
        "llama",
        retensored(lambda t: t.update(extra=torch.ones(1))),
        "has extra, which a llama here does not have",
    ),
    "another shape": ("llama", retensored(lambda t: t.update({GATE: t[GATE][1:]})), "do not fit"),
    "other sizes": ("llama", configured(num_key_value_heads=4), "do not fit config.json"),
    "a wider MLP": ("llama", configured(intermediate_size=320), "do not fit config.json"),
    "a wider model": (
        "llama",
        configured(hidden_size=128, head_dim=16),
        "(320, 64) do not fit config.json",
    ),
    "more tokens": ("llama", configured(vocab_size=400), "(320, 64) do not fit config.json"),
    "wider experts": (
        "qwen3-moe",
        configured(moe_intermediate_size=64),
        "experts.0.up_proj.weight: (32, 64), (32, 64) do not fit config.json",
    ),
    "more positions": ("gpt2", configured(n_positions=256), "(128, 64) do not fit config.json"),
    "two dtypes": (
        "llama",
        retensored(lambda t: t.update({GATE: t[GATE].half()})),
        "have different dtypes",
    ),
    "quantized": (
        "llama",
        configured(quantization_config={"quant_method": "compressed-tensors"}),
        "is quantized",
    ),
    "biases of attention": ("llama", configured(attention_bias=True), "attention_bias True"),
    "activation": ("llama", configured(hidden_act="gelu"), "hidden_act gelu"),
    "yarn": ("llama", configured(rope_parameters=ROPE), "rope_type yarn"),
    "other constants": (
        "llama",
        configured(
            rope_parameters={
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "rope_theta": 1e4,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }
        ),
        "Megatron has the constants",
    ),
    "half a base": (
        "llama",
        configured(rope_parameters={"rope_type": "default", "rope_theta": 10000.5}),
        "rope_theta 10000.5: Megatron takes an integer",
    ),
    "a window": ("mistral", configured(sliding_window=64), "sliding_window 64: attention here has"),
    "scaled attention": (
        "gpt2",
        configured(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_model_that_cannot_be_imported(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, says = BAD[what]
    save(name, tmp_path / "hf")
    spoil(tmp_path / "hf")
    assert says in refused(capsys, "import-hf", tmp_path / "hf", "--output", tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("window", [128, None])
def test_a_window_that_is_never_reached(window: int | None, tmp_path: Path) -> None:
    save("mistral", tmp_path / "hf", sliding_window=window)
    assert command.main(["import-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "to")]) == 0


def test_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, to = tmp_path / "hf", tmp_path / "to"
    save("llama", hf)
    to.mkdir()
    (to / "mine").write_text("")
    assert "--force to replace it" in refused(capsys, "import-hf", hf, "--output", to)
    inside = refused(capsys, "import-hf", hf, "--output", tmp_path, "--force")
    assert "has what is to be read" in inside
    assert (to / "mine").exists() and (hf / "config.json").exists()
    assert command.main(["import-hf", str(hf), "--output", str(to), "--force"]) == 0
    assert not (to / "mine").exists()
    for multiple, says in {0: "is not positive", 10**13: "would add 9999999999680 rows"}.items():
        words = ("import-hf", hf, "--output", tmp_path / "x", "--vocab-multiple", multiple)
        assert f"--vocab-multiple {multiple} {says}" in refused(capsys, *words)


def test_damaged_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut at any place; the header changed at any place: refused, or without effect."""
    save("llama", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    whole_file = file.read_bytes()
    header = int.from_bytes(whole_file[:8], "little")
    draw = random.Random(0)
    for _ in range(20):
        file.write_bytes(whole_file[: draw.randrange(len(whole_file))])
        refused(capsys, "import-hf", tmp_path / "hf", "--output", tmp_path / "to")
    for _ in range(40):
        spoilt = bytearray(whole_file)
        spoilt[draw.randrange(8 + header)] ^= 1 << draw.randrange(8)
        file.write_bytes(spoilt)
        words = ["import-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "to"), "--dry-run"]
        if command.main(words):
            assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_checkpoints_that_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama", tmp_path / "hf")
    save("qwen3", tmp_path / "other")
    to = tmp_path / "to"
    assert command.main(["import-hf", str(tmp_path / "hf"), "--output", str(to)]) == 0
    out = ("--output", tmp_path / "out")
    assert "other architecture" in refused(
        capsys, "export-hf", to, *out, "--like", tmp_path / "other"
    ).replace("another", "other")
    assert "has no iter_0000007" in refused(capsys, "export-hf", to, *out, "--step", 7)
    assert "has no latest_checkpointed_iteration.txt" in refused(
        capsys, "export-hf", tmp_path, *out
    )
    # An architecture that transformers does not have here: RMSNorm without SwiGLU.
    info = TensorInfo((2,), torch.float32)
    args = _arguments(to) | {"swiglu": False}
    foreign = {"common_state/shard_0_1": saved({"args": _namespace(args)})}
    write(tmp_path / "foreign", [whole("x", info, lambda: torch.zeros(2))], foreign)
    assert "no model of transformers" in refused(capsys, "export-hf", tmp_path / "foreign", *out)
    lacking = {"common_state/shard_0_1": saved({"args": _namespace(_arguments(to))})}
    write(tmp_path / "lacking", [whole("x", info, lambda: torch.zeros(2))], lacking)
    assert "has no tensor" in refused(capsys, "export-hf", tmp_path / "lacking", *out)
    for size in ("nan", "inf", "-1", "0"):
        said = refused(capsys, "export-hf", to, *out, "--shard-gb", size)
        assert said == f"--shard-gb is a size above 0, such as 2, not {size}"
    for form in ("plain", "gpt-oss-experts"):
        words = ("export-hf", to, *out, "--format", form, "--activations", "bf16")
        assert "--activations needs --format" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_arguments_that_do_not_fit_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint whose arguments were changed is not exported with a config of other sizes."""
    made = checkpoint(tmp_path, "llama", {"ffn_hidden_size": 320})
    shutil.rmtree(made / "huggingface")
    said = refused(capsys, "export-hf", made, "--output", tmp_path / "out")
    assert "linear_fc1.weight is (2, 320, 64)" in said and "imply (2, 640, 64)" in said


@pytest.mark.parametrize("like", [True, False], ids=["like", "made"])
@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("llama", "activation_func_clamp_value", 7.0),
        ("llama", "glu_linear_offset", 1.0),
        ("llama", "use_mup", True),
        ("qwen3-moe", "moe_apply_probs_on_input", True),
        ("qwen3-moe", "moe_router_group_topk", 1),
        ("qwen3-moe", "moe_router_load_balancing_type", "sinkhorn"),
    ],
)
def test_a_run_that_computed_another_function_is_not_exported(
    model: str,
    name: str,
    value: Any,
    like: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its weights are those of a model of transformers, which would compute another function."""
    made = checkpoint(tmp_path, model, {name: value})
    if not like:
        shutil.rmtree(made / "huggingface")
    words = ("export-hf", made, "--output", tmp_path / "out")
    said = refused(capsys, *words)
    assert said == f"{name} {value}: no model of transformers here has it"


@pytest.mark.parametrize("like", [True, False], ids=["like", "made"])
@pytest.mark.parametrize("kind", ["aux_loss", ["seq_aux_loss"], "none"])
def test_a_loss_that_balances_experts_is_no_part_of_the_model(
    kind: Any, like: bool, tmp_path: Path
) -> None:
    made = checkpoint(tmp_path, "qwen3-moe", {"moe_router_load_balancing_type": kind})
    if not like:
        shutil.rmtree(made / "huggingface")
    assert command.main(["export-hf", str(made), "--output", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("like", [True, False], ids=["like", "made"])
@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "qwen3-moe-dense-first"])
def test_the_size_of_dense_layers_matters_if_there_are_some(
    like: bool, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = checkpoint(tmp_path, model, {"ffn_hidden_size": 320})
    if not like:
        shutil.rmtree(made / "huggingface")
    words = ("export-hf", made, "--output", tmp_path / "out")
    if model == "qwen3-moe-dense-first":
        reason = "ffn_hidden_size is 320, not 160" if like else "linear_fc1.weight is (320, 64)"
        assert reason in refused(capsys, *words)
    else:
        assert command.main([str(word) for word in words]) == 0


def _arguments(folder: Path) -> dict[str, Any]:
    from megatron_fp4.convert.torch_dist import Checkpoint, find

    return vars(Checkpoint(find(folder)).args())


def _namespace(args: dict[str, Any]) -> Any:
    from argparse import Namespace

    return Namespace(**args)


@pytest.mark.slow
def test_a_killed_import_leaves_no_target(tmp_path: Path) -> None:
    """Killed while it writes; the next import is not disturbed by what was left."""
    save("llama", tmp_path / "hf", vocab_size=400_000)  # 200 MB, so that writing takes a while
    words = ["import-hf", str(tmp_path / "hf"), "--output", str(tmp_path / "to")]
    child = subprocess.Popen(
        [sys.executable, "-m", "megatron_fp4.convert.command", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    partial = tmp_path / "to.partial"
    deadline = time.monotonic() + 120
    while not (partial / "release").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert partial.exists() and not (tmp_path / "to").exists()
    assert command.main(words) == 0
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not partial.exists()


def test_a_checkpoint_that_has_changed_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama", tmp_path / "hf")
    run, made = tmp_path / "run", tmp_path / "made"
    assert command.main(["import-hf", str(tmp_path / "hf"), "--output", str(run)]) == 0
    [file] = (run / "release").glob("*.distcp")
    data = file.read_bytes()
    at = len(data) // 2  # in the values of a weight
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    words = ("export-hf", run, "--output", made)
    assert "has changed since it was saved" in refused(capsys, *words)
    assert not made.exists()
    # What can be said without reading all files is said first.
    assert "--vocab-size is" in refused(capsys, *words, "--vocab-size", 0)
    made.mkdir()
    assert "exists: give another --output" in refused(capsys, *words)
    made.rmdir()
    # The control: only the SHA-256 finds it.
    assert command.main([str(word) for word in (*words, "--no-verify")]) == 0
