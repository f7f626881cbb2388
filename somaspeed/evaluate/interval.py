"""The uncertainty of a success rate."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # two-sided 95 %


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, (low, high) in [0, 1]; (0, 1) without trials.

    Unlike the normal approximation it keeps its meaning at 0 and at 100 % (Wilson 1927, J. Am. Stat. Assoc. 22).
    """
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high
