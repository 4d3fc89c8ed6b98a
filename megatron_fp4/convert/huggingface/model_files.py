"""The files of a model of `transformers` beside its weights: config.json, tokenizer, generation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.convert.safetensors_files import PACKAGES
from megatron_fp4.errors import ConfigError

CONFIG = "config.json"
# What is not copied with a model: its weights in all forms, and what is no part of it.
_LEFT = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer has one of them
TOKENIZER = (
    *_VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
FOLDER = "huggingface"  # in a folder of Megatron checkpoints: the files of the imported model


def read_config(folder: Path) -> dict[str, Any]:
    """config.json with the defaults of its class. Raises ConfigError if it cannot be read."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} has no {CONFIG}: give the folder of a Hugging Face model")
    auto = _transformers().AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many kinds for a bad file
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder / CONFIG} cannot be read: {line}") from error
    found: dict[str, Any] = config.to_dict()
    if found.get("quantization_config"):
        raise ConfigError(f"{folder} is quantized: give the model that it was made from")
    return found


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes config.json: these fields, and for others the defaults of the class."""
    auto = _transformers().AutoConfig
    auto.for_model(**fields).save_pretrained(folder)


def set_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Sets the dtype in the config.json of `folder`, under the name that it has there."""
    config = json.loads((folder / CONFIG).read_text())
    word = "torch_dtype" if "torch_dtype" in config else "dtype"
    edit_config(folder, {word: str(dtype).removeprefix("torch.")})


def edit_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Sets fields of the config.json in `folder`, which is not written if it has them already."""
    path = folder / CONFIG
    config = json.loads(path.read_text())
    if config | dict(fields) != config:
        path.write_text(json.dumps(config | dict(fields), indent=2) + "\n")


def copy(source: Path, target: Path) -> list[str]:
    """Copies all files of a model but its weights; returns their names. `target` is made."""
    target.mkdir(parents=True, exist_ok=True)
    names = [
        file.name
        for file in sorted(source.iterdir())
        if file.is_file() and not file.name.endswith(_LEFT) and not file.name.startswith(".")
    ]
    for name in names:
        shutil.copy(source / name, target / name)
    return names


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, of a class of transformers. Raises ConfigError if it cannot be
    read."""
    auto = _transformers().AutoTokenizer
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as in read_config
        line = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: give --like MODEL for another ({line})"
        ) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a tokenizer of transformers from one folder to another."""
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def has_tokenizer(folder: Path) -> bool:
    """Whether transformers finds a tokenizer in `folder`."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"transformers is not installed: {PACKAGES}") from None
    return transformers
