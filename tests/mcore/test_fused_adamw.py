"""Training with torch's fused AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_scale

from megatron_fp4.mcore.model import optimizers
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


def test_gradients_are_clipped_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bits of Megatron's function, which it replaces."""
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    monkeypatch.setattr(optimizers, "stepping_optimizers", lambda optimizer: [])
    optimizers.fuse(None)  # type: ignore[arg-type]
    scale = clip_grads.multi_tensor_scale_impl
    assert scale is optimizers._scale
    gradients = [torch.randn(5, 7), torch.randn(3)[1:], torch.tensor([torch.nan, torch.inf, 1e-42])]
    wanted = [gradient.clone() for gradient in gradients]
    others = [torch.zeros_like(gradient) for gradient in gradients]
    local_multi_tensor_scale(0, None, [wanted, wanted], 0.3)
    scale(0, None, [gradients, others], 0.3)
    monkeypatch.setattr(optimizers, "local_multi_tensor_scale", None)  # makes new tensors
    scale(0, None, [gradients, gradients], 0.3)
    for found in (gradients, others):
        for each, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)
    monkeypatch.undo()
    scale(0, None, [[], []], 0.3)


def test_the_scale_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", abs)
    monkeypatch.setattr(optimizers, "stepping_optimizers", lambda optimizer: [])
    optimizers.fuse(None)  # type: ignore[arg-type]
    assert clip_grads.multi_tensor_scale_impl is abs
