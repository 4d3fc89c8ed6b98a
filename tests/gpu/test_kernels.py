"""On a GPU: the quantize kernels' codes and scales are the reference's."""

from functools import partial

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.philox import Key, Noise
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.makers import choose, outliers
from megatron_fp4.makers.base import Given
from megatron_fp4.setting import Setting
from megatron_fp4.target import target_of
from testing.builders.operand_plans import made_in_pytorch, plan
from testing.kernels.compare_block_scales import QUANTIZERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def by_kernel(
    x: torch.Tensor, quantizer: Quantizer, given: dict[int, Given], group: int = 0
) -> list[QuantizedTensor]:
    """The copies of x along the axes that are given, by the maker of a plan on this GPU."""
    operands = [plan(x, quantizer, axis, group=group) for axis in given]
    [maker] = {choose(operand, target_of(x.device)).maker for operand in operands}
    assert maker.name != "pytorch"
    made = maker.make(x, operands, list(given.values()))
    return [each.operand for each in made if isinstance(each.operand, QuantizedTensor)]


def test_codes_and_scales_are_the_reference_s() -> None:
    from testing.kernels.compare_mxfp4 import differences

    assert differences("cuda") == []


def test_codes_with_float32_scales_are_the_reference_s() -> None:
    from testing.kernels.compare_row_scales import differences

    assert list(differences("cuda")) == []


@pytest.mark.parametrize("name", [*QUANTIZERS, "transformed", "float32", "restored"])
def test_codes_with_scales_in_small_floats_are_the_reference_s(name: str) -> None:
    from testing.kernels.compare_block_scales import differences

    assert list(differences("cuda", name)) == []


def test_quotients_are_those_of_ieee_754() -> None:
    from testing.kernels.compare_quotients import differences

    assert list(differences("cuda")) == []


def test_products_are_scaled_as_by_pytorch() -> None:
    from testing.kernels.compare_scaled_product import differences

    assert list(differences("cuda")) == []


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil", "mxfp4-sr", "mxfp4-ceil-sr"])
def test_every_magnitude_under_every_scale(name: str, axis: int) -> None:
    """Blocks' largest elements of every exponent, with those of 15 binades below them."""
    mantissas = torch.tensor([0, 1, 0x20, 0x3F, 0x40, 0x41, 0x60, 0x7F])
    tops = (torch.arange(255)[:, None] * 128 + mantissas).reshape(-1, 1)
    others = (tops - torch.arange(64 * 31)).clamp(min=0)
    others |= (torch.arange(64 * 31) % 2) << 15
    blocks = torch.cat((tops[:, :, None].expand(-1, 64, 1), others.view(-1, 64, 31)), 2)
    x = blocks.view(len(tops), -1).short().view(torch.bfloat16).cuda()
    x = x if axis == 1 else x.t().contiguous()
    noise = Noise(Key(3), 5) if name.endswith("sr") else None
    [found] = by_kernel(x, get_quantizer(name), {axis: Given(noise=noise)})
    made = made_in_pytorch(x, get_quantizer(name), axis, noise=noise)
    assert torch.equal(found.codes, made.codes) and torch.equal(found.scales, made.scales)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-17-16-sr"])
def test_nvfp4_through_the_maker(name: str) -> None:
    x = torch.randn(1024, 4096, device="cuda").bfloat16()
    noise = Noise(Key(3), 5) if name.endswith("sr") else None
    for axis in (0, 1):
        [found] = by_kernel(x, get_quantizer(name), {axis: Given(noise=noise)})
        made = made_in_pytorch(x, get_quantizer(name), axis, noise=noise)
        assert torch.equal(found.codes, made.codes) and torch.equal(found.scales, made.scales)
        assert torch.equal(found.dequantize(), made.dequantize())


def test_an_average_through_the_maker() -> None:
    x = torch.randn(1024, 4096, device="cuda").bfloat16()
    average = x.float() + 0.2 * torch.randn(1024, 4096, device="cuda")
    quantizer = Quantizer(rule="ceil", rounding="ema")
    given = Given(average=average)
    for axis, found in zip((1, 0), by_kernel(x, quantizer, {1: given, 0: given}), strict=True):
        other = made_in_pytorch(x, quantizer, axis, average=average)
        assert torch.equal(found.codes, other.codes) and torch.equal(found.scales, other.scales)


def test_the_estimator_s_factor_is_the_reference_s() -> None:
    from testing.kernels.compare_dge_factor import differences

    assert list(differences("cuda")) == []


def test_adamw_in_few_bits_is_that_of_the_formulas() -> None:
    from testing.kernels.compare_low_bit_adamw import differences

    assert list(differences("cuda")) == []


def test_messages_of_gradients_are_the_reference_s() -> None:
    from testing.kernels.compare_messages import differences

    assert list(differences("cuda")) == []


def test_weights_that_are_sent_are_the_reference_s() -> None:
    from testing.kernels.compare_sent_weights import differences

    assert list(differences("cuda")) == []


def test_ramping_is_that_of_the_formulas() -> None:
    from testing.kernels.compare_ramping import differences

    assert list(differences("cuda")) == []


def test_averages_are_updated_as_by_the_reference() -> None:
    from testing.kernels.compare_averages import differences

    assert list(differences("cuda")) == []


def test_a_norm_is_that_of_pytorch() -> None:
    from testing.kernels.compare_rms_norm import differences

    assert differences("cuda") == []


def test_a_rotation_is_that_of_float64_and_mistakes_are_noticed() -> None:
    from testing.kernels.compare_rotary import differences

    assert differences("cuda") == []


def test_a_swiglu_is_that_of_pytorch() -> None:
    from testing.kernels.compare_swiglu import differences

    assert differences("cuda") == []


def test_outliers_are_the_reference_s_on_a_cpu() -> None:
    from testing.kernels.compare_outlier_clamp import NARROW, differences

    assert list(differences("cuda", (*NARROW, 4096, 14336, 32766))) == []


@pytest.mark.parametrize("features", [4096, 14336])
def test_many_tokens_are_split_through_the_maker(features: int) -> None:
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(512, features, generator=generator).exp().bfloat16() - 0.7
    wanted, wanted_residual = OutlierClamp().split(x)
    target, bf16 = target_of(torch.device("cuda")), torch.bfloat16
    setting = Setting(512, features, 64, bf16, target, bf16)
    splitting = outliers.choose(get_recipe("dge-occ"), setting)
    assert splitting is not None and isinstance(splitting.split, partial)
    for each in (splitting.split, OutlierClamp().split):  # PyTorch's sort on a GPU too
        found, residual = each(x.cuda())
        assert torch.equal(found.cpu(), wanted)
        assert torch.equal(residual.dense().cpu(), wanted_residual.dense())


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-ceil-sr"])
def test_a_large_gradient_both_ways_through_the_maker(name: str, group: int) -> None:
    x = torch.randn(1024, 4096, device="cuda").bfloat16()
    quantizer = get_quantizer(name)
    given = {
        axis: Given(noise=Noise(Key(3), axis) if quantizer.stochastic else None) for axis in (1, 0)
    }
    for axis, found in zip((1, 0), by_kernel(x, quantizer, given, group), strict=True):
        other = made_in_pytorch(x, quantizer, axis, group, noise=given[axis].noise)
        differing = (found.codes != other.codes).sum() + (found.scales != other.scales).sum()
        assert differing <= (1e-4 * x.numel() if group else 0)
