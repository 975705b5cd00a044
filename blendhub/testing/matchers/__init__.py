"""The conformance suite of matchers: every sentence of :mod:`blendhub.contracts.matcher`, tested."""

from blendhub.testing.matchers.exactness import ExactnessTests
from blendhub.testing.matchers.finding import FindingTests
from blendhub.testing.matchers.machine import HistoryTests
from blendhub.testing.matchers.refusing import RefusingTests
from blendhub.testing.matchers.sharing import SharingTests
from blendhub.testing.matchers.storing import StoringTests


class MatcherSuite(FindingTests, ExactnessTests, StoringTests, RefusingTests, SharingTests, HistoryTests):
    """Subclass it as ``class TestMine(MatcherSuite)`` with a ``create`` that makes an empty matcher."""
