"""Refuses flags of Megatron that need an optional package, or another flag, that is missing.

Megatron itself would ignore such a flag, or end with a failed import.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron_fp4.mcore.launch import machine
from megatron_fp4.mcore.launch.flags import flag_of

# By Megatron's argument: the package that is imported, and its name for pip (None if a package
# registry does not have it).
_NEEDED = {
    "tensorboard_dir": ("tensorboard", "tensorboard"),
    "wandb_project": ("wandb", "wandb"),
    "log_energy": ("pynvml", "nvidia-ml-py"),
    "enable_ft_package": ("nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    "enable_msc": ("multistorageclient", "multi-storage-client"),
    "run_workload_inspector_server": ("workload_inspector", None),
    "adlr_autoresume": ("userlib", None),
    "one_logger_run_name": ("one_logger", None),
    "one_logger_async": ("one_logger", None),
}
# Arguments that have no effect without --tensorboard-dir. Megatron writes to wandb only where it
# writes to TensorBoard too.
_NEEDS_TENSORBOARD = (
    "wandb_project",
    "log_timers_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
)


def needed(args: Namespace) -> Iterator[str]:
    """Refuses a flag whose package is not installed, or that has no effect without another flag."""
    for name, (package, distribution) in _NEEDED.items():
        if getattr(args, name) and not machine.installed(package):
            yield _missing(flag_of(name), package, distribution)
    is_local = args.non_persistent_ckpt_type == "local"
    if is_local and not machine.installed("nvidia_resiliency_ext"):
        flag, package = "--non-persistent-ckpt-type local", "nvidia_resiliency_ext"
        yield _missing(flag, package, "nvidia-resiliency-ext")
    for name in _NEEDS_TENSORBOARD:
        if getattr(args, name) and not args.tensorboard_dir:
            yield f"{flag_of(name)} logs nothing without --tensorboard-dir DIR: add it"
    if args.wandb_project and not args.wandb_exp_name:
        yield "--wandb-project needs --wandb-exp-name NAME: add it"
    if args.wandb_project and not (args.wandb_save_dir or args.save):
        yield "--wandb-project needs --wandb-save-dir DIR, or --save: add one"


def _missing(flag: str, package: str, distribution: str | None) -> str:
    remedy = "leave it out" if distribution is None else f"pip install {distribution}"
    return f"{flag} needs the package {package}, which is not installed: {remedy}"
