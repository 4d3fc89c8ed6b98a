"""The family of a model: by its config.json, or by Megatron's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megatron_fp4.convert.huggingface.decoder import Decoder, moe_pattern
from megatron_fp4.convert.huggingface.gpt2 import Gpt2
from megatron_fp4.convert.huggingface.layouts import Entry
from megatron_fp4.convert.huggingface.settings import (
    UNSUPPORTED,
    UNSUPPORTED_VALUES,
    Settings,
    differences,
    of_args,
)
from megatron_fp4.errors import ConfigError


class Family(Protocol):
    """How models of one architecture of `transformers` are described and named."""

    @property
    def model_type(self) -> str:
        """The model_type of config.json."""

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""

    def settings(self, config: Mapping[str, Any], padded: int) -> Settings:
        """The settings of the model that config.json describes.

        padded: rows of Megatron's embedding. Raises ConfigError for what Megatron does not have.
        """

    def config(self, settings: Settings, vocab_size: int) -> dict[str, Any]:
        """The config.json of a model with these settings, without token ids and dtype."""

    def entries(self, settings: Settings, vocab_size: int) -> Iterator[Entry]:
        """Every tensor of the model, in the order of its layers."""


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Decoder("llama", "LlamaForCausalLM", scales_rope=True),
        Decoder("mistral", "MistralForCausalLM"),
        Decoder("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        Decoder("qwen3", "Qwen3ForCausalLM", qk_norm=True),
        Decoder(
            "mixtral", "MixtralForCausalLM", experts="block_sparse_moe", gated=("w1", "w3", "w2")
        ),
        Decoder(
            "qwen2_moe", "Qwen2MoeForCausalLM", qkv_bias=True, experts="mlp", shared_expert=True
        ),
        Decoder("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, experts="mlp"),
        Gpt2(),
    )
}


def by_name(model_type: str) -> Family:
    """The family with this model_type. Raises ConfigError if it is not known here."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type} is not known here; {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]


def of_run(args: argparse.Namespace, vocab_size: int) -> tuple[Family, Settings]:
    """The first family that can express the model of a Megatron run, and the model's settings.

    args: the run's arguments. Raises ConfigError, with the arguments that stand in the way, if no
    family can.
    """
    settings = settings_of(args)
    reasons: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        reasons[name] = changed(family, settings, vocab_size)
        if not reasons[name]:
            return family, settings
    closest = min(reasons, key=lambda name: len(reasons[name]))
    raise ConfigError(
        f"no model of transformers that is known here has these arguments; against {closest}, "
        + "; ".join(reasons[closest])
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of a run. Raises ConfigError for arguments that no family can express."""
    found = [name for name, value in UNSUPPORTED.items() if getattr(args, name, value) != value]
    found += [
        name for name, value in UNSUPPORTED_VALUES.items() if getattr(args, name, None) == value
    ]
    for name in found:
        raise ConfigError(f"{name} {getattr(args, name)}: no model of transformers here has it")
    return of_args(args)


def changed(family: Family, settings: Settings, vocab_size: int) -> list[str]:
    """Which settings a family's config.json would change; [] if it can express them all."""
    padded = settings["padded_vocab_size"]
    if (settings["num_experts"] is None) == family.has_experts:
        return [f"num_experts is {settings['num_experts']}", *(["other layers"] * len(settings))]
    try:
        expressed = family.settings(family.config(settings, vocab_size), padded)
    except ConfigError as error:
        return [str(error)]
    return differences(comparable(settings), comparable(expressed))


def comparable(settings: Settings) -> Settings:
    """The settings in a form in which two are equal if the models are.

    moe_layer_freq, which has several spellings, is a flag for each layer. ffn_hidden_size, which is
    of layers without experts, is None if there are none.
    """
    pattern = moe_pattern(settings)
    unused = {"ffn_hidden_size": None} if all(pattern) else {}
    return settings | {"moe_layer_freq": pattern} | unused
