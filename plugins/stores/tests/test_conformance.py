"""The conformance suite of stores, run on those of this distribution."""

from pathlib import Path

import pytest
from blendhub_stores.disk import DiskStore
from blendhub_stores.options import DiskOptions

from blendhub.contracts import Store
from blendhub.testing.stores import StoreSuite
from blendhub.testing.stores.keeping import KeepingTests

pytestmark = pytest.mark.slow


class TestDisk(StoreSuite):
    def create(self, path: Path, capacity: int) -> Store:
        return DiskStore(DiskOptions(path=str(path), capacity_gib=capacity / 2**30))


class TestDiskThatWaits(KeepingTests):
    def create(self, path: Path, capacity: int) -> Store:
        return DiskStore(DiskOptions(path=str(path), capacity_gib=capacity / 2**30, fsync=True))
