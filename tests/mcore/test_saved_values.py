"""Megatron saves what linears take and return in a step, and the gradients of both, where asked."""

from pathlib import Path

import torch
from torch.nn import functional as F

from testing.worlds.launch import train

LAYERS = ("decoder.layers.0", "decoder.layers.1")
SIZES = {  # of X and Y of the linears of a layer
    "self_attention.linear_qkv": (64, 128),
    "self_attention.linear_proj": (64, 64),
    "mlp.linear_fc1": (64, 256),
    "mlp.linear_fc2": (128, 64),
}


def saved(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """What --save-<kind>-interval saves of the second step, by the name of a module."""
    train(
        1, "--fp4-recipe", "tetrajet", "--bf16", "--train-iters", "2", "--ffn-hidden-size", "128",
        "--save", str(folder), "--save-interval", "100", f"--save-{kind}-interval", "2",
    )  # fmt: skip
    state = torch.load(folder / kind / "iter_0000002" / "mp_rank_00.pth", weights_only=True)
    values = state["model_chunk0"]
    for layer in LAYERS:
        for name, (x, y) in SIZES.items():
            assert values[f"{layer}.{name}/input0"].shape == (64, 2, x)  # tokens, sequences
            assert values[f"{layer}.{name}/output0"].shape == (64, 2, y)
    return values


def test_x_and_y_of_each_linear_are_saved(tmp_path: Path) -> None:
    """They are not what linears exchange where they compute SwiGLU and RMSNorm themselves."""
    values = saved(tmp_path, "activations")
    for layer in LAYERS:
        gate, up = values[f"{layer}.mlp.linear_fc1/output0"].chunk(2, -1)
        torch.testing.assert_close(values[f"{layer}.mlp.linear_fc2/input0"], F.silu(gate) * up)
        normed = values[f"{layer}.self_attention.linear_qkv/input0"].float()
        assert 0.9 < normed.square().mean() < 1.1


def test_dx_and_dy_of_each_linear_are_saved(tmp_path: Path) -> None:
    values = saved(tmp_path, "dgrads")
    assert all(values[f"{layer}.{name}/input0"].any() for layer in LAYERS for name in SIZES)
