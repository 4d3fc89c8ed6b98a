"""Checks of the tensors that users pass to the public functions.

The functions take plain floating-point tensors whose shapes, devices and dtypes fit together.
Anything else is refused with a one-line ConfigError. A Tensor subclass that keeps its data
elsewhere (DTensor, FakeTensor) is refused because a kernel would read from an invalid address.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp4.errors import ConfigError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(tensor: Tensor, what: str) -> None:
    """Check that `tensor` is a plain dense tensor in float16, bfloat16, float32 or float64.

    Raises ConfigError otherwise, also inside torch.func transforms and torch.jit tracing. what:
    how the message names the tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{what} is a {type(tensor).__name__}; give a torch.Tensor")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        remedy = "give a plain torch.Tensor"
        if kind.__name__ == "DTensor":
            remedy = (
                "use Megatron's tensor parallelism, or FSDP2 (fully_shard), under which forward "
                "passes see plain tensors"
            )
        if kind.__name__ == "FakeTensor":
            remedy = "torch.export traces no linear of a recipe; use torch.compile"
        raise ConfigError(f"{what} is a {kind.__name__}, which is not supported: {remedy}")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ConfigError(f"{what} is inside a torch.func transform, which is not supported")
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(f"{what} is being traced by torch.jit, which is not supported")
    if tensor.dtype not in _DTYPES:
        known = "float16, bfloat16, float32 or float64"
        raise ConfigError(f"{what} is {_short(tensor.dtype)}; convert it to {known}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        form = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ConfigError(f"{what} is a {form} tensor; give a dense one")


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> None:
    """Check that nn.functional.linear would take these tensors, of which weight is [out, in].

    Raises ConfigError unless each passes `check_tensor`, their shapes fit, and they share a device
    and, after autocast's casts, a dtype. name: how the message names the linear.
    """
    given = [("x", x), ("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for what, tensor in given:
        check_tensor(tensor, f"{name}: {what}")
    if weight.ndim != 2:
        raise ConfigError(f"{name}: weight is [out, in], not {list(weight.shape)}")
    outputs, inputs = weight.shape
    if not weight.numel():
        raise ConfigError(f"{name}: weight is {list(weight.shape)}; give it rows and columns")
    if not x.ndim or x.shape[-1] != inputs:
        raise ConfigError(f"{name}: x is [..., {inputs}] under this weight, not {list(x.shape)}")
    if bias is not None and bias.shape != (outputs,):
        raise ConfigError(f"{name}: bias is [{outputs}] under this weight, not {list(bias.shape)}")
    for what, tensor in given:
        if tensor.device != x.device:
            raise ConfigError(
                f"{name}: x is on {x.device} and {what} on {tensor.device}; move one of them"
            )
        if tensor.dtype != x.dtype and computes_in(tensor) != computes_in(x):
            raise ConfigError(
                f"{name}: x is {_short(x.dtype)} and {what} {_short(tensor.dtype)}; convert one of "
                "them, or use torch.autocast"
            )


def computes_in(tensor: Tensor) -> torch.dtype:
    """The dtype in which a linear computes with `tensor`.

    It is the tensor's own dtype, or under torch.autocast the autocast dtype, to which all dtypes
    but float64 are cast.
    """
    if tensor.dtype == torch.float64 or not autocasts(tensor.device.type):
        return tensor.dtype
    return torch.get_autocast_dtype(tensor.device.type)


def autocasts(device: str) -> bool:
    """Whether torch.autocast is enabled for a device type; False for types without autocast, such
    as "meta"."""
    if not torch._C._is_any_autocast_enabled():  # the cheapest question first
        return False
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
