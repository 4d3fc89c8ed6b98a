"""A script that parses its arguments by itself, not by `parse_and_validate_args`.

With --own-scale it adds flags of its own to Megatron's parser.
"""

import sys

from data_and_step import datasets, forward_step
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables
from provider import model_provider, own_flags

if __name__ == "__main__":
    args = parse_args(own_flags if "--own-scale" in sys.argv else None)
    validate_args(args, {"tokenizer_type": "NullTokenizer"})
    set_global_variables(args)
    config = pretrain_cfg_container_from_args(args, None)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, model_provider)
