"""The conformance suite of stores: each test stands for a sentence of :mod:`blendhub.contracts.store`."""

from blendhub.testing.stores.crashes import CrashTests
from blendhub.testing.stores.damage import DamageTests
from blendhub.testing.stores.keeping import BoundsTests, KeepingTests, StoreRefusingTests
from blendhub.testing.stores.machine import StoreHistoryTests
from blendhub.testing.stores.sharing import StoreSharingTests


class StoreSuite(
    KeepingTests, BoundsTests, StoreRefusingTests, DamageTests, CrashTests, StoreSharingTests, StoreHistoryTests
):
    """Subclass it as ``class TestMine(StoreSuite)`` with a ``create`` that opens a store at a path."""
