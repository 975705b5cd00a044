"""The conformance suite of stores, run on those of this distribution."""

import pytest

from blendhub import PluginHost
from blendhub.testing.stores import StoreSuite
from blendhub.testing.stores.keeping import KeepingTests

pytestmark = pytest.mark.slow
HOST = PluginHost.discover()


class TestDisk(StoreSuite.of_installed(HOST, "disk", {})):  # type: ignore[misc]
    """The suite that ``blendhub conformance`` runs."""


class TestDiskThatWaits(KeepingTests.of_installed(HOST, "disk", {"fsync": True})):  # type: ignore[misc]
    """What does not depend on how a file reaches the disk is tested once."""
