"""Core attention against Megatron's own, and what it refuses."""

from typing import Any, cast

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model import attention
from megatron_fp4.mcore.model.attention import SdpaAttention

SEQUENCE, BATCH, HEADS, CHANNELS = 24, 2, 4, 16


class OneRank:
    """The process groups of a model that is not split."""

    class tp:
        size = staticmethod(lambda: 1)
        rank = staticmethod(lambda: 0)


def build(kind: type, mask_type: AttnMaskType, **options: Any) -> Any:
    dropout = options.pop("attention_dropout", 0.0)
    scale = options.pop("softmax_scale", None)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        attention_dropout=dropout,
        **options,
    )
    return kind(config, 3, mask_type, "self", softmax_scale=scale, pg_collection=OneRank)


def operands(groups: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(SEQUENCE, BATCH, heads, CHANNELS, requires_grad=True)
        for heads in (HEADS, groups, groups)
    ]


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream puts its scores on the current CUDA device and forks its random states."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", None)
    parallel_state._set_global_memory_buffer()
    monkeypatch.setattr(fused_softmax, "get_default_causal_mask", lambda length: CAUSAL)
    states = NoStates()
    for module in (attention, DotProductAttention.__init__.__globals__["tensor_parallel"]):
        monkeypatch.setattr(module, "get_cuda_rng_tracker", lambda: states)


class NoStates:
    forks = 0

    def fork(self) -> "NoStates":
        return self

    def __enter__(self) -> None:
        self.forks += 1

    def __exit__(self, *_: object) -> None: ...


def padding() -> Tensor:
    """The last five keys of the second sample are padding; True is masked out."""
    mask = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    mask[1, :, :, -5:] = True
    return mask


CAUSAL = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("mask_type", "mask", "groups", "options"),
    [
        (AttnMaskType.causal, None, 4, {}),
        (AttnMaskType.causal, None, 2, {"num_query_groups": 2}),
        (AttnMaskType.causal, CAUSAL | padding(), 1, {"num_query_groups": 1}),
        (AttnMaskType.padding, padding(), 4, {}),
        (AttnMaskType.no_mask, None, 4, {"softmax_scale": 0.5}),
        (AttnMaskType.causal, None, 4, {"apply_query_key_layer_scaling": True}),
    ],
    ids=["causal", "grouped", "reset-mask", "padding", "scale", "layer-scaling"],
)
def test_output_and_gradients_are_upstream_s(
    on_the_host: None,
    mask_type: AttnMaskType,
    mask: Tensor | None,
    groups: int,
    options: dict[str, Any],
) -> None:
    results = []
    for kind in (SdpaAttention, DotProductAttention):
        inputs = operands(groups)
        output = build(kind, mask_type, **options)(*inputs, mask)
        output.backward(torch.sin(torch.arange(output.numel())).view_as(output))
        results.append([output, *(cast(Tensor, x.grad) for x in inputs)])
    for mine, upstream in zip(*results, strict=True):
        torch.testing.assert_close(mine, upstream, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    mask = padding()
    mask[0, :, 7] = True
    inputs = operands(4)
    output = build(SdpaAttention, AttnMaskType.padding)(*inputs, mask)
    output.sum().backward()
    assert not output[7, 0].any() and output[7, 1].all()
    assert all(torch.isfinite(cast(Tensor, x.grad)).all() for x in inputs)


def test_dropout_draws_from_the_model_parallel_stream_and_not_in_evaluation(
    on_the_host: None,
) -> None:
    module = build(SdpaAttention, AttnMaskType.causal, attention_dropout=0.5)
    states = attention.get_cuda_rng_tracker()
    dropped = module(*operands(4), None)
    assert states.forks == 1
    kept = module.eval()(*operands(4), None)
    assert states.forks == 1 and not torch.equal(dropped, kept)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window_size": (4, 0)}, "--window-size"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        ({"context_parallel_size": 2}, "context parallelism"),
    ],
    ids=["window", "softmax", "context"],
)
def test_what_it_cannot_do_is_refused_when_built(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* not supported"):
        build(SdpaAttention, AttnMaskType.causal, **options)


def test_packed_sequences_and_a_bias_are_refused() -> None:
    module = build(SdpaAttention, AttnMaskType.causal)
    with pytest.raises(ConfigError, match="packed sequences"):
        module(*operands(4), None, packed_seq_params=PackedSeqParams())
    with pytest.raises(ConfigError, match="attention bias"):
        module(*operands(4), None, attention_bias=torch.zeros(1))


OLDER = (
    "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found runtime "
    "version (9, 14, 0). PyTorch already comes bundled with cuDNN. One option is to remove it."
)


@pytest.mark.parametrize(
    ("capability", "is_older", "problem"),
    [
        ((9, 0), False, None),
        ((9, 0), True, "PyTorch was compiled against (9, 19, 0) but found runtime version (9, 14"),
        ((10, 0), True, "PyTorch was compiled against (9, 19, 0) but found runtime version (9, 14"),
        ((8, 0), True, None),
    ],
)
def test_an_older_cudnn_than_torch_s_is_a_problem_where_torch_prefers_cudnn(
    capability: tuple[int, int],
    is_older: bool,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version() -> int:
        if is_older:
            raise RuntimeError(OLDER)
        return 91900

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    found = attention.cudnn_problem()
    assert found is None if problem is None else found is not None and problem in found
    assert found is None or "One option" not in found


def test_there_is_no_problem_with_cudnn_on_a_cpu() -> None:
    if not torch.cuda.is_available():
        assert attention.cudnn_problem() is None
