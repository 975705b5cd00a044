"""Shares a step's budget among several requests."""

from collections.abc import Sequence


def shares(needs: Sequence[int], amount: int) -> list[int]:
    """The amount that each request gets, in the order of their arrival; none gets more than it needs.

    One half is shared equally: the work of a long prompt must not hold up the short ones behind it. All the rest goes
    to the oldest: of equal prompts the first one is ready early, and not all at the end.
    """
    if not needs:
        return []
    equal = amount // 2 // len(needs)
    given = [min(need, equal) for need in needs]
    left = amount - sum(given)
    for number, need in enumerate(needs):
        more = min(need - given[number], left)
        given[number] += more
        left -= more
    return given
