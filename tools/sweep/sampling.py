"""Draws the combinations of a sweep.

Combinations are drawn in stars. A star is a combination that is drawn at random, its center, with
the lines through it on all axes: their scores show what an axis does while all others stay the
same. A sample also has the combinations of factorial.py and words.py.
"""

from __future__ import annotations

import random

from tools.sweep import factorial, words
from tools.sweep.axes import AXES, Combination, draw, line


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
