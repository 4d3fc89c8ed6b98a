"""The share of a dataset's documents that --split gives to training, validation and test."""

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

SPLITS = ("training", "validation", "test")
DEFAULT = "969, 30, 1"  # megatron/training/arguments.py:validate_args, for --data-path

# For each of SPLITS the begin and end of its documents, as fractions of all documents in 0 to 1;
# None for a split without documents.
Shares = list[tuple[float, float] | None]


def shares_of(split: str) -> Shares | None:
    """The shares of SPLITS that a value of --split such as "95,5,0" stands for.

    Returns None if `split` is not three numbers of which Megatron can make shares.
    """
    try:
        shares: Shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError):
        return None
    return shares


def left_without(shares: Shares, documents: int) -> list[str]:
    """The names of SPLITS whose share is above 0 but, with this many documents, rounds to none.

    Megatron would loop without end over such a split, adding epochs of no tokens.
    """
    return [
        name
        for name, share in zip(SPLITS, shares, strict=True)
        if share and round(share[0] * documents) == round(share[1] * documents)
    ]
