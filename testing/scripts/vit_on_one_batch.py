"""examples/vit/pretrain_vit.py with the same images in every batch, to be learned by heart."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "vit"))
import pretrain_vit  # noqa: E402  # found in the folder of the example alone
from vit_data import TrainingImages  # noqa: E402

BATCH = 8  # as --micro-batch-size


class OneBatch(TrainingImages):
    """The first images of the first epoch, again and again."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return super().__getitem__(item % BATCH)


if __name__ == "__main__":
    pretrain_vit.TrainingImages = OneBatch
    pretrain_vit.main()
