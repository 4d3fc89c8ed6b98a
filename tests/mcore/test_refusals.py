"""The loop over refusals, and what is refused when a layer is built."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch.refusals import model
from megatron_fp4.mcore.launch.refusals.table import refuse


def test_the_first_refusal_ends_the_launch_and_no_more_is_asked() -> None:
    def refusals() -> Iterator[str]:
        yield "the first"
        raise AssertionError("asked for more")

    refuse(iter(()))
    with pytest.raises(ConfigError, match="^the first$"):
        refuse(refusals())


def test_layers_that_are_not_built() -> None:
    def config(**options: Any) -> Any:
        plain = {"multi_latent_attention": False, "experimental_attention_variant": None}
        return SimpleNamespace(**plain | {"num_layers": 4, "moe_layer_freq": 1} | options)

    for other in ({"multi_latent_attention": True}, {"experimental_attention_variant": "gdn"}):
        with pytest.raises(ConfigError, match="multi-latent and experimental attention are not"):
            refuse(model.architecture(config(**other)))
    with pytest.raises(
        ConfigError, match="--moe-layer-freq lists 3 layers and --num-layers is 4: list 4"
    ):
        refuse(model.layers_of_experts(config(moe_layer_freq=[1, 0, 1])))
    with pytest.raises(ConfigError, match="--moe-grouped-gemm is not supported; leave it out"):
        refuse(model.experts(moe_use_grouped_gemm=True))
    refuse(model.architecture(config()))
    refuse(model.layers_of_experts(config(moe_layer_freq=[1, 0, 1, 0])))
    refuse(model.experts(moe_use_grouped_gemm=False))
