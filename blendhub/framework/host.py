"""Makes objects from the names in a configuration, out of the plugins that are installed.

Nothing is hard-wired: the plugins of this repository are found through entry points like any other. A plugin that is
broken in any way becomes a :class:`Plugin` with a reason; it never takes others down.
"""

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from blendhub.core.errors import BlendHubError, PluginError
from blendhub.framework.builtin_plugins import install_command
from blendhub.framework.discovery import (
    CONTRACTS,
    FOREIGN_ERRORS,
    Offer,
    Plugin,
    distribution_of,
    import_factory,
    read_entry_points,
    short,
)
from blendhub.framework.hookspecs import PROJECT, NoOptions, PluginSpec
from blendhub.framework.options import did_you_mean, parse_options


class PluginHost:
    """The plugins of some entry points, which are imported when the host is first asked for something."""

    def __init__(self, entries: Iterable[EntryPoint] = ()) -> None:
        self._entries = sorted(entries, key=lambda entry: (distribution_of(entry), entry.name))

    @classmethod
    def discover(cls) -> "PluginHost":
        """A host of all plugins installed here."""
        return cls(entry_points(group=PROJECT))

    def plugins(self) -> list[Plugin]:
        """Every plugin found, usable or not; asks each for its probe."""
        plugins = [offer.describe() for offer in self._offers]
        return sorted(plugins, key=lambda plugin: (plugin.kind or "~", plugin.name, plugin.distribution))

    def names(self, kind: str) -> list[str]:
        """The names that ``create`` knows for this kind, usable or not."""
        return sorted({offer.name for offer in self._offers if offer.kind == kind})

    def spec(self, kind: str, name: str) -> PluginSpec[Any]:
        """The spec behind a name; raises PluginError with the reason if it cannot be used here."""
        return self._usable(kind, name)[1]

    def offered(self, kind: str, name: str) -> PluginSpec[Any]:
        """The spec behind a name, without a probe: an installed plugin may still be unable to run on this machine."""
        return self._sound(kind, name)[1]

    def observers(self) -> list[Offer]:
        """The modules that implement hooks of observers, for :class:`blendhub.framework.observers.Observers`."""
        return [offer for offer in self._offers if offer.hooks]

    def create(self, kind: str, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Make the object called ``name`` from the options in a configuration, which are checked first."""
        offer, spec = self._usable(kind, name)
        parsed = parse_options(f"{kind} {name!r}", spec.options, options)
        factory = import_factory(spec.factory, offer.origin) if isinstance(spec.factory, str) else spec.factory
        try:
            made = factory() if spec.options is NoOptions else factory(parsed)
        except BlendHubError:
            raise
        except FOREIGN_ERRORS as error:
            raise PluginError(f"{offer.origin}: its factory failed: {short(error)}") from error
        if not isinstance(made, CONTRACTS[kind]):
            raise PluginError(
                f"{offer.origin}: its factory made a {type(made).__name__}, "
                f"which is not a blendhub.contracts.{CONTRACTS[kind].__name__}"
            )
        return made

    def _usable(self, kind: str, name: str) -> tuple[Offer, PluginSpec[Any]]:
        """The offer behind a name, and its spec; raises PluginError with the reason if it cannot be used here."""
        offer, spec = self._sound(kind, name)
        reason = offer.problem()
        if reason:
            raise PluginError(f"{kind} {name!r} of {offer.distribution} cannot be used: {reason}")
        return offer, spec

    def _sound(self, kind: str, name: str) -> tuple[Offer, PluginSpec[Any]]:
        """The offer behind a name, and its spec, whether or not its probe says that it can run here."""
        if kind not in CONTRACTS:
            raise PluginError(f"no plugin kind {kind!r}{did_you_mean(kind, CONTRACTS)}; kinds: {', '.join(CONTRACTS)}")
        offers = [offer for offer in self._offers if offer.kind == kind and offer.name == name]
        if not offers:
            raise PluginError(self._unknown(kind, name))
        # If there are several, at most one was accepted.
        offer = next((offer for offer in offers if offer.spec), offers[0])
        if offer.spec is None:
            raise PluginError(f"{kind} {name!r} of {offer.distribution} cannot be used: {offer.error}")
        return offer, offer.spec

    @functools.cached_property
    def _offers(self) -> list[Offer]:
        return read_entry_points(self._entries)

    def _unknown(self, kind: str, name: str) -> str:
        valid = self.names(kind)
        message = f"no {kind} {name!r}{did_you_mean(name, valid)}; installed: {', '.join(valid) or 'none'}"
        command = install_command(kind, name)
        if command:
            message += f"; it comes with: {command}"
        # A module that failed to import may be the one that offers this name.
        for offer in self._offers:
            if offer.kind is None:
                message += f"; {offer.distribution} ({offer.name}) is broken: {offer.error}"
        return message
