"""The conformance suite of selectors: each test stands for a sentence of :mod:`blendhub.contracts.selector`."""

from blendhub.testing.selectors.picking import AgreeingTests, PickingTests
from blendhub.testing.selectors.probing import ProbingTests
from blendhub.testing.selectors.scoring import ScoringTests


class SelectorSuite(PickingTests, ProbingTests, ScoringTests, AgreeingTests):
    """Subclass it as ``class TestMine(SelectorSuite)`` with a ``create`` that returns a new selector."""
