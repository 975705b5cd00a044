"""The conformance suite of devices, run on the CPU device as on a stranger's: through the host."""

from blendhub import PluginHost
from blendhub.testing.devices import DeviceSuite


class TestCpu(DeviceSuite.of_installed(PluginHost.discover(), "cpu", {})):  # type: ignore[misc]
    """The suite that ``blendhub conformance`` runs."""
