"""The stores of BlendHub. The entry point names this module, which imports nothing heavy."""

from blendhub.contracts import Store
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_stores.options import DiskOptions


@hookimpl
def blendhub_stores() -> list[PluginSpec[Store]]:
    return [
        PluginSpec(
            name="disk",
            api=1,
            summary="plain files with checksums below one directory; drops the least recently used",
            factory="blendhub_stores.disk:DiskStore",
            options=DiskOptions,
        ),
    ]
