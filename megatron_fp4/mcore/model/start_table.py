"""The table that a training run prints before its first step: what runs each linear's GEMMs."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.ramping import MOVEMENT_BYTES, SNAPSHOT_BYTES, STATE_BYTES, Ramping
from megatron_fp4.description import describe
from megatron_fp4.mcore.launch.steps import steps_of
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import token_tile
from megatron_fp4.plan.words import gemm_words, notes
from megatron_fp4.recipe import GEMMS, Phase, Recipe

LAYERS, EXPERTS = "layers.", "local_experts."  # in a module's name, a number follows these


@dataclass(frozen=True)
class Row:
    """What the table says of one linear.

    name: its global name. local_shape: the shape of W on this rank, as text.
    precision: the name of its recipe, or "high precision".
    gemms: for each of the three GEMMs the operands' formats and the multiplier; empty for a linear
        in high precision.
    notes: which faster kernels and multipliers are not used, and why.
    refusal: why the linear cannot follow its recipe; None if it can.
    after: the share of training after which the recipe holds, of a phase.
    """

    name: str
    local_shape: str
    precision: str
    gemms: tuple[str, ...]
    notes: tuple[str, ...]
    refusal: str | None = None
    after: float = 0.0


class SentGradients(NamedTuple):
    """How much one rank sends of its gradients in a step, of either dense parameters or experts.

    ranks: the number of data-parallel ranks that have a copy of these parameters. elements: the
    number of these parameters on the rank. to_owners: the bytes of gradients that it sends to the
    ranks that sum them. to_all: the bytes of sums that it sends to the other ranks.
    """

    ranks: int
    elements: int
    to_owners: int
    to_all: int


class GatheredWeights(NamedTuple):
    """The weights of a rank that data-parallel ranks gather as codes and scales.

    elements: their number. size: the bytes of their codes and scales. plain: the bytes of the
    weights themselves. sent, plain_sent: what of either one rank sends in a step, on average.
    """

    elements: int
    size: int
    plain: int
    sent: int
    plain_sent: int


def unquantized(name: str, weight: Tensor) -> Row:
    """The row of a linear that stays in high precision."""
    return Row(name, _shape(weight), "high precision", (), ())


def stock(name: str, weight: Tensor, kind: str) -> Row:
    """The row of a linear that no recipe can be given to. kind: the name of its class."""
    return Row(name, _shape(weight), f"none: {kind}", (), ())


def refused(name: str, weight: Tensor, recipe: Recipe, why: str) -> Row:
    """The row of a linear that cannot follow its recipe. why: the refusal."""
    return Row(name, _shape(weight), recipe.name, (), (), why)


def planned(
    name: str, weight: Tensor, plan: LinearPlan, tokens: int, phase: Phase | None = None
) -> Row:
    """The row of a linear that executes `plan`. tokens: see `Setting.tokens`. phase: of whose
    recipe the plan is; None: of the first."""
    gemms = tuple(gemm_words(plan, gemm) for gemm in plan.gemms)
    found, recipe, after = [*notes(plan), *_saved_x(name, plan, tokens)], plan.recipe.name, 0.0
    if phase is not None:
        after, recipe = phase.after, f"{recipe} after {phase.after:.4g}"
        found = [f"{recipe}: {note}" for note in found]
    return Row(name, _shape(weight), recipe, gemms, tuple(found), after=after)


def _saved_x(name: str, plan: LinearPlan, tokens: int) -> list[str]:
    """A note if --fp4-saved-x cannot be followed, or bf16 changes nothing, else []."""
    if plan.wgrad is None:
        return []
    keeps_x = plan.wgrad.b.quantizer is not None and plan.saves_x == "model"
    if not plan.setting.packs_x:
        nothing = (
            f"--fp4-saved-x bf16 changes nothing for {plan.recipe.name}: its backward quantizes no "
            "X itself"
        )
        return [] if keeps_x else [nothing]
    if not keeps_x:
        return []
    if plan.setting.has_part("dy"):
        tokens *= plan.setting.sharding.ranks
    linear, tile = name.rpartition(".")[2], token_tile(plan.recipe, "wgrad", "x")
    return [
        f"X of {linear} is kept in BF16 for backward: {tokens} tokens on a rank are not a "
        f"multiple of {tile}"
    ]


def _shape(weight: Tensor) -> str:
    return " x ".join(map(str, weight.shape))


def held(keeps: str | None, size: int, is_sent: bool) -> str:
    """The line about W's operands that are held over a step.

    keeps: see `Setting.keeps_w`. size: bytes on the rank with most. is_sent: whether W of fprop
    comes as codes, so that linears quantize that of dgrad alone.
    """
    weights = "weights for dgrad" if is_sent else "weights"
    if keeps in (None, "remade") or (keeps == "fprop" and is_sent):
        twice = ", and again in its backward pass" if keeps == "remade" and not is_sent else ""
        return f"{weights} are quantized again for each microbatch{twice}"
    if keeps == "fprop":
        once = "weights are quantized once a step for fprop, whose codes are kept"
    else:
        once = f"{weights} are quantized once a step and kept {keeps}"
    return f"{once}: {_size(size)} on a rank"


def gathered(args: Namespace, weights: GatheredWeights) -> str:
    """The line about --fp4-param-gather; "" without the flag. args: Megatron's.

    weights: those of the rank with most.
    """
    if not args.fp4_gathers_codes:
        return ""
    if not trains(args):
        return "no weights are gathered under --skip-train, which makes no optimizer"
    count = max(weights.elements, 1)
    bits, plain_bits = (8 * size / count for size in (weights.size, weights.plain))
    return (
        f"{weights.elements:,} weights on a rank are gathered as codes for fprop, in "
        f"{bits:.3g} bits each and not {plain_bits:.3g}: a rank sends {_size(weights.sent)} a "
        f"step, not {_size(weights.plain_sent)}"
    )


def states(recipes: Sequence[Recipe], size: int, args: Namespace) -> str:
    """The line about averages of weights; "" if no recipe has one.

    size: bytes of the layers' copies on the rank with most. args: Megatron's; under --skip-train it
    makes no optimizer, and so nothing that keeps the state.
    """
    names = sorted({name for recipe in recipes for name in recipe.weight_states})
    if not names:
        return ""
    if not trains(args):
        return (
            f"no {' and '.join(names)} under --skip-train, which loads no optimizer state: "
            "rounding ema rounds to nearest here"
        )
    kept = "as optimizer state"
    if not size:
        return f"{' and '.join(names)} of each weight in float32, as optimizer state, sharded"
    if getattr(args, "use_distributed_optimizer", False):
        kept = "as copies for linears to read, and as much as optimizer state, sharded"
    return f"{' and '.join(names)} of each weight in float32: {_size(size)} on a rank, {kept}"


def moments(args: Namespace) -> str:
    """The line about Adam's moments in few bits; "" without --fp4-optimizer-state.

    args: Megatron's.
    """
    given = getattr(args, "fp4_optimizer_state", None)  # a model without a loop has none
    if given is None or not trains(args):
        return ""
    each = Moments.read(given).bytes
    return (
        f"Adam's moments are stored as {given}: {each:.4g} bytes a parameter in place of 8, "
        f"with the main weight {4 + each:.4g} in place of 12"
    )


def trains(args: Namespace) -> bool:
    """Whether the launch trains, and does not only evaluate. args: Megatron's."""
    return not getattr(args, "skip_train", False)  # a model without a loop has none


def calibrations(ramping: Ramping, args: Namespace, ramped: int, everything: int) -> str:
    """The line about Q-Ramping. args: Megatron's.

    ramped, everything: the elements of the weights with periods, and of all weights, on the rank
    with most, before the distributed optimizer shards them.
    """
    kept, steps = _size(STATE_BYTES * ramped), steps_of(args)
    size = _size(SNAPSHOT_BYTES * everything + MOVEMENT_BYTES * ramped)
    number = ""
    if steps is not None:
        if not (found := ramping.calibrations_in(steps)):
            return (
                f"Q-Ramping does nothing: {steps} steps end before a calibration after "
                f"{ramping.interval_in(steps)}; give ramping_interval_share"
            )
        number = f"{found} "
    place = " on the host" if args.fp4_offload_calibration else ""
    return (
        f"Q-Ramping: sums, counts and periods of {kept} on a rank, as optimizer state, sharded "
        f"like it; {number}calibrations of {ramping.calibration} steps, each with {size} "
        f"more{place}, sharded too"
    )


def gradients(form: str, held: int, sent: Mapping[str, SentGradients]) -> str:
    """The lines about gradients that data-parallel ranks exchange in few bits.

    form: in which form, in words. held: bytes of the buffers that they go through. sent: by kind of
    parameter.
    """
    lines = [f"megatron-fp4: data-parallel ranks send gradients in {form}"]
    if held:
        lines[0] += f", through buffers of {_size(held)}"
    for kind, of_kind in sent.items():
        bytes_ = [
            f"{size / of_kind.elements:.2f} by {collective}"
            for size, collective in (
                (of_kind.to_owners, "all-to-all"),
                (of_kind.to_all, "all-gather"),
            )
            if size
        ]
        what = f"bytes of a parameter: {' and '.join(bytes_)}" if bytes_ else "nothing"
        ranks = "1 rank sends" if of_kind.ranks == 1 else f"each of {of_kind.ranks} ranks sends"
        lines.append(f"  {kind}: {ranks} {what}")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


def table(recipes: Sequence[Recipe], rows: list[Row]) -> str:
    """The start table: the recipes in words, then one line for each kind of linear.

    A line has the linear's name, its layers, the shape of W on a rank, its recipe, and the formats
    and multiplier of each GEMM. Each phase of a recipe has a line of its own. Notes follow.
    recipes: the launch's recipe, then those that --fp4-module-recipe gives to single modules.
    """
    kinds: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for row in rows:
        name, *numbers = kind(row.name)
        gemms = row.gemms or ("high precision",) * len(GEMMS)
        key = (name, row.local_shape, row.after, row.precision, *gemms)
        kinds.setdefault(key, []).append((numbers[0], numbers[1]))
    head = ("linear", "layers", "out x in on a rank", "recipe", *GEMMS)
    cells = []
    for (name, shape, _, *rest), found in sorted(kinds.items()):
        for experts, layers in _alike(found):
            named = name.replace(EXPERTS + "*", f"{EXPERTS}{experts}")
            cells.append((named, layers, shape, *rest))
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    words = [f"  {line}" for recipe in dict.fromkeys(recipes) for line in describe(recipe)]
    lines = [
        f"megatron-fp4: {words[0].strip()}",
        *words[1:],
        *(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in [head, *cells]
        ),
        "  embedding, head, norms, attention scores: high precision",
    ]
    lines += sorted({f"  {note}" for row in rows for note in row.notes})
    return "\n".join(line.rstrip() for line in lines)


def _alike(numbers: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """(experts, layers) as ranges of numbers, from the (layer, expert) numbers of a kind of linear.

    Layers that have the same experts are put together. A missing number is -1, as `kind` returns.
    """
    of_layer: dict[int, set[int]] = {}
    for layer, expert in numbers:
        of_layer.setdefault(layer, set()).add(expert)
    layers: dict[str, list[int]] = {}
    for layer, experts in sorted(of_layer.items()):
        layers.setdefault(_ranges(experts), []).append(layer)
    return [(experts, _ranges(found)) for experts, found in layers.items()]


def kind(name: str) -> tuple[str, int, int]:
    """(name with * for the numbers of layer and expert, layer, expert); -1 for a missing number."""
    numbers = []
    for start in (LAYERS, EXPERTS):
        match = re.search(rf"{re.escape(start)}(\d+)", name)
        numbers.append(-1 if match is None else int(match[1]))
        if match is not None:
            name = f"{name[: match.start()]}{start}*{name[match.end() :]}"
    return name, numbers[0], numbers[1]


def _ranges(numbers: Iterable[int]) -> str:
    """The numbers as ranges, for example "0-3,7" for {0, 1, 2, 3, 7}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
