"""The subject of an examination: this machine, for the hub of a configuration or for the default one."""

from typing import Any

import msgspec

from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.config import HubConfig


def settings_of(flag: Any) -> dict[str, Any]:
    """BlendHub's settings in vLLM's flag, valid or not."""
    extra = flag.get("kv_connector_extra_config") if isinstance(flag, dict) else None
    settings = extra.get("blendhub") if isinstance(extra, dict) else None
    return settings if isinstance(settings, dict) else {}


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    host: PluginHost
    hub: HubConfig
    """The hub that would run here."""
    config: str = "-"
    """The file of its settings, as commands name it."""
    flag: Any = None
    """The value of vLLM's ``--kv-transfer-config``; None if none is examined."""
    device: str | None = None
    """vLLM's device, if the user named it."""
    endpoint: str = ""
    """The endpoint of a running hub that is examined too."""
    transport: PluginChoice = PluginChoice("zmq")
    """The transport that reaches the running hub."""

    def to_set_arena(self, gib: float) -> str:
        """The words that give the arena another size."""
        if self.flag is not None:
            return f"set kv_connector_extra_config.blendhub.hub.arena_gib to {gib:g} in the configuration"
        return f"blendhub serve --config {self.config} --arena-gib {gib:g}"

    @property
    def device_choice(self) -> PluginChoice | None:
        """The device that the configuration names; None: any that can run here."""
        return self.choice("device") or (PluginChoice(self.device) if self.device else None)

    @property
    def configured_endpoint(self) -> str:
        named = self.settings.get("endpoint")
        return named if isinstance(named, str) else ""

    def choice(self, key: str) -> PluginChoice | None:
        """The plugin that the flag names under a key."""
        try:
            return msgspec.convert(self.settings[key], PluginChoice)
        except (KeyError, msgspec.ValidationError):  # none, or a mistake, which is reported where settings are checked
            return None

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.flag)
