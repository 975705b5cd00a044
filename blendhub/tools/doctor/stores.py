"""Whether the store's directory can be used, by this user alone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from blendhub.system.default_paths import default_disk_store
from blendhub.tools.doctor.access import quoted, trouble_with_directory, trouble_with_secret
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, ok, warn

LEAST_FREE_BYTES = 2**30


def stores(at: Circumstances) -> Iterator[Finding]:
    folder = store_directory(at)
    if folder is None:
        yield ok("no store is configured: KV that is evicted is lost")
        return
    # What keeps others out altogether comes first: it also keeps them from replacing anything.
    wrong = list(trouble_with_secret(folder, "the KV in")) if folder.is_dir() else []
    wrong = wrong or list(trouble_with_directory(folder, what="KV"))
    if not wrong and folder.is_dir():
        wrong = list(_room(folder))
    yield from wrong or [ok(f"KV can be stored in {folder}, and only this user can read it there")]


def store_directory(at: Circumstances) -> Path | None:
    """The directory of the configured store, or of the default one if that exists; None: there is no store."""
    store = at.hub.store
    if store is None:
        return default_disk_store() if default_disk_store().exists() else None
    path = store.options.get("path")
    if isinstance(path, str) and path:
        return Path(path).expanduser().absolute()
    return default_disk_store() if store.name == "disk" else None


def _room(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        yield warn(
            f"the disk of {folder} has {free / 2**20:.0f} MiB left, so chunks will not be saved any more",
            f"du -xh --max-depth=1 {quoted(Path(os.path.realpath(folder)).parent)} | sort -h",
        )
