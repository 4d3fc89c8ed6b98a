"""Two ways to test megatron_fp4.te without a GPU.

`stand_in` replaces Transformer Engine by the few classes that its quantizer hook needs. `on_a_cpu`
runs the linears of an installed Transformer Engine on a machine without CUDA.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

import megatron_fp4.te

ROOT = "transformer_engine"
MODULES = ("megatron_fp4.te.quantizers", "megatron_fp4.kernels.te_nvfp4", "transformer_engine")


class Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, tensor: Any) -> Any:
        return self.quantize(tensor)  # type: ignore[attr-defined]


class Storage:
    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size())  # type: ignore[attr-defined]


class Identity(Quantizer):
    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)


def custom_gemm(
    A: Any,
    B: Any,
    workspace: Any,
    out_dtype: Any = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Any = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: Any = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> Any:
    """Calls the quantizer's `qgemm`, with the signature of Transformer Engine 2.20.2."""
    return B._quantizer.qgemm(), None, None, None


@contextmanager
def stand_in() -> Iterator[None]:
    """Replaces Transformer Engine, installed or not, by the classes of this file."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith(MODULES)}
    package = vars(megatron_fp4.te)
    imported = package.pop("quantizers", None)
    _forget()
    sys.modules.update(_modules())
    try:
        yield
    finally:
        _forget()
        sys.modules.update(kept)
        package.pop("quantizers", None)
        if imported is not None:
            package["quantizers"] = imported


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]


def general_gemm(A: Any, B: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a test's own")


def _modules() -> dict[str, types.ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "pytorch.constants": {"DType": types.SimpleNamespace(kFloat4E2M1="E2M1")},
        "pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "pytorch.cpp_extensions.gemm": {"custom_gemm": custom_gemm},
        "pytorch.module.base": {"_ub_communicators": None},
        "pytorch.quantized_tensor": {"Quantizer": Quantizer, "QuantizedTensorStorage": Storage},
        "pytorch.tensor.storage.nvfp4_tensor_storage": {
            "NVFP4TensorStorage": types.SimpleNamespace
        },
        "pytorch.tensor.identity_tensor": {"IdentityQuantizer": Identity},
    }
    made: dict[str, types.ModuleType] = {}
    for path, names in contents.items():
        parts = [ROOT, *path.split(".")]
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = types.ModuleType(name)
                made[name].__path__ = []
                made[name].__spec__ = ModuleSpec(name, None)
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[name])
        vars(made[".".join(parts)]).update(names)
    return made


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Lets the linears of the installed Transformer Engine run on a machine without CUDA.

    Its questions about the GPU get the answers of one of compute capability 9.0.
    """
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base, linear

    def prepared(self: Any, inp: Any, num_gemms: int = 1, **_: Any) -> Any:
        self.allow_different_data_and_param_types = False
        self.set_activation_dtype(inp)
        self.init_fp8_metadata(num_gemms=num_gemms)
        return inp

    device = types.SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name in ("range_push", "range_pop"):
            patch.setattr(torch.cuda.nvtx, name, lambda *_: None)
        patch.setattr(gemm, "get_cublas_workspace", lambda *_, **__: torch.empty(1))
        patch.setattr(
            linear, "get_dummy_wgrad", lambda shape, dtype, **_: torch.zeros(shape).to(dtype)
        )
        patch.setattr(base.TransformerEngineBaseModule, "prepare_forward", prepared)
        patch.setattr(base.TransformerEngineBaseModule, "end_forward", lambda self: None)
        yield
