"""The digits that the small tasks learn: scikit-learn's, 8 x 8 pixels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_fp4.errors import ConfigError

PIXELS, CLASSES = 64, 10
HELD_OUT = 357  # of 1,797: the others are 45 batches of 32


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(images, labels) to train on and (images, labels) that are held out.

    Images are float32 [n, 64] in [-1, 1], labels int64 [n]. The held-out ones are the last, which
    other people have written. Raises ConfigError without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ConfigError("the digits come with scikit-learn: pip install '.[vision]'") from None
    found = load_digits()
    images = torch.from_numpy(found.data).float() / 8 - 1
    labels = torch.from_numpy(found.target).long()
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]
