"""The stores of BlendHub. The entry point names this module, which imports nothing heavy."""

from typing import Any

from blendhub.contracts import Store
from blendhub.hookspecs import PluginSpec, hookimpl
from blendhub_stores.options import DiskOptions


def _disk(options: Any) -> Store:
    from blendhub_stores.disk import DiskStore

    return DiskStore(options)


@hookimpl
def blendhub_plugins() -> list[PluginSpec]:
    return [
        PluginSpec(
            kind="store",
            name="disk",
            api=1,
            summary="plain files with checksums below one directory; drops the least recently used",
            factory=_disk,
            options=DiskOptions,
        ),
    ]
