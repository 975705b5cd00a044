"""The conformance suite of matchers: each test stands for a sentence of :mod:`blendhub.contracts.matcher`."""

from blendhub.testing.matchers.finding import ExactnessTests, FindingTests
from blendhub.testing.matchers.machine import MatcherHistoryTests
from blendhub.testing.matchers.sharing import MatcherSharingTests
from blendhub.testing.matchers.storing import MatcherRefusingTests, StoringTests


class MatcherSuite(
    FindingTests, ExactnessTests, StoringTests, MatcherRefusingTests, MatcherSharingTests, MatcherHistoryTests
):
    """Subclass it as ``class TestMine(MatcherSuite)`` with a ``create`` that makes an empty matcher."""
