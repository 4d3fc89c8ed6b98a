"""Warnings that name a line of the caller's code, and not one of this package or of PyTorch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

_BETWEEN = tuple(str(Path(each).parent) + os.sep for each in (__file__, torch.__file__))


def warn_caller(text: str) -> None:
    """Shows a UserWarning at the line that called this package."""
    warnings.warn(text, skip_file_prefixes=_BETWEEN)
