"""The plugins that a configuration names, and whether they are there and take their options."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from blendhub.core.errors import PluginError
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options


class NamedPlugin(NamedTuple):
    """A plugin named in a configuration or by a default."""

    key: str
    """Where it is named, or would be."""
    kind: str
    name: str
    options: Mapping[str, Any]


def check_plugins(plugins: Iterable[NamedPlugin], host: PluginHost) -> None:
    """Raise PluginError or OptionError, with the key, for the first that is missing or does not take its options.

    A plugin may still need another machine than this one.
    """
    for plugin in plugins:
        try:
            options = host.offered(plugin.kind, plugin.name).options
        except PluginError as error:
            raise PluginError(f"{plugin.key}: {error}") from None
        parse_options(f"{plugin.key}: {plugin.kind} {plugin.name!r}", options, plugin.options)


def check_here(plugins: Iterable[NamedPlugin], host: PluginHost) -> None:
    """Raise PluginError, with the key and what to install, for the first that cannot run on this machine."""
    for plugin in plugins:
        try:
            host.spec(plugin.kind, plugin.name)
        except PluginError as error:
            raise PluginError(f"{plugin.key}: {error}") from None
