"""Makes a Hugging Face model of a Megatron checkpoint.

The checkpoint has the format torch_dist. The family (LLaMA, Qwen3, Mixtral, GPT-2 and so on) is the
first that can express the arguments of its run, or that of --like. Tensors are converted one at a
time; memory holds those of one safetensors file (--shard-gb). config.json, the tokenizer and the
generation config are those of --like; without it, those that import-hf kept beside the checkpoint,
or else new ones.

--format compressed-tensors exports the weights of linears as the FP4 codes and scales that training
multiplied; gpt-oss-experts does so for experts, in the layout of gpt-oss. Weights that training did
not quantize, or in a way that the format cannot hold, are quantized if --quantize-as asks for it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import get_quantizer, list_quantizers
from megatron_fp4.convert import keys, rewrite, safetensors_files, torch_dist
from megatron_fp4.convert.arguments import whole_number
from megatron_fp4.convert.huggingface import compressed_tensors, families, model_files
from megatron_fp4.convert.huggingface.compressed_tensors import CompressedTensors
from megatron_fp4.convert.huggingface.gpt_oss import GptOssExperts
from megatron_fp4.convert.huggingface.layouts import Entry
from megatron_fp4.convert.huggingface.run_tokenizer import RunTokenizer
from megatron_fp4.convert.huggingface.settings import differences
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.output import Progress, check_target, complete_folder
from megatron_fp4.convert.safetensors_files import Folder, Named
from megatron_fp4.convert.torch_dist import Checkpoint
from megatron_fp4.errors import ConfigError

FORMATS = ("plain", "compressed-tensors", "gpt-oss-experts")


class Fp4Format(Protocol):
    """A form in which weights are exported in FP4."""

    def holds(self, entry: Entry) -> bool:
        """Whether this entry is quantized."""

    def tensors(self, entry: Entry) -> Iterator[Named]:
        """The tensors that stand for a quantized entry."""

    def config(self) -> dict[str, Any]:
        """The fields that config.json has beside those of the model."""

    def summary(self) -> list[str]:
        """Lines that tell what is exported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="a folder of Megatron checkpoints, or one checkpoint in it")
    add("--step", type=int, help="the step of the checkpoint (the newest)")
    add("--output", type=Path, required=True, help="the folder of the model to make")
    add("--like", type=Path, metavar="MODEL", help="a Hugging Face model of the same architecture")
    add("--format", choices=FORMATS, default="plain", help="plain: in the checkpoint's dtype")
    held = [name for name in list_quantizers() if _can_be_asked_for(name)]
    add("--quantize-as", choices=held, help="quantize weights whose FP4 codes cannot be exported")
    add(
        "--activations",
        choices=("training", "bf16"),
        default="training",
        help="of linears in FP4, where compressed-tensors expresses it (%(default)s)",
    )
    add("--vocab-size", type=int, help="tokens, that is rows of the embedding without padding")
    add("--shard-gb", type=float, default=2.0, help="size of a safetensors file (%(default)s)")
    add("--force", action="store_true", help="replace --output if it exists")
    add("--dry-run", action="store_true", help="check the checkpoint; write nothing")
    rewrite.add_verify(parser)


def run(args: argparse.Namespace) -> None:
    """Exports a model. Raises ConfigError, before anything is written, if it cannot be."""
    if not (math.isfinite(args.shard_gb) and args.shard_gb > 0):
        raise ConfigError(f"--shard-gb is a size above 0, such as 2, not {args.shard_gb:g}")
    path = torch_dist.find(args.checkpoint, args.step)
    checkpoint = Checkpoint(path)
    source = MegatronModel(checkpoint, args.like or _kept(path), args.vocab_size)
    form = _form(args, source)
    named = list(source.tensors(form))
    size = sum(tensor.info.bytes for tensor in named)
    print(f"{path}: {source.family.model_type}, {size / 1e9:.2f} GB")
    for line in [*([] if form is None else form.summary()), *source.notes()]:
        print(f"    {line}")
    sources = (args.checkpoint, path, *([args.like] if args.like else []))
    check_target(args.output, args.force, sources)
    if args.dry_run:
        return
    rewrite.verify([checkpoint], args)
    progress = Progress(f"export to {args.output}", size)
    with complete_folder(args.output) as folder:
        safetensors_files.write(
            folder, named, int(args.shard_gb * 1e9), lambda tensor: progress.add(tensor.info.bytes)
        )
        source.write_config(folder)
        if form is not None:
            model_files.edit_config(folder, form.config())
        _check(named, Folder(folder))
    print(f"{args.output}: written and read again, every tensor is equal")


def _can_be_asked_for(name: str) -> bool:
    quantizer = get_quantizer(name)
    return not quantizer.stochastic and not compressed_tensors.problem(quantizer)


def _form(args: argparse.Namespace, source: MegatronModel) -> Fp4Format | None:
    """The form of FP4 weights; None to export weights as the checkpoint has them."""
    if args.activations != "training" and args.format != "compressed-tensors":
        raise ConfigError("--activations needs --format compressed-tensors")
    if args.format == "plain":
        if args.quantize_as is not None:
            raise ConfigError("--quantize-as needs --format compressed-tensors")
        return None
    quantizer = args.quantize_as and get_quantizer(args.quantize_as)
    if args.format == "gpt-oss-experts":
        return GptOssExperts(source.checkpoint, source.entries, quantizer)
    return CompressedTensors(source.checkpoint, source.entries, quantizer, args.activations)


def _kept(path: Path) -> Path | None:
    """The folder in which import-hf kept the files of the imported model; None without one."""
    kept = path.resolve().parent / model_files.FOLDER
    return kept if (kept / model_files.CONFIG).is_file() else None


def _check(named: list[Named], made: Folder) -> None:
    for tensor in named:
        if not rewrite.equal_bits(made.tensor(tensor.name), tensor.load()):
            raise ConfigError(f"{tensor.name} was not read as it was written: check the disk")


class MegatronModel:
    """A Megatron checkpoint as a model of `transformers`.

    like: the folder of a model of the same architecture, or None.
    vocab_size: tokens of the vocabulary; None: those of `like`, or of the run's tokenizer, or as
        many as the embedding has rows.
    Raises ConfigError if no family can express the model, if `like` has another architecture, if
    the embedding cannot have so many tokens, and if the checkpoint does not have the tensors that
    its arguments imply.
    """

    def __init__(self, checkpoint: Checkpoint, like: Path | None, vocab_size: int | None) -> None:
        self.checkpoint, self.like = checkpoint, like
        self.args = self.checkpoint.args()
        config = None if like is None else model_files.read_config(like)
        self.tokenizer = RunTokenizer(self.args) if config is None else None
        self.vocab_size = self._vocab_size(config, vocab_size)
        self.family: families.Family
        if config is None:
            self.family, self.settings = families.of_run(self.args, self.vocab_size)
        else:
            self.family = families.by_name(config["model_type"])
            self.settings = families.settings_of(self.args)
            self._compare(config)
        self.entries = list(self.family.entries(self.settings, self.vocab_size))
        self._check_keys()
        self._check_shapes()

    def _vocab_size(self, config: dict[str, Any] | None, given: int | None) -> int:
        """The number of tokens: the rows of the embedding that are exported, without its padding.

        config: of the model that --like names, if it is given. given: --vocab-size. Raises
        ConfigError if the embedding has fewer rows, or if `given` leaves out known tokens.
        """
        rows = whole_number(self.args, "padded_vocab_size")
        if config is not None:
            tokens, source = config["vocab_size"], str(self.like)
        else:
            assert self.tokenizer is not None
            tokens, source = self.tokenizer.size, "the run's tokenizer"
        if tokens is not None and tokens > rows:
            raise ConfigError(
                f"{source} has {tokens} tokens, more than the embedding's {rows} rows: give --like "
                "MODEL, with the tokenizer of the run"
            )
        if given is None:
            return rows if tokens is None else int(tokens)
        if not (tokens or 1) <= given <= rows:
            least = "1" if tokens is None else f"{tokens} (the tokens of {source})"
            raise ConfigError(
                f"--vocab-size is {least} to {rows} (the embedding's rows), not {given}"
            )
        return given

    def notes(self) -> list[str]:
        """Lines that tell what the run's arguments leave open."""
        found = []
        if self.tokenizer is not None and self.tokenizer.problem:
            found.append(
                f"tokenizer: none, since the run {self.tokenizer.problem}: give --like MODEL for "
                "another"
            )
            if self.vocab_size == self.settings["padded_vocab_size"] != self.tokenizer.size:
                found.append(
                    f"vocabulary: {self.vocab_size}, all rows of the embedding; if some are "
                    "padding, give --vocab-size"
                )
        return found

    def _compare(self, config: dict[str, Any]) -> None:
        """Raises ConfigError if the model of --like has other settings than the checkpoint."""
        padded = self.settings["padded_vocab_size"]
        given = families.comparable(self.family.settings(config, padded))
        found = differences(families.comparable(self.settings), given)
        if found:
            raise ConfigError(f"{self.like} has another architecture: {'; '.join(found)}")

    def _check_keys(self) -> None:
        have = {key for key in self.checkpoint.tensors if keys.kind(key) == "weights"}
        want = {entry.key for entry in self.entries}
        if missing := sorted(want - have):
            raise ConfigError(f"{self.checkpoint.path} has no tensor {missing[0]}")
        if unknown := sorted(have - want):
            raise ConfigError(
                f"{self.checkpoint.path} has {unknown[0]}, which a {self.family.model_type} here "
                "does not have"
            )

    def _check_shapes(self) -> None:
        for entry in self.entries:
            shape = self.checkpoint.tensors[entry.key].shape
            if shape != (*entry.axes, *entry.shape):
                raise ConfigError(
                    f"{self.checkpoint.path}: {entry.key} is {shape}, and the checkpoint's "
                    f"arguments imply {(*entry.axes, *entry.shape)}: it is damaged"
                )

    def tensors(self, form: Fp4Format | None = None) -> Iterator[Named]:
        """Every tensor of the model, to be loaded when it is written.

        form: of the entries that it holds.
        """
        for entry in self.entries:
            if form is not None and form.holds(entry):
                yield from form.tensors(entry)
                continue
            info = self.checkpoint.tensors[entry.key]
            empty = torch.empty(info.shape[len(entry.index) :], device="meta")
            for i, part in enumerate(entry.layout.split(empty)):
                shape = TensorInfo(tuple(part.shape), info.dtype)
                yield Named(entry.names[i], shape, partial(self._load, entry, i))

    def _load(self, entry: Entry, number: int) -> Tensor:
        whole = self.checkpoint.tensor(entry.key, entry.index)
        return entry.layout.split(whole)[number].contiguous()

    def write_config(self, folder: Path) -> None:
        """Writes config.json, the tokenizer and the generation config to `folder`."""
        dtype = next(iter(self.tensors())).info.dtype
        if self.like is not None:
            model_files.copy(self.like, folder)
            model_files.edit_config(folder, {"vocab_size": self.vocab_size})
        else:
            assert self.tokenizer is not None
            config = self.family.config(self.settings, self.vocab_size) | self.tokenizer.ids()
            model_files.write_config(folder, config)
            self.tokenizer.write(folder)
        model_files.set_dtype(folder, dtype)
