"""Settings of Python's garbage collector for a process that runs nothing but a hub."""

import gc


def disable_full_collections() -> None:
    """Collect only the young generations from now on: with a million chunks, a full collection stops the hub for
    more than a second.

    The hub's state has no reference cycles, so what it drops is freed at once. Cycles come from errors and tasks
    alone; they are young when they become garbage, so the collections of the young generations find them.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)
