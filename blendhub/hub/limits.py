"""The most that one message, one client or one namespace costs the hub, whatever a client asks for.

The bounds are the hub's own: no option of a client or of a plugin widens them. They stand above what the largest
honest prompt needs.
"""

from blendhub.client.wire import MOST_MATCHES

MOST_CHUNKS = MOST_MATCHES
"""4096: chunks that one lookup concerns: a million tokens in chunks of 256. A longer one is answered with as much of
its beginning."""

MOST_PROMPT_TOKENS = 2**24
"""Longer prompts are refused."""

INLINE_TOKENS = 2**17
"""Longer prompts are matched in a thread, so that other requests need not wait."""

WAIT_FOR_STORE_S = 1.0
"""How long a reservation waits for chunks to be saved when the arena is full."""

MOST_SLOTS = 1024
"""The most slots of one reservation, which also ends where it evicts MOST_CHUNKS chunks. Clients then reserve more."""

MOST_SLOTS_OF_AN_ARENA = 2**18
"""Smaller slots take as much room, so that neither the chunks of an arena nor those in the way of a large slot are more
than this."""

MOST_TRIES = 64
"""The number of places of the arena that are tried for a slot where chunks in use leave no room around."""

AT_ONCE = 256
"""Chunks that are dropped before other requests have their turn."""

MOST_WAITING_SAVES = 2**16
"""The most chunks that wait to be saved, and the most that wait until the store answers again. The hub does not save a
further chunk, and counts it: the chunk is lost when it is evicted."""

CHUNKS_A_PIECE = 16
"""Chunks of another hub that become matchable before other requests have their turn."""

MATCH_THREADS = 2
"""Threads for long matches. An engine has one of them at a time, so that another engine's long lookups find one."""

MOST_WRITE_LEASES = 4096
"""The most write leases of one session. One more reservation is answered Busy."""

MOST_READ_LEASES = 4096
"""The most read leases of one session. One more is answered Busy."""

FREE_INDEX_BYTES = 2**28
"""What indexes may take beyond the KV that each of them indexes. Where they take more, the engine whose indexes take
the most loses its oldest text. KV takes a thousand times as much as its tokens; only many salts with little text each,
or reservations of few tokens behind long prefixes that are not stored, come near this."""

MOST_SESSIONS = 2**14
"""The most sessions of all clients. One more is answered Busy."""

MOST_AUDITED_NAMESPACES = 1024
"""Engines' namespaces whose audits are counted. With one more, the one that was silent longest is forgotten."""

MOST_KEPT_REPORTS = 200
MOST_REPORTING_ENGINES = 16
"""Reports of an engine's prompts that are kept: the last ones; each takes at most some KiB. With one more engine, the
one that was silent longest is forgotten."""

MOST_METRICS_REQUEST_BYTES = 2**13
"""The bytes of the head of a request to ``/metrics``."""
