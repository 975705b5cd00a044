"""Which installed plugin a suite is to be run on."""

from typing import Any

import msgspec

from blendhub import testing
from blendhub.core.errors import PluginError
from blendhub.framework.host import PluginHost
from blendhub.testing import SUITES, SUITES_OF_CAPABILITIES

VARIABLE = "BLENDHUB_CONFORMANCE"
"""The environment variable that carries a target to the processes that test it."""


class Target(msgspec.Struct, frozen=True):
    """An installed plugin, and the options to create it with."""

    kind: str
    name: str
    options: dict[str, Any]

    def suite(self) -> type:
        """A class that pytest collects; raises if the plugin cannot be created with these options."""
        if self.kind not in SUITES:
            raise PluginError(f"no conformance suite for kind {self.kind!r}; kinds with one: {', '.join(SUITES)}")
        host = PluginHost.discover()
        suites = [
            SUITES_OF_CAPABILITIES[self.kind, capability]
            for capability in host.spec(self.kind, self.name).capabilities
            if (self.kind, capability) in SUITES_OF_CAPABILITIES
        ]
        made: type = (suites or [getattr(testing, SUITES[self.kind])])[0].of_installed(host, self.name, self.options)
        return made

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Target":
        return msgspec.json.decode(text, type=cls)
