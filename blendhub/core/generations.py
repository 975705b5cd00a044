"""Generations: how many moves lie between stored KV and KV that is exact.

KV of generation 0 is exact. Moved text of generation n is KV of generation n + 1 in the prompt that it was moved to,
and so is what is blended or computed behind it there. Settled KV keeps its generation: the prompt is the same one.
"""

from collections.abc import Iterable

from blendhub.core.spans import MOST_GENERATION, Match

MAX_GENERATION = 4
"""The default of ``max_generation``, the highest generation that an engine makes."""


def generation_of(matches: Iterable[Match]) -> int:
    """The generation of KV that is blended or computed behind these matches, in the prompt that reuses them."""
    reached = max((match.generation + match.moved for match in matches), default=0)
    return min(reached, MOST_GENERATION)
