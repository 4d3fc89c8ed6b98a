"""A conversion holds a few tensors of a model, and never the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.builders.small_hf import save

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TOOL = "-m", "tools.checkpoint"
# Prints the largest resident memory of a command, in KiB. The test's own process may be larger.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
# The tool, in a process that holds the model of its first argument.
HOLDING = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from megatron_fp4.convert.command import main
held = [load_file(file) for file in Path(sys.argv[2]).glob("*.safetensors")]
held = [[tensor.clone() for tensor in tensors.values()] for tensors in held]
sys.exit(main())
"""


def peak(*words: object) -> int:
    """The bytes that a command of Python's has in memory at most."""
    command = [sys.executable, "-c", PEAK, sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout) * 1024


def model(folder: Path, layers: int) -> int:
    """Makes a model of small files in folder/hf; returns its bytes."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096}
    sizes["num_hidden_layers"] = layers
    save("llama", folder / "hf", shard="100MB", **sizes)
    return sum(file.stat().st_size for file in (folder / "hf").glob("*.safetensors"))


@pytest.mark.outside
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    more = model(large, 10) - model(small, 1)
    assert more > 500e6 and len(list((large / "hf").glob("*.safetensors"))) > 3
    both = small, large
    imports = [peak(*TOOL, "import-hf", f / "hf", "--output", f / "megatron") for f in both]
    # An export holds the tensors of the file that it is to write next.
    files = "--shard-gb", "0.1"
    exports = [
        peak(*TOOL, "export-hf", f / "megatron", "--output", f / "back", *files) for f in both
    ]
    assert imports[1] - imports[0] < more / 4
    assert exports[1] - exports[0] < more / 4
    # The control: a process that holds the model is seen to.
    held = peak("-c", HOLDING, "import-hf", large / "hf", "--output", large / "again")
    assert held - imports[1] > more / 2
