"""The whole plug-in surface of BlendHub, on one page.

A plugin is a module, named by an entry point of the group ``blendhub``, that implements
:func:`blendhub_plugins` with ``@hookimpl`` and returns a :class:`PluginSpec` for each object it offers.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import pluggy

PROJECT = "blendhub"
"""The name of the pluggy project and of the entry-point group."""

API_VERSION = 1
"""Raised whenever a plugin written for the version before would break."""

Kind = Literal["matcher", "transport", "device", "selector", "store"]

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For plugins with nothing to set."""


class Unavailable(msgspec.Struct, frozen=True):
    """Why a plugin cannot run here, and the command that would change it."""

    reason: str
    command: str


def available_everywhere() -> None:
    """The probe of a plugin that runs wherever it can be imported."""


class PluginSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One object that a distribution offers.

    Building the spec must be cheap: name a factory that is heavy to import as ``"module:Class"``.
    """

    kind: Kind
    name: str
    """What people write in their configuration."""
    api: int
    """The :data:`API_VERSION` that the plugin was written for: a number, never the imported constant."""
    summary: str
    """One line for ``blendhub plugins``."""
    factory: Callable[..., Any] | str
    """Makes the object from an instance of ``options``, or from nothing where there are none; it must meet the contract
    of its kind. A string names it as ``"module:Class"`` and is imported when the first object is made."""
    options: type[msgspec.Struct] = NoOptions
    """Every field has a default and a ``msgspec.Meta`` with a description and its bounds."""
    capabilities: tuple[str, ...] = ()
    """What it can do beyond the contract, in words that the contract of its kind defines."""
    probe: Callable[[], Unavailable | None] = available_everywhere
    """Says why the plugin cannot run on this machine, or None if it can."""


@hookspec
def blendhub_plugins() -> Iterable[PluginSpec]:  # type: ignore[empty-body]
    """The objects that this module offers."""
