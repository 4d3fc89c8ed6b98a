"""Draws the combinations of a sweep.

Combinations are drawn in stars. A star is a combination that is drawn at random, its center, with
all combinations that differ from the center on one axis: their scores show what that axis does
while all other axes stay the same. A sample also has the combinations of factorial.py.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from megatron_fp4.errors import ConfigError
from tools.sweep import factorial
from tools.sweep.axes import AXES, Combination, flips, settled
from tools.sweep.building import recipe_of


@dataclass
class Sample:
    """What was drawn.

    stars: the key of the star's center by combination, or factorial.STAR; a combination is in the
    first star that has it. refused: how often each reason refused a combination.
    """

    stars: dict[Combination, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, combination: Combination, star: str) -> bool:
        """Adds a combination if it quantizes anything and a recipe can be made of it; returns
        whether it did."""
        if not combination.quantized or combination in self.stars:
            return False
        try:
            recipe_of(combination)
        except ConfigError as error:
            self.refused[str(error).removeprefix(f"{combination.key}: ")] += 1
            return False
        self.stars[combination] = star
        return True


def sample(number: int, seed: int) -> Sample:
    """Takes all combinations of factorial.py, then draws stars until these have at least `number`
    combinations. The last star is whole too. The same seed gives the same sample."""
    source, found = random.Random(seed), Sample()
    for each in factorial.combinations():
        found.add(each, factorial.STAR)
    number += len(found.stars)
    while len(found.stars) < number:
        drawn = {axis: source.choice(values) for axis, values in AXES.items()}
        center = settled(Combination(**drawn))
        if found.add(center, center.key):
            for _, flipped in flips(center):
                found.add(flipped, center.key)
    return found
