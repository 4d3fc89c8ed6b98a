"""Parses a command line without a launch, and writes the data that it names."""

import argparse
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import add_megatron_arguments

from megatron_fp4.mcore.launch import command_line
from testing.worlds.launch import TINY


def parse(*flags: str, model: list[str] = TINY) -> argparse.Namespace:
    """The arguments that Megatron's parser with the plugin returns for these flags, checked."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = command_line.add_arguments(add_megatron_arguments(parser))
    return parser.parse_args([*model, *flags])


def dataset(folder: Path, *documents: list[int]) -> str:
    """Writes documents, lists of tokens, as an indexed dataset in `folder`; returns its prefix."""
    prefix = str(folder / "text")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_document(numpy.array(document, dtype=numpy.uint16), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix
