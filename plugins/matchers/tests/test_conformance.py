"""The conformance suite, run on each built-in matcher."""

import pytest

from blendhub import PluginHost
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
