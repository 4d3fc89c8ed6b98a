"""What the command line means on a machine without a GPU."""

import argparse

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import arguments
from tests.mcore.launch import MOCK_DATA

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = arguments.add_arguments(add_megatron_arguments(parser))
    return parser.parse_args(["--train-iters", "1", *flags])


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
        ("--transformer-impl transformer_engine", r"install transformer-engine\[pytorch\]"),
        ("--attention-backend local", "leave it out"),
        ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model PATH"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model no.model", "prepare_data"),
        ("--data-path 0.5 no/data 0.5 no/other", "no/data.idx does not exist"),
        ("--per-split-data-args-path no.json", "should list the datasets"),
        ("--tokenizer-type HuggingFaceTokenizer --mock-data", "pip install transformers"),
        ("--sft", "pretraining only"),
        ("--rampup-batch-size 2 2 8", "use --step-batch-size-schedule"),
        ("--recompute-modules layernorm", "recompute other modules"),
        ("--train-iters 0", "give --train-iters or --train-samples"),
        ("--not-a-flag", "unrecognized arguments: --not-a-flag"),
        ("--num-layers two", "invalid int value"),
    ],
)
def test_a_mistake_is_a_config_error_that_names_the_remedy(flags: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse(*MOCK_DATA, *flags.split())


def test_data_and_a_tokenizer_have_to_be_named() -> None:
    with pytest.raises(ConfigError, match="no tokenizer: give --tokenizer-type"):
        parse("--mock-data")
    with pytest.raises(ConfigError, match="no data: give --data-path PREFIX"):
        parse("--tokenizer-type", "NullTokenizer", "--vocab-size", "512")
