"""Mooncake Store as the place of a fleet's KV cache. The entry point names this module, which imports nothing heavy."""

from blendhub.contracts import Store
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_mooncake.availability import probe
from blendhub_mooncake.options import MooncakeOptions


@hookimpl
def blendhub_stores() -> list[PluginSpec[Store]]:
    return [
        PluginSpec(
            name="mooncake",
            api=3,
            summary="the memory of many machines, by Mooncake Store, with a catalogue in Redis",
            factory="blendhub_mooncake.store:open_store",
            options=MooncakeOptions,
            probe=probe,
        ),
    ]
