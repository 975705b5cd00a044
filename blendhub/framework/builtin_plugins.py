"""Maps this project's plugins to its distributions: what to install for a plugin, and who owns a plugin's name."""

import re
from collections.abc import Mapping
from types import MappingProxyType

HOMES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("command", "advise"): "tools",
        ("command", "analyze"): "tools",
        ("device", "cpu"): "cpu",
        ("device", "cuda"): "cuda",
        ("device", "npu"): "ascend",
        ("matcher", "prefix"): "matchers",
        ("matcher", "rolling_hash"): "matchers",
        ("matcher", "separator"): "matchers",
        ("selector", "attended"): "selectors",
        ("selector", "first_k"): "selectors",
        ("selector", "hkvd"): "selectors",
        ("store", "disk"): "stores",
        ("store", "mooncake"): "mooncake",
        ("store", "shared_directory"): "fleet",
        ("transport", "inproc"): "transports",
        ("transport", "zmq"): "transports",
    }
)
"""The extra of ``blendhub`` that installs each plugin, by the plugin's kind and name. The extra X brings at least the
distribution ``blendhub-X``."""


def owner_of(kind: str, name: str) -> str | None:
    """The only distribution that may offer a plugin of this name; None if any distribution may."""
    extra = HOMES.get((kind, name))
    return f"blendhub-{extra}" if extra else None


def install_command(kind: str, name: str) -> str | None:
    """The command that installs this plugin; None if it is not a plugin of this project."""
    extra = HOMES.get((kind, name))
    return f"pip install 'blendhub[{extra}]'" if extra else None


def same_distribution(*names: str) -> bool:
    """Whether the names mean the same distribution: packaging tools spell a name in several ways."""
    return len({re.sub(r"[-_.]+", "-", name).lower() for name in names}) == 1
