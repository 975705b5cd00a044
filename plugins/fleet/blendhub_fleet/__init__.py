"""Stores that hubs share. The entry point names this module, which imports nothing heavy."""

from blendhub.contracts import Store
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_fleet.options import DirectoryOptions


@hookimpl
def blendhub_stores() -> list[PluginSpec[Store]]:
    return [
        PluginSpec(
            name="shared_directory",
            api=1,
            summary="files below a directory that several machines mount, with a catalogue in Redis",
            factory="blendhub_fleet.directory:open_store",
            options=DirectoryOptions,
            capabilities=("shared",),
        ),
    ]
