"""The most that one message, one client or one namespace costs the hub, whatever a client asks for.

The bounds are the hub's own: no option of a client or of a plugin widens them. They stand above what the largest
honest prompt needs.
"""

MOST_CHUNKS = 4096
"""Chunks that one message reserves, evicts, or takes a lease on: a million tokens in chunks of 256.

A longer reservation or lookup is answered with as much of its beginning."""

MOST_TRIES = 64
"""Places of the arena that are tried for a slot where chunks that are in use leave no room around."""

AT_ONCE = 256
"""Chunks that are dropped before other requests have their turn."""

MOST_WAITING_SAVES = 2**16
"""Chunks that wait for the store. One more is not saved: it is lost when it is evicted, and counted."""
