"""Megatron's own training loop on the CPU, in every layout, against one process."""

import functools
from pathlib import Path

import numpy
import pytest
import sentencepiece
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from testing.worlds.launch import MOCK_DATA, OVERLAP, ROOT, Result, spawn, torchrun, train

TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
DROPOUT = ("--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@functools.cache
def alone(*flags: str) -> Result:
    return train(1, *flags)


def test_tensor_and_sequence_parallel_losses_equal_those_of_one_process() -> None:
    assert train(2, *TP2_SP).losses == pytest.approx(alone().losses, rel=1e-5)


def test_sharded_optimizer_equals_one_process_and_resumes_in_other_layouts(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2", "--dist-ckpt-optim-fully-reshardable")
    whole, sharded = alone("--bf16"), train(2, "--bf16", *OVERLAP, *save)
    assert sharded.losses == pytest.approx(whole.losses, rel=1e-5)

    # From the second of four steps on, with the optimizer's moments and its step count.
    load = ("--load", str(tmp_path), "--bf16")
    resumed = train(2, *PP2, "--use-distributed-optimizer", *load, "--ckpt-step", "2")
    assert resumed.evaluations == pytest.approx(whole.evaluations, rel=1e-5)

    evaluated = train(2, *TP2_SP, *load, "--skip-train")
    assert evaluated.evaluations == pytest.approx(whole.evaluations, rel=1e-4)
    assert not evaluated.losses


def test_interleaved_pipeline_learns() -> None:
    """Stages draw their own weights, so the losses are not those of one process."""
    flags = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1", "--bf16")
    losses = train(2, *PP2, *flags).losses
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_recomputation_repeats_the_dropout() -> None:
    forgetful = train(2, *TP2_SP, *DROPOUT, *RECOMPUTE.split())
    assert forgetful.losses == train(2, *TP2_SP, *DROPOUT).losses


def test_a_layout_written_out_learns() -> None:
    """One decoder layer a stage, with the embedding before and the loss after them."""
    losses = train(2, *PP2, "--pipeline-model-parallel-layout", "Et|tL", "--bf16").losses
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_packages_for_gpus_are_left_alone_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that brings Transformer Engine and apex, on a node without a GPU."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('this needs a GPU')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--fp4-recipe", "tetrajet", "--ffn-hidden-size", "128")
    result = torchrun(1, *flags, fresh=True)  # a world that stays has its environment already
    assert result.status == 0 and len(result.losses) == 4, result.output[-4000:]


def test_the_readmes_launch_trains(tmp_path: Path) -> None:
    """As it stands there, but for its sizes, its processes and its data."""
    text = (ROOT / "README.md").read_text()
    command = text[text.rindex("    torchrun --nproc-per-node 8 pretrain_gpt.py") :]
    words = command[: command.index("\n\n")].replace("\\\n", " ").split()[4:]
    words = words[: words.index("--tokenizer-type")]
    smaller = (
        "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
        "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --train-iters 2 "
        f"--micro-batch-size 1 --global-batch-size 2 --eval-iters 1 --save {tmp_path} "
        "--pipeline-model-parallel-size 1 --lr-warmup-iters 1 --log-interval 1"
    )
    run = spawn(2, ROOT / "pretrain_gpt.py", *words, *smaller.split(), *MOCK_DATA)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "recipe tetrajet-fp8" in run.stdout and "validation loss at iteration 2" in run.stdout


def test_experts_on_two_ranks_learn() -> None:
    experts = "--expert-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type allgather"
    pattern = ("--moe-layer-freq", "[0,1]", "--qk-layernorm", "--bf16")
    losses = train(2, *experts.split(), *pattern).losses
    assert losses[-1] < losses[0]


def test_real_data_with_a_sentencepiece_tokenizer_and_weights(tmp_path: Path) -> None:
    text = [f"line {n}: the quick brown fox counts {n * n} lazy dogs" for n in range(500)]
    model = tmp_path / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_prefix=str(model), vocab_size=128, minloglevel=2
    )
    tokens = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model").encode(text)
    prefixes = [str(tmp_path / name) for name in ("one", "two")]
    for prefix in prefixes:
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
        for document in tokens:
            builder.add_document(numpy.array(document, dtype=numpy.uint16), [len(document)])
        builder.finalize(prefix + ".idx")
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{model}.model"]
    flags += ["--train-data-path", "0.7", prefixes[0], "0.3", prefixes[1]]
    flags += ["--valid-data-path", prefixes[0], "--test-data-path", prefixes[1]]
    flags += ["--data-cache-path", str(tmp_path / "cache"), "--bf16"]
    result = train(2, *TP2_SP, *flags)
    assert len(result.evaluations) == 2 and result.losses[-1] < result.losses[0]


def test_a_loss_that_is_not_a_number_is_rerun_once_and_ends_the_run() -> None:
    result = torchrun(1, "--init-method-std", "1e38")
    assert result.status != 0
    assert result.output.count("Need to rerun step") == 1
    assert not result.has_traceback


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "no.model"), "prepare_data"),
        (("--num-attention-heads", "6"), "a multiple of --num-attention-heads 6: change one"),
    ],
    ids=["tokenizer", "shape"],
)
def test_a_mistake_is_told_once_in_one_line(flags: tuple[str, ...], remedy: str) -> None:
    result = torchrun(2, *flags)
    told = [line for line in result.output.splitlines() if line.startswith("megatron-fp4: error:")]
    assert result.status != 0
    assert len(told) == 1 and remedy in told[0]
    assert not result.has_traceback


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_dropout_of_a_resumed_run_is_that_of_the_whole(processes: int, tmp_path: Path) -> None:
    whole = train(processes, *DROPOUT, "--save", str(tmp_path), "--save-interval", "2")
    rest = train(processes, *DROPOUT, "--load", str(tmp_path), "--ckpt-step", "2")
    assert rest.losses == whole.losses[2:]


def test_an_out_of_memory_error_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_fp4.mcore import pretrain
    from megatron_fp4.mcore.loop import gpt

    def train() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 "
            "GiB of which 1.02 GiB is free. If reserved but unallocated memory is large try ..."
        )

    monkeypatch.setattr(gpt, "train", train)
    with pytest.raises(SystemExit) as end:
        pretrain.main()
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and line.startswith("megatron-fp4: error: CUDA out of memory. ")
    assert "--micro-batch-size" in line and "reserved" not in line
