"""Measures in which linears a recipe loses most: the held-out loss of a checkpoint with one place
of the model at a time in another recipe.

    python -m tools.sensitivity --in-place fp8 --choose 2 -- \\
        <the flags of the launch that trained the checkpoint, with --fp4-recipe and --load>

The launch is evaluated, not trained: with the recipe in all linears, with the other recipe in all,
and with the other recipe in each layer of the decoder and in each kind of linear. All runs read the
same held-out text, so that differences of their losses are due to the recipes. It is the loss of
the forward pass alone. What a recipe loses in training is more than that.

A recipe with phases is measured in the one that holds at one share of training (--at), by default
in the first. Linears of its `layers` follow what they follow there, unless they are in the place
that is measured.

Prints a table, and the `layers` of a recipe that leaves the places of the largest gain to the other
recipe (docs/recipe-files.md, Layers).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml

from megatron_fp4 import ConfigError, Recipe, get_recipe, list_recipes
from megatron_fp4.recipe import Layers
from megatron_fp4.recipes import content, read_options
from megatron_fp4.recipes.assignment import Modules, recipes_of_layers
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
    """A launch whose places are measured.

    flags: all but those that name the recipe. layers: of the decoder. recipe: as --fp4-recipe names
    it. options: those of --fp4-recipe-option, by their names.
    """

    flags: list[str]
    layers: int
    recipe: str
    options: dict[str, str]


def read_launch(flags: Sequence[str]) -> Launch:
    """The launch with these flags. Raises ValueError for one that cannot be measured."""
    of_recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_recipe.add_argument("--fp4-recipe")
    of_recipe.add_argument("--fp4-recipe-option", action="append", default=[])
    named, others = of_recipe.parse_known_args(flags)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-layers")
    for name in ("--load", *CONFLICTS):
        parser.add_argument(name, nargs="*")
    known, _ = parser.parse_known_args(others)
    if known.num_layers is None or not known.num_layers.isdecimal():
        raise ValueError("the launch needs --num-layers: its layers are measured one by one")
    if known.load is None:
        raise ValueError("the launch needs --load: it evaluates a checkpoint")
    if named.fp4_recipe in (None, "bf16", "off"):
        raise ValueError(
            "the launch needs --fp4-recipe with a recipe: it may be another than that "
            "of the training"
        )
    for name in CONFLICTS:
        if getattr(known, name.strip("-").replace("-", "_")) is not None:
            raise ValueError(f"leave out {name}: each place is measured in one recipe or the other")
    options = read_options(named.fp4_recipe_option)
    return Launch(others, int(known.num_layers), named.fp4_recipe, options)


def recipes_at(recipe: Recipe, share: float, layers: int) -> Modules:
    """What the linears of a decoder with so many layers follow at one share of training: globs for
    their names, each with a recipe without phases and layers, or None for BF16. The last glob that
    matches a name decides.

    Raises ValueError where nothing is quantized then, and for a share outside of [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"--at is a share of training, from 0 to 1, not {share:g}")
    found = [
        (glob, own and replace(own.at(share), phases=(), layers=()))
        for glob, own in [("*", recipe), *recipes_of_layers(recipe, layers)]
    ]
    if not any(own and own.quantized for _, own in found):
        raise ValueError(
            f"recipe {recipe.name} quantizes nothing at {share:g} of training: give --at the share "
            "of training of a phase that does"
        )
    return [(glob, own if own and own.quantized else None) for glob, own in found]


def flags_of(modules: Modules, folder: Path) -> list[str]:
    """Flags of a launch whose linears follow `modules`, as `recipes_at` returns them. Its recipes
    are written into the folder."""
    files: dict[Recipe, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in dict.fromkeys(own for _, own in modules if own):
        path = folder.resolve() / f"recipe-{len(files)}.yaml"
        path.write_text(content.write(recipe))  # JSON, which is YAML too
        files[recipe] = str(path)
    flags = ["--fp4-recipe", next(iter(files.values()))]
    for glob, own in modules:
        flags += ["--fp4-module-recipe", f"{glob}={files[own] if own else 'bf16'}"]
    return flags


def sensitivity(
    evaluate: Evaluate, other: str, layers: int, at_once: int = 1
) -> tuple[float, float, list[Found]]:
    """Evaluates the launch with its recipe in all linears, with `other` in all, and with `other` in
    one place at a time (see `places`). Returns the three: (loss, loss, the loss of each place).

    evaluate: takes further flags of the launch, and returns its held-out loss. at_once: how many
    evaluations run at a time. The first one runs alone, since it may write an index of the data
    that the others read. After an evaluation that fails no other begins, and its error is raised.
    """

    def loss(place: str) -> float:
        in_place = ["--fp4-module-recipe", f"{place}={other}"]
        if (place, other) == ("*", "bf16"):  # a recipe that quantizes no linear is refused
            in_place = ["--fp4-eval-forward", "bf16"]
        try:
            found = evaluate(in_place)
        except Exception:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        print(f"{place} in {other}: {found:.4f}", file=sys.stderr, flush=True)
        return found

    low, single = evaluate([]), list(places(layers))
    with ThreadPoolExecutor(at_once) as pool:
        high, *others = pool.map(loss, ["*", *single])
    return low, high, list(map(Found, single, others))


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
    numbers = itertools.count()

    def evaluate(more: Sequence[str]) -> float:
        found = run(
            [*command, *more], work / f"{next(numbers)}.log", environment={"OMP_NUM_THREADS": "1"}
        )
        _, loss = found.held_out[0]  # of the validation set; that of the test set follows
        return loss

    return evaluate


def heading(recipe: Recipe, share: float) -> list[str]:
    """Lines above the table: the share of training that is measured, if there are phases, and how W
    is rounded, if training rounds it towards an average."""
    lines = []
    if any(each.phases for each in recipe.followed):
        lines.append(f"At {share:g} of training:")
    if any(each.weight_average for each in recipe.followed):
        lines.append(
            "W is rounded to nearest here, not towards its average: an evaluation loads no state "
            "of the optimizer."
        )
    return lines


def table(low: float, high: float, found: Sequence[Found], recipe: str, other: str) -> list[str]:
    """A Markdown table: layers, then kinds of linears, each in the order of their gains."""

    def row(place: str, loss: float) -> list[str]:
        share = f"{(low - loss) / (low - high):.0%}" if low > high else ""
        return [place, f"{loss:.4f}", f"{low - loss:+.4f}", share]

    ordered = sorted(found, key=lambda each: (each.place.startswith("*"), each.loss))
    head = [f"`{other}` in place of `{recipe}`", "loss", "gain", "share of all"]
    rows = [row("none", low), *(row(*each) for each in ordered), row("all", high)]
    return pages.table(head, rows)


def chosen(found: Sequence[Found], count: int, low: float, launch: Launch, other: str) -> str:
    """The text of a recipe file: the launch's recipe, but `other` in the `count` layers whose loss
    it lowers most. Layers whose loss it does not lower are left out.

    found: the losses with `other` in one place each. low: the loss without it.
    """
    gaining = [each for each in found if not each.place.startswith("*") and each.loss < low]
    best = sorted(gaining, key=lambda each: each.loss)[:count]
    file: dict[str, object] = {"base": launch.recipe}
    if launch.options:
        file["options"] = launch.options
    if best:  # a file with layers of its own has none of its base
        own = get_recipe(launch.recipe, **launch.options).layers
        file["layers"] = [
            *map(entry, own), *({"modules": each.place, "recipe": other} for each in best)
        ]  # fmt: skip
    text = yaml.safe_dump(file, default_flow_style=None, sort_keys=False).strip()
    return text if best else f"# no layer gains\n{text}"


def entry(layers: Layers) -> dict[str, object]:
    """The entry of a recipe file's `layers` for these."""
    recipe, name = layers.recipe, layers.recipe.name
    named: object = "bf16"
    if recipe.ever_quantized:
        builtin = name in list_recipes() and get_recipe(name) == recipe
        named = name if builtin else json.loads(content.write(recipe))
    places = {key: getattr(layers, key) for key in ("first", "last", "modules")}
    return {key: place for key, place in places.items() if place} | {"recipe": named}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        usage="python -m tools.sensitivity [options] -- <flags of the launch>",
    )
    parser.add_argument("--in-place", default="fp8", help="of one place at a time: fp8, bf16, ...")
    parser.add_argument("--at", type=float, default=0.0, help="share of training, for phases")
    parser.add_argument("--choose", type=int, default=2, help="layers of the recipe file")
    parser.add_argument("--processes", type=int, default=1, help="ranks of the launch")
    parser.add_argument("--at-once", type=int, default=1, help="evaluations at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/sensitivity"), help="for logs")
    parser.add_argument(
        "flags", nargs="+", help="of the launch, after --: with --fp4-recipe and --load"
    )
    args = parser.parse_args()
    try:
        for name in ("processes", "choose", "at-once"):
            if (given := getattr(args, name.replace("-", "_"))) < 1:
                raise ValueError(f"--{name} is {given}: give 1 or more")
        launch = read_launch(args.flags)
        if args.in_place != "bf16" and not get_recipe(args.in_place).is_uniform:
            raise ValueError(
                f"--in-place {args.in_place} has phases or layers: give a recipe without, as fp8"
            )
        recipe = get_recipe(launch.recipe, **launch.options)
        own = flags_of(recipes_at(recipe, args.at, launch.layers), args.work)
        evaluate = launched([*launch.flags, *own], args.processes, args.work)
        low, high, found = sensitivity(evaluate, args.in_place, launch.layers, args.at_once)
    except OSError as error:
        sys.exit(f"sensitivity: --work {args.work}: {error.strerror}: give another folder")
    except (ValueError, ConfigError, RunFailed) as error:
        sys.exit(f"sensitivity: {error}")
    for line in heading(recipe, args.at):
        print(f"{line}\n")
    print("\n".join(table(low, high, found, launch.recipe, args.in_place)))
    print()
    print(chosen(found, args.choose, low, launch, args.in_place))


if __name__ == "__main__":
    main()
