"""The conformance suite of transports: each test stands for a sentence of :mod:`blendhub.contracts.transport`."""

from blendhub.testing.transports.suite import TransportSuite

__all__ = ["TransportSuite"]
