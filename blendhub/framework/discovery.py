"""Reads entry points: lists the offers of each module, and the faults of modules that do not fit."""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

import msgspec
import pluggy

from blendhub.contracts import Command, Device, Matcher, Selector, Store, Transport
from blendhub.core.errors import PluginError
from blendhub.framework import hookspecs
from blendhub.framework.builtin_plugins import install_command, owner_of, same_distribution
from blendhub.framework.hookspecs import API_VERSION, PROJECT, PluginSpec, Unavailable
from blendhub.framework.options import describe_options, did_you_mean

CONTRACTS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "matcher": Matcher,
        "transport": Transport,
        "device": Device,
        "selector": Selector,
        "store": Store,
        "command": Command,
    }
)
"""The contract that the objects of each kind must meet. The hook that offers them is called ``blendhub_KINDs``."""

OBSERVER_HOOKS = ("blendhub_engine_started", "blendhub_request_done", "blendhub_engine_stopping")

FACTORY_NAME = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+")

FOREIGN_ERRORS = (Exception, SystemExit)
"""The errors of a plugin's module that must not end the host's process; a person's Ctrl-C still ends it."""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``blendhub plugins``: an object that can be created, an observer, or the reason why it is neither.

    A module that could not even be read has no kind. Its name is that of its entry point, and so is an observer's.
    """

    kind: str | None
    name: str
    distribution: str
    version: str
    api: int | None
    summary: str
    available: bool
    reason: str | None
    remedy: str | None
    """The command that makes the plugin available; None where there is a fault that no command repairs."""
    details: tuple[str, ...]
    capabilities: tuple[str, ...]
    options: list[dict[str, Any]]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of an entry point: a spec, the hooks of an observer, or an error in their place."""

    kind: str | None
    name: str
    distribution: str
    version: str
    api: int | None = None
    spec: PluginSpec[Any] | None = None
    hooks: dict[str, pluggy.HookCaller] | None = None
    error: str | None = None

    @property
    def origin(self) -> str:
        """How errors call the plugin."""
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"

    def problem(self) -> str | None:
        """Why this cannot be used right now, in a sentence that ends with what to do; None if it can."""
        trouble = self._trouble()
        if trouble is None:
            return None
        return f"{trouble.reason}; to change it: {trouble.command}" if trouble.command else trouble.reason

    def _trouble(self) -> Unavailable | None:
        """Why the offer cannot be used right now, without a command if no command repairs it."""
        if self.error:
            return Unavailable(self.error, "")
        if self.spec is None:
            return None
        try:
            missing = self.spec.probe()
        except FOREIGN_ERRORS as error:
            return Unavailable(f"its probe failed: {short(error)}", "")
        if missing is not None and not isinstance(missing, Unavailable):
            return Unavailable(f"its probe returned {missing!r}, which should be None or a blendhub.Unavailable", "")
        return missing

    def _details(self) -> tuple[str, ...]:
        if self.spec is None:
            return ()
        try:
            return tuple(map(str, self.spec.details()))
        except FOREIGN_ERRORS as error:
            return (f"its details failed: {short(error)}",)

    def describe(self) -> Plugin:
        trouble = self._trouble()
        return Plugin(
            kind=self.kind,
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            api=self.api,
            summary=self.spec.summary if self.spec else "",
            available=trouble is None,
            reason=trouble.reason if trouble else None,
            remedy=(trouble.command or None) if trouble else None,
            details=() if trouble else self._details(),
            capabilities=self.spec.capabilities if self.spec else (),
            options=describe_options(self.spec.options) if self.spec else [],
        )


def read_entry_points(entries: Iterable[EntryPoint]) -> list[Offer]:
    """The offers of all entry points; one with an error for a module, or a hook of it, that cannot be read."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    read = [(entry, *_register(manager, entry)) for entry in entries]
    return _refuse_duplicates([offer for each in read for offer in _offers(manager, *each)])


def _register(manager: pluggy.PluginManager, entry: EntryPoint) -> tuple[Any, str]:
    """The module of an entry point, and why it cannot be registered; empty if it is."""
    try:
        module = entry.load()
    except FOREIGN_ERRORS as error:
        return None, f"import of {entry.value} failed: {short(error)}"
    try:
        manager.register(module)
    except Exception as error:
        fault = str(error)
    else:
        fault = _unknown_hooks(manager, module)
    if fault and manager.is_registered(module):
        manager.unregister(module)
    return module, fault


def _offers(manager: pluggy.PluginManager, entry: EntryPoint, module: Any, fault: str) -> list[Offer]:
    version = (entry.dist.version if entry.dist else None) or "?"

    def offer(kind: str | None, **rest: Any) -> Offer:
        return Offer(
            kind=kind, **{"name": entry.name, "distribution": distribution_of(entry), "version": version, **rest}
        )

    if fault:
        return [offer(None, error=fault)]
    others = manager.get_plugins() - {module}
    offers = []
    for kind in CONTRACTS:
        hook = f"blendhub_{kind}s"
        try:
            specs = [spec for group in manager.subset_hook_caller(hook, others)() for spec in group]
        except FOREIGN_ERRORS as error:
            offers.append(offer(None, error=f"its hook {hook} failed: {short(error)}"))
            continue
        offers += [offer(kind, **_checked(spec, kind, hook)) for spec in specs]
    hooks = {name: manager.subset_hook_caller(name, others) for name in OBSERVER_HOOKS}
    if any(hook.get_hookimpls() for hook in hooks.values()):
        offers.append(offer("observer", hooks=hooks))
    return offers or [
        offer(None, error=f"{entry.value} offers nothing: it implements no hook, or its hooks return no specs")
    ]


def import_factory(named: str, origin: str) -> Callable[..., Any]:
    """The factory called ``module:Class``; raises PluginError with the plugin and what is wrong."""
    try:
        factory: Callable[..., Any] = pkgutil.resolve_name(named)
    except FOREIGN_ERRORS as error:
        raise PluginError(f"{origin}: its factory {named!r} cannot be used: {short(error)}") from error
    if not callable(factory):
        raise PluginError(f"{origin}: its factory {named!r} is {factory!r}, which cannot be called")
    return factory


def _unknown_hooks(manager: pluggy.PluginManager, module: Any) -> str:
    callers = manager.get_hookcallers(module) or []
    unknown = [caller.name for caller in callers if not caller.has_spec()]
    if not unknown:
        return ""
    specified = sorted(name for name in vars(manager.hook) if getattr(manager.hook, name).has_spec())
    hints = ", ".join(f"{name!r}{did_you_mean(name, specified)}" for name in sorted(unknown))
    hooks = ", ".join(specified)
    return f"it implements hooks that plugin API {API_VERSION} does not have: {hints}; the hooks are: {hooks}"


def _checked(spec: Any, kind: str, hook: str) -> dict[str, Any]:
    """The fields of an offer that follow from what a hook returned."""
    error = _refusal(spec, kind, hook)
    name, api = (getattr(spec, field, None) for field in ("name", "api"))
    fields = {"api": api if type(api) is int else None, "spec": None if error else spec, "error": error}
    # An offer without a valid name has that of its entry point.
    return {**fields, "name": name} if isinstance(name, str) and name else fields


def _refusal(spec: Any, kind: str, hook: str) -> str | None:
    """Why this host does not take the spec; None if it does."""
    if not isinstance(spec, PluginSpec):
        return f"{hook} returned {spec!r}, which is not a blendhub.PluginSpec"
    # First of all: a spec made for another version may rightly look otherwise.
    if type(spec.api) is int and spec.api != API_VERSION:
        newer = "a newer release of the plugin" if spec.api < API_VERSION else "a newer BlendHub"
        return f"made for plugin API {spec.api}, this BlendHub has {API_VERSION}; install {newer}"
    return _fault_of(spec)


def _fault_of(spec: PluginSpec[Any]) -> str | None:
    """The first fault of a spec, in a sentence that says what belongs there; None if it is sound.

    A Struct does not check the types of its fields, and a fault that is not found here would surface far away, as an
    error of other code.
    """
    expected: tuple[tuple[str, bool, str], ...] = (
        ("name", isinstance(spec.name, str) and bool(spec.name), "a string that is not empty"),
        ("api", type(spec.api) is int, "an integer"),
        ("summary", isinstance(spec.summary, str), "a string"),
        ("factory", _is_factory(spec.factory), "something to call with the options, or its name as 'module:Class'"),
        ("options", _is_struct(spec.options), "a subclass of msgspec.Struct"),
        ("text_options", _are_words(spec.text_options), "a tuple of strings"),
        ("capabilities", _are_words(spec.capabilities), "a tuple of strings"),
        ("probe", callable(spec.probe), "something to call without arguments"),
        ("details", callable(spec.details), "something to call without arguments"),
    )
    for field, sound, wanted in expected:
        if not sound:
            return f"its PluginSpec has {field} = {getattr(spec, field)!r}, which should be {wanted}"
    return _fault_of_options(spec.options)


def _fault_of_options(options: type[msgspec.Struct]) -> str | None:
    required = [field.encode_name for field in msgspec.structs.fields(options) if field.required]
    if required:
        return f"its options {options.__name__} need a default for every field, but have none for {', '.join(required)}"
    if not options.__struct_config__.forbid_unknown_fields:
        return f"its options {options.__name__} take any name, so a misspelt one would pass: set forbid_unknown_fields"
    try:
        describe_options(options)
    except Exception as error:  # any type may stand there: what msgspec raises about it is the fault
        return f"its options {options.__name__} cannot be described: {type(error).__name__}: {error}"
    return None


def _is_factory(factory: Any) -> bool:
    return callable(factory) or (isinstance(factory, str) and FACTORY_NAME.fullmatch(factory) is not None)


def _is_struct(options: Any) -> bool:
    return isinstance(options, type) and issubclass(options, msgspec.Struct)


def _are_words(words: Any) -> bool:
    return isinstance(words, tuple) and all(isinstance(word, str) for word in words)


def _refuse_duplicates(offers: list[Offer]) -> list[Offer]:
    """Refuse offers with the same name, which would let a configuration mean different things on different machines."""
    checked = [_refuse_reserved_name(offer) for offer in offers]
    owners: dict[tuple[str | None, str], list[str]] = {}
    for offer in checked:
        if offer.spec:
            owners.setdefault((offer.kind, offer.name), []).append(f"{offer.distribution} {offer.version}")
    for number, offer in enumerate(checked):
        distributions = owners.get((offer.kind, offer.name), [])
        if offer.spec and len(distributions) > 1:
            error = f"offered {len(distributions)} times: by {' and by '.join(distributions)}; uninstall all but one"
            checked[number] = msgspec.structs.replace(offer, spec=None, error=error)
    return checked


def _refuse_reserved_name(offer: Offer) -> Offer:
    """The names of this project's plugins are reserved: a plugin that took one would replace or disable another."""
    owner = owner_of(offer.kind or "", offer.name)
    if owner is None or same_distribution(owner, offer.distribution):
        return offer
    error = (
        f"{offer.name!r} is the name of a plugin of {owner} ({install_command(offer.kind or '', offer.name)}), so that "
        f"of {offer.distribution} {offer.version} is ignored; its author must choose another name"
    )
    return msgspec.structs.replace(offer, spec=None, error=error)


def distribution_of(entry: EntryPoint) -> str:
    # The metadata of a half-removed distribution has no name.
    return (entry.dist.name if entry.dist else None) or "unknown"


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
