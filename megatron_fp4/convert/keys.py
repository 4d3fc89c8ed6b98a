"""What the keys of a checkpoint say: which tensor is a weight, an optimizer's, or other state.

Megatron names a weight by its place in the model, and its optimizer's state by that name after
`optimizer.state.NAME.`: optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_fp4.arithmetic.weight_states import key_of

Kind = Literal["weights", "optimizer", "states"]

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<weight>.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_BESIDE = re.compile(r"(?:chained_\d+\.)?optimizer\..*\bfp4_\w+(\.|$)")  # states beside weights
_RUN = re.compile(r"(?:.+\.)?(rng_state|rerun_state_machine_state|common_state)/")
_LAYER = re.compile(r"(?P<stack>.*\blayers)\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")


def kind(key: str) -> Kind:
    """Of a tensor: "weights" of the model; "states" that this package keeps beside weights (such as
    their average); "optimizer" for the rest of an optimizer's state, main weights among it."""
    if _BESIDE.match(key):
        return "states"
    return "optimizer" if _OPTIMIZER.match(key) else "weights"


def is_average(key: str) -> bool:
    """Whether a tensor is of the averages of weights, one of the "states"."""
    return kind(key) == "states" and key_of("average") in key.split(".")


def is_of_model(key: str) -> bool:
    """Whether an object that is not a tensor belongs to the model, as a linear's extra state does,
    and not to the optimizer or the run (random state, arguments)."""
    return not (_OPTIMIZER.match(key) or _RUN.match(key))


def is_sharded_in_memory(key: str) -> bool:
    """Whether a tensor or object is of an optimizer whose state was saved as ranks had it, so that
    only a launch in the same layout can load it."""
    return "dp_group_idx" in key or "gbuf_idx" in key


@dataclass(frozen=True)
class Address:
    """Where the tensor of a key is in the model.

    name: the weight's name without the number of a layer: decoder.layers.mlp.linear_fc1.weight.
    layer: its decoder layer, from 0, if the key names one; else None.
    is_stacked: whether the tensor's first axis is the layer.
    has_experts: whether an axis of experts follows.
    """

    name: str
    layer: int | None
    is_stacked: bool
    has_experts: bool

    @property
    def is_layer(self) -> bool:
        """Whether it belongs to layers of the decoder."""
        return self.is_stacked or self.layer is not None

    @property
    def leading(self) -> int:
        """How many axes come before those of the weight itself: layers, experts."""
        return self.is_stacked + self.has_experts


def address(key: str) -> Address:
    """Where the weight of a key is, or the weight that a key of an optimizer's state belongs to."""
    state = _STATE.fullmatch(key)
    weight = state["weight"] if state else key
    numbered = _LAYER.fullmatch(weight)
    if numbered and not numbered["stack"].startswith("decoder"):
        numbered = None
    name = f"{numbered['stack']}.{numbered['rest']}" if numbered else weight
    is_stacked = numbered is None and weight.startswith("decoder.layers.")
    layer = int(numbered["layer"]) if numbered else None
    return Address(name, layer, is_stacked, bool(_EXPERTS.search(weight)))
