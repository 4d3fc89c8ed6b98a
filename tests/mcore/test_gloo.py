"""Gloo groups keep one worker thread: torch's two damage the heap (docs/notes/gloo.md)."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import distributed as dist
from megatron_fp4.mcore.runtime import gloo

def group(name):
    return dist.ProcessGroupGloo(dist.FileStore(f"{sys.argv[1]}/{name}", 1), 0, 1)

torchs = group("torch's")
gloo.use_one_worker()
gloo.use_one_worker()
mended = group("mended")
ones = torch.ones(3)
mended.allreduce([ones]).wait()
assert ones.tolist() == [1, 1, 1]
print(torchs.options._threads, mended.options._threads)
assert torchs.options._timeout == mended.options._timeout
# A worker that drops a collective's tensors while Python ends aborts the process ("terminate
# called without an active exception"). The end of a group waits for its workers.
del torchs, mended
"""


def test_groups_have_one_worker(tmp_path: Path) -> None:
    """And torch still gives two (the control): once it does not, the mend can go."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "1"])
