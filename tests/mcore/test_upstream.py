"""Whose linears a layer is built of, where upstream's own FP4 and FP8 are asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine_spec_provider as upstream
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.spec import Fp4SpecProvider

ENGINES = (type("TEColumn", (), {}), type("TERow", (), {}))
OWN = (Fp4ColumnParallelLinear, Fp4RowParallelLinear)
MEGATRONS = (ColumnParallelLinear, RowParallelLinear)


class Engine:
    def column_parallel_linear(self) -> type:
        return ENGINES[0]

    def row_parallel_linear(self) -> type:
        return ENGINES[1]


@pytest.mark.parametrize(
    ("asked", "implementation", "linears"),
    [
        ({"fp4": "e2m1", "fp4_recipe": "custom"}, "transformer_engine", ENGINES),
        ({"fp8": "hybrid"}, "transformer_engine", ENGINES),
        ({"fp4_recipe": "tetrajet"}, "transformer_engine", OWN),
        ({"fp4_recipe": "tetrajet"}, "local", OWN),
        ({}, "transformer_engine", MEGATRONS),
    ],
)
def test_linears(
    asked: dict[str, Any],
    implementation: str,
    linears: tuple[type, type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "TESpecProvider", Engine)
    nothing = {"fp4": None, "fp8": None, "fp4_recipe": None, "transformer_impl": implementation}
    provider = Fp4SpecProvider(SimpleNamespace(**nothing | asked))  # type: ignore[arg-type]
    assert (provider.column_parallel_linear(), provider.row_parallel_linear()) == linears
