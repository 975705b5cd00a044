"""The whole plug-in surface of BlendHub, on one page.

A plugin is a module, named by an entry point of the group ``blendhub``, that implements hooks of this page with
``@hookimpl``. Those that offer objects return a :class:`PluginSpec` for each; those of observers see an engine work.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec
import pluggy

from blendhub.contracts import Command, Device, Matcher, Selector, Store, Transport
from blendhub.outcome.report import Outcome

__all__ = ["API_VERSION", "EngineInfo", "NoOptions", "Outcome", "PluginSpec", "Unavailable", "hookimpl"]
"""What plugins import."""

PROJECT = "blendhub"
"""The name of the pluggy project and of the entry-point group."""

API_VERSION = 1
"""Raised whenever a plugin written for the version before would break; docs/plugins.md says what it promises."""

T = TypeVar("T")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of plugins with nothing to set."""


class Unavailable(msgspec.Struct, frozen=True):
    """Why a plugin cannot run here, and the command that would change it."""

    reason: str
    command: str


def available_everywhere() -> None:
    """The probe of a plugin that runs wherever it can be imported."""


def nothing_to_add() -> tuple[str, ...]:
    """The details of a plugin that works alike on every machine."""
    return ()


class PluginSpec(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One object that a distribution offers; ``T`` is the contract of its kind.

    Building the spec must be cheap: name a factory that is heavy to import as ``"module:Class"``.
    """

    name: str
    """The name in configurations."""
    api: int
    """The :data:`API_VERSION` that the plugin was written for: a number, never the imported constant."""
    summary: str
    """One line for ``blendhub plugins``."""
    factory: Callable[..., T] | str
    """Makes the object from an instance of ``options``, or from nothing where there are none. A string names it as
    ``"module:Class"`` and is imported when the first object is made."""
    options: type[msgspec.Struct] = NoOptions
    """Every field has a default and a ``msgspec.Meta`` with a description and its bounds."""
    text_options: tuple[str, ...] = ()
    """Options of a matcher that hold token ids, and may be written as text. An engine puts the ids in its place when it
    starts, with its model's tokenizer; the object is made of ids only."""
    capabilities: tuple[str, ...] = ()
    """What it can do beyond the contract, in words that the contract of its kind defines."""
    probe: Callable[[], Unavailable | None] = available_everywhere
    """Says why the plugin cannot run on this machine, or None if it can."""
    details: Callable[[], tuple[str, ...]] = nothing_to_add
    """Says for ``blendhub plugins`` how it runs on this machine, if that differs between machines. It is called after
    a probe that found nothing missing."""


@hookspec
def blendhub_matchers() -> Iterable[PluginSpec[Matcher]]:  # type: ignore[empty-body]
    """The matchers that this module offers: they find stored tokens that a prompt repeats."""


@hookspec
def blendhub_transports() -> Iterable[PluginSpec[Transport]]:  # type: ignore[empty-body]
    """The transports that this module offers: they carry requests between engines and the hub."""


@hookspec
def blendhub_devices() -> Iterable[PluginSpec[Device]]:  # type: ignore[empty-body]
    """The devices that this module offers: they copy KV between an engine's pages and the arena."""


@hookspec
def blendhub_selectors() -> Iterable[PluginSpec[Selector]]:  # type: ignore[empty-body]
    """The selectors that this module offers: they pick reused tokens to recompute."""


@hookspec
def blendhub_stores() -> Iterable[PluginSpec[Store]]:  # type: ignore[empty-body]
    """The stores that this module offers: they keep KV beyond this machine's memory."""


@hookspec
def blendhub_commands() -> Iterable[PluginSpec[Command]]:  # type: ignore[empty-body]
    """The commands that this module adds to ``blendhub``; those of the core keep their names."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has started."""

    engine: str
    """Its id, as the hub and its metrics have it."""
    model: str
    device: str
    """The names of the plugins that it uses."""
    matchers: tuple[str, ...]
    selector: str


@hookspec
def blendhub_engine_started(info: EngineInfo) -> None:
    """An engine is ready for requests."""


@hookspec
def blendhub_request_done(outcome: Outcome) -> None:
    """A request has ended."""


@hookspec
def blendhub_engine_stopping() -> None:
    """The engine stops, after all that it reported before; what an observer keeps open is closed here."""
