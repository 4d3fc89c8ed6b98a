"""Draws the combinations of a sweep.

Combinations are drawn in stars. A star is a combination that is drawn at random, its center, with
the lines through it on all axes: their scores show what an axis does while all others stay the
same. A sample also has the combinations of factorial.py and words.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from megatron_fp4.errors import ConfigError
from tools.sweep import factorial, words
from tools.sweep.axes import AXES, Combination, check, draw, line, settled, with_values

DIRECTED = "directed"  # in place of a star's key, in results


def sample(number: int, seed: int) -> dict[Combination, str]:
    """Takes all combinations of factorial.py and words.py, then draws stars until these have at
    least `number` combinations. The last star is whole too. The same seed gives the same sample.

    Returns by combination the key of its star's center, factorial.STAR or words.STAR. A combination
    is in the first star that has it.
    """
    source = random.Random(seed)
    found = dict.fromkeys(factorial.combinations(), factorial.STAR)
    found |= dict.fromkeys(words.combinations(), words.STAR)
    number += len(found)
    while len(found) < number:
        center = draw(source)
        if not center.in_fp4 or center in found:
            continue
        for axis in AXES:
            for each in line(center, axis).values():
                if each.in_fp4:
                    found.setdefault(each, center.key)
    return found


def directed(chosen: Mapping[str, str]) -> tuple[dict[Combination, str], list[str]]:
    """The product of values, each with the star DIRECTED, and for each that is left out why.

    chosen: by axis its values, with commas. All other axes are at their first value, or at the
    first that goes with the others. Combinations whose values contradict each other are left out.
    Raises ConfigError for an axis or value that does not exist, and if all are left out.
    """
    every = list(product(*(dict.fromkeys(each.split(",")) for each in chosen.values())))
    found: dict[Combination, str] = {}
    reasons: list[str] = []
    for values in every:
        wanted = dict(zip(chosen, values, strict=True))
        each = replace(settled(with_values(wanted)), **wanted)
        try:
            check(each)
        except ConfigError as error:
            reasons.append(str(error))
        else:
            found[each] = DIRECTED
    if not found:
        raise ConfigError(f"these values contradict each other: {reasons[0]}")
    return found, reasons
