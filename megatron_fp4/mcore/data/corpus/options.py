"""What a user chooses: what the data depend on, and how the command runs."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_fp4.mcore.data.errors import DataError


@dataclass(frozen=True)
class CorpusOptions:
    """What the data depend on, besides the text and the tokenizer.

    json_key: the key of JSON lines, and the column of Parquet, that has the text.
    held_out_share: the share of the documents for validation, at least 0 and below 1. Raises
    DataError if it is not.
    """

    json_key: str = "text"
    held_out_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_share < 1:
            raise DataError(f"--held-out-share {self.held_out_share} is not at least 0 and below 1")


@dataclass(frozen=True)
class Running:
    """How the command runs, which changes nothing in the data.

    workers: the number of processes that tokenize. strict: whether the first line or file that
    cannot be used ends the command. say: called with each line for the user. Raises DataError if
    there are no workers.
    """

    workers: int
    strict: bool = False
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise DataError(f"--workers {self.workers}: give 1 or more")
