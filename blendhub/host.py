"""Finds plugins, says what is wrong with those that do not fit, and makes objects from names.

Nothing is hard-wired: the plugins of this repository are found through entry points like a stranger's. A
plugin that is broken in any way becomes a :class:`Plugin` with a reason; it never takes others down.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import msgspec
import pluggy

from blendhub import hookspecs
from blendhub.contracts import Device, Matcher, Selector, Store, Transport
from blendhub.errors import BlendHubError, PluginError
from blendhub.faults import fault_of
from blendhub.guard import guard
from blendhub.homes import install_command, owner_of, same_distribution
from blendhub.hookspecs import API_VERSION, PROJECT, NoOptions, PluginSpec, Unavailable
from blendhub.options import describe_options, parse_options
from blendhub.suggest import did_you_mean

CONTRACTS: Mapping[str, type] = MappingProxyType(
    {"matcher": Matcher, "transport": Transport, "device": Device, "selector": Selector, "store": Store}
)
"""The contract that the objects of each kind must meet."""


STRANGE = (Exception, SystemExit)
"""What a stranger's module may raise, and must not take the host down with; a person's Ctrl-C still does."""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``blendhub plugins``: an object that can be created, or the reason why it cannot.

    A module that could not even be read has no kind; its name is that of its entry point.
    """

    kind: str | None
    name: str
    distribution: str
    version: str
    api: int | None
    available: bool
    reason: str | None
    capabilities: tuple[str, ...]
    options: list[dict[str, Any]]


class PluginHost:
    """The plugins of this installation.

    ``PluginHost.discover()`` sees every entry point and imports them when first asked for something;
    ``.load(only=[...])`` narrows the host to some of them, named by entry point or distribution.
    """

    def __init__(self, entries: Iterable[EntryPoint] = ()) -> None:
        self._entries = sorted(entries, key=lambda entry: (_distribution(entry), entry.name))
        self._loaded = False
        self._offers: list[_Offer] = []

    @classmethod
    def discover(cls) -> "PluginHost":
        """A host of all plugins installed here."""
        return cls(entry_points(group=PROJECT))

    def load(self, only: Collection[str] | None = None) -> "PluginHost":
        """Import the entry points, or just those whose name or distribution is in ``only``; returns the host."""
        chosen = self._entries
        if only is not None:
            known = {name for entry in chosen for name in (entry.name, _distribution(entry))}
            for name in only:
                if name not in known:
                    raise PluginError(
                        f"no entry point or distribution {name!r} in group {PROJECT!r}{did_you_mean(name, known)}; "
                        f"found: {', '.join(sorted(known)) or 'none'}"
                    )
            chosen = [e for e in chosen if e.name in only or _distribution(e) in only]
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        offers = [offer for entry in chosen for offer in _read(manager, entry)]
        self._offers = _refuse_duplicates(offers)
        self._loaded = True
        return self

    def plugins(self) -> list[Plugin]:
        """Every plugin found, usable or not; asks each for its probe."""
        found = [offer.describe() for offer in self._all()]
        return sorted(found, key=lambda plugin: (plugin.kind or "~", plugin.name, plugin.distribution))

    def names(self, kind: str) -> list[str]:
        """The names that ``create`` knows for this kind, usable or not."""
        return sorted({offer.name for offer in self._all() if offer.kind == kind})

    def spec(self, kind: str, name: str) -> PluginSpec:
        """The spec behind a name; raises PluginError with the reason if it cannot be used here."""
        return self._usable(kind, name)[1]

    def offered(self, kind: str, name: str) -> PluginSpec:
        """The same, but without a probe: what is installed may still be unable to run on this machine."""
        return self._sound(kind, name)[1]

    def create(self, kind: str, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Make the object called ``name`` from what a person wrote as its options."""
        offer, spec = self._usable(kind, name)
        origin = f"{kind} {name!r} of {offer.distribution} {offer.version}"
        parsed = parse_options(f"{kind} {name!r}", spec.options, options)
        factory = _import_factory(spec.factory, origin) if isinstance(spec.factory, str) else spec.factory
        try:
            made = factory() if spec.options is NoOptions else factory(parsed)
        except BlendHubError:
            raise
        except STRANGE as error:
            raise PluginError(f"{origin}: its factory failed: {_short(error)}") from error
        if not isinstance(made, CONTRACTS[kind]):
            raise PluginError(
                f"{origin}: its factory made a {type(made).__name__}, "
                f"which is not a blendhub.contracts.{CONTRACTS[kind].__name__}"
            )
        return guard(made, CONTRACTS[kind], origin)

    def _usable(self, kind: str, name: str) -> "tuple[_Offer, PluginSpec]":
        """The offer behind a name, and its spec; raises PluginError with the reason if it cannot be used here."""
        offer, spec = self._sound(kind, name)
        reason = offer.problem()
        if reason:
            raise PluginError(f"{kind} {name!r} of {offer.distribution} cannot be used: {reason}")
        return offer, spec

    def _sound(self, kind: str, name: str) -> "tuple[_Offer, PluginSpec]":
        """The same, whether its probe says that it can run here or not."""
        if kind not in CONTRACTS:
            raise PluginError(f"no plugin kind {kind!r}{did_you_mean(kind, CONTRACTS)}; kinds: {', '.join(CONTRACTS)}")
        offers = [offer for offer in self._all() if offer.kind == kind and offer.name == name]
        if not offers:
            raise PluginError(self._unknown(kind, name))
        # Of several, at most one was not refused.
        offer = next((offer for offer in offers if offer.spec), offers[0])
        if offer.spec is None:
            raise PluginError(f"{kind} {name!r} of {offer.distribution} cannot be used: {offer.error}")
        return offer, offer.spec

    def _all(self) -> "list[_Offer]":
        if not self._loaded:
            self.load()
        return self._offers

    def _unknown(self, kind: str, name: str) -> str:
        valid = self.names(kind)
        message = f"no {kind} {name!r}{did_you_mean(name, valid)}; installed: {', '.join(valid) or 'none'}"
        command = install_command(kind, name)
        if command:
            message += f"; it comes with: {command}"
        # A module that failed to import may be the one that offers this name.
        for offer in self._all():
            if offer.kind is None:
                message += f"; {offer.distribution} ({offer.name}) is broken: {offer.error}"
        return message


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry point offers: a spec, or an error in its place."""

    kind: str | None
    name: str
    distribution: str
    version: str
    api: int | None = None
    spec: PluginSpec | None = None
    error: str | None = None

    def problem(self) -> str | None:
        """Why this cannot be used right now, in a sentence that ends with what to do; None if it can."""
        if self.error or self.spec is None:
            return self.error
        try:
            missing = self.spec.probe()
        except STRANGE as error:
            return f"its probe failed: {_short(error)}"
        if missing is not None and not isinstance(missing, Unavailable):
            return f"its probe returned {missing!r}, which should be None or a blendhub.Unavailable"
        return f"{missing.reason}; to change it: {missing.command}" if missing else None

    def describe(self) -> Plugin:
        reason = self.problem()
        return Plugin(
            kind=self.kind,
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            api=self.api,
            available=reason is None,
            reason=reason,
            capabilities=self.spec.capabilities if self.spec else (),
            options=describe_options(self.spec.options) if self.spec else [],
        )


def _import_factory(named: str, origin: str) -> Callable[..., Any]:
    """The factory called ``module:Class``; raises PluginError naming the plugin, the module and what is wrong."""
    module_name, attribute = named.split(":")
    try:
        module = import_module(module_name)
    except STRANGE as error:
        raise PluginError(
            f"{origin}: its factory {named!r} cannot be used: import of {module_name} failed: {_short(error)}"
        ) from error
    try:
        factory = getattr(module, attribute)
    except AttributeError:
        hint = did_you_mean(attribute, vars(module))
        raise PluginError(
            f"{origin}: its factory {named!r} cannot be used: module {module_name} has no {attribute!r}{hint}"
        ) from None
    if not callable(factory):
        raise PluginError(f"{origin}: its factory {named!r} is {factory!r}, which cannot be called")
    called: Callable[..., Any] = factory
    return called


def _read(manager: pluggy.PluginManager, entry: EntryPoint) -> list[_Offer]:
    """The offers of one entry point; one with an error if it cannot be read at all."""
    version = (entry.dist.version if entry.dist else None) or "?"

    def broken(error: str) -> list[_Offer]:
        return [_Offer(kind=None, name=entry.name, distribution=_distribution(entry), version=version, error=error)]

    try:
        module = entry.load()
    except STRANGE as error:
        return broken(f"import of {entry.value} failed: {_short(error)}")
    try:
        manager.register(module, name=f"{_distribution(entry)}:{entry.name}")
        unknown = _unknown_hooks(manager, module)
        if unknown:
            raise PluginError(unknown)
    except Exception as error:
        # Pluggy leaves a plugin half registered when one of its hooks does not fit.
        if manager.is_registered(module):
            manager.unregister(module)
        return broken(str(error))
    others = manager.get_plugins() - {module}
    try:
        groups = manager.subset_hook_caller("blendhub_plugins", others)()
        specs = [spec for group in groups for spec in group]
    except STRANGE as error:
        return broken(f"its hook blendhub_plugins failed: {_short(error)}")
    if not specs:
        return broken(f"{entry.value} offers nothing: it has no hook blendhub_plugins, or that returns no specs")
    return [_offer(spec, entry, version) for spec in specs]


def _unknown_hooks(manager: pluggy.PluginManager, module: Any) -> str | None:
    callers = manager.get_hookcallers(module) or []
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    if not unknown:
        return None
    known = [name for name in vars(manager.hook) if getattr(manager.hook, name).has_spec()]
    hints = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in sorted(unknown))
    return f"it implements hooks that do not exist: {hints}; the hooks are: {', '.join(sorted(known))}"


def _offer(spec: Any, entry: EntryPoint, version: str) -> _Offer:
    error = _refusal(spec)
    kind, name, api = (getattr(spec, field, None) for field in ("kind", "name", "api"))
    return _Offer(
        kind=kind if isinstance(kind, str) else None,
        name=name if isinstance(name, str) and name else entry.name,
        distribution=_distribution(entry),
        version=version,
        api=api if type(api) is int else None,
        spec=None if error else spec,
        error=error,
    )


def _refusal(spec: Any) -> str | None:
    """Why this host does not take the spec; None if it does."""
    if not isinstance(spec, PluginSpec):
        return f"blendhub_plugins returned {spec!r}, which is not a blendhub.PluginSpec"
    # First of all: a spec made for another version may rightly look otherwise.
    if type(spec.api) is int and spec.api != API_VERSION:
        return f"made for plugin API {spec.api}, this BlendHub has {API_VERSION}; install a release made for it"
    if not isinstance(spec.kind, str) or spec.kind not in CONTRACTS:
        hint = did_you_mean(str(spec.kind), CONTRACTS)
        return f"{spec.kind!r} is not a plugin kind{hint}; kinds: {', '.join(CONTRACTS)}"
    return fault_of(spec)


def _refuse_duplicates(offers: list[_Offer]) -> list[_Offer]:
    """Two plugins with one name would make a configuration mean different things on different machines."""
    checked = [_refuse_another_s_name(offer) for offer in offers]
    owners: dict[tuple[str | None, str], list[str]] = {}
    for offer in checked:
        if offer.spec:
            owners.setdefault((offer.kind, offer.name), []).append(f"{offer.distribution} {offer.version}")
    for number, offer in enumerate(checked):
        found = owners.get((offer.kind, offer.name), [])
        if offer.spec and len(found) > 1:
            error = f"offered {len(found)} times: by {' and by '.join(found)}; uninstall all but one"
            checked[number] = msgspec.structs.replace(offer, spec=None, error=error)
    return checked


def _refuse_another_s_name(offer: _Offer) -> _Offer:
    """The names of this project's plugins stay theirs: whoever takes one would take their place, or disable them."""
    owner = owner_of(offer.kind or "", offer.name)
    if owner is None or same_distribution(owner, offer.distribution):
        return offer
    error = (
        f"{offer.name!r} is the name of a plugin of {owner} ({install_command(offer.kind or '', offer.name)}), so that "
        f"of {offer.distribution} {offer.version} is ignored; its author must choose another name"
    )
    return msgspec.structs.replace(offer, spec=None, error=error)


def _distribution(entry: EntryPoint) -> str:
    # The metadata of a half-removed distribution has no name.
    return (entry.dist.name if entry.dist else None) or "unknown"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
