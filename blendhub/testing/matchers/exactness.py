"""When a match may be called exact."""

from collections.abc import Sequence

import numpy as np

from blendhub.core.spans import Match, Span
from blendhub.testing.checks import MatcherWithOracle, covers
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.sentences import holds


def exact_tokens(matches: Sequence[Match]) -> int:
    return sum(len(match.span) for match in matches if match.exact)


@holds("A match is marked exact only when the stored KV is bit for bit what the")
class ExactnessTests(MatcherTests):
    """Same tokens, same positions, same whole prefix, and stored as exact: then only is a match exact.

    That no match says so wrongly is checked at every match of every test; here stand the cases by name.
    """

    def test_a_prefix_stored_as_exact_is_exact(self, checked: MatcherWithOracle, writer: Writer) -> None:
        self.needs_reach(checked.matcher, "prefix")
        text = writer.text()
        checked.add(1, text)
        found = checked.match(np.concatenate([text, writer.text()]))
        assert exact_tokens(found) == len(text)

    def test_what_was_blended_is_not_exact(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        checked.add(1, text, exact=False)
        found = checked.match(text)
        assert covers(found, Span(0, len(text)))
        assert exact_tokens(found) == 0

    def test_the_prefix_counts_even_where_it_is_not_stored(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        stored, spans = writer.joined(writer.text(20), text)
        checked.add(1, stored, spans[1])
        prompt, _ = writer.joined(writer.text(20), text)
        assert exact_tokens(checked.match(prompt)) == 0
