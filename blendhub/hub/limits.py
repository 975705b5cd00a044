"""The most that one message costs the hub, and how much the hub does before other requests have their turn.

No option of a client or of a plugin widens these bounds. They lie above what the largest honest prompt needs.
"""

from blendhub.client.wire import MAX_MATCHES

MAX_CHUNKS = MAX_MATCHES
"""4096: chunks that one lookup concerns: a million tokens in chunks of 256. A longer one is answered with as much of
its beginning."""

MAX_PROMPT_TOKENS = 2**24
"""Longer prompts are refused."""

INLINE_TOKENS = 2**17
"""Longer prompts are matched in a thread, so that other requests need not wait."""

WAIT_FOR_STORE_S = 1.0
"""How long a deletion waits for chunks that are being saved or loaded, before it looks for them again."""

MAX_SLOTS = 1024
"""The most slots of one reservation, which also ends where it evicts MAX_CHUNKS chunks. Clients then reserve more."""

MAX_SLOTS_OF_AN_ARENA = 2**18
"""Smaller slots take as much room, so that neither the chunks of an arena nor those in the way of a large slot are more
than this."""

MAX_TRIES = 64
"""The number of places of the arena that are tried for a slot where chunks in use leave no room around."""

AT_ONCE = 256
"""Chunks that are dropped before other requests have their turn."""

MAX_WAITING_SAVES = 2**16
"""The most chunks that wait to be saved. With one more, the hub does not save the first one, and counts it: that chunk
is lost when it is evicted."""

CHUNKS_A_PIECE = 16
"""Chunks of another hub that become matchable before other requests have their turn."""

MATCH_THREADS = 2
"""Threads for long matches."""

MAX_KEPT_REPORTS = 200
MAX_REPORTING_ENGINES = 16
"""Reports of an engine's prompts that are kept: the last ones; each takes at most some KiB. With one more engine, the
one that was silent longest is forgotten."""
