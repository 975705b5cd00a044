"""The kernels of the rolling-hash index, compiled once and kept in Numba's cache on disk.

They run without the interpreter's lock. What they do stands in the modules that they call.
"""

import hashlib
from pathlib import Path
from typing import Any

from numba import njit

from blendhub_matchers import (
    rolling_crowds,
    rolling_hashing,
    rolling_pages,
    rolling_search,
    rolling_table,
    rolling_updates,
)
from blendhub_matchers.rolling_pages import Index

MODULES = (rolling_hashing, rolling_pages, rolling_table, rolling_crowds, rolling_updates, rolling_search)


def digest_of_sources() -> str:
    sources = (Path(module.__file__).read_bytes() for module in MODULES if module.__file__)
    return hashlib.blake2b(b"".join(sources)).hexdigest()


def _compiled(sources: str) -> tuple[Any, ...]:
    """The kernels. Numba's cache on disk would not notice that a file they call into has changed; it does compare what
    a kernel closes over, and so they close over ``sources``.
    """
    kernel = njit(nogil=True, cache=True)

    @kernel
    def store(
        tokens,
        pages,
        table,
        homes,
        counters,
        runs,
        crowded,
        nodes,
        crowds,
        slot,
        sequence,
        start,
        approximate,
        base,
        tag_mask,
    ):
        sources  # noqa: B018
        index = Index(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds)
        return rolling_updates.store(index, slot, sequence, start, approximate, base, tag_mask)

    @kernel
    def join_crowds(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds, page):
        sources  # noqa: B018
        index = Index(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds)
        return rolling_crowds.join_crowds(index, page)

    @kernel
    def forget(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds, slot, start, end):
        sources  # noqa: B018
        index = Index(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds)
        return rolling_updates.forget(index, slot, start, end)

    @kernel
    def find_candidates(
        tokens,
        pages,
        table,
        homes,
        counters,
        runs,
        crowded,
        nodes,
        crowds,
        prompt,
        base,
        tag_mask,
        min_tokens,
        candidates,
    ):
        sources  # noqa: B018
        index = Index(tokens, pages, table, homes, counters, runs, crowded, nodes, crowds)
        return rolling_search.find_candidates(index, prompt, base, tag_mask, min_tokens, candidates)

    @kernel
    def choose(candidates, min_tokens, chosen):
        sources  # noqa: B018
        return rolling_search.choose(candidates, min_tokens, chosen)

    @kernel
    def move_entries(old, new, homes):
        sources  # noqa: B018
        rolling_table.move_entries(old, new, homes)

    @kernel
    def free_new_pages(pages, counters, first, end):
        sources  # noqa: B018
        rolling_pages.free_new_pages(pages, counters, first, end)

    @kernel
    def free_new_nodes(nodes, crowds, first, end):
        sources  # noqa: B018
        rolling_crowds.free_new_nodes(nodes, crowds, first, end)

    return store, join_crowds, forget, find_candidates, choose, move_entries, free_new_pages, free_new_nodes


KERNELS = _compiled(digest_of_sources())
store, join_crowds, forget, find_candidates, choose, move_entries, free_new_pages, free_new_nodes = KERNELS
