"""Which classes of a specification become this package's linears."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.mlp import GatedMLP
from megatron_fp4.mcore.model.norm_linear import Fp4NormColumnParallelLinear
from megatron_fp4.mcore.model.replacement import followed


@dataclass(frozen=True)
class Parts:
    """The submodules of a fork's layer."""

    first: Any = ColumnParallelLinear
    more: Any = (RowParallelLinear, WrappedTorchNorm)
    number: int = 3
    inner: Any = field(default_factory=lambda: ModuleSpec(module=RowParallelLinear))


def test_a_tree_is_copied_and_its_linears_are_replaced() -> None:
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    spec = ModuleSpec(module=MLP, params={"a": 1}, submodules=[Parts(), mlp])
    found = followed(spec)
    parts, made = found.submodules  # type: ignore[misc]
    assert (parts.first, parts.number) == (Fp4ColumnParallelLinear, 3)
    assert parts.more == (Fp4RowParallelLinear, WrappedTorchNorm)
    assert parts.inner.module is Fp4RowParallelLinear
    assert made.func == GatedMLP.as_mlp_submodule and made.keywords["submodules"] == MLPSubmodules(
        linear_fc1=Fp4ColumnParallelLinear, linear_fc2=Fp4RowParallelLinear
    )
    assert found.module is MLP and found.params == {"a": 1}
    assert submodules.linear_fc1 is ColumnParallelLinear  # the user's tree is as it was
    assert spec.submodules[0].inner.module is RowParallelLinear  # type: ignore[index]
    assert followed(found).submodules[0] == parts  # type: ignore[index]


def test_a_class_that_is_named_by_its_module() -> None:
    path = ("megatron.core.tensor_parallel", "ColumnParallelLinear")
    assert followed(ModuleSpec(module=path)).module is Fp4ColumnParallelLinear


def test_a_subclass_keeps_what_it_changes() -> None:
    class Own(ColumnParallelLinear):
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named)

    made = followed(Own)
    assert issubclass(made, Fp4ColumnParallelLinear) and issubclass(made, Own)
    assert made.forward is Own.forward
    assert made._forward_impl is Fp4ColumnParallelLinear._forward_impl
    assert followed(Own) is made  # one class, however often it is used


def test_a_subclass_that_multiplies_for_itself_is_refused() -> None:
    class OwnGemm(ColumnParallelLinear):
        def _forward_impl(self, *given: Any, **named: Any) -> Any:
            return None

    class OwnForward(RowParallelLinear):
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named)

    for kind, name in ((OwnGemm, "_forward_impl"), (OwnForward, "forward")):
        with pytest.raises(ConfigError, match=f"{kind.__name__} has a {name} of its own"):
            followed(kind)


def engine(name: str, *bases: type) -> type:
    return type(name, bases, {"__module__": transformer_engine.__name__})


def test_transformer_engines_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine("TELinear")
    expected = {
        "TELayerNormColumnParallelLinear": (engine("A"), Fp4NormColumnParallelLinear),
        "TEColumnParallelLinear": (engine("B", plain), Fp4ColumnParallelLinear),
        "TERowParallelLinear": (engine("C", plain), Fp4RowParallelLinear),
        "TELinear": (plain, plain),
    }
    for name, (kind, _) in expected.items():
        monkeypatch.setattr(transformer_engine, name, kind)
    for kind, ours in expected.values():
        assert followed(kind) is ours
    changed = type("Changed", (expected["TERowParallelLinear"][0],), {})
    with pytest.raises(ConfigError, match="Changed changes Transformer Engine's TERowParallel"):
        followed(changed)
    for name, remedy in (("TEGroupedLinear", "grouped-gemm"), ("TEFusedMLP", "op-fuser")):
        monkeypatch.setattr(transformer_engine, name, engine(name), raising=False)
        with pytest.raises(ConfigError, match=f"use {name}, which follows no recipe: .*{remedy}"):
            followed(getattr(transformer_engine, name))
