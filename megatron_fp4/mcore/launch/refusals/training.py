"""Refuses a launch that lacks a flag that every training needs."""

from argparse import Namespace
from collections.abc import Iterator

from megatron_fp4.mcore.arguments.flag_names import flag_of

# Arguments that Megatron requires and has no default for, with the older name that some have.
_REQUIRED = {
    "num_layers": "encoder_num_layers",
    "hidden_size": None,
    "num_attention_heads": None,
    "seq_length": "encoder_seq_length",
    "max_position_embeddings": None,
    "micro_batch_size": None,
}


def settings(args: Namespace) -> Iterator[str]:
    """Refuses missing, contradictory or unsupported settings of the training.

    Missing: its length, in the unit that another flag needs, the learning rate or a size of the
    model. Contradictory: two dtypes.
    Unsupported: in-process restart.
    """
    if not (args.train_iters or args.train_samples):
        why = "Megatron reads as much text, with --skip-train too: " if args.skip_train else ""
        yield f"{why}how long to train? give --train-iters or --train-samples"
    if args.phase_transition_iterations and not args.train_samples:  # T/training.py reads them
        yield "--phase-transition-iterations needs --train-samples in place of --train-iters"
    if args.lr is None and not args.skip_train:
        yield "no learning rate: give --lr"
    for name, older in _REQUIRED.items():
        if getattr(args, name) is None and getattr(args, older or name) is None:
            yield f"give {flag_of(name)} N: it has no default"
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 contradict each other: choose one"
    if args.inprocess_restart:
        yield "--inprocess-restart is not supported: leave it out"
