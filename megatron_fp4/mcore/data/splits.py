"""What of the documents training, validation and test get by --split."""

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

SPLITS = ("training", "validation", "test")
DEFAULT = "969, 30, 1"  # of --data-path, T/arguments.py:validate_args

Shares = list[tuple[float, float] | None]  # of each split: from where to where in 0 to 1


def shares_of(split: str) -> Shares | None:
    """The share of the documents that each of SPLITS gets, None for one that gets none. None for
    all of them if `split` is not three shares, such as "95,5,0"."""
    try:
        shares: Shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError):
        return None
    return shares


def left_without(shares: Shares, documents: int) -> list[str]:
    """Which of SPLITS have a share that comes to none of so many documents. Megatron would count
    epochs of no tokens for them without end."""
    return [
        name
        for name, share in zip(SPLITS, shares, strict=True)
        if share and round(share[0] * documents) == round(share[1] * documents)
    ]
