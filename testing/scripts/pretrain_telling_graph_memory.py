"""Runs pretrain_gpt.py on a GPU, and prints how much memory is reserved for CUDA graphs.

    torchrun ... pretrain_telling_graph_memory.py MISTAKE FLAGS ...

Rank 0 prints the bytes after each step. In the first step of each phase it also prints them when
the graphs have been dropped and no new ones are captured yet. FLAGS are those of pretrain_gpt.py.

MISTAKE is "none", or "keep-pool": a test's negative control, in which the memory pool of dropped
graphs is not released.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

OUTSIDE = (0, 0)  # what torch calls the memory that belongs to no pool of graphs


def main() -> None:
    mistake = sys.argv.pop(1)
    cpu.install()
    from megatron.training import training

    from megatron_fp4.mcore.loop import phased_graphs

    patched: Any = phased_graphs
    if mistake == "keep-pool":
        patched._release_pool = lambda: None
    else:
        assert mistake == "none"
    patched._drop = _telling(phased_graphs._drop, "dropped")
    training.train_step = _telling(training.train_step, "step")
    pretrain.main()


def _telling(upstream: Any, when: str) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        found = upstream(*given, **named)
        if torch.distributed.get_rank():
            return found
        segments = torch.cuda.memory_snapshot()
        of_graphs = [each for each in segments if tuple(each["segment_pool_id"]) != OUTSIDE]
        size = sum(each["total_size"] for each in of_graphs)
        sys.stderr.write(f"memory of graphs, {when}: {size}\n")
        return found

    return call


if __name__ == "__main__":
    main()
