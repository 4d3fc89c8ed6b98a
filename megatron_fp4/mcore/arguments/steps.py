"""Whether and how long a launch trains. args: Megatron's."""

from argparse import Namespace


def steps_of(args: Namespace) -> int | None:
    """The number of steps of the training, from --train-iters or --train-samples.

    None under --step-batch-size-schedule with --train-samples: Megatron counts the steps later.
    """
    if args.train_iters or not args.train_samples or args.step_batch_size_schedule:
        return args.train_iters or None
    return int(args.train_samples // args.global_batch_size) if args.global_batch_size else None


def trains(args: Namespace) -> bool:
    """Whether the launch trains, and does not only evaluate."""
    return not getattr(args, "skip_train", False)  # a model without a loop has none
