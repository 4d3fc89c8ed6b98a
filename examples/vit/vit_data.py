"""Images for pretrain_vit.py: scikit-learn's digits or a folder, divided into folds.

A fold is a part of the images that a run does not train on. The division depends on the number of
images and folds alone, so every seed and recipe has the same folds.
"""

import math
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset


def refusal(message: str) -> SystemExit:
    """The end of a launch that cannot run; raise it on every rank. Rank 0 prints the line."""
    return SystemExit(1 if int(os.environ.get("RANK", "0")) else f"pretrain_vit.py: {message}")


class Images(Protocol):
    """Images with labels. classes: the number of labels."""

    classes: int

    def __len__(self) -> int: ...

    def get(self, index: int, trains: bool) -> tuple[Tensor, int]:
        """(float32 [3, height, width], label) of an image. trains: whether to augment it."""
        ...


class Digits:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, up-sampled bilinearly.

    Grey values are divided by their largest, 16, and shifted and scaled to the range -1 to 1. The
    three channels are equal. Digits are never augmented. Raises SystemExit without scikit-learn.
    """

    classes = 10

    def __init__(self, height: int, width: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise refusal(
                "the digits come with scikit-learn: pip install scikit-learn, or "
                "give --image-folder PATH"
            ) from None
        found = load_digits()
        grey = torch.from_numpy(found.images).float()[:, None] / 8 - 1
        self._pixels = torch.nn.functional.interpolate(grey, (height, width), mode="bilinear")
        self._labels = found.target.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, index: int, trains: bool) -> tuple[Tensor, int]:
        return self._pixels[index].expand(3, -1, -1), self._labels[index]


class Folder:
    """Images in a folder for each class, as ImageNet's, read by torchvision.

    To train on, an image is cropped at random and mirrored at random; to evaluate, its centre is
    cropped. Raises SystemExit without torchvision, and for a folder that has no images.
    """

    def __init__(self, path: Path, height: int, width: int) -> None:
        try:
            from torchvision import transforms
            from torchvision.datasets import ImageFolder
        except ModuleNotFoundError:
            raise refusal(
                "--image-folder reads images by torchvision: pip install the "
                f"torchvision that belongs to torch {torch.__version__}"
            ) from None
        try:
            self._found = ImageFolder(str(path))
        except OSError as error:
            reason = error.strerror or str(error).rstrip(".")
            raise refusal(
                f"--image-folder {path}: {reason}; give a folder with a folder of images for each "
                "class"
            ) from None
        self.classes = len(self._found.classes)
        size = height, width
        end = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
        augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        larger = transforms.Resize(round(max(size) * 8 / 7))
        self._train = transforms.Compose([*augment, *end])
        self._evaluate = transforms.Compose([larger, transforms.CenterCrop(size), *end])

    def __len__(self) -> int:
        return len(self._found)

    def get(self, index: int, trains: bool) -> tuple[Tensor, int]:
        image, label = self._found[index]
        return (self._train if trains else self._evaluate)(image), label


def divide(count: int, folds: int, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """(the indices to train on, the indices of the held-out fold) of `count` images."""
    order = np.random.default_rng(count).permutation(count)
    is_held_out = np.arange(count) % folds == fold
    return order[~is_held_out], order[is_held_out]


class TrainingImages(Dataset):
    """`samples` items: the images of `indices` in a new random order in each epoch.

    An item has "image", float32 [3, height, width]; "label"; and "weight", 1.0.
    """

    split = Split.train

    def __init__(self, images: Images, indices: np.ndarray, samples: int, seed: int) -> None:
        self._images, self._indices, self._samples, self._seed = images, indices, samples, seed
        self._epoch, self._order = -1, indices

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, item: int) -> dict[str, Any]:
        epoch, place = divmod(item, len(self._indices))
        if epoch != self._epoch:
            shuffle = np.random.default_rng([self._seed, epoch])
            self._epoch, self._order = epoch, shuffle.permutation(self._indices)
        image, label = self._images.get(int(self._order[place]), trains=True)
        return {"image": image, "label": label, "weight": 1.0}


class HeldOutImages(Dataset):
    """`samples` items: the images of `indices`, again and again.

    Each round ends with items of weight 0.0 that fill its last batch, so that a number of whole
    batches evaluates each image once. Items are as those of TrainingImages.
    """

    split = Split.valid

    def __init__(self, images: Images, indices: np.ndarray, samples: int, batch: int) -> None:
        self._images, self._indices, self._samples = images, indices, samples
        self._round = batches(len(indices), batch) * batch

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, item: int) -> dict[str, Any]:
        place = item % self._round
        counts = place < len(self._indices)
        image, label = self._images.get(int(self._indices[place if counts else 0]), trains=False)
        return {"image": image, "label": label, "weight": float(counts)}


def batches(images: int, batch: int) -> int:
    """The number of batches that contain all images; the last one may be filled up."""
    return math.ceil(images / batch)
