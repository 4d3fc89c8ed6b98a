"""This package's own training script: model, datasets, batches and loss in Megatron's loop.

T stands for megatron/training.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import (
    arguments,
    get_args,
    get_timers,
    get_tokenizer,
    print_rank_0,
    training,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import fp4_arguments
from megatron_fp4.mcore.launch.refusals.dataset import unknown_token
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.launch.refusals.table import refuse
from megatron_fp4.mcore.loop import log, loss_check, plugin
from megatron_fp4.mcore.model.spec import layer_spec

# --check-for-spiky-loss warns of a loss this many times as large as the largest so far. Upstream's
# value.
SPIKE = 10

Datasets = tuple[Any, Any, Any]  # training, validation, test; any may be None
Batch = dict[str, Any]  # tensors by name; None for those that a pipeline stage does not need
LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def train() -> None:
    """Trains with `megatron.training.pretrain`, from sys.argv; with --skip-train only evaluates.

    Raises ConfigError for a launch that is refused.
    """
    plugin.install(ours=True)
    with log.Start() as start:
        args = arguments.parse_and_validate_args()
        start.follow(args)
        with megatrons_demands():
            config = pretrain_cfg_container_from_args(args, _model(args))
        kind = ModelType.encoder_or_decoder
        training.pretrain(config, datasets, kind, start.before(forward_step))


def _model(args: Any) -> GPTModelConfig:
    model: GPTModelConfig = gpt_config_from_args(args)
    if fp4_arguments.recipe_of(args) is not None or args.transformer_impl == "local":
        model.transformer_layer_spec = layer_spec  # else Transformer Engine's layers
    # T/argument_utils.py:gpt_config_from_args leaves it out, so that the flag would have no effect.
    model.rope_scaling_factor = args.rope_scaling_factor
    return model


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Datasets:
    """Builds the training, validation and test datasets, Megatron's `datasets provider`.

    num_samples: how many sequences each has at least. Returns None in place of a dataset on ranks
    that do not read data. Raises ConfigError if Megatron cannot write its index of the data.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building the datasets ...")
    builder = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(_reads_data, vp_stage), _dataset_config(args)
    )
    try:
        return builder.build()
    except Exception as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise ConfigError(  # upstream's message names no flag
            f"the index of the data cannot be written ({error.__cause__.strerror}): give "
            "--data-cache-path a folder that can be"
        ) from error


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it, T/training.py


def _reads_data(vp_stage: int | None) -> bool:
    first_in_tp = mpu.get_tensor_model_parallel_rank() == 0
    return first_in_tp and (is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage))


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences,
        context_parallel_size=args.context_parallel_size,
    )


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, LossFunction]:
    """Runs the forward pass of one microbatch in this pipeline stage.

    Returns (output of the stage, function that computes the microbatch's loss from it). On the last
    stage the output is the loss of each token, [batch, sequence].
    """
    stragglers, timers = StragglerDetector(), get_timers()
    timers("batch-generator", log_level=2).start()
    with stragglers(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    loss_mask: Any = batch.get("loss_mask")  # None on stages that do not compute the loss
    with stragglers:
        output = model(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            loss_mask=loss_mask,
        )
    return output, partial(loss_function, loss_mask)


def get_batch(data_iterator: Iterator[Batch], vp_stage: int | None) -> Batch:
    """This rank's part of the next microbatch, tensors of [batch, sequence].

    With context parallelism over N ranks each rank gets 1/N of the sequence. The keys are tokens,
    labels, loss_mask, position_ids and attention_mask (None if there is no mask). The result is {}
    on pipeline stages that need no data. The first rank of each tensor-parallel group reads the
    data and broadcasts it to the others. vp_stage: the virtual pipeline stage, or None.

    Raises ConfigError for a token beyond the vocabulary.
    """
    has_mtp = _has_mtp(vp_stage)
    if not (is_first_or_last_pipeline_stage(vp_stage) or has_mtp):
        return {}
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        read = next(data_iterator)  # tensors on the CPU
        # With a vocabulary sharded over ranks, each rank would treat an unknown token as one of
        # another rank, and its embedding would be zero.
        largest = max(int(read[key].max()) for key in ("tokens", "labels"))
        refuse(unknown_token(largest, args))
        batch = {"attention_mask": None} | {
            key: value.cuda(non_blocking=True) for key, value in read.items()
        }
    evaluates = not torch.is_grad_enabled()
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.eval_micro_batch_size if evaluates else args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a microbatch, summed over its tokens; Megatron's schedule divides it.

    loss_mask, losses: [batch, sequence]; tokens whose mask is 0 do not count.
    Returns (sum of the losses, number of tokens that count, {"lm loss": both} for the log).

    The sum is checked on each rank, when the backward pass has been launched (loss_check.py). With
    --overlap-grad-reduce upstream checks the gradients of the last microbatch before that. If the
    sum is NaN or infinite, upstream reruns the step to tell faulty hardware from faulty numerics,
    and ends the run (--no-check-for-nan-in-loss-and-grad disables this). With
    --check-for-spiky-loss a loss that is unexpectedly large causes a warning.
    """
    args, mask = get_args(), loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    # A copy, since the schedule divides the loss in place, and a rerun is compared with this value.
    seen = loss.detach().clone()
    checks: list[tuple[str, Callable[[Tensor], Any], bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append(("found NaN in local forward loss calculation", torch.isnan, True))
        checks.append(("found Inf in local forward loss calculation", torch.isinf, True))
    if args.check_for_spiky_loss:
        rerun = get_rerun_state_machine()
        is_spike = partial(rerun.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks.append(("Spiky loss", is_spike, False))
    if checks:
        loss_check.after_backward(losses, partial(_validate, loss_check.on_host(seen), checks))
    return loss, tokens, {"lm loss": torch.stack([seen, tokens.float()])}


def _validate(
    seen: Callable[[], Tensor], checks: list[tuple[str, Callable[[Tensor], Any], bool]]
) -> None:
    """Passes the loss of a microbatch to Megatron's rerun state machine, once for each check.

    seen: returns the loss, on the CPU. checks: for each (message for the log, function that says
    whether a loss is bad, whether a bad loss ends the run).
    """
    value, rerun = seen(), get_rerun_state_machine()
    for message, is_bad, fatal in checks:
        rerun.validate_result(
            result=value, rejection_func=is_bad, message=message, tolerance=0.0, fatal=fatal
        )


def _has_mtp(vp_stage: int | None) -> bool:
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if isinstance(layout, str):
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return mtp_on_this_rank(
        layout=layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=vp_stage is None,
        vp_stage=vp_stage,
    )
