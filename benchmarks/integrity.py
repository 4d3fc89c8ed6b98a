"""Measures how fast a rank hashes its share of a checkpoint, when saving and when loading.

    python -m benchmarks.integrity

The file is in the host's page cache, as it is after a rank has written it. Hashing a checkpoint
takes its bytes divided by the number of ranks and by this rate, or by the rate at which the file
system reads if that is lower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megatron_fp4.mcore.checkpoints import integrity
from tools.stamp import stamp

GIB = 2**30


def processor() -> str:
    """The model name of the first core, as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def measure(size: int, runs: int) -> list[float]:
    """The bytes hashed in a second, for each of `runs` passes over a file of `size` bytes.

    A pass before them, which is not reported, brings the file into memory.
    """
    with tempfile.NamedTemporaryFile() as file:
        torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tofile(file.name)
        rates = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            integrity.hash_of_file(Path(file.name))
            rates.append(size / (time.perf_counter() - began))
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/integrity.json"))
    out = parser.parse_args().out
    rates = measure(GIB, runs=5)
    median = round(statistics.median(rates))
    result = {
        "stamp": stamp() | {"processor": processor()},
        "bytes": GIB,
        "bytes_a_second": [round(rate) for rate in rates],
        "median": median,
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{median / 1e9:.2f} GB/s a rank")


if __name__ == "__main__":
    main()
