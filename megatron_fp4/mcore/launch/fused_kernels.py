"""Which fused kernels a launch may use (--fp4-fused-kernels): this package's, Liger-Kernel's, and
torch's AdamW."""

from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version

import torch
from packaging.version import Version

from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.launch.fp4_arguments import has_recipe

OLDEST = "0.8.5"  # of the versions that were tried
INSTALL = f"pip install 'liger-kernel>={OLDEST}'"


def refusals(args: Namespace) -> Iterator[str]:
    """Refuses --fp4-fused-kernels liger where the package, a GPU or the layers are missing."""
    if args.fp4_fused_kernels != "liger":
        return
    flag = "--fp4-fused-kernels liger"
    if not _installed():
        yield f"{flag} needs the package liger_kernel {OLDEST} or newer: {INSTALL}"
    if not machine.runs_triton():
        yield f"{flag} needs a GPU: leave it out"
    if args.transformer_impl != "local":
        yield (
            f"{flag} needs --transformer-impl local: {args.transformer_impl} has fused kernels of "
            "its own; leave one of them out"
        )


def settle(args: Namespace, is_checked: bool) -> None:
    """Sets these arguments of a launch from its flags and its machine. Checkpoints record them.

    fp4_liger: the version of Liger-Kernel, or None; which of its kernels run is known once the
        model is built (model/fused_kernels.py).
    fp4_rotates: whether one kernel splits QKV and rotates query and key, where it can
        (model/rotary.py).
    fp4_fused_adamw: whether torch's AdamW updates a weight by one kernel.
    fp4_joins_swiglu: whether linears compute the SwiGLU between them, where they can
        (model/mlp.py).
    fp4_joins_norms: whether linears compute the RMSNorm before them, where they can
        (model/joined_norms.py).

    is_checked: see `Script.is_checked`; other launches get what they ask for.
    """
    wanted = args.fp4_fused_kernels
    if wanted == "auto" and not is_checked:
        wanted = "off"
    is_local = args.transformer_impl == "local" and machine.runs_triton()
    args.fp4_rotates = wanted != "off" and is_local
    args.fp4_liger = version("liger-kernel") if args.fp4_rotates and _installed() else None
    # Megatron saves what linears take and return, and its gradients, which must be X, Y, dX and dY.
    saves = args.save_activations_interval or args.save_dgrads_interval
    joins = wanted != "off" and has_recipe(args) and not saves
    args.fp4_joins_swiglu = joins and _has_swiglu(args)
    args.fp4_joins_norms = joins and args.normalization == "RMSNorm"
    args.fp4_fused_adamw = wanted != "off" and torch.cuda.is_available() and _has_adamw(args)


def _installed() -> bool:
    if not machine.installed("liger_kernel"):
        return False
    return Version(version("liger-kernel")) >= Version(OLDEST)


def _has_swiglu(args: Namespace) -> bool:
    return bool(args.swiglu and not args.add_bias_linear)


def _has_adamw(args: Namespace) -> bool:
    """Whether Megatron makes torch's AdamW, with all of its state on the GPU, and it stays."""
    has_another = machine.HAVE_TE or machine.installed("apex")  # whose FusedAdam Megatron uses
    is_plain = not (args.optimizer_cpu_offload or args.optimizer_cuda_graph)
    stays = args.optimizer == "adam" and args.fp4_optimizer_state is None
    return stays and is_plain and not has_another
