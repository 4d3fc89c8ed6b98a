"""Training with torch's fused AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.worlds.launch import SCRIPTS, torchrun

ADAMW = SCRIPTS / "pretrain_with_fused_adamw.py"
SHARDED = ("--use-distributed-optimizer",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ("--bf16",)),
        (1, ("--bf16", "--ckpt-format", "torch")),
        (2, ("--bf16", *SHARDED)),
        (2, ("--bf16", *SHARDED, "--dist-ckpt-optim-fully-reshardable")),
        (1, ("--fp4-recipe", "tetrajet-ema", "--bf16", *SHARDED)),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, tuple) else str(flags),
)
def test_a_run_with_the_fused_adamw_resumes(
    processes: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Bit for bit, and from the checkpoint of a plain AdamW with a line."""
    flags = (*flags, "--save", str(tmp_path / "fused"), "--save-interval", "2")
    whole = torchrun(processes, *flags, script=ADAMW)
    assert "AdamW in torch's fused kernel" in whole.output, whole.output[-4000:]
    again = torchrun(
        processes, *flags, "--load", str(tmp_path / "fused"), "--ckpt-step", "2", script=ADAMW
    )
    assert again.losses == whole.losses[2:] and len(again.losses) == 2, again.output[-4000:]
    told = "was trained with fused kernels of torch's AdamW"
    assert told not in again.output
    plain = torchrun(processes, *flags, "--load", str(tmp_path / "fused"), "--ckpt-step", "2")
    assert told in plain.output and plain.losses == pytest.approx(again.losses, rel=1e-4)
    assert whole.losses[2:] != whole.losses[:2]
