"""Lines that follow the start table: what linears hold over a step, what ranks send, and what the
optimizer keeps.

Each function returns a line without an indent, or "" where there is nothing to say.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.ramping import MOVEMENT_BYTES, SNAPSHOT_BYTES, STATE_BYTES, Ramping
from megatron_fp4.mcore.arguments.steps import steps_of, trains
from megatron_fp4.plan.owned_codes import Times
from megatron_fp4.recipe import Recipe


class SentGradients(NamedTuple):
    """The bytes of gradients that ranks send in a step, of either dense parameters or experts.

    ranks: the number of data-parallel ranks that have a copy of these parameters. The other fields
    are those of one rank, or sums over several ranks. elements: the number of parameters.
    to_owners: the bytes of gradients that are sent to the ranks that sum them. to_all: the bytes of
    sums that are sent to the other ranks.
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


def held_weights(keeps: str | None, size: int, sent: Collection[bool]) -> str:
    """The line about W's operands that are held over a step.

    keeps: see `Setting.keeps_w`. size: bytes on the rank with most. sent: {True} if W of fprop
    comes as codes, so that linears quantize that of dgrad alone, {False} if it does not, and both
    if it does in some linears.
    """
    if len(sent) > 1:
        return f"{held_weights(keeps, size, {False})}; where W comes as codes, for dgrad alone"
    is_sent = True in sent
    weights = "weights for dgrad" if is_sent else "weights"
    if keeps in (None, "remade") or (keeps == "fprop" and is_sent):
        twice = ", and again in its backward pass" if keeps == "remade" and not is_sent else ""
        return f"{weights} are quantized again for each microbatch{twice}"
    if keeps == "fprop":
        once = "weights are quantized once a step for fprop, whose codes are kept"
    else:
        once = f"{weights} are quantized once a step and kept {keeps}"
    return f"{once}: {_size(size)} on a rank"


def gathered_weights(args: Namespace, weights: GatheredWeights, times: Times) -> str:
    """The line about --fp4-param-gather; "" without the flag. args: Megatron's.

    weights: those of the rank with most. times: when they are gathered as codes.
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
        f"step, not {_size(weights.plain_sent)}{''.join(_turns(times))}"
    )


def _turns(times: Times) -> Iterator[str]:
    """When weights are gathered in BF16 and when as codes, if that changes."""
    (_, at_first), *turns = times
    if not at_first:
        yield "; at first in BF16"
    for after, codes in turns:
        yield f"; from {after:.4g} of training on {'as codes' if codes else 'in BF16'}"


def weight_states(recipes: Sequence[Recipe], size: int, args: Namespace) -> str:
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
    kept = f"{' and '.join(names)} of each weight in float32, as optimizer state"
    if not getattr(args, "use_distributed_optimizer", False):
        return f"{kept}: {_size(size)} on a rank"
    copies = f"; linears read copies: {_size(size)} on a rank" if size else ""
    return f"{kept}, sharded{copies}"


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


def calibrations(ramping: Ramping, args: Namespace, ramped: int, everything: int) -> str:
    """The line about Q-Ramping: the memory that it takes, and how often it calibrates.

    args: Megatron's. ramped: the number of elements of the weights that are updated at periods of
    their own. everything: that of all weights. Both are of the rank with most, before the
    distributed optimizer shards them.
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

    form: in which form, in words. held: bytes of the buffers that they go through, on the rank with
    most. sent: by kind of parameter, summed over all ranks.
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
        mean = f"bytes of a parameter, on average: {' and '.join(bytes_)}"
        what = mean if bytes_ else "nothing"
        ranks = "1 rank sends" if of_kind.ranks == 1 else f"each of {of_kind.ranks} ranks sends"
        lines.append(f"  {kind}: {ranks} {what}")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
