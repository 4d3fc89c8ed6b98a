"""What a layer of a model saves for the backward pass, by tensor."""

from __future__ import annotations

import argparse

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.fits import refusals
from megatron_fp4.estimate.flags import add_model, checked_model
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.memory import LayerPlans
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import BF16, recipe_named
from megatron_fp4.plan.command import target_given
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import read_options
from megatron_fp4.setting import keeps_w_of
from megatron_fp4.target import Target


def saved_by_layer(
    model: Model, layout: Layout, recipe: Recipe, target: Target
) -> dict[str, dict[str, dict[str, float]]]:
    """The bytes of each tensor that a layer saves for the backward pass of a microbatch.

    The result is {kind of layer: {name of a tensor: {"own": bytes, "bf16": bytes}}}. Kinds are "a
    layer" and "a layer with experts", as far as the model has them. "own" is with the recipe,
    "bf16" in BF16.
    """
    own, plain = (LayerPlans(model, layout, each, target) for each in (recipe, BF16))
    found = {}
    for kind in sorted({model.has_experts(layer) for layer in range(model.layers)}):
        sizes = own.saved_tensors(kind), plain.saved_tensors(kind)
        found["a layer with experts" if kind else "a layer"] = {
            name: {"own": sizes[0].get(name, 0.0), "bf16": sizes[1].get(name, 0.0)}
            for name in sizes[0] | sizes[1]
        }
    return found


def saved_table(model: Model, layout: Layout, recipe: Recipe, target: Target) -> list[str]:
    """`saved_by_layer` as lines, with a sum."""
    lines = []
    for kind, tensors in saved_by_layer(model, layout, recipe, target).items():
        lines.append(f"saved by {kind} for the backward pass of a microbatch, MB (in BF16):")
        total = {name: sum(sizes[name] for sizes in tensors.values()) for name in ("own", "bf16")}
        for tensor, sizes in [*tensors.items(), ("all", total)]:
            own, plain = (f"{sizes[name] / 1e6:,.1f}" for name in ("own", "bf16"))
            lines.append(f"  {tensor:<26}{own:>10}{f'({plain})':>12}")
    return lines


def layer_text(args: argparse.Namespace, prog: str) -> str:
    """`saved_table` of the model that the flags after `plan --layer` describe, as text.

    args: those of `plan.command.add_arguments`. prog: the command, for messages.

    Raises ConfigError for flags that do not fit together, and for tokens that are no whole
    sequences.
    """
    given = {
        f"--dtype {args.dtype}": args.dtype != "bf16",
        f"--saved-x {args.saved_x}": args.saved_x != "packed",
        f"--multiplier {args.multiplier}": args.multiplier != "auto",
        "--param-gather": args.param_gather,
    }
    for flag, is_there in given.items():
        if is_there:
            raise ConfigError(f"--layer does not support {flag}: leave out one of them")
    parser = argparse.ArgumentParser(prog=f"{prog} plan --layer", description="A model's flags.")
    add_model(parser)
    model = checked_model(parser.parse_args(args.layer))
    if args.tokens % model.sequence:
        raise ConfigError(
            f"--tokens {args.tokens} is not a multiple of --seq-length {model.sequence}: change "
            "one of them"
        )
    batch = args.tokens // model.sequence
    layout = Layout(
        args.tp, tp=args.tp, sp=args.sequence_parallel, micro_batch=batch, batch=batch,
        keeps_w=keeps_w_of(args.weight_cache),
    )  # fmt: skip
    recipe = recipe_named(args.recipe, **read_options(args.recipe_option))
    if (problem := next(refusals(model, layout, recipe), None)) is not None:
        raise ConfigError(f"--layer: {problem}")
    return "\n".join(saved_table(model, layout, recipe, target_given(args.gpu))) + "\n"
