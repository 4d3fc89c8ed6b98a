"""A script with a model provider and flags of its own, in upstream's older style."""

import argparse
from functools import partial
from typing import Any

from data_and_step import datasets, forward_step
from layers import block
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
    layers: Any = block,
) -> GPTModel:
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers(config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument_group("fork").add_argument("--own-scale", type=float, default=1.0)
    return parser


def main(layers: Any = block) -> None:
    args = parse_and_validate_args(own_flags, args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, None)
    provider = partial(model_provider, layers=layers)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, provider)


if __name__ == "__main__":
    main()
