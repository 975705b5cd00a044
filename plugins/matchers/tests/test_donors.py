"""Among the owners of one text, rolling_hash names the one whose KV was computed most as the prompt asks for it."""

from typing import NamedTuple

import numpy as np
from blendhub_matchers.options import RollingHashOptions
from blendhub_matchers.rolling_hash import RollingHashMatcher
from blendhub_matchers.rolling_pages import CONTEXT
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.core.spans import Match

random = np.random.default_rng(7)
TEXT = random.integers(0, 10**6, 90, dtype=np.uint32)
LEFT = random.integers(10**6, 2 * 10**6, 3 * CONTEXT, dtype=np.uint32)
"""What stands before the text in the prompt; no part of it is long enough to be found by itself."""


class Owner(NamedTuple):
    """A run with the text: some foreign tokens, the last ``alike`` ones of LEFT, the text."""

    foreign: int
    alike: int
    stored: int
    """How many of the tokens before the text are stored too. The others were stored by an earlier run."""

    @property
    def starts_at(self) -> int:
        return self.foreign + self.alike

    @property
    def stored_alike(self) -> int:
        return min(self.stored, self.alike)

    @property
    def known_before(self) -> int:
        """What the prompt has before the match too, as far as that is looked at."""
        return min(self.alike - self.stored, CONTEXT) if self.alike >= self.stored else 0

    def tokens(self, number: int) -> np.ndarray:
        noise = np.random.default_rng(number).integers(2 * 10**6, 2**32, self.foreign + 40, dtype=np.uint32)
        return np.concatenate([noise[: self.foreign], LEFT[len(LEFT) - self.alike :], TEXT, noise[self.foreign :]])


@st.composite
def owners(draw) -> Owner:
    foreign, alike = draw(st.integers(0, 120)), draw(st.integers(0, 2 * CONTEXT))
    return Owner(foreign, alike, draw(st.integers(0, min(foreign + alike, 2 * CONTEXT))))


@given(st.lists(owners(), min_size=1, max_size=7))
def test_the_best_owner_is_named(drawn):
    matcher = RollingHashMatcher(RollingHashOptions(min_match_tokens=1))
    ranks = []
    for number, owner in enumerate(drawn):
        tokens = owner.tokens(number)
        matcher.add(number, tokens, Span(owner.starts_at - owner.stored, len(tokens)))
        ranks.append((owner.stored_alike, owner.known_before, -abs(owner.starts_at - len(LEFT)), number))
    number = max(ranks)[-1]
    best, start = drawn[number], len(LEFT) - drawn[number].stored_alike
    source = best.starts_at - best.stored_alike
    matches = matcher.match(np.concatenate([LEFT, TEXT, LEFT[:1]]))
    assert matches == [Match(Span(start, len(LEFT) + len(TEXT)), number, source, exact=False)]


def test_a_neighbour_counts_although_the_search_looks_back_no_further():
    """What an earlier match covers is not part of a later one, but it says whose neighbour the later one has."""
    random = np.random.default_rng(3)
    before, foreign = random.integers(0, 2**32, (2, 100), dtype=np.uint32)
    matcher = RollingHashMatcher(RollingHashOptions(min_match_tokens=1))
    matcher.add(1, before, Span(0, 100))
    matcher.add(2, np.concatenate([foreign, before, TEXT]), Span(200, 200 + len(TEXT)))
    matcher.add(3, np.concatenate([foreign, TEXT]), Span(100, 100 + len(TEXT)))
    runs = [match.run for match in matcher.match(np.concatenate([before, TEXT]))]
    assert runs == [1, 2]
