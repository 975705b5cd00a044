"""The conformance suite, run on each built-in matcher."""

import pytest

from blendhub import PluginHost
from blendhub.contracts import Matcher
from blendhub.testing import MatcherSuite

HOST = PluginHost.discover()


class TestPrefix(MatcherSuite):
    def create(self) -> Matcher:
        return HOST.create("matcher", "prefix")


class TestSeparator(MatcherSuite):
    separator = (0, 3)

    def create(self) -> Matcher:
        return HOST.create("matcher", "separator", {"separator": (0, 3), "min_match_tokens": 4})


class TestRollingHash(MatcherSuite):
    def create(self) -> Matcher:
        return HOST.create("matcher", "rolling_hash")


@pytest.mark.slow
class TestRollingHashWithShortMatches(MatcherSuite):
    def create(self) -> Matcher:
        return HOST.create("matcher", "rolling_hash", {"min_match_tokens": 1})
