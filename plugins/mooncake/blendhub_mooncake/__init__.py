"""Mooncake Store as the place of a fleet's KV cache. The entry point names this module, which imports nothing heavy."""

import ctypes
from importlib.util import find_spec

from blendhub.contracts import Store
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl
from blendhub_mooncake.options import MooncakeOptions

PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""The libraries that Mooncake's builds need of the system, and the Debian packages that have them."""


def probe() -> Unavailable | None:
    """Why Mooncake cannot run here. The hub's own process never imports it."""
    if find_spec("mooncake") is None:
        return Unavailable("Mooncake is not installed", "pip install mooncake-transfer-engine-non-cuda")
    missing = [library for library in PACKAGES if not _is_there(library)]
    if missing:
        names = " ".join(PACKAGES[library] for library in missing)
        return Unavailable(f"Mooncake needs {', '.join(missing)}", f"apt-get install {names}")
    return None


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@hookimpl
def blendhub_stores() -> list[PluginSpec[Store]]:
    return [
        PluginSpec(
            name="mooncake",
            api=1,
            summary="the memory of many machines, by Mooncake Store, with a catalogue in Redis",
            factory="blendhub_mooncake.bytes:open_store",
            options=MooncakeOptions,
            probe=probe,
        ),
    ]
