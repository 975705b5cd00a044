"""Keeps a hub's pauses short: what Python's collector may do in a process that is a hub's alone."""

import gc


def disable_full_collections() -> None:
    """No full collections from now on: with a million chunks one would hold up all engines for a second and more.

    What a hub forgets goes at once, as nothing refers to it. Cycles come from errors and tasks alone; they are
    young when they are let go, so the collections that remain find them.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)
