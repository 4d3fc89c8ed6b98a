"""What the command line means on a machine without a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.launch import command_line
from megatron_fp4.mcore.launch.refusals.checkpoints import background_save
from megatron_fp4.mcore.launch.refusals.table import of_launch, refuse
from megatron_fp4.mcore.loop import gpt
from testing.builders.command_line import dataset, parse
from testing.worlds.launch import MOCK_DATA, TINY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


@pytest.fixture(autouse=True)
def no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cpu.install() hides it in a launch; this process may have imported it."""
    monkeypatch.setattr(machine, "HAVE_TE", False)


def test_no_flag_has_to_say_that_there_is_no_gpu() -> None:
    args = parse(*MOCK_DATA)
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")
    assert args.use_cpu_initialization and args.no_persist_layer_norm and args.num_workers == 0
    fusions = ("gradient_accumulation", "masked_softmax", "apply_rope", "bias_swiglu")
    assert not any(getattr(args, f"{fusion}_fusion") for fusion in fusions)


def test_the_mask_is_made_only_where_it_says_something() -> None:
    assert not parse(*MOCK_DATA).create_attention_mask_in_dataloader
    assert parse(*MOCK_DATA, "--reset-attention-mask").create_attention_mask_in_dataloader


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--distributed-backend nccl", "use --distributed-backend gloo"),
        ("--transformer-impl transformer_engine", r"pip install 'transformer-engine\[pytorch\]'"),
        ("--attention-backend local", "leave it out"),
        ("--fp4-recipe tetrajet --spec some.module spec", "does not support --spec: leave it out"),
        ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model PATH"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model no.model", "prepare_data"),
        ("--data-path 0.5 no/data 0.5 no/other", "no/data.idx does not exist"),
        ("--per-split-data-args-path no.json", "should list the datasets"),
        ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model PATH"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/such", "no tokenizer at /no"),
        ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file PATH"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file pyproject.toml", "needs --merge-file"),
        ("--tokenizer-type TikTokenizer --tokenizer-model no.json", "no tokenizer at no.json"),
        ("--tokenizer-type MultimodalTokenizer", "is not supported"),
        ("--inprocess-restart", "not supported"),
        ("--full-validation", "--full-validation is not supported: leave it out"),
        ("--multiple-validation-sets", "--multiple-validation-sets is not supported"),
        ("--profile", "--profile needs a GPU and this machine shows none: leave it out"),
        (
            "--profile --use-pytorch-profiler",
            "beside TensorBoard's logs: add --tensorboard-dir DIR",
        ),
        ("--data-cache-path /proc/nope", "--data-cache-path /proc/nope cannot be written"),
        (
            "--fp4-recipe tetrajet --num-layers-at-start-in-bf16 1",
            "--num-layers-at-start-in-bf16 1 needs --first-last-layers-bf16: add it",
        ),
        ("--yaml-cfg no.yaml", "no file no.yaml"),
        ("--tensorboard-dir /proc/nope", "--tensorboard-dir /proc/nope cannot be written"),
        ("--defer-embedding-wgrad-compute", "fused_weight_gradient_mlp_cuda.*: leave it out"),
        ("--adlr-autoresume", "needs the package userlib, which is not installed: leave it out"),
        ("--non-persistent-ckpt-type local", "pip install nvidia-resiliency-ext"),
        ("--log-memory-to-tensorboard", "logs nothing without --tensorboard-dir DIR: add it"),
        (
            "--num-query-groups 3",
            "--num-attention-heads 4 is not a multiple of --num-query-groups 3",
        ),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 161",
            "161 is not a multiple of --tensor-model-parallel-size 2",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
            "--seq-length 63 is not a multiple of --tensor-model-parallel-size 2",
        ),
        ("--num-experts 4 --moe-router-topk 5", "above --num-experts 4: lower it"),
        ("--sft", "pretraining only"),
        ("--logits-load-dir teacher", "--logits-load-dir is not supported: pretraining only"),
        ("--perform-rl-step", "--perform-rl-step is not supported: pretraining only"),
        ("--dataloader-type external", "external is not supported: use single or cyclic"),
        ("--gpu-sniff-test-interval 2", "^--gpu-sniff-test-interval needs a GPU.*: leave it out"),
        ("--log-device-memory-used", "^--log-device-memory-used needs a GPU.*: leave it out"),
        ("--record-memory-history", "^--record-memory-history needs a GPU.*: leave it out"),
        ("--moe-routing-trace-path DIR", "^--moe-routing-trace-path needs a GPU.*: leave it out"),
        ("--activation-func-fp8-input-store", "needs a SwiGLU that is fused: by Megatron on a GPU"),
        (
            "--activation-func-fp8-input-store --fp4-recipe tetrajet --fp4-fused-kernels off",
            "needs a SwiGLU that is fused: by Megatron on a GPU",
        ),
        ("--rampup-batch-size 2 2 8", "use --step-batch-size-schedule"),
        ("--apply-residual-connection-post-layernorm", "Megatron-core 0.19 drops .*leave it out"),
        ("--openai-gelu", "Megatron-core 0.19 drops --openai-gelu: leave it out"),
        (
            "--num-experts 4 --moe-use-upcycling",
            "cannot load the dense model of --moe-use-upcycling: leave it out",
        ),
        ("--init-method-xavier-uniform", "builds no model with --init-method-xavier.*leave it out"),
        ("--num-experts 4 --save-tokens-per-expert-interval 2", "saves nothing .*leave it out"),
        ("--phase-transition-iterations 2", "needs --train-samples in place of --train-iters"),
        ("--recompute-modules layernorm", "needs Transformer Engine"),
        ("--use-precision-aware-optimizer", "needs Transformer Engine"),
        (
            "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            "use --moe-token-dispatcher-type allgather",
        ),
        ("--num-experts 4 --tensor-model-parallel-size 2", "need --sequence-parallel: add it"),
        ("--fp16 --bf16", "choose one"),
        ("--save checkpoints", "--save needs --save-interval N"),
        ("--save /proc/nope --save-interval 1", "/proc/nope cannot be written"),
        ("--async-save --ckpt-format torch", "leave out one"),
        ("--async-save --use-persistent-ckpt-worker", "needs a GPU.*leave it out"),
        (
            "--async-save --use-persistent-ckpt-worker --use-checkpoint-args",
            "needs a GPU.*leave it out",
        ),
        (
            "--save checkpoints --non-persistent-save-interval 2",
            "needs --non-persistent-ckpt-type global",
        ),
        (
            "--save checkpoints --save-interval 4 --non-persistent-save-interval 2 "
            "--non-persistent-ckpt-type global --ckpt-format torch",
            "does not save in --ckpt-format torch: leave out one",
        ),
        ("--train-iters 0", "^how long to train. give --train-iters or --train-samples"),
        ("--train-iters 0 --skip-train", "with --skip-train too: how long to train. give --train-"),
        (
            "--fp4-recipe tetrajet --fp4-bf16-after 1.5",
            "-after 1.5: give a share of training in",
        ),
        ("--not-a-flag", "unrecognized arguments: --not-a-flag"),
        ("--lrr 1", "unrecognized arguments: --lrr 1; did you mean --lr"),
        ("--fp4-recipe", "expected one argument: give a value .a shell variable may not be set"),
        ("--fp4-recipe --bf16", "argument --fp4-recipe: expected one argument"),
        ("--fp4-bf16-gemms", "expected at least one argument: give a value"),
        ("--num-layers two", "invalid int value"),
    ],
)
def test_a_mistake_is_a_config_error_that_names_the_remedy(flags: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse(*MOCK_DATA, *flags.split())


def test_fp8_input_is_that_of_swiglu() -> None:
    flag = "--activation-func-fp8-input-store"
    assert parse(*MOCK_DATA, flag, "--fp4-recipe", "tetrajet").activation_func_fp8_input_store
    given = parse(*MOCK_DATA)
    given.activation_func_fp8_input_store, given.swiglu = True, False
    with pytest.raises(ConfigError, match="keeps the input of SwiGLU: add --swiglu, or leave"):
        refuse(of_launch(given, ours=True))


def test_saving_over_another_run_is_refused(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    parse(*MOCK_DATA, *save)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(ConfigError, match=f"add --load {tmp_path} to go on"):
        parse(*MOCK_DATA, *save)
    parse(*MOCK_DATA, *save, "--load", str(tmp_path))


def test_layers_in_bf16_are_one_at_each_end_unless_given() -> None:
    layers = ["--fp4-recipe", "tetrajet", "--first-last-layers-bf16"]
    args = parse(*MOCK_DATA, *layers, "--num-layers-at-end-in-bf16", "2")
    assert (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16) == (1, 2)


def test_data_and_a_tokenizer_have_to_be_named() -> None:
    with pytest.raises(ConfigError, match="no tokenizer: give --tokenizer-type"):
        parse("--mock-data")
    with pytest.raises(ConfigError, match="no data: give --train-data-path and --valid-data-path"):
        parse("--tokenizer-type", "NullTokenizer", "--vocab-size", "512")


@pytest.mark.parametrize(
    "flag",
    "--lr --micro-batch-size --num-layers --hidden-size --num-attention-heads --seq-length "
    "--max-position-embeddings".split(),
)
def test_what_megatron_has_no_default_for_is_asked_for(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"give {flag}"):
        parse(*MOCK_DATA, model=tiny_without(flag))


def test_evaluation_alone_needs_no_learning_rate() -> None:
    assert parse(*MOCK_DATA, "--skip-train", model=tiny_without("--lr")).lr is None


def tiny_without(flag: str) -> list[str]:
    at = TINY.index(flag)
    return TINY[:at] + TINY[at + 2 :]


def test_a_folder_to_save_in_is_made_and_a_file_is_none(tmp_path: Path) -> None:
    save = ("--save-interval", "1", "--save")
    parse(*MOCK_DATA, *save, str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be written"):
        parse(*MOCK_DATA, *save, str(tmp_path / "file"))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\n\x0e\n\x05<unk>"])
def test_a_tokenizer_that_is_none(content: bytes, tmp_path: Path) -> None:
    model = tmp_path / "tokenizer.model"
    model.write_bytes(content)
    flags = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model))
    with pytest.raises(ConfigError, match="no SentencePiece model, or is cut short"):
        parse("--mock-data", *flags)


@pytest.mark.parametrize(
    ("suffix", "damage", "problem"),
    [
        (".idx", lambda content: b"", "not an index"),
        (".idx", lambda content: content[:20], "text.idx is cut short"),
        (".idx", lambda content: b"x" * len(content), "not an index"),
        (".idx", lambda content: content[:17] + b"\xff" + content[18:], "not an index"),
        (".idx", lambda content: content[:-1], "text.idx is cut short"),
        (".bin", lambda content: b"", "text.bin is cut short"),
        (".bin", lambda content: content[:-1], "text.bin is cut short"),
    ],
)
def test_a_damaged_dataset(
    suffix: str, damage: Callable[[bytes], bytes], problem: str, tmp_path: Path
) -> None:
    prefix = dataset(tmp_path, [1, 2, 3], [4, 5])
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "8")
    halves = ("--split", "50,50,0")
    parse(*tokenizer, "--data-path", prefix, *halves)
    file = Path(prefix + suffix)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=problem):
        parse(*tokenizer, "--data-path", prefix, *halves)


def test_a_dataset_without_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lists no text"):
        parse(
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "8",
            "--data-path",
            dataset(tmp_path),
        )


def test_data_of_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "8", "--split", "50,50,0"]
    args = parse(*flags, "--data-path", dataset(tmp_path, [1, 7], [2]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(command_line, "parse_and_validate_args", lambda **_: args)
    args.padded_vocab_size = 8
    assert command_line.parse() is args
    args.padded_vocab_size = 7
    with pytest.raises(ConfigError, match="token 7 of the data is beyond the vocabulary of 7"):
        command_line.parse()


@pytest.mark.parametrize("key", ["tokens", "labels"])
def test_a_token_beyond_the_vocabulary_is_told_where_it_is_read(
    key: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        batch = {"tokens": torch.zeros(1, 4).long(), "labels": torch.zeros(1, 4).long()}
        batch[key][0, 2] = 8
        yield batch

    args: Any = SimpleNamespace(padded_vocab_size=8, pipeline_model_parallel_layout=None)
    monkeypatch.setattr(gpt, "get_args", lambda: args)
    monkeypatch.setattr(gpt, "_has_mtp", lambda stage: False)
    with pytest.raises(ConfigError, match="token 8 of the data is beyond the vocabulary of 8"):
        gpt.get_batch(batches(), None)


def test_a_mistake_in_a_layer_is_told_without_the_modules_around_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Layer:
        def __init__(self, **inner: Any) -> None:
            if not inner:
                raise ConfigError("32 heads are too many: give fewer")
            build_module(ModuleSpec(Layer))

    def train() -> None:
        build_module(ModuleSpec(Layer), inner=True)

    with pytest.raises(ConfigError, match="fewer when instantiating Layer when instantiating"):
        train()
    monkeypatch.setattr(gpt, "train", train)
    with pytest.raises(SystemExit):
        pretrain.main()
    assert capsys.readouterr().err == ("megatron-fp4: error: 32 heads are too many: give fewer\n")


def test_an_mlp_with_biases_is_not_recomputed() -> None:
    """Megatron 0.19 would, without end."""
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    args = parse(*MOCK_DATA, *flags)
    args.add_bias_linear = True
    with pytest.raises(ConfigError, match="add --disable-bias-linear"):
        refuse(of_launch(args, ours=True))


def test_saving_in_the_background_needs_its_package_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parse(*MOCK_DATA, "--async-save")  # upstream saves in the foreground, and says so
    args.use_persistent_ckpt_worker = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "installed", lambda package: False)
    with pytest.raises(ConfigError, match="add --async-strategy mcore"):
        refuse(background_save(args))
    args.async_strategy = "mcore"
    refuse(background_save(args))
