"""How a configuration names a plugin."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class PluginChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin and its options. Namespace digests depend on these fields' names: see :mod:`blendhub.core.layout`."""

    name: Annotated[str, Meta(max_length=1024, description="a plugin by name")]
    options: Annotated[dict[str, Any], Meta(description="the plugin's options")] = {}
