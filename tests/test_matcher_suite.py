"""The suite, run on the reference: what judges others must pass itself."""

import pytest

from blendhub.contracts import Matcher
from blendhub.testing import MatcherSuite, ReferenceMatcher

pytestmark = pytest.mark.slow


class ReferenceSuite(MatcherSuite):
    entries = 40


class TestPrefix(ReferenceSuite):
    def create(self) -> Matcher:
        return ReferenceMatcher("prefix")


class TestSegments(ReferenceSuite):
    separator = (0, 3)

    def create(self) -> Matcher:
        return ReferenceMatcher("segments", 4, self.separator)


class TestAnywhere(ReferenceSuite):
    def create(self) -> Matcher:
        return ReferenceMatcher("anywhere", 16)
