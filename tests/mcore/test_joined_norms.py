"""RMSNorms that the linears behind them compute, in Megatron's models and training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_fp4 import get_recipe
from megatron_fp4.execution.call import Site
from megatron_fp4.mcore.model import joined_norms
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4State
from megatron_fp4.mcore.model.norm import Norm
from testing.builders import small_gpt
from testing.builders.small_gpt import losses_and_gradients
from testing.worlds.launch import train

RECIPE = ("--bf16", "--fp4-recipe", "tetrajet")
OFF = ("--fp4-fused-kernels", "off")
SAID = "RMSNorm is computed by linear_qkv and mlp.linear_fc1 behind it"


@dataclass
class Following(Fp4State):
    """The state of a linear that follows its recipe if `is_followed`; notes what it is given."""

    is_followed: bool = True

    def follows(self, training: bool) -> bool:
        return self.is_followed

    def product(self, x: Any, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        assert self.site.norm is not None
        with torch.no_grad():
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.site.norm.gain, 1e-5)
        stands_for_it = x + (normed - x).detach()  # its gradient is that of the norm
        return torch.nn.functional.linear(stands_for_it, weight, bias)


def built(follows: bool = True, **options: Any) -> MegatronModule:
    """A model whose column-parallel linears follow recipes, in float32."""
    sizes = dict(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4)
    plain = dict(normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0)
    config = small_gpt.config(**sizes | plain | options)
    model = small_gpt.build(config, 96, 16)
    for name, module in model.named_modules():
        if isinstance(module, Fp4ColumnParallelLinear) and name != "output_layer":
            recipe = get_recipe("tetrajet")
            module.fp4 = Following(None, recipe, Site(name), is_followed=follows)  # type: ignore[arg-type]
    return model


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # of Megatron's embedding


def test_a_layer_passes_each_norm_and_residual_on(one_rank: None) -> None:
    """Linears that compute torch's norm give the losses and gradients of a model of Megatron's."""
    model, plain = built(), built()
    plain.load_state_dict(model.state_dict())
    for module in plain.modules():
        if isinstance(module, Fp4ColumnParallelLinear):
            module.fp4 = None
    assert joined_norms.join(model) == 4
    found, wanted = losses_and_gradients(model), losses_and_gradients(plain)
    assert len(found) == len(wanted) > 10
    assert all(
        torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True)
    )
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_norm_whose_linear_does_not_follow_now_is_computed_as_ever(one_rank: None) -> None:
    """As in an evaluation in BF16."""
    model, plain = built(follows=False), built()
    plain.load_state_dict(model.state_dict())
    for module in plain.modules():
        if isinstance(module, Fp4ColumnParallelLinear):
            module.fp4 = None
    assert joined_norms.join(model) == 4
    assert all(map(torch.equal, losses_and_gradients(model), losses_and_gradients(plain)))


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        (dict(normalization="LayerNorm"), 0),
        (dict(fp32_residual_connection=True), 0),
        (dict(recompute_granularity="selective", recompute_modules=["layernorm"]), 0),
        (
            dict(num_moe_experts=2, moe_router_pre_softmax=True, moe_router_topk=1),
            2,
        ),  # routers read the norms before experts
    ],
    ids=("LayerNorm", "wide residuals", "norms that are computed again", "experts"),
)
def test_other_norms_stay_as_they_are(options: dict[str, Any], joined: int, one_rank: None) -> None:
    model = built(**options)
    assert joined_norms.join(model) == joined
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    assert sum(norm.linear_follows is not None for norm in norms) == joined


@pytest.mark.parametrize("method", ["forward", "_forward_mlp", "_forward_pre_mlp_layernorm"])
def test_a_layer_with_a_forward_pass_of_its_own_is_left_alone(method: str, one_rank: None) -> None:
    model = built()

    def own(self: TransformerLayer, *args: Any, **named: Any) -> Any:
        return getattr(TransformerLayer, method)(self, *args, **named)

    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.__class__ = type("Other", (TransformerLayer,), {method: own})
    assert joined_norms.join(model) == 0


def test_linears_compute_them_and_train_as_with_norms_of_their_own() -> None:
    joined, apart = train(1, *RECIPE), train(1, *RECIPE, *OFF)
    assert SAID in joined.output and SAID not in apart.output
    assert joined.losses == pytest.approx(apart.losses, rel=2e-3)


@pytest.mark.slow
def test_recomputation_of_a_part_repeats_it() -> None:
    part = "--recompute-granularity selective --recompute-modules mlp"
    assert train(1, *RECIPE, *part.split()).losses == train(1, *RECIPE).losses
