"""The result of every check, what is examined, and the removal of secrets from what is sent to others."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.config import HubConfig

Verdict = Literal["ok", "warn", "fail"]
FROM_WORST: tuple[Verdict, ...] = ("fail", "warn")


class Finding(msgspec.Struct, frozen=True):
    """One line: what a check found."""

    verdict: Verdict
    sentence: str
    command: str = ""
    """The command that repairs the fault; empty only where nothing is wrong."""
    check: str = ""
    """The name of the check that found it."""


def ok(sentence: str) -> Finding:
    return Finding("ok", sentence)


def warn(sentence: str, command: str) -> Finding:
    """BlendHub works, but worse than it could, or not for long."""
    return Finding("warn", sentence, command)


def fail(sentence: str, command: str) -> Finding:
    """Something does not work, or is not safe."""
    return Finding("fail", sentence, command)


def worst(findings: Iterable[Finding]) -> Verdict:
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in FROM_WORST if verdict in found), "ok")


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


SECRET_NAME = re.compile(r"secret|password|passwd|credential|token$|api_?key|salt", re.IGNORECASE)
SHORTEST = 4
"""A shorter value would be struck out of words."""

USER_IN_URL = re.compile(r"//[^/\s@]+@")


def without_secrets(at: Circumstances, findings: list[Finding]) -> list[Finding]:
    """The findings without the values of options named like secrets, users in addresses, and the home directory."""
    secrets = set(_secrets([at.flag, at.transport.options, msgspec.to_builtins(at.hub)]))
    # The longest first: one may be a part of another.
    struck = sorted((one for one in secrets if len(one) >= SHORTEST), key=len, reverse=True)
    return [
        msgspec.structs.replace(
            finding, sentence=_cleaned(finding.sentence, struck), command=_cleaned(finding.command, struck)
        )
        for finding in findings
    ]


def _cleaned(text: str, struck: list[str]) -> str:
    for secret in struck:
        text = text.replace(secret, "***")
    text = USER_IN_URL.sub("//***@", text)
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)


def _secrets(given: Any, is_secret: bool = False) -> Iterator[str]:
    """The texts in a configuration under a name that says that they are secret."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            yield from _secrets(value, is_secret or bool(SECRET_NAME.search(str(name))))
    elif isinstance(given, list | tuple):
        for value in given:
            yield from _secrets(value, is_secret)
    elif is_secret and isinstance(given, str) and not os.path.exists(given):  # the name of a key's file is no secret
        yield given
