"""Runs Megatron's training loop on a machine without a GPU, over gloo.

Megatron asks for CUDA by name in a few hundred places. Here they are answered as if the host were
device 0: `install()` puts a device-rewriting mode on every torch call and a stand-in for each
torch.cuda function that the loop calls. It does nothing where there is a GPU, and
`torch.cuda.is_available()` stays False, so every "is there a GPU?" gets the honest answer.

C stands for megatron/core, T for megatron/training.
"""

import collections
import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, autograd
from torch.overrides import TorchFunctionMode

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.runtime import gloo
from megatron_fp4.target import ROCM

_mode: "_HostIsTheDevice | None" = None  # also the mark that install() has run


def install() -> None:
    """Makes the host Megatron's device 0; call it before anything imports megatron. Idempotent.
    Raises ConfigError for GPUs that are not NVIDIA's."""
    global _mode
    if torch.cuda.is_available() and torch.version.hip is not None:
        raise ConfigError(f"{ROCM}: hide the GPUs (HIP_VISIBLE_DEVICES=) to train on the CPU")
    if torch.cuda.is_available() or _mode is not None:
        return
    # Their kernels are CUDA's, and Megatron takes them wherever they import: a container made for
    # GPUs must fall back on a node without one as if it had neither.
    for package in ("transformer_engine", "apex"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    _mode = _HostIsTheDevice()
    _mode.__enter__()  # for good: the loop has no end at which a process goes on without it
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    # C/tensor_parallel/random.py:_get_cuda_rng_state reads it from the submodule.
    torch.cuda.random.get_rng_state = _get_rng_state
    # The mode is off while a torch function runs, torch.autograd.backward as well; the autograd
    # functions of C/tensor_parallel/mappings.py that it calls back need it.
    autograd._engine_run_backward = _under_mode(autograd._engine_run_backward)  # type: ignore
    gloo.use_one_worker()
    with _without_compile():
        _patch_megatron()


def _under_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _HostIsTheDevice():
            return function(*args, **kwargs)

    return call


class _HostIsTheDevice(TorchFunctionMode):
    """Sends CUDA devices and device indices to the CPU in every call of a torch function."""

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
            # C/optimizer/optimizer.py, distrib_optimizer.py and clip_grads.py sort parameters by
            # comparing this string with 'torch.cuda.FloatTensor' and its like.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _host(args[1]), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if kwargs.get("pin_memory"):  # C/distributed/param_and_grad_buffer.py: CPU offload buffers
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _host(device: Any) -> Any:
    """A CUDA device in any of its spellings becomes the CPU; anything else stays as it is."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_index or is_cuda else device


class _Stream:
    """The one queue there is: work is finished when the call returns."""

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
    """A point in the one queue, always reached."""

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


# Where the loop calls each (torch's own raise without a GPU, or wait for one that never comes):
_CUDA_STAND_INS: dict[str, Any] = {
    # every `device=torch.cuda.current_device()`, and T/initialize.py:_initialize_distributed
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    # T/arguments.py:validate_args; 0 is "older than any GPU that a kernel is written for"
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
    # C/tensor_parallel/random.py, T/checkpointing.py:get_rng_state. The host has one generator, so
    # Megatron's "CPU" and "CUDA" random streams are the same one.
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
    # T/training.py:training_log indexes the statistics by name
    "memory_stats": lambda device=None: collections.defaultdict(int),
}


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    """torch.compile gives functions back as they are.

    C/jit.py hands it to every fused function while megatron is imported. On a CPU those fusions
    are off, yet each import of TorchInductor costs a second, and one that did run would compile
    C++ for half a minute.
    """
    original = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return function or _as_it_is


def _patch_megatron() -> None:
    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.training import initialize, training

    jit.disable_jit_fuser()  # for the modules imported later
    random._set_cuda_rng_state = _set_rng_state  # it queues the call for a CUDA that never starts

    # C/tensor_parallel/random.py:CudaRNGStatesTracker.fork warns when the CPU's generator moves
    # within a fork of the GPU's; here they are one and the same.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # T/training.py:pretrain calls it without allow_no_cuda; inside, model parallelism and the
    # random states are set up only where the device count is not 0.
    def initialize_megatron(**kwargs: Any) -> Any:
        count, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
        try:
            return initialize.initialize_megatron(allow_no_cuda=True, **kwargs)
        finally:
            torch.cuda.device_count = count

    training.initialize_megatron = initialize_megatron

    # T/initialize.py:set_jit_fusion_options runs each fused function ten times at full size to
    # warm up compiled code; here nothing is compiled.
    training.set_jit_fusion_options = lambda tp_size=None: None
