"""Transformer Engine's own linears with this package's quantizers, where it is installed; without
a GPU what only asks for CUDA is answered."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_fp4.te
from megatron_fp4 import ConfigError, Recipe, get_recipe
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.te import Factory
from testing.builders import te_stand_in
from testing.oracles import normal, relative_error
from testing.worlds.launch import ROOT, SCRIPTS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine"
)
HAS_GPU = torch.cuda.is_available()
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
)
CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs it"))
NEAREST = get_recipe("tetrajet", backward_rounding="nearest")
IN, OUT, TOKENS = 128, 256, (2, 64)


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with te_stand_in.on_a_cpu() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


def tensors(device: str) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((*TOKENS, IN), (OUT, IN), (*TOKENS, OUT))
    x, w, dy = (normal(s, seed, torch.bfloat16).to(device) for seed, s in enumerate(shapes))
    return x, w, dy


class Model:
    """A te.Linear under a CustomRecipe, made anew in each pass as Megatron makes it."""

    def __init__(self, recipe: Recipe, device: str, fuses: bool = False, bias: bool = False):
        import transformer_engine.pytorch as te

        self.te, self.recipe = te, recipe
        self.layer = te.Linear(
            *(IN, OUT),
            bias=bias,
            params_dtype=torch.bfloat16,
            device=device,
            fuse_wgrad_accumulation=fuses,
        )
        self.x, w, self.dy = tensors(device)
        self.weight = self.layer.weight
        self.weight.data.copy_(w)
        if fuses:
            self.weight.main_grad = torch.full_like(w, 3.0, dtype=torch.float32)
            self.weight.grad_added_to_main_grad = False

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        from transformer_engine.common.recipe import CustomRecipe

        with self.te.autocast(enabled=True, recipe=CustomRecipe(Factory(self.recipe))):
            return self.layer(x, **kwargs)

    def run(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(y, dx); dW is in the weight's grad or main_grad."""
        x = self.x.clone().requires_grad_()
        y = self.forward(x, **kwargs)
        y.backward(self.dy)
        assert x.grad is not None
        return y.detach(), x.grad


def expected(recipe: Recipe, device: str, fuses: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = tensors(device)
    x, w = x.requires_grad_(), w.requires_grad_()
    if fuses:
        w.main_grad = torch.full_like(w, 3.0, dtype=torch.float32)  # type: ignore[attr-defined]
    y = quantized_linear(x, w, None, recipe, Site(fuses=fuses))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.main_grad if fuses else w.grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mxfp4", "tetrajet-nearest"])
def test_bit_for_bit_as_this_package_s_linear(device: str, name: str) -> None:
    recipe = NEAREST if name == "tetrajet-nearest" else get_recipe(name)
    made = Model(recipe, device)
    y, dx = made.run()
    right = expected(recipe, device)
    for found, wanted in zip((y, dx, made.weight.grad), right, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    plain = tensors(device)[0] @ tensors(device)[1].t()
    assert 0.02 < relative_error(y, plain.double()) < 0.3  # the control: it was quantized


def test_dw_is_in_main_grad_unrounded(device: str) -> None:
    made = Model(NEAREST, device, fuses=True)
    made.run()
    main_grad = expected(NEAREST, device, fuses=True)[2]
    assert torch.equal(made.weight.main_grad, main_grad) and made.weight.grad_added_to_main_grad
    rounded = 3.0 + expected(NEAREST, device)[2].float()
    assert not torch.equal(main_grad, rounded)  # the control
    made.run()
    assert torch.equal(made.weight.main_grad, 2 * main_grad - 3.0) or (
        relative_error(made.weight.main_grad, 2 * main_grad.double() - 3.0) < 1e-6
    )


def test_a_weight_is_kept_for_the_microbatches_of_a_step(device: str) -> None:
    """Evaluated first, then trained: its copies are made anew with the first microbatch."""
    made = Model(NEAREST, device)
    with torch.no_grad():
        made.forward(made.x, is_first_microbatch=True)
    right = expected(NEAREST, device)
    for first in (True, False, False):
        made.weight.grad = None
        if not first:  # nobody looks
            made.weight.data.zero_()
        y, dx = made.run(is_first_microbatch=first)
        assert torch.equal(y, right[0]) and torch.equal(dx, right[1])
        assert torch.equal(made.weight.grad, right[2])
    y, _ = made.run(is_first_microbatch=True)
    assert not y.any()  # the control: it looks again


def test_a_recomputed_forward_pass(device: str) -> None:
    made = Model(NEAREST, device)
    x = made.x.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(made.forward, x, use_reentrant=False)
    y.backward(made.dy)
    right = expected(NEAREST, device)
    assert torch.equal(y, right[0]) and torch.equal(x.grad, right[1])  # type: ignore[arg-type]
    assert torch.equal(made.weight.grad, right[2])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="the norm is a CUDA kernel")
def test_the_linear_with_a_norm_before_it() -> None:
    """It quantizes what the norm puts out."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import CustomRecipe

    common = {"normalization": "RMSNorm", "params_dtype": torch.bfloat16, "device": "cuda"}
    layer = te.LayerNormLinear(IN, OUT, bias=False, **common)
    norm = te.RMSNorm(IN, dtype=torch.bfloat16, device="cuda")
    x, _, dy = tensors("cuda")
    one, other = (x.clone().requires_grad_() for _ in range(2))
    with te.autocast(enabled=True, recipe=CustomRecipe(Factory(NEAREST))):
        y = layer(one)
    y.backward(dy)
    weight = layer.weight.detach().clone().requires_grad_()
    right = quantized_linear(norm(other), weight, None, NEAREST)
    right.backward(dy)
    assert torch.equal(y, right) and torch.equal(layer.weight.grad, weight.grad)
    assert one.grad is not None and other.grad is not None
    assert relative_error(one.grad, other.grad.double()) < 1e-2
    assert not torch.equal(y, norm(x) @ weight.t())  # the control: it was quantized


def test_stochastic_gradients_estimate_those_of_the_forward_operands(device: str) -> None:
    """The mean of n draws nears that of nearest rounding's clip-free double quantization."""
    made, n = Model(get_recipe("tetrajet"), device), 64
    draws = []
    for _ in range(n):
        made.weight.grad = None
        made.run()
        draws.append(made.weight.grad.double())
    x, w, dy = tensors(device)
    operand = megatron_fp4.quantize(x, "mxfp4-ceil").dequantize(torch.float64)
    right = dy.view(-1, OUT).double().t() @ operand.view(-1, IN)
    several = torch.stack(draws)
    spread = float(several.std(0).norm() / right.norm())
    assert 0.05 < spread < 0.5
    assert relative_error(several.mean(0), right) < 1.2 * spread / n**0.5 + 2e-3
    nearest = Model(NEAREST, device)
    nearest.run()
    assert relative_error(nearest.weight.grad, right) > 2 * spread / n**0.5  # the control


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU")
def test_sharded_under_sequence_parallelism() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append(str(SCRIPTS / "te_linears.py"))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "both modes agree" in done.stdout, done.stderr[-4000:]


def test_a_bias_is_refused_in_one_line(device: str) -> None:
    with pytest.raises(ConfigError, match="--disable-bias-linear"):
        Model(NEAREST, device, bias=True).run()


# --- NVFP4 operands for its GEMM ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 208])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-four-over-six"])
@pytest.mark.parametrize("place", [CPU, CUDA])
def test_nvfp4_operands_are_what_it_would_hold(place: str, name: str, rows: int) -> None:
    """Where it can decode, its own kernel gives the values that this package's codes stand for."""
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    from megatron_fp4.kernels.te_nvfp4 import _operand

    x = 3 * normal((rows, 416), 1).to(place)
    q = megatron_fp4.quantize(x, name)
    stored = _operand(q)
    assert isinstance(stored, NVFP4TensorStorage)
    assert tuple(stored.size()) == (rows, 416)
    if place == "cpu":
        return
    values = stored.dequantize(dtype=torch.float32)
    right = q.dequantize(torch.float64)
    assert relative_error(values, right) < 1e-6
    assert relative_error(_operand(q, 2.0).dequantize(dtype=torch.float32), right) > 0.9  # control
