"""Models of transformers, as Megatron checkpoints and back: the same logits, the same files."""

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.convert import command
from megatron_fp4.convert.huggingface import decoder, gpt2, model_files, settings
from megatron_fp4.convert.huggingface.import_hf import HuggingFaceModel
from megatron_fp4.convert.huggingface.layouts import Qkv, Rows
from testing.builders.small_hf import MODELS, TOKENS, VOCABULARY, save, tokens
from testing.worlds.launch import MOCK_DATA, SCRIPTS, spawn, train

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()

QUICK = ("llama", "gpt2", "qwen3-moe")
LAUNCH = f"""
    --seq-length {TOKENS} --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 2
    --eval-iters 1 --attention-dropout 0 --hidden-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
""".split()
# Two float32 forward passes that sum in other orders differ by rounding errors. Each of some 50
# sums has at most 160 terms, each with an error of up to 2**-24 of itself. Independent errors add
# in squares, so the relative norm of the difference is about the root of 50 * 160, times 2**-24.
SUMS = 4 * (50 * 160) ** 0.5 * 2**-24


def run(*words: object) -> None:
    assert command.main([str(word) for word in words]) == 0


def imported(folder: Path, name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """The model of transformers, which was saved in folder/hf and imported to folder/megatron."""
    model = save(name, folder / "hf", dtype, **fields)
    run("import-hf", folder / "hf", "--output", folder / "megatron", "--force")
    return model


def megatron_logits(folder: Path, processes: int = 1, *flags: str) -> Tensor:
    """Megatron's logits of `tokens()`, [2, TOKENS, VOCABULARY], by the flags of the import."""
    torch.save(tokens(), folder / "tokens.pt")
    own = settings.flags(HuggingFaceModel(folder / "hf", 1).settings)
    script = SCRIPTS / "logits.py"
    files = str(folder / "tokens.pt"), str(folder / "logits.pt")
    done = spawn(
        processes, script, *files, *own, *LAUNCH, "--load", str(folder / "megatron"), *flags
    )
    assert (folder / "logits.pt").exists(), done.stdout[-3000:]
    logits: Tensor = torch.load(folder / "logits.pt")
    return logits[..., :VOCABULARY]


def difference(folder: Path, model: Any, processes: int = 1, *flags: str) -> float:
    """The norm of the difference of both sides' logits, relative to the norm of the logits."""
    with torch.no_grad():
        wanted = model(tokens()).logits.float()
    found = megatron_logits(folder, processes, *flags)
    return float((found - wanted).norm() / wanted.norm())


slow_unless_quick = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.outside) for name in MODELS
]


@pytest.mark.parametrize("name", slow_unless_quick)
def test_megatron_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    assert difference(tmp_path, imported(tmp_path, name)) < SUMS


@pytest.mark.outside
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_two_ranks_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model = imported(tmp_path, name)
    layout = "--tensor-model-parallel-size 2".split()
    layout += ["--sequence-parallel"] if name == "mixtral" else []  # which Megatron demands
    assert difference(tmp_path, model, 2, *layout) < SUMS


@pytest.mark.outside
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_bf16_logits_differ_by_its_rounding(name: str, tmp_path: Path) -> None:
    # Some 12 results of a layer are rounded one after the other, each by up to 2**-9 of itself.
    model = imported(tmp_path, name, torch.bfloat16)
    assert difference(tmp_path, model, 1, "--bf16") < 24 * 2**-9


def _joined_in_a_row(self: Any, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


def _reversed(join: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, parts: join(self, parts[::-1])


def _halves_of_heads(self: Qkv, parts: list[Tensor]) -> Tensor:
    """Rotary positions of pairs (0, 1), (2, 3), ..., as older checkpoints have them."""
    turned = [
        part.unflatten(0, (-1, 2, self.size // 2)).transpose(1, 2).flatten(0, 2)
        for part in parts[:2]
    ]
    return Qkv_join(self, [*turned, parts[2]])


Qkv_join, Rows_join = Qkv.join, Rows.join
MISTAKES = {
    "Q, K and V are not grouped": ("llama", Qkv, _joined_in_a_row),
    "gate and up are swapped": ("llama", Rows, _reversed(Rows_join)),
    "rotary positions of pairs": ("llama", Qkv, _halves_of_heads),
    "experts' gate and up are swapped": ("qwen3-moe", Rows, _reversed(Rows_join)),
}


@pytest.mark.outside
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_layout_would_be_noticed(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, layout, wrong = MISTAKES[mistake]
    monkeypatch.setattr(layout, "join", wrong)
    monkeypatch.setattr("megatron_fp4.convert.huggingface.import_hf._check", lambda *_: None)
    assert difference(tmp_path, imported(tmp_path, name)) > 100 * SUMS


@pytest.mark.outside
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("llama", "rotary_base", 11000),
        ("llama", "use_rope_scaling", False),
        ("llama", "layernorm_epsilon", 1e-2),
        ("gpt2", "bias_gelu_fusion", False),
        ("qwen2-moe", "moe_router_pre_softmax", False),
        ("qwen3-moe", "moe_router_pre_softmax", True),
        ("qwen3-moe", "moe_router_topk", 3),
    ],
)
def test_a_wrong_setting_would_be_noticed(
    name: str, setting: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gpt2 if name == "gpt2" else decoder
    normal = module.normal
    monkeypatch.setattr(module, "normal", lambda given: normal(given) | {setting: value})
    assert difference(tmp_path, imported(tmp_path, name)) > 5 * SUMS


# --- and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_round_trip_gives_the_same_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    imported(tmp_path, name, dtype)
    run("export-hf", tmp_path / "megatron", "--output", tmp_path / "again")
    names = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "again").iterdir())
    same, *_ = filecmp.cmpfiles(tmp_path / "hf", tmp_path / "again", names, shallow=False)
    assert same == names


def test_the_tokenizer_travels_through_every_command(tmp_path: Path) -> None:
    """Its files are the released ones, byte by byte, also after a checkpoint was rewritten."""
    save("llama", tmp_path / "hf")
    own = {name: f"{name} of the model" for name in ("tokenizer.model", *model_files.TOKENIZER)}
    for name, content in own.items():
        (tmp_path / "hf" / name).write_text(content)
    run("import-hf", tmp_path / "hf", "--output", tmp_path / "imported")
    two = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 1)
    run("reshard", tmp_path / "imported", "--output", tmp_path / "resharded", *two)
    run("strip", tmp_path / "resharded", "--output", tmp_path / "stripped")
    run("export-hf", tmp_path / "stripped", "--output", tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_text() for name in own} == own


def test_show_tells_of_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(tmp_path, "llama")
    capsys.readouterr()
    run("show", tmp_path / "megatron")
    said = capsys.readouterr().out
    assert f"made by import-hf from {tmp_path / 'hf'}" in said and "optimizer: none" in said
    assert "None" not in said and all(line.strip() for line in said.splitlines())
    # The note is among the files that a launch verifies.
    listed = json.loads((tmp_path / "megatron/release/integrity.json").read_text())["files"]
    assert "made_by.json" in listed


@pytest.mark.parametrize("name", MODELS)
def test_a_config_is_made_of_megatron_s_arguments(name: str, tmp_path: Path) -> None:
    """Without the imported model's files: transformers loads it and gives the same logits."""
    model = imported(tmp_path, name)
    shutil.rmtree(tmp_path / "megatron" / "huggingface")
    run("export-hf", tmp_path / "megatron", "--output", tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_shards_and_rows_of_padding(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf", torch.float16, shard="50KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    run("import-hf", tmp_path / "hf", "--output", tmp_path / "to", "--vocab-multiple", "128")
    run("export-hf", tmp_path / "to", "--output", tmp_path / "again", "--shard-gb", "0.0001")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    first, again = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "hf", tmp_path / "again")
    )
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_gpt2_as_it_was_released(tmp_path: Path) -> None:
    """Without a head and the prefix of it, and with masks beside the weights."""
    from safetensors.torch import load_file, save_file

    save("gpt2", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    found = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(found | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file, {"format": "pt"})
    run("import-hf", tmp_path / "hf", "--output", tmp_path / "to")
    run("export-hf", tmp_path / "to", "--output", tmp_path / "again")
    exported = load_file(tmp_path / "again" / "model.safetensors")
    assert {name.removeprefix("transformer.") for name in exported} == set(found)
    assert all(
        torch.equal(found[name.removeprefix("transformer.")], exported[name]) for name in exported
    )


@pytest.mark.outside
def test_a_trained_model_is_exported(tmp_path: Path) -> None:
    """Two ranks train from a release; transformers then computes what Megatron does."""
    imported(tmp_path, "llama", torch.bfloat16, intermediate_size=192)
    own = settings.flags(HuggingFaceModel(tmp_path / "hf", 1).settings)
    layout = "--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16".split()
    places = ["--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "trained")]
    kind = [*MOCK_DATA[2:3], str(VOCABULARY - 1)]
    train(
        2,
        *own,
        *layout,
        *LAUNCH,
        *places,
        *kind,
        "--fp4-recipe",
        "tetrajet",
        "--save-interval",
        "2",
    )
    like = ["--like", str(tmp_path / "hf")]
    run("export-hf", tmp_path / "trained", "--output", tmp_path / "again", *like)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", dtype=torch.bfloat16
    ).eval()
    shutil.rmtree(tmp_path / "megatron")
    (tmp_path / "trained").rename(tmp_path / "megatron")
    flags = "--bf16", "--no-load-optim", "--no-load-rng"
    assert difference(tmp_path, again, 1, *flags) < 24 * 2**-9
    released = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    changed = [
        key for key, value in again.state_dict().items() if not torch.equal(value, released[key])
    ]
    assert "model.layers.0.mlp.gate_proj.weight" in changed


def test_the_flags_are_those_of_the_release(tmp_path: Path, capsys: Any) -> None:
    save("qwen3-moe", tmp_path / "hf")
    run("import-hf", tmp_path / "hf", "--output", tmp_path / "to", "--dry-run")
    assert not (tmp_path / "to").exists()
    said = capsys.readouterr().out
    for words in ("--qk-layernorm", "--num-experts 4", "--moe-ffn-hidden-size 32", "--swiglu"):
        assert words in said
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert f"--num-layers {config['num_hidden_layers']}" in said


@pytest.mark.parametrize(
    ("name", "fields", "attention", "hidden"),
    [
        ("llama", {}, "0", "0"),
        ("llama", {"attention_dropout": 0.05}, "0.05", "0"),
        ("gpt2", {"attn_pdrop": 0.2}, "0.2", "0.1"),
    ],
)
def test_the_flags_give_the_model_s_dropout(
    name: str,
    fields: dict[str, Any],
    attention: str,
    hidden: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Megatron's defaults are 0.1."""
    save(name, tmp_path / "hf", **fields)
    run("import-hf", tmp_path / "hf", "--output", tmp_path / "to", "--dry-run")
    words = capsys.readouterr().out.split()
    assert words[words.index("--attention-dropout") + 1] == attention
    assert words[words.index("--hidden-dropout") + 1] == hidden
