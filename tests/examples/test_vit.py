"""The ViT example: it learns by every recipe, and never sees the fold it is evaluated on."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.vit.vit_data import Digits, Folder, HeldOutImages, TrainingImages, batches, divide
from testing.worlds.vit import ON_ONE_BATCH, PRETRAIN_VIT, Trained, train

FOLDS = 5
LINEARS = ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj",
           "self_attention.linear_qkv")  # fmt: skip


def by(recipe: str) -> list[str]:
    return [] if recipe == "bf16" else ["--fp4-recipe", recipe]


def mistake_of(trained: Trained) -> str:
    """The one line in which a launch has ended."""
    lines = [line for line in trained.output.splitlines() if line.startswith("pretrain_vit.py:")]
    assert trained.status == 1 and len(lines) == 1, trained.output[-2000:]
    assert "Traceback" not in trained.output.split("torch/distributed")[0]
    return lines[0]


# --- it learns ------------------------------------------------------------------------------------


BATCH, SEED = 8, 1234
BY_HEART = ("--train-iters", "26", "--micro-batch-size", str(BATCH), "--seed", str(SEED),
            "--lr", "3e-3", "--lr-decay-style", "constant")  # fmt: skip


def blind_loss() -> float:
    """The least loss on the batch without a look at the images: the entropy of its labels."""
    indices, _ = divide(1797, FOLDS, 0)
    items = TrainingImages(Digits(32, 32), indices, BATCH, SEED)
    shares = np.unique([items[i]["label"] for i in range(BATCH)], return_counts=True)[1] / BATCH
    return float(-(shares * np.log(shares)).sum())


def learned(trained: Trained) -> bool:
    """Whether the batch is known by heart: the loss is half of what labels alone allow, or less."""
    assert trained.status == 0, trained.output[-4000:]
    return trained.losses[-1] < blind_loss() / 2


@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        pytest.param("mxfp4", marks=pytest.mark.outside),
        pytest.param("tetrajet", marks=pytest.mark.outside),
        pytest.param("tetrajet-ema", marks=pytest.mark.slow),
    ],
)
def test_a_batch_is_learned_by_heart_and_the_linears_follow_the_recipe(recipe: str) -> None:
    trained = train(ON_ONE_BATCH, *BY_HEART, *by(recipe))
    assert len(trained.losses) == 26 and learned(trained) and trained.losses[0] > blind_loss()
    table = re.findall(r"^  decoder\.layers\.\*\.(\S+) +(\S+) +(\d+ x \d+) +(\S+) +(\S+)",
                       trained.output, re.M)  # fmt: skip
    followed = [] if recipe == "bf16" else [(name, "0-1", recipe) for name in LINEARS]
    assert sorted((name, layers, of) for name, layers, _, of, _ in table) == sorted(followed)
    assert all(gemm == "e2m1" for *_, gemm in table)
    assert ("megatron-fp4: recipe" in trained.output) == (recipe != "bf16")


def test_nothing_is_learned_without_a_learning_rate() -> None:
    """The control of the test above."""
    assert not learned(train(ON_ONE_BATCH, *BY_HEART, "--lr", "1e-9", "--min-lr", "0"))


@pytest.mark.outside
def test_two_ranks_learn_it_too() -> None:
    """Tensor parallelism shards the linears; data parallelism, the batch."""
    flags = [*BY_HEART, *by("tetrajet")]
    for layout in ("--tensor-model-parallel-size 2", "--micro-batch-size 4"):
        assert learned(train(ON_ONE_BATCH, *flags, *layout.split(), processes=2))


# --- a folder of images ---------------------------------------------------------------------------

COLOURS = ((220, 40, 40), (40, 200, 60), (50, 60, 220))
OF_A_CLASS = 12


def image_folder(path: Path, of_class: Callable[[int, int], int] = lambda label, _: label) -> Path:
    """Noisy images of one colour, in a folder for each of three classes; returns `path`.

    of_class: the index of the colour, from a label and the number of an image of its class.
    """
    from PIL import Image

    draw = np.random.default_rng(0)
    for label in range(len(COLOURS)):
        (path / f"class-{label}").mkdir(parents=True)
        for number in range(OF_A_CLASS):
            pixels = COLOURS[of_class(label, number)] + draw.normal(0, 20, (40, 48, 3))
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            image.save(path / f"class-{label}" / f"{number}.{'png' if number % 2 else 'jpg'}")
    return path


def accuracy_of(folder: Path) -> float:
    """On the held-out fold, after a training on the others by tetrajet."""
    flags = "--folds 3 --train-iters 12 --micro-batch-size 8 --lr 3e-3 --fp4-recipe tetrajet"
    trained = train(PRETRAIN_VIT, "--image-folder", str(folder), *flags.split())
    assert trained.status == 0 and len(trained.losses) == 12, trained.output[-4000:]
    assert "megatron-fp4: recipe tetrajet" in trained.output
    [accuracy] = trained.accuracy
    assert accuracy * OF_A_CLASS == pytest.approx(round(accuracy * OF_A_CLASS), abs=1e-3)
    return accuracy


@pytest.mark.outside
def test_a_folder_of_images_is_learned(tmp_path: Path) -> None:
    """Its held-out fold is 12 images of 36. The control: colours that say nothing of the class."""
    pytest.importorskip("torchvision")
    assert accuracy_of(image_folder(tmp_path / "told")) == 1
    blind = image_folder(tmp_path / "blind", lambda _, number: number % len(COLOURS))
    assert accuracy_of(blind) <= 0.75  # a guess is above that in 0.05% of all cases


def test_a_folder_without_images_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    (tmp_path / "classes" / "a").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, says in (
        ("classes", "no valid file for the classes a"),
        ("empty", "Couldn't find any class folder"),
        ("file", "Not a directory"),
        ("nowhere", "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match=rf"{says}.*; give a folder with a folder of images"):
            Folder(tmp_path / name, 32, 32)
    said = mistake_of(train(PRETRAIN_VIT, "--image-folder", str(tmp_path / "empty")))
    assert said.startswith(f"pretrain_vit.py: --image-folder {tmp_path}/empty: Couldn't find")


# --- the folds ------------------------------------------------------------------------------------

EPOCHS = 2


class Numbers:
    """Images of which each is its own number."""

    classes = 10

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def get(self, index: int, trains: bool) -> tuple[Tensor, int]:
        return torch.tensor(float(index)), index % self.classes


def seen(dataset: Any) -> Counter[int]:
    """How often each image counts in a dataset."""
    items: Iterable[dict[str, Any]] = (dataset[i] for i in range(len(dataset)))
    return Counter(int(item["image"]) for item in items if item["weight"])


def training(images: Numbers, indices: np.ndarray) -> Counter[int]:
    return seen(TrainingImages(images, indices, EPOCHS * len(indices), seed=3))


def held_out(images: Numbers, indices: np.ndarray) -> Counter[int]:
    samples = batches(len(indices), BATCH) * BATCH * EPOCHS
    return seen(HeldOutImages(images, indices, samples, BATCH))


def is_clean(trained: Counter[int], evaluated: Counter[int]) -> bool:
    return not trained.keys() & evaluated.keys()


@pytest.mark.parametrize("count", [1797, 64])
def test_a_fold_is_never_trained_on_and_is_evaluated_once(count: int) -> None:
    images, of_all = Numbers(count), Counter[int]()
    for fold in range(FOLDS):
        indices, others = divide(count, FOLDS, fold)
        trained, evaluated = training(images, indices), held_out(images, others)
        assert is_clean(trained, evaluated)
        assert set(trained.values()) == set(evaluated.values()) == {EPOCHS}
        assert trained.keys() | evaluated.keys() == set(range(count))
        of_all += evaluated
        # Controls: trained on all images, or on those of another division.
        assert not is_clean(training(images, np.arange(count)), evaluated)
        assert not is_clean(
            training(images, divide(count, FOLDS, (fold + 1) % FOLDS)[0]), evaluated
        )
    assert of_all == Counter(dict.fromkeys(range(count), EPOCHS))


def test_an_epoch_has_an_order_of_its_own_that_the_seed_gives() -> None:
    def order(seed: int) -> list[int]:
        dataset = TrainingImages(Numbers(50), np.arange(50), 100, seed)
        return [int(dataset[i]["image"]) for i in range(100)]

    assert order(1) == order(1) != order(2)
    assert order(1)[:50] != order(1)[50:]


def test_the_digits_are_scikit_learns() -> None:
    """Up-sampled as numpy interpolates between the centres of pixels, along each axis in turn."""
    from sklearn.datasets import load_digits

    digits, found = Digits(32, 32), load_digits()
    centres = (np.arange(32) + 0.5) / 4 - 0.5
    assert len(digits) == 1797
    for index in (0, 1000, 1796):
        image, label = digits.get(index, trains=True)
        rows = [np.interp(centres, np.arange(8), row) for row in found.images[index]]
        columns = [np.interp(centres, np.arange(8), column) for column in np.array(rows).T]
        assert label == found.target[index] and image.shape == (3, 32, 32)
        for channel in image:
            np.testing.assert_allclose(channel, np.array(columns).T / 8 - 1, atol=1e-6)


# --- launches -------------------------------------------------------------------------------------


def test_the_evaluation_takes_each_image_of_the_fold_once() -> None:
    """Fold 4 has 359 images, in 23 batches of 16: without weights it would be out of 368."""
    trained = train(PRETRAIN_VIT, "--fold", "4", "--train-iters", "1")
    [accuracy] = trained.accuracy
    assert abs(accuracy * 359 - round(accuracy * 359)) < 1e-3
    assert abs(accuracy * 368 - round(accuracy * 368)) > 1e-3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--folds 2000", "--folds 2000 of 1797 images: give"),
        ("--fold 5", "--fold is from 0 to --folds - 1"),
        ("--patch-dim 0", "--img-h, --img-w and --patch-dim are 1 or more"),
        ("--img-h -32 --img-w -32", "--img-h, --img-w and --patch-dim are 1 or more"),
        ("--img-h 64", "an image has 128 patches: give --seq-length 128"),
        ("--img-w 30", "--img-h and --img-w are multiples of --patch-dim"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(flags: str, says: str) -> None:
    assert says in mistake_of(train(PRETRAIN_VIT, *flags.split()))


@pytest.mark.parametrize(
    ("package", "make", "says"),
    [
        ("sklearn.datasets", lambda: Digits(32, 32), "pip install scikit-learn"),
        ("torchvision", lambda: Folder(Path("nowhere"), 32, 32), "pip install the torchvision"),
    ],
)
def test_a_missing_package_is_named(
    package: str, make: Callable[[], object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"^pretrain_vit\.py: .*{says}"):
        make()
