"""The conformance suite of transports: each test stands for a sentence of :mod:`blendhub.contracts.transport`."""

from blendhub.testing.transports.answering import AnsweringTests
from blendhub.testing.transports.ending import EndingTests
from blendhub.testing.transports.limits import HostileTests, LimitTests


class TransportSuite(AnsweringTests, LimitTests, EndingTests, HostileTests):
    """Subclass it as ``class TestMine(TransportSuite)`` with ``create``."""
