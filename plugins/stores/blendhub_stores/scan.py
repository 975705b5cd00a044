"""Scans a directory when it is opened: catalogues its entries, and removes damaged files."""

import logging

from blendhub.contracts import RunKey
from blendhub.system.safe_open import NotOurs
from blendhub_stores.catalogue import Catalogue
from blendhub_stores.directory import Directory, File, digest_of
from blendhub_stores.file_format import Damaged, StoreFile

log = logging.getLogger(__name__)


def scan(directory: Directory, catalogue: Catalogue) -> int:
    """Fill an empty catalogue, least recently used first; returns how many damaged files were removed.

    Chunks are checked by name and size only: opening each file would take a minute where there are many. ``load``
    verifies their bytes.
    """
    files = sorted(directory.files(), key=lambda file: file.used_ns)
    damaged: list[tuple[File, str]] = []
    keys: dict[str, RunKey] = {}
    skipped: set[str] = set()
    for file in files:
        if file.span is None:
            try:
                with StoreFile(file.path) as store_file:
                    key = store_file.header.key
                    if store_file.header.span is not None or digest_of(key) != file.digest:
                        raise Damaged("it holds another entry's bytes")
                    catalogue.put_run(key, store_file.nbytes, store_file.header.sizes[0] // 4)
                    keys[file.digest] = key
            except Damaged as error:
                damaged.append((file, str(error)))
            except (NotOurs, OSError) as error:
                log.warning("skipped %s and the chunks of its run: %s", file.path, error)
                skipped.add(file.digest)
    for file in files:
        if file.span is None or file.digest in skipped:
            continue
        run = keys.get(file.digest)
        if run is None or file.span.end > (catalogue.n_tokens(run) or 0):
            damaged.append((file, "the tokens of its run are missing"))
        elif not file.nbytes:
            damaged.append((file, "it is empty"))
        else:
            catalogue.put_chunk(run, file.span, file.nbytes)
    for file, _ in damaged:
        directory.unlink(file.path)
    for key in list(catalogue):
        if not catalogue.chunks(key):
            directory.remove(catalogue.discard((key, None)))
    while catalogue.nbytes > catalogue.capacity:
        directory.remove(catalogue.discard(catalogue.longest_unused()))
    if damaged:
        file, reason = damaged[0]
        log.warning("dropped %d damaged files, the first of them %s: %s", len(damaged), file.path, reason)
    return len(damaged)
