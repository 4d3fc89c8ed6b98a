"""The parser of the commands that prepare data."""

import argparse
from typing import NoReturn

from megatron_fp4.mcore.data.errors import DataError


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises DataError for a wrong command line, and does not print the usage."""

    def error(self, message: str) -> NoReturn:
        raise DataError(message)
