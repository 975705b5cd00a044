"""Conformance suites for authors of plugins, and the slow references that they are judged by.

Needs the extra ``blendhub[testing]``.
"""

from importlib import import_module
from typing import Any

import pytest

# Before the imports below: pytest explains the failing asserts only of modules that it rewrote.
pytest.register_assert_rewrite(
    "blendhub.testing.checks",
    "blendhub.testing.devices",
    "blendhub.testing.matchers",
    "blendhub.testing.selectors",
    "blendhub.testing.shared_stores",
    "blendhub.testing.stores",
    "blendhub.testing.transports",
)

from blendhub.testing.checks import check_complete, check_matches  # noqa: E402
from blendhub.testing.matchers import MatcherSuite  # noqa: E402
from blendhub.testing.reference import ReferenceMatcher  # noqa: E402
from blendhub.testing.selectors import MeasuringTests, ScoringTests, SelectorSuite  # noqa: E402
from blendhub.testing.shared_stores import SharedStoreSuite  # noqa: E402
from blendhub.testing.stores import StoreSuite  # noqa: E402
from blendhub.testing.transports import TransportSuite  # noqa: E402

__all__ = [
    "SUITES",
    "SUITES_OF_CAPABILITIES",
    "AttentionTests",
    "DeviceSuite",
    "MatcherSuite",
    "MeasuringTests",
    "ReferenceMatcher",
    "ScoringTests",
    "SelectorSuite",
    "SharedStoreSuite",
    "StoreSuite",
    "TransportSuite",
    "check_complete",
    "check_matches",
]

SUITES = {
    "device": "DeviceSuite",
    "matcher": "MatcherSuite",
    "selector": "SelectorSuite",
    "store": "StoreSuite",
    "transport": "TransportSuite",
}
"""The name here of each kind's suite, which offers ``of_installed``. A new kind is one more line."""

SUITES_OF_CAPABILITIES: dict[tuple[str, str], Any] = {("store", "shared"): SharedStoreSuite}
"""The suites of plugins that fulfil another contract of their kind, by the capability that says so."""


def __getattr__(name: str) -> Any:
    """The suites of devices need torch, which authors of other plugins need not have."""
    if name in ("AttentionTests", "DeviceSuite"):
        return getattr(import_module("blendhub.testing.devices"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
