"""Checks that a recipe's blocks divide the sizes of a linear on a rank.

The error names the flags that set the size.
"""

import argparse
import re

from megatron_fp4.arithmetic.philox import GROUP
from megatron_fp4.errors import ConfigError, SizeError
from megatron_fp4.mcore.arguments.flag_names import flag_of
from megatron_fp4.mcore.model.shards import tokens_on_rank
from megatron_fp4.plan.sizes import check_sizes, token_tile
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import UNSHARDED, Sharding

# The (inputs, outputs) of a linear over all ranks as formulas, by the end of the linear's name.
# Words in braces are Megatron's arguments.
_HIDDEN, _FFN, _EXPERT = "{hidden_size}", "{ffn_hidden_size}", "{moe_ffn_hidden_size}"
_SHARED = "{moe_shared_expert_intermediate_size}"
_SET_BY = {
    "linear_qkv": (_HIDDEN, "({num_attention_heads} + 2 x {num_query_groups}) x {kv_channels}"),
    "linear_proj": ("{num_attention_heads} x {kv_channels}", _HIDDEN),
    "mlp.linear_fc1": (_HIDDEN, _FFN),
    "mlp.linear_fc2": (_FFN, _HIDDEN),
    "shared_experts.linear_fc1": (_HIDDEN, _SHARED),
    "shared_experts.linear_fc2": (_SHARED, _HIDDEN),
    "local_experts.linear_fc1": (_HIDDEN, _EXPERT),
    "local_experts.linear_fc2": (_EXPERT, _HIDDEN),
    "eh_proj": (f"2 x {_HIDDEN}", _HIDDEN),  # of multi-token prediction
}
_FEATURES = {"in_features": "inputs", "out_features": "outputs"}


def check(
    args: argparse.Namespace,
    recipe: Recipe,
    name: str,
    inputs: int,
    outputs: int,
    sharding: Sharding,
    is_expert: bool,
) -> None:
    """Raises ConfigError if a recipe cannot be applied to a linear because of its sizes.

    The sizes on a rank must be multiples of the recipe's blocks and Hadamard groups, and inputs and
    outputs of the number of features that share a random draw.

    args: Megatron's. name: the linear's global name. inputs, outputs: W is [outputs, inputs] on
    this rank. is_expert: the linear belongs to an expert, which pads its tokens to whole blocks.
    """
    tokens = None if is_expert else tokens_on_rank(args, UNSHARDED)
    try:
        check_sizes(recipe, tokens, inputs, outputs, name)
        for axis, size in (("in_features", inputs), ("out_features", outputs)):
            if size % GROUP:
                raise SizeError(name, axis, size, GROUP, "which share a random draw")
    except SizeError as error:
        product = "{micro_batch_size} x {seq_length}"
        if error.axis != "tokens":
            product = _product(error, sharding, is_expert)
        raise _refusal(error, product, args) from error
    if not is_expert:
        _check_parts(args, recipe, name, sharding)


def _check_parts(args: argparse.Namespace, recipe: Recipe, name: str, sharding: Sharding) -> None:
    """Raises ConfigError if blocks of fprop do not divide this rank's part of X's tokens.

    A rank has a part of them in a column-parallel linear under sequence parallelism. Training and
    evaluation are checked, since their micro-batch sizes may differ.
    """
    parts = sharding.ranks if sharding.scattered == "x" else 1
    tile = token_tile(recipe, "fprop", "x")
    for batch in ("micro_batch_size", "eval_micro_batch_size"):
        tokens = tokens_on_rank(args, sharding if parts > 1 else UNSHARDED, batch)
        if tokens % tile:
            reason = f"which fprop of recipe {recipe.name} takes in blocks"
            product = f"{{{batch}}} x {{seq_length}}" + _over(parts, is_expert=False)
            raise _refusal(SizeError(name, "tokens", tokens, tile, reason), product, args)


def _product(error: SizeError, sharding: Sharding, is_expert: bool) -> str:
    """The formula, from _SET_BY, for the number of features that `error` is about; of a linear that
    is not Megatron's, in words."""
    end = re.sub(r"local_experts\.\d+", "local_experts", error.where)
    number = list(_FEATURES).index(error.axis)
    own = (flags[number] for name, flags in _SET_BY.items() if end.endswith(name))
    product = next(own, f"its {_FEATURES[error.axis]}")
    return product + _over(sharding.ranks if sharding.w == 1 - number else 1, is_expert)


def _over(ranks: int, is_expert: bool) -> str:
    kind = "expert-tensor" if is_expert else "tensor-model"
    return "" if ranks == 1 else f" / --{kind}-parallel-size {ranks}"


def _refusal(error: SizeError, product: str, args: argparse.Namespace) -> ConfigError:
    def flag(match: re.Match[str]) -> str:
        name = match[1]
        if name == "num_query_groups" and not args.group_query_attention:
            name = "num_attention_heads"  # without groups each head has a key and a value
        return f"{flag_of(name)} {getattr(args, name)}"

    return ConfigError(
        f"{error.where}: {error.size} {_FEATURES.get(error.axis, error.axis)} on a rank are not a "
        f"multiple of {error.multiple}, {error.reason}; change "
        f"{re.sub(r'{(.*?)}', flag, product)} to a multiple of it"
    )
