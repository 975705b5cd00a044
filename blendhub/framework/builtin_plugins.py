"""Maps this project's plugins to its distributions: what to install for a plugin, and who owns a plugin's name."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_EXTRAS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ascend": {"device": ("npu",)},
        "cpu": {"device": ("cpu",)},
        "cuda": {"device": ("cuda",)},
        "fleet": {"store": ("shared_directory",)},
        "matchers": {"matcher": ("prefix", "rolling_hash")},
        "mooncake": {"store": ("mooncake",)},
        "selectors": {"selector": ("combined", "first_k", "hkvd")},
        "stores": {"store": ("disk",)},
        "transports": {"transport": ("inproc", "zmq")},
    }
)
"""The plugins of each extra of ``blendhub``, by kind; the extra X brings at least the distribution ``blendhub-X``."""

HOMES: Mapping[tuple[str, str], str] = MappingProxyType(
    {(kind, name): extra for extra, plugins in _EXTRAS.items() for kind, names in plugins.items() for name in names}
)
"""The extra that installs each plugin, by the plugin's kind and name."""


def owner_of(kind: str, name: str) -> str | None:
    """The only distribution that may offer a plugin of this name; None if any distribution may."""
    extra = HOMES.get((kind, name))
    return f"blendhub-{extra}" if extra else None


def install_command(kind: str, name: str) -> str | None:
    """The command that installs this plugin; None if it is not a plugin of this project."""
    extra = HOMES.get((kind, name))
    return f"pip install 'blendhub[{extra}]'" if extra else None


def same_distribution(one: str, other: str) -> bool:
    """Whether two names mean the same distribution: packaging tools spell a name in several ways."""
    return _normal(one) == _normal(other)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
