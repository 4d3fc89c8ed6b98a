"""Makes a Megatron checkpoint of a Hugging Face model.

The model is a folder with config.json and safetensors files: LLaMA, Mistral, Qwen2, Qwen3, Mixtral,
Qwen2-MoE, Qwen3-MoE or GPT-2. The checkpoint has the format torch_dist, which loads under every
parallel layout, and is a release: a run that loads it starts at step 0 with a new optimizer. The
flags for such a run are printed. Tensors are converted one at a time, so little memory is needed.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.convert import torch_dist, torch_dist_writer
from megatron_fp4.convert.huggingface import families, model_files, settings
from megatron_fp4.convert.huggingface.layouts import Entry
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.output import Progress, check_target, complete_folder
from megatron_fp4.convert.rewrite import equal_bits, note
from megatron_fp4.convert.safetensors_files import Folder
from megatron_fp4.convert.torch_dist import Checkpoint
from megatron_fp4.convert.torch_dist_writer import Chunk
from megatron_fp4.errors import ConfigError

# Tensors that are computed from config.json: masks of GPT-2, frequencies of rotary positions.
_COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_BASE = "transformer."  # GPT-2 was released without its head, and without this prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="the folder of the Hugging Face model")
    add("--output", type=Path, required=True, help="the folder of checkpoints to make")
    add(
        "--vocab-multiple",
        type=int,
        default=1,
        metavar="N",
        help="add rows of zeros to the embedding up to a multiple of N; tensor parallelism needs a "
        "multiple of its size (%(default)s)",
    )
    add("--force", action="store_true", help="replace --output if it exists")
    add("--dry-run", action="store_true", help="check the model and print the flags; write nothing")


def run(args: argparse.Namespace) -> None:
    """Imports a model. Raises ConfigError, before anything is written, if it cannot be."""
    source = HuggingFaceModel(args.model, args.vocab_multiple)
    size = sum(chunk.bytes for chunk in source.chunks())
    print(f"{args.model}: {source.family.model_type}, {size / 1e9:.2f} GB")
    check_target(args.output, args.force, (args.model,))
    if not args.dry_run:
        _write(source, args.output, size)
    print("Megatron's flags for this model:\n")
    words = [*settings.flags(source.settings), *source.dropout_flags()]
    words += source.tokenizer_flags(args.output)
    print(f"    {_lines(words)}\n")
    print(f"To train from it, add --load {args.output} and --save with another folder.")


def _write(source: HuggingFaceModel, output: Path, size: int) -> None:
    progress = Progress(f"import to {output}", size)
    with complete_folder(output) as folder:
        path = folder / torch_dist.RELEASE
        path.mkdir()
        note(path, "import-hf", [source.folder.path])
        torch_dist_writer.write(
            path, source.chunks(), source.objects(), lambda chunk: progress.add(chunk.bytes)
        )
        (folder / torch_dist.TRACKER).write_text(torch_dist.RELEASE)
        model_files.copy(source.folder.path, folder / model_files.FOLDER)
        _check(source, Checkpoint(path))
    print(f"{output}: written and read again, every tensor is equal")


def _check(source: HuggingFaceModel, made: Checkpoint) -> None:
    """Raises ConfigError unless every tensor of the checkpoint is what the model has."""
    for entry in source.entries:
        parts = entry.layout.split(made.tensor(entry.key, entry.index))
        for name, part in zip(entry.names, parts, strict=True):
            if not equal_bits(part, source.folder.tensor(source.names[name])):
                raise ConfigError(f"{name} was not read as it was written: check the disk")


class HuggingFaceModel:
    """A Hugging Face model, and what Megatron's checkpoint of it has.

    path: its folder. multiple: of which the number of rows of the embedding is to be one.
    Raises ConfigError if the model is not known here, and if its files do not have the tensors that
    its config.json implies.
    """

    def __init__(self, path: Path, multiple: int) -> None:
        if multiple < 1:
            raise ConfigError(f"--vocab-multiple {multiple} is not positive")
        self.config = model_files.read_config(path)
        self.family = families.by_name(self.config["model_type"])
        vocab_size = self.config["vocab_size"]
        padded = -(-vocab_size // multiple) * multiple
        if padded > 2 * vocab_size:
            raise ConfigError(
                f"--vocab-multiple {multiple} would add {padded - vocab_size} rows to the "
                f"{vocab_size} of the vocabulary: give the tensor-parallel size, or a small "
                "multiple of it"
            )
        self.settings = self.family.settings(self.config, padded)
        self.entries = list(self.family.entries(self.settings, vocab_size))
        self.folder = Folder(path)
        self.names = self._find_names()  # of a tensor, and in the files

    def _find_names(self) -> dict[str, str]:
        given = self.folder.tensors
        wanted = [name for entry in self.entries for name in entry.names]
        prefix = _BASE if wanted[0].startswith(_BASE) and wanted[0] not in given else ""
        names = {name: name.removeprefix(prefix) for name in wanted}
        if missing := [name for name in wanted if names[name] not in given]:
            raise ConfigError(
                f"{self.folder.path} has no {missing[0]}: it does not fit config.json"
            )
        rest = set(given) - set(names.values())
        if not self.settings["untie_embeddings_and_output_weights"]:
            rest.discard("lm_head.weight")  # the embedding once more
        if unknown := sorted(name for name in rest if not _COMPUTED.search(name)):
            raise ConfigError(
                f"{self.folder.path} has {unknown[0]}, which a {self.family.model_type} here does "
                "not have"
            )
        return names

    def chunks(self) -> Iterator[Chunk]:
        """Every tensor of Megatron's checkpoint, to be loaded when it is written."""
        for entry in self.entries:
            infos = [self.folder.tensors[self.names[name]] for name in entry.names]
            self._check_shapes(entry, infos)
            whole = TensorInfo((*entry.axes, *entry.shape), infos[0].dtype)
            offset = (*entry.index, *(0 for _ in entry.shape))
            part = (*(1 for _ in entry.index), *entry.shape)
            yield Chunk(entry.key, whole, offset, part, partial(self._load, entry))

    def _check_shapes(self, entry: Entry, infos: list[TensorInfo]) -> None:
        """Raises ConfigError if tensors of the model have other shapes than config.json implies.

        entry: the tensor of Megatron that they are joined to. infos: their shapes and dtypes.
        """
        if len({info.dtype for info in infos}) > 1:
            raise ConfigError(f"{', '.join(entry.names)} have different dtypes: save in one dtype")
        try:
            joined = entry.layout.join([torch.empty(info.shape, device="meta") for info in infos])
            again = [tuple(part.shape) for part in entry.layout.split(joined)]
            fits = joined.shape == entry.shape and again == [info.shape for info in infos]
        except RuntimeError:
            fits = False
        if not fits:
            shapes = ", ".join(str(info.shape) for info in infos)
            raise ConfigError(f"{', '.join(entry.names)}: {shapes} do not fit config.json")

    def _load(self, entry: Entry) -> Tensor:
        return entry.layout.join([self.folder.tensor(self.names[name]) for name in entry.names])

    def objects(self) -> dict[str, bytes]:
        """What Megatron expects in a checkpoint beside tensors."""
        # An empty extra state for each linear, under the key that Megatron asks for.
        empty = torch_dist_writer.saved(None)
        linears = [entry for entry in self.entries if entry.linear is not None]
        found = {_extra_state(entry): empty for entry in linears}
        common = {
            "args": argparse.Namespace(**self.arguments()),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {"singleton_local_shards": False},
        }
        return found | {torch_dist.COMMON: torch_dist_writer.saved(common)}

    def arguments(self) -> dict[str, Any]:
        """Arguments of Megatron's, by name, to be saved in the checkpoint.

        A launch that loads it compares its own with some of them, and --use-checkpoint-args takes
        the model's sizes from them.
        """
        return self.settings | {"add_position_embedding": True, "seq_length": None}

    def dropout_flags(self) -> list[str]:
        """The model's own dropout. Without these flags Megatron trains with 0.1."""
        attention = self.config.get("attention_dropout", self.config.get("attn_pdrop", 0.0))
        hidden = self.config.get("resid_pdrop", 0.0)
        return ["--attention-dropout", f"{attention:g}", "--hidden-dropout", f"{hidden:g}"]

    def tokenizer_flags(self, output: Path) -> list[str]:
        if not model_files.has_tokenizer(self.folder.path):
            return []
        kept = str(output / model_files.FOLDER)
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", kept]


def _extra_state(entry: Entry) -> str:
    """The key of the extra state of the linear whose weight `entry` is."""
    index, axes = entry.index or (0,), entry.axes or (1,)
    shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, axes))}"
    return f"{entry.key.removesuffix('weight')}_extra_state/shard_{shard}"


def _lines(words: list[str]) -> str:
    """Flags as a shell takes them, on lines of at most 90 characters."""
    lines = [""]
    for flag in re.split(r" (?=--)", shlex.join(words)):
        if len(lines[-1]) + len(flag) > 90:
            lines.append("")
        lines[-1] += f" {flag}" if lines[-1] else flag
    return " \\\n    ".join(lines)
