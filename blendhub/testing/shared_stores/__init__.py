"""The conformance suite of shared stores: :mod:`blendhub.contracts.shared_store`, tested with several objects at one
place."""

from blendhub.testing.shared_stores.following import FollowingTests
from blendhub.testing.shared_stores.history import FleetHistoryTests
from blendhub.testing.shared_stores.moving import MovingTests


class SharedStoreSuite(MovingTests, FollowingTests, FleetHistoryTests):
    """Subclass it as ``class TestMine(SharedStoreSuite)`` with a ``create`` that opens a place once more."""
