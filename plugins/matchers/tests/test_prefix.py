"""The prefix matcher against what can be said of every position by itself."""

import numpy as np
from blendhub_matchers.options import PrefixOptions
from blendhub_matchers.prefix import PrefixMatcher
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.plan import check_tiling

CHUNK = 4

Stored = tuple[list[int], int, list[tuple[int, int]]]
"""A sequence, the position from which its KV is stored, and what of that is discarded again."""


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    sequence = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK))
    start = draw(st.integers(0, len(sequence) - 1))
    borders = draw(st.lists(st.integers(start, len(sequence)), max_size=6))
    ordered = sorted(set(borders))
    return sequence, start, list(zip(ordered[::2], ordered[1::2], strict=False))


@given(st.lists(stored(), max_size=6), st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK))
def test_every_position_that_a_run_holds_after_the_same_tokens_is_found(runs: list[Stored], prompt: list[int]) -> None:
    matcher = PrefixMatcher(PrefixOptions(chunk_tokens=CHUNK))
    held: set[tuple[int, int]] = set()
    for run, (sequence, start, discarded) in enumerate(runs):
        matcher.add(run, np.array(sequence, np.uint32), Span(start, len(sequence)))
        held |= {(run, at) for at in range(start, len(sequence))}
        for first, end in discarded:
            matcher.discard(run, Span(first, end))
            held -= {(run, at) for at in range(first, end)}

    matches = matcher.match(np.array(prompt, np.uint32))

    check_tiling(len(prompt), matches)
    found = {(match.run, at) for match in matches for at in range(match.span.start, match.span.end)}
    right = {(run, at) for run, at in held if runs[run][0][: at + 1] == prompt[: at + 1]}
    assert found <= right and {at for _, at in found} == {at for _, at in right}
    assert all(match.exact and match.source_start == match.span.start for match in matches)
