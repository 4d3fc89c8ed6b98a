"""Measures in which linears a recipe loses most: the held-out loss of a checkpoint with one place
of the model at a time in another recipe.

    python -m tools.sensitivity --in-place fp8 --choose 2 -- \\
        <the flags of the launch that trained the checkpoint, with --fp4-recipe and --load>

The launch is evaluated, not trained: with the recipe in all linears, with the other recipe in all,
and with the other recipe in each layer of the decoder and in each kind of linear. All runs read the
same held-out text, so that differences of their losses are due to the recipes. It is the loss of
the forward pass alone. What a recipe loses in training is more than that.

Prints a table, and the `layers` of a recipe that leaves the places of the largest gain to the other
recipe (docs/recipe-files.md, Layers).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from megatron_fp4 import ConfigError, get_recipe
from megatron_fp4.recipes.registry import read_options
from tools import pages
from tools.runs import RunFailed, run

KINDS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Nothing is trained, and the recipe may differ from that of training.
EVALUATED = """
    --skip-train --no-load-optim --no-load-rng --exit-on-missing-checkpoint --fp4-load-anyway
""".split()
# Flags that give some linears a recipe, or some of the training.
CONFLICTS = (
    *("--fp4-module-recipe", "--fp4-bf16-after", "--first-last-layers-bf16"),
    "--fp4-eval-forward",
)
Evaluate = Callable[[Sequence[str]], float]


class Found(NamedTuple):
    """The loss with the other recipe in one place. place: a glob for names of linears."""

    place: str
    loss: float


def places(layers: int) -> Iterator[str]:
    """Globs: one for each layer of the decoder, and one for each kind of linear."""
    yield from (f"decoder.layers.{layer}.*" for layer in range(layers))
    yield from (f"*.{kind}" for kind in KINDS)


class Launch(NamedTuple):
    """What the flags of a launch say of its model and recipe.

    layers: of the decoder. recipe: as --fp4-recipe names it. options: those of --fp4-recipe-option,
    by their names.
    """

    layers: int
    recipe: str
    options: dict[str, str]


def read_launch(flags: Sequence[str]) -> Launch:
    """The layers and the recipe of a launch. Raises ValueError for one that cannot be measured."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--num-layers", "--fp4-recipe"):
        parser.add_argument(name)
    parser.add_argument("--fp4-recipe-option", action="append", default=[])
    for name in ("--load", *CONFLICTS):
        parser.add_argument(name, nargs="*")
    known, _ = parser.parse_known_args(flags)
    if known.num_layers is None or not known.num_layers.isdecimal():
        raise ValueError("the launch needs --num-layers: its layers are measured one by one")
    if known.load is None:
        raise ValueError("the launch needs --load: it evaluates a checkpoint")
    if known.fp4_recipe is None:
        raise ValueError("the launch needs --fp4-recipe, of all linears: it may be another recipe")
    for name in CONFLICTS:
        if getattr(known, name.strip("-").replace("-", "_")) is not None:
            raise ValueError(f"leave out {name}: each place is measured in one recipe or the other")
    return Launch(int(known.num_layers), known.fp4_recipe, read_options(known.fp4_recipe_option))


def sensitivity(evaluate: Evaluate, other: str, layers: int) -> tuple[float, float, list[Found]]:
    """(loss with the launch's recipe in all linears, with the other one in all, with the other one
    in each place).

    evaluate: the held-out loss of the launch with further flags.
    """

    def loss(place: str) -> float:
        in_place = ["--fp4-module-recipe", f"{place}={other}"]
        if (place, other) == ("*", "bf16"):  # a recipe that quantizes no linear is refused
            in_place = ["--fp4-eval-forward", "bf16"]
        found = evaluate(in_place)
        print(f"{place} in {other}: {found:.4f}", file=sys.stderr, flush=True)
        return found

    return evaluate([]), loss("*"), [Found(place, loss(place)) for place in places(layers)]


def launched(flags: Sequence[str], processes: int, work: Path) -> Evaluate:
    """A function that takes further flags, evaluates the launch with them, and returns its loss.

    flags: of the launch. Paths in them are relative to the checkout, where it runs. processes: how
    many ranks it has. work: a folder for the logs. The function raises RunFailed if the launch
    fails; the message has the end of its log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "pretrain_gpt.py", *flags, *EVALUATED]
    if not {"--train-iters", "--train-samples"} & {flag.partition("=")[0] for flag in flags}:
        command += ["--train-iters", "1"]  # Megatron asks for one of them
    logs = (work / f"{number}.log" for number in itertools.count())

    def evaluate(more: Sequence[str]) -> float:
        found = run([*command, *more], next(logs), environment={"OMP_NUM_THREADS": "1"})
        _, loss = found.held_out[0]  # of the validation set; that of the test set follows
        return loss

    return evaluate


def table(low: float, high: float, found: Sequence[Found], recipe: str, other: str) -> list[str]:
    """A Markdown table: layers, then kinds of linears, each in the order of their gains."""

    def row(place: str, loss: float) -> list[str]:
        share = f"{(low - loss) / (low - high):.0%}" if low > high else ""
        return [place, f"{loss:.4f}", f"{low - loss:+.4f}", share]

    ordered = sorted(found, key=lambda each: (each.place.startswith("*"), each.loss))
    head = [f"`{other}` in place of `{recipe}`", "loss", "gain", "share of all"]
    rows = [row("none", low), *(row(*each) for each in ordered), row("all", high)]
    return pages.table(head, rows)


def chosen(
    found: Sequence[Found],
    count: int,
    low: float,
    recipe: str,
    options: Mapping[str, str],
    other: str,
) -> str:
    """The text of a recipe file: `recipe`, but `other` in the `count` layers whose loss it lowers
    most. Layers whose loss it does not lower are left out.

    found: the losses with `other` in one place each. low: the loss without it. options: of
    `recipe`.
    """
    layers = [each for each in found if not each.place.startswith("*") and each.loss < low]
    best = sorted(layers, key=lambda each: each.loss)[:count]
    lines = [f"base: {recipe}" if best else f"base: {recipe}  # no layer gains"]
    if options:
        lines.append(f"options: {yaml.safe_dump(options, default_flow_style=True).strip()}")
    if best:
        lines.append("layers:")
    return "\n".join(
        [*lines, *(f'  - {{modules: "{each.place}", recipe: {other}}}' for each in best)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        usage="python -m tools.sensitivity [options] -- <flags of the launch>",
    )
    parser.add_argument("--in-place", default="fp8", help="of one place at a time: fp8, bf16, ...")
    parser.add_argument("--choose", type=int, default=2, help="layers of the recipe file")
    parser.add_argument("--processes", type=int, default=1, help="ranks of the launch")
    parser.add_argument("--work", type=Path, default=Path("runs/sensitivity"), help="for logs")
    parser.add_argument(
        "flags", nargs="+", help="of the launch, after --: with --fp4-recipe and --load"
    )
    args = parser.parse_args()
    try:
        if args.processes < 1:
            raise ValueError(f"--processes is {args.processes}: give 1 or more")
        launch = read_launch(args.flags)
        for name, options in ((launch.recipe, launch.options), (args.in_place, {})):
            if name not in ("bf16", "off"):
                recipe = get_recipe(name, **options)
                if recipe.phases or recipe.layers:
                    raise ValueError(f"{name} has phases or layers: give one without, as tetrajet")
        evaluate = launched(args.flags, args.processes, args.work)
        low, high, found = sensitivity(evaluate, args.in_place, launch.layers)
    except OSError as error:
        sys.exit(f"sensitivity: --work {args.work}: {error.strerror}: give another folder")
    except (ValueError, ConfigError, RunFailed) as error:
        sys.exit(f"sensitivity: {error}")
    print("\n".join(table(low, high, found, launch.recipe, args.in_place)))
    print()
    print(chosen(found, args.choose, low, launch.recipe, launch.options, args.in_place))


if __name__ == "__main__":
    main()
