"""pretrain_gpt.py, in which each rank tells which files of a checkpoint it reads tensors from.

torchrun ... pretrain_telling_files.py FLAGS ...

Prints a line "rank R reads N bytes of FILE" for each file.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    read_data = FileSystemReader.read_data

    def telling(self: Any, plan: Any, planner: Any) -> Any:
        read: Counter[str] = Counter()
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                place = self.storage_data[item.storage_index]
                read[place.relative_path] += place.length
        for name, count in read.items():
            line = f"rank {os.environ['RANK']} reads {count} bytes of {name}\n"
            os.write(2, line.encode())  # in one piece, and not where a launch's log is kept short
        return read_data(self, plan, planner)

    FileSystemReader.read_data = telling  # type: ignore[method-assign]
    pretrain.main()


if __name__ == "__main__":
    main()
