"""The norms against float64."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model.norm import Norm

HIDDEN, EPS = 48, 1e-5


def config(normalization: str, **options: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization=normalization,
        layernorm_zero_centered_gamma=options.get("zero_centered", False),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_output_and_gradients_are_those_of_float64(
    kind: str, zero_centered: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = Norm(config(kind, zero_centered=zero_centered), HIDDEN, EPS).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = (3 * torch.randn(5, 7, HIDDEN) + 1).to(dtype).requires_grad_()
    dy = torch.randn(5, 7, HIDDEN).to(dtype)

    exact = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    gain = exact[1] + 1 if zero_centered else exact[1]
    if kind == "RMSNorm":
        expected = F.rms_norm(exact[0], (HIDDEN,), gain, EPS)
    else:
        expected = F.layer_norm(exact[0], (HIDDEN,), gain, exact[2], EPS)
    expected.backward(dy.double())

    y = norm(x)
    y.backward(dy)
    assert y.dtype == dtype
    one_rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y.double(), expected, rtol=1.01 * one_rounding + 1e-6, atol=1e-5)
    for mine, reference in zip((x, *norm.parameters()), exact, strict=True):
        assert mine.grad is not None and reference.grad is not None
        error = (mine.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("parallel", [False, True])
def test_parameters_tell_megatron_of_sequence_parallelism(parallel: bool) -> None:
    layer_norm = config("LayerNorm")
    layer_norm.sequence_parallel = parallel
    marks = [getattr(p, "sequence_parallel", None) for p in Norm(layer_norm, HIDDEN).parameters()]
    assert marks == [parallel, parallel]


def test_an_fp32_residual_comes_out_in_the_parameters_type() -> None:
    norm = Norm(config("RMSNorm"), HIDDEN).bfloat16()
    assert norm(torch.randn(2, HIDDEN)).dtype == torch.bfloat16


def test_another_norm_is_refused() -> None:
    other = config("RMSNorm")
    other.normalization = "L2Norm"
    with pytest.raises(ConfigError, match="use RMSNorm or LayerNorm"):
        Norm(other, HIDDEN)
