"""Warnings that name a line of the caller's code, and not one of this package or of PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def warn_caller(text: str) -> None:
    """Shows a UserWarning at the line that called this package."""
    warnings.warn(text, skip_file_prefixes=_BETWEEN)
