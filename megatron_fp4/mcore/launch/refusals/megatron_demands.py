"""Rewords the errors of Megatron's own checks of its arguments to one line that says what to do.

Megatron's checks are mostly assertions. Some have no message; the message of others names variables
and not flags.
"""

import ast
import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import megatron.core

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments.flag_names import flag_of

# New messages for Megatron's. A key is a regular expression that is searched for in the error's
# message or, if it has none, in the source of the assertion's condition. Names in braces are local
# variables, and their attributes, of the function that raises and of its callers.
_IN_WORDS = {
    r"self\.lr_warmup_steps < self\.lr_decay_steps": (
        "the warm-up of the learning rate takes {self.lr_warmup_steps} samples and the whole "
        "schedule {self.lr_decay_steps}: lower --lr-warmup-iters, --lr-warmup-samples or "
        "--lr-warmup-fraction, or raise --lr-decay-iters or --train-iters"
    ),
    r"min_lr <= args\.lr": "--min-lr {args.min_lr} is above --lr {args.lr}: lower it",
    r"self\.end_wd >= self\.start_wd": (
        "--end-weight-decay {self.end_wd} is below --start-weight-decay {self.start_wd}: raise it"
    ),
    r"self\.init_lr <= self\.max_lr": (
        "--lr-warmup-init {self.init_lr} is above --lr {self.max_lr}: lower it"
    ),
    r"args\.hidden_size % args\.num_attention_heads": (
        "--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads "
        "{args.num_attention_heads}: change one of them, or give --kv-channels"
    ),
    r"args\.data_path is None|A single data source must be provided": (
        "the data are named twice: leave out all but one of --mock-data, --data-path, "
        "--data-args-path, --train-data-path with its like, and --per-split-data-args-path"
    ),
    r"world size \(\d+\) is not divisible by total_model_size": (
        "{args.world_size} processes cannot be shared out to --tensor-model-parallel-size "
        "{args.tensor_model_parallel_size} x --pipeline-model-parallel-size "
        "{args.pipeline_model_parallel_size} x --context-parallel-size "
        "{args.context_parallel_size}: start a multiple of their product (torchrun "
        "--nproc-per-node), or lower one"
    ),
    r"eval_global_batch_size \(\d+\) must be divisible": (
        "--global-batch-size {args.global_batch_size} (--eval-global-batch-size "
        "{args.eval_global_batch_size}) is not a multiple of --micro-batch-size "
        "{args.micro_batch_size} (--eval-micro-batch-size {args.eval_micro_batch_size}) x "
        "{args.data_parallel_size} (the data-parallel size): give one that is"
    ),
    r"max_position_embeddings \(\d+\) must be greater|max_position_embeddings >=": (
        "--seq-length {args.seq_length} is longer than --max-position-embeddings "
        "{args.max_position_embeddings}: raise the latter"
    ),
    r"Number of layers should be divisible by the pipeline": (
        "--num-layers {args.num_layers} is not a multiple of --pipeline-model-parallel-size "
        "{args.pipeline_model_parallel_size}: change one, or share the layers out with "
        "--pipeline-model-parallel-layout"
    ),
    r"num_experts must be non None to use expert": (
        "--expert-model-parallel-size {args.expert_model_parallel_size} needs experts: give "
        "--num-experts, or leave it out"
    ),
    r"When interleaved schedule is used, pipeline": (
        "virtual pipeline stages need --pipeline-model-parallel-size 2 or more: raise it, or leave "
        "out --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
    ),
    r"expected (iteration|sample)-based training": (
        "--train-iters and --train-samples exclude each other: leave out one"
    ),
    r"expected iteration-based": (
        "--train-iters takes a schedule in steps: give --lr-decay-iters and --lr-warmup-iters in "
        "place of --lr-decay-samples and --lr-warmup-samples"
    ),
    r"expected sample-based": (
        "--train-samples takes a schedule in samples: give --lr-decay-samples and "
        "--lr-warmup-samples in place of --lr-decay-iters and --lr-warmup-iters"
    ),
    r"can only specify one of lr-warmup-fraction": (
        "--lr-warmup-fraction and the length of the warm-up exclude each other: leave out one"
    ),
    r"Cannot specify both --step-batch-size-schedule": (
        "--step-batch-size-schedule and --global-batch-size exclude each other: leave out one"
    ),
    r"--overlap-param-gather only supported": (
        "--overlap-param-gather needs --use-distributed-optimizer: add it"
    ),
    r"recompute_method must be": (
        "--recompute-granularity {args.recompute_granularity} needs --recompute-method uniform or "
        "block, and --recompute-num-layers N: add them"
    ),
    r"recompute_num_layers must be between": (
        "--recompute-method needs --recompute-num-layers N, from 1 to the layers of a pipeline "
        "stage: add it"
    ),
}


@contextmanager
def megatrons_demands(while_building: bool = False) -> Iterator[None]:
    """A context in which errors of Megatron's checks are raised as ConfigErrors.

    AssertionError, ValueError and NotImplementedError are converted, and ImportError if Megatron's
    own code raises it.

    while_building: for the time while Megatron builds the model and the optimizer. Code of other
    packages runs then too, so only errors that Megatron's own code raises are converted, and a
    message that has no new wording also gives file and line.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        source = frame.f_code.co_filename
        if (while_building or isinstance(error, ImportError)) and not _is_megatrons(source):
            raise
        raise ConfigError(_told(error, frame, line, while_building)) from error


def _is_megatrons(source: str) -> bool:
    """Whether the source file `source` is part of Megatron."""
    return Path(source).is_relative_to(Path(megatron.core.__file__).parents[1])


def _told(error: Exception, frame: FrameType, line: int, says_where: bool) -> str:
    text = " ".join(str(error).split())
    condition = "" if text else _condition(frame, line)
    for pattern, words in _IN_WORDS.items():
        if re.search(pattern, text or condition):
            with suppress(KeyError, AttributeError):  # another version may have other variables
                return words.format_map(_variables(error))
    if not text:
        text = f"Megatron demands {_as_flags(condition)}{_values(condition, frame)}"
    return text + (f" ({Path(frame.f_code.co_filename).name}:{line})" if says_where else "")


def _variables(error: Exception) -> dict[str, Any]:
    """The local variables, by name, of the function that raised the error and of its callers.

    If several functions have a variable of the same name, that of the innermost one is taken.
    """
    found: dict[str, Any] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found |= frame.f_locals
    return found


def _condition(frame: FrameType, line: int) -> str:
    """The source of the condition that is asserted at `line`, as one line of text.

    If there is no assertion at that line: the line itself.
    """
    lines = linecache.getlines(frame.f_code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or line):
            return ast.unparse(node.test)
    return lines[line - 1].strip() if line <= len(lines) else "(no source)"


def _values(condition: str, frame: FrameType) -> str:
    """The values of the variables in a condition, as text: ", and x is 1, y.z is 2".

    Only numbers, strings and None are included; "" if there are none.
    """
    found = {}
    for name in re.findall(r"[a-zA-Z_][\w.]*", condition):
        first, *attributes = name.split(".")
        value = frame.f_locals.get(first, ...)
        for attribute in attributes:
            value = getattr(value, attribute, ...)
        if value is None or isinstance(value, int | float | str):
            found[name] = value
    values = [f"{_as_flags(name)} is {value}" for name, value in found.items()]
    return f", and {', '.join(values)}" if values else ""


def _as_flags(condition: str) -> str:
    return re.sub(r"\bargs\.(\w+)", lambda name: flag_of(name[1]), condition)
