"""What a check found, and what is checked."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from blendhub.core.errors import OptionError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig
from blendhub.system.default_paths import runtime_directory
from blendhub.vllm.settings import EXTRA, KEY, EmbeddedHubConfig

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    verdict: Verdict
    sentence: str
    command: str = ""
    """The command that mends it; empty where nothing is wrong, or where only an edit mends it."""


def ok(sentence: str) -> Finding:
    return Finding("ok", sentence)


def warn(sentence: str, command: str) -> Finding:
    """BlendHub works, but worse than it could."""
    return Finding("warn", sentence, command)


def fail(sentence: str, command: str = "") -> Finding:
    """Something does not work."""
    return Finding("fail", sentence, command)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=("ok", "warn", "fail").index, default="ok")


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked."""

    host: PluginHost
    flag: Any = None
    """The value of vLLM's ``--kv-transfer-config``; None: no engine's configuration is checked."""
    toml: HubConfig | None = None
    """The configuration of a hub, from a file."""
    device: str | None = None
    """What vLLM runs on, if the user named it."""
    endpoint: str = ""
    """A running hub's, if the user named it."""

    @property
    def settings(self) -> dict[str, Any]:
        """BlendHub's settings in the flag, valid or not."""
        extra = self.flag.get(EXTRA) if isinstance(self.flag, dict) else None
        settings = extra.get(KEY) if isinstance(extra, dict) else None
        return settings if isinstance(settings, dict) else {}

    @property
    def hub(self) -> HubConfig:
        """The hub that would run here; with mistakes in its settings, which another check reports, the default one."""
        try:
            return self.toml or parse_options("hub", EmbeddedHubConfig, self.settings.get("hub"))
        except OptionError:
            return HubConfig()

    @property
    def transport(self) -> PluginChoice:
        """The transport that reaches a running hub."""
        try:
            return msgspec.convert(self.settings["transport"], PluginChoice)
        except (KeyError, msgspec.ValidationError):
            return DEFAULT_TRANSPORT

    @property
    def hub_endpoint(self) -> str:
        """Where a hub should run: as the user or the settings say; empty: an engine may embed one."""
        named = self.endpoint or self.settings.get("endpoint")
        if isinstance(named, str) and named:
            return named
        if self.toml and self.toml.listen:
            return self.toml.listen[0].endpoint
        socket = runtime_directory() / "hub.sock"
        return f"ipc://{socket}" if socket.exists() else ""
