"""The order of a model's layers, by their names."""

from __future__ import annotations

# Words of names that stand beside each other, in the order in which a model runs through them.
# Words that are not among them come after these, as text.
_ORDER = (
    "embedding", "vision_model", "encoder", "decoder", "mtp", "output_layer",
    "self_attention", "cross_attention", "mlp",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "linear_qkv", "linear_proj",
    "router", "experts", "shared_experts", "linear_fc1", "linear_fc2",
)  # fmt: skip
_RANK = {word: rank for rank, word in enumerate(_ORDER)}


def place(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts names of layers in the order of the model.

    A number in a name sorts as a number, so that layer 2 comes before layer 10, and linears of one
    layer sort as they run: qkv, proj, fc1, fc2.
    """
    return tuple(_word(word) for word in name.split("."))


def _word(word: str) -> tuple[int, int, str]:
    if word.isascii() and word.isdigit():
        return 0, int(word), word
    return 1, _RANK.get(word, len(_ORDER)), word
