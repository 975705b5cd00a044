"""Whether vLLM's configuration is right, and whether what it names can run here."""

from collections.abc import Iterator
from typing import Any

from blendhub.core.errors import OptionError, PluginError
from blendhub.framework.builtin_plugins import install_command
from blendhub.framework.options import parse_options
from blendhub.hub.config import HubConfig
from blendhub.tools.doctor.access import quoted
from blendhub.tools.doctor.circumstances import Circumstances, settings_of
from blendhub.tools.doctor.finding import Finding, fail, ok
from blendhub.vllm.settings import EmbeddedHubConfig, named_plugins
from blendhub.vllm.transfer_config import mistakes_in_transfer_config


def hub_of(flag: Any) -> HubConfig:
    """The embedded hub of a flag; with mistakes in it, which are reported elsewhere, the default one."""
    try:
        return parse_options("hub", EmbeddedHubConfig, settings_of(flag).get("hub"))
    except OptionError:
        return EmbeddedHubConfig()


def configuration(at: Circumstances) -> Iterator[Finding]:
    if at.flag is None:
        return
    wrong = [
        fail(str(mistake), f"blendhub check {quoted(at.config)}")
        for mistake in mistakes_in_transfer_config(at.flag, at.host, at.device)
        # Those concern plugins that are not installed.
        if not isinstance(mistake, PluginError)
    ]
    wrong += _plugins(at)
    yield from wrong or [ok("there is no mistake in it, and every plugin that it names can run here")]


def _plugins(at: Circumstances) -> Iterator[Finding]:
    found = {(plugin.kind, plugin.name): plugin for plugin in at.host.plugins()}
    for named in named_plugins(at.settings, at.device):
        plugin = found.get((named.kind, named.name))
        if plugin is None:
            try:
                at.host.offered(named.kind, named.name)
            except PluginError as error:
                command = install_command(named.kind, named.name) or "blendhub plugins"
                yield fail(f"{named.key}: {error}", command)
        elif not plugin.available:
            yield fail(
                f"{named.key}: {named.kind} {named.name} cannot be used: {plugin.reason}",
                plugin.remedy or "blendhub plugins",
            )
