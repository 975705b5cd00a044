"""The conformance suite, run on each built-in matcher."""

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.core.tokens import as_tokens
from blendhub.testing import MatcherSuite

HOST = PluginHost.discover()
SEPARATED = {"separator": (0, 3), "min_match_tokens": 4}


class TestPrefix(MatcherSuite.of_installed(HOST, "prefix", {})):  # type: ignore[misc]
    pass


class TestSeparator(MatcherSuite.of_installed(HOST, "separator", SEPARATED)):  # type: ignore[misc]
    pass


class TestRollingHash(MatcherSuite.of_installed(HOST, "rolling_hash", {})):  # type: ignore[misc]
    pass


@pytest.mark.slow
class TestWithShortMatches(MatcherSuite.of_installed(HOST, "rolling_hash", {"min_match_tokens": 1})):  # type: ignore[misc]
    pass


def test_a_segment_is_whole_where_the_separator_behind_it_is_stored_in_part():
    matcher, text = (
        HOST.create("matcher", "separator", SEPARATED),
        as_tokens(np.array([0, 3, 5, 6, 7, 8, 0, 3, 9], np.uint32)),
    )
    for span in (Span(0, 6), Span(6, 7)):
        matcher.add(1, text, span)
        assert [match.span for match in matcher.match(text[2:6])] == [Span(0, 4)]
