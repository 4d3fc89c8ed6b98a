"""A script that builds its model by Megatron's builders, as upstream's pretrain_gpt.py does."""

from data_and_step import datasets, forward_step
from layers import block
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = lambda config, vp_stage: block(config.transformer, vp_stage)
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
