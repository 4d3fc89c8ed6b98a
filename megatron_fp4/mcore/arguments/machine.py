"""Which packages and devices this machine has, and defaults for Megatron's arguments that fit."""

import importlib.util
import os
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE


def installed(package: str) -> bool:
    """Whether a package is installed, so that it can be imported."""
    return importlib.util.find_spec(package) is not None


def runs_triton() -> bool:
    """Whether Triton's kernels run here: there is a GPU, or they are interpreted, as in tests."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def defaults() -> dict[str, Any]:
    """New defaults, by name, for Megatron's arguments that need what this machine does not have.

    Megatron's own defaults require Transformer Engine, apex and NCCL.
    """
    found: dict[str, Any] = {}
    if not HAVE_TE:
        found |= {"transformer_impl": "local", "apply_rope_fusion": False}
    if not installed("apex"):
        found |= {"no_persist_layer_norm": True, "masked_softmax_fusion": False}
    if not installed("one_logger"):  # NVIDIA's; upstream enables it and warns if it is missing
        found["enable_one_logger"] = False
    if not torch.cuda.is_available():
        found |= {
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            "bias_swiglu_fusion": False,
            "bias_dropout_fusion": False,
            "num_workers": 0,  # a worker process of the data loader would load torch again
        }
    return found
