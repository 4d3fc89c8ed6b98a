"""Runs Megatron's training loop on a machine without a GPU, over gloo.

Megatron names CUDA devices in a few hundred places. `install()` makes the CPU stand in for device
0: a torch function mode rewrites CUDA devices to the CPU in every torch call, and each torch.cuda
function that the training loop calls is replaced by a stand-in. On a machine with a GPU `install()`
does nothing. `torch.cuda.is_available()` stays False, so code that asks whether there is a GPU
still gets the right answer.

C stands for megatron/core, T for megatron/training.
"""

import collections
import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, autograd
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.target import ROCM

_mode: "_HostIsTheDevice | None" = None  # not None once the CPU stands in for device 0 in torch
_is_in_megatron = False  # whether _patch_megatron has run


def install() -> None:
    """Makes the CPU Megatron's device 0, on a machine without a GPU. Idempotent.

    Call it before anything imports megatron, or call `install_in_torch` before that. Raises
    ConfigError for GPUs that are not NVIDIA's.
    """
    global _is_in_megatron
    install_in_torch()
    if _mode is None or _is_in_megatron:
        return
    # The import may call this function again (mcore/permanent.py).
    import megatron.training  # noqa: F401

    if not _is_in_megatron:
        _is_in_megatron = True
        _patch_megatron()
        torch.compile = _compile


def install_in_torch() -> None:
    """The part of `install` that does not import megatron. Idempotent.

    Until `install` is called, torch.compile returns functions uncompiled. C/jit.py applies it to
    every fused function while megatron is imported. On a CPU the fused functions are not used.
    Still, importing TorchInductor would take a second, and a fused function that did run would
    spend half a minute on compiling C++.
    """
    global _mode
    if torch.cuda.is_available() and torch.version.hip is not None:
        raise ConfigError(f"{ROCM}: hide the GPUs (HIP_VISIBLE_DEVICES=) to train on the CPU")
    if torch.cuda.is_available() or _mode is not None:
        return
    # Megatron uses these packages wherever they can be imported, but their kernels need CUDA. Hide
    # them, so that a container made for GPUs also runs on a node without one.
    for package in ("transformer_engine", "apex"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    _mode = _HostIsTheDevice()
    _mode.__enter__()  # never left: the process needs the mode until it exits
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    # C/tensor_parallel/random.py:_get_cuda_rng_state calls it through torch.cuda.random.
    torch.cuda.random.get_rng_state = _get_rng_state
    # torch disables the mode while a torch function runs, and torch.autograd.backward is one. The
    # autograd functions of C/tensor_parallel/mappings.py that it calls need the mode.
    autograd._engine_run_backward = _under_mode(autograd._engine_run_backward)  # type: ignore
    gloo.use_one_worker()
    torch.compile = _as_it_is  # type: ignore[assignment]


def _under_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _HostIsTheDevice():
            return function(*args, **kwargs)

    return call


class _HostIsTheDevice(TorchFunctionMode):
    """Replaces CUDA devices and device indices by the CPU in every call of a torch function."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # C/optimizer/optimizer.py, distrib_optimizer.py and clip_grads.py compare this string
            # with 'torch.cuda.FloatTensor' and other such names to group parameters by dtype.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _host(args[1]), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if kwargs.get("pin_memory"):  # C/distributed/param_and_grad_buffer.py asks for it
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _host(device: Any) -> Any:
    """The CPU for a CUDA device (an index, a string or a torch.device); else `device` unchanged."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_index or is_cuda else device


class _Stream:
    """Stand-in for torch.cuda.Stream. On a CPU work has finished when its call returns."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: "_Stream") -> None: ...
    def wait_event(self, event: "_Event") -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """Stand-in for torch.cuda.Event, which has always completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: _Stream | None = None) -> None: ...
    def wait(self, stream: _Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_THE_STREAM = _Stream()


def _get_rng_state(device: Any = "cuda") -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


# The stand-ins by the names of torch.cuda, with the callers that need them. torch's own functions
# would raise without a GPU, or queue the call until CUDA is initialized, which never happens.
_CUDA_STAND_INS: dict[str, Any] = {
    # `device=torch.cuda.current_device()` in many places, T/initialize.py:_initialize_distributed
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    # T/arguments.py:validate_args; 0 means older than any GPU that has fused kernels
    "get_device_properties": lambda device=None: types.SimpleNamespace(major=0, minor=0),
    "get_device_capability": lambda device=None: (0, 0),
    # C/timers.py, C/pipeline_parallel/p2p_communication.py, C/dist_checkpointing
    "synchronize": lambda device=None: None,
    # T/models/dist_utils.py:_ddp_wrap, C/distributed, C/transformer/moe
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda device=None: _THE_STREAM,
    "default_stream": lambda device=None: _THE_STREAM,
    "stream": lambda stream: contextlib.nullcontext(),
    # C/tensor_parallel/random.py, T/checkpointing.py:get_rng_state. There is one generator, that of
    # the CPU, so Megatron's "CPU" and "CUDA" random streams are the same.
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
    # T/training.py:training_log reads the statistics by name
    "memory_stats": lambda device=None: collections.defaultdict(int),
}


_compile = torch.compile


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Stand-in for torch.compile, as a function and as a decorator with options."""
    return function or _as_it_is


def _patch_megatron() -> None:
    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.training import initialize, training

    jit.disable_jit_fuser()  # for modules of Megatron that are imported later
    # Upstream's queues the call until CUDA is initialized, which never happens here.
    random._set_cuda_rng_state = _set_rng_state

    # C/tensor_parallel/random.py:CudaRNGStatesTracker.fork warns if the CPU's generator changes
    # while the GPU's is forked. Here the two are the same generator.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # T/training.py:pretrain calls initialize_megatron without allow_no_cuda. initialize_megatron
    # sets up model parallelism and random states only if the device count is not 0.
    def initialize_megatron(**kwargs: Any) -> Any:
        count, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
        try:
            return initialize.initialize_megatron(allow_no_cuda=True, **kwargs)
        finally:
            torch.cuda.device_count = count

    training.initialize_megatron = initialize_megatron

    # T/initialize.py:set_jit_fusion_options warms up the compiled functions with ten calls of each
    # at full size. Here nothing is compiled.
    training.set_jit_fusion_options = lambda tp_size=None: None

    # A loader draws a seed for its workers when it starts. On a GPU that does not change dropout,
    # and a run that resumes, and so starts its loaders once more, repeats the dropout of the whole.
    start = DataLoader.__iter__

    @functools.wraps(start)
    def __iter__(self: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            return start(self)

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
