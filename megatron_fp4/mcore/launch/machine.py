"""What the machine at hand has, and the defaults of Megatron's arguments that follow from it."""

import importlib.util
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE


def installed(package: str) -> bool:
    """Whether a package is there to be imported."""
    return importlib.util.find_spec(package) is not None


def defaults() -> dict[str, Any]:
    """Megatron's arguments with other defaults than its own: what the machine lacks is turned off.

    Megatron's defaults ask for Transformer Engine, apex and NCCL.
    """
    found: dict[str, Any] = {}
    if not HAVE_TE:
        found |= {"transformer_impl": "local", "apply_rope_fusion": False}
    if not installed("apex"):
        found |= {"no_persist_layer_norm": True, "masked_softmax_fusion": False}
    if not installed("one_logger"):  # NVIDIA's own: on by default, a warning if missing
        found["enable_one_logger"] = False
    if not torch.cuda.is_available():
        found |= {
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            "bias_gelu_fusion": False,
            "bias_swiglu_fusion": False,
            "bias_dropout_fusion": False,
            "num_workers": 0,  # a forked loader would have to start torch once more
        }
    return found
