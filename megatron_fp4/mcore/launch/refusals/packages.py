"""Refuses flags of Megatron that need an optional package, or another flag, that is missing.

Megatron itself would ignore such a flag, or end with a failed import.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.transformer.enums import AttnBackend

from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.arguments.flag_names import flag_of

# By Megatron's argument: the package that is imported, and its name for pip (None if a package
# registry does not have it).
_NEEDED = {
    "tensorboard_dir": ("tensorboard", "tensorboard"),
    "wandb_project": ("wandb", "wandb"),
    "log_energy": ("pynvml", "nvidia-ml-py"),
    "log_device_memory_used": ("pynvml", "nvidia-ml-py"),
    "enable_ft_package": ("nvidia_resiliency_ext", "nvidia-resiliency-ext"),
    "enable_msc": ("multistorageclient", "multi-storage-client"),
    "run_workload_inspector_server": ("workload_inspector", None),
    "defer_embedding_wgrad_compute": ("fused_weight_gradient_mlp_cuda", None),
    "adlr_autoresume": ("userlib", None),
    "one_logger_run_name": ("one_logger", None),
    "one_logger_async": ("one_logger", None),
}
TRANSFORMER_ENGINE = "Transformer Engine and a GPU: pip install 'transformer-engine[pytorch]'"
# Arguments that act in Transformer Engine alone. Without it Megatron ignores some of them, and ends
# with an error while it builds the model, or in the first step, for the others.
_NEEDS_TE = (
    "use_precision_aware_optimizer",
    "use_transformer_engine_op_fuser",
    "te_rng_tracker",
    "te_precision_config_file",
    "tp_comm_overlap",
    "cpu_offloading_num_layers",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_flash_attn",
)
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
    if args.optimizer not in ("adam", "sgd") and not machine.installed("emerging_optimizers"):
        flag = f"--optimizer {args.optimizer}"
        yield _missing(flag, "emerging_optimizers", "emerging-optimizers")
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


def transformer_engine(args: Namespace) -> Iterator[str]:
    """Refuses what only Transformer Engine can do if it is not installed."""
    if machine.HAVE_TE:
        return
    given = [flag_of(name) for name in _NEEDS_TE if getattr(args, name)]
    if args.transformer_impl != "local":
        given.append(f"--transformer-impl {args.transformer_impl}")
    if args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te":
        given.append("--cross-entropy-fusion-impl te")
    if args.attention_backend in (AttnBackend.flash, AttnBackend.fused):
        given.append(f"--attention-backend {args.attention_backend.name}")
    if "layernorm" in (args.recompute_modules or []):
        given.append("--recompute-modules layernorm")
    for flag in given:
        yield f"{flag} needs {TRANSFORMER_ENGINE}; or leave it out"


def _missing(flag: str, package: str, distribution: str | None) -> str:
    remedy = "leave it out" if distribution is None else f"pip install {distribution}"
    return f"{flag} needs the package {package}, which is not installed: {remedy}"
