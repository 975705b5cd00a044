"""Which of this project's distributions brings which plugin: to name what to install, and whose a name is."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_EXTRAS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ascend": {"device": ("npu",)},
        "cpu": {"device": ("cpu",)},
        "cuda": {"device": ("cuda",)},
        "fleet": {"store": ("shared_directory",)},
        "matchers": {"matcher": ("prefix", "separator", "rolling_hash")},
        "mooncake": {"store": ("mooncake",)},
        "selectors": {"selector": ("combined", "first_k", "hkvd")},
        "stores": {"store": ("disk",)},
        "transports": {"transport": ("inproc", "zmq")},
    }
)
"""Extras of the distribution ``blendhub``; the extra X brings at least the distribution ``blendhub-X``."""

HOMES: Mapping[tuple[str, str], str] = MappingProxyType(
    {(kind, name): extra for extra, plugins in _EXTRAS.items() for kind, names in plugins.items() for name in names}
)
"""The extra that brings a plugin, by kind and name."""


def owner_of(kind: str, name: str) -> str | None:
    """The distribution that alone may offer this name; None if the name is free."""
    extra = HOMES.get((kind, name))
    return f"blendhub-{extra}" if extra else None


def install_command(kind: str, name: str) -> str | None:
    """What to type to get this plugin; None if it is not one of this project."""
    extra = HOMES.get((kind, name))
    return f"pip install 'blendhub[{extra}]'" if extra else None


def same_distribution(one: str, other: str) -> bool:
    """Whether two names mean the same distribution: packaging tools write them in several ways."""
    return _normal(one) == _normal(other)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
