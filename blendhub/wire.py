"""The messages between engines and the hub.

Token ids are a request's first payload, raw uint32, sent once. Whatever comes from a peer is decoded into these
structs, which bound every field; the hub checks the rest before it uses it. Replies name slots by their offset in
the arena; KV travels in payloads only between machines.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from blendhub.arena_view import ArenaName, MappingId
from blendhub.contracts.transport import Codec
from blendhub.layout import Namespace, Text
from blendhub.plan import Match, Span
from blendhub.processes import ProcessId

WIRE_VERSION = 1

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Position = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
MOST_ITEMS = 2**16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="is"):
    """Base of what travels."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``span`` of a prompt, which all lie in one chunk, and where their KV is."""

    span: Span
    run: Id
    source_start: Position
    """The position in the run of the span's first token; its keys are turned for this position."""
    slot: Position
    """Offset of the chunk's slot in the arena."""
    slot_token: Position
    """Which row of the slot holds the span's first token."""
    exact: bool


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``span`` of a sequence, and the slot where their KV is to be written."""

    span: Span
    slot: Position


# What clients ask.


class Register(Message, frozen=True):
    """Join as one process of an engine. The first of an engine fixes its namespace."""

    engine: Text
    rank: Annotated[int, Meta(ge=-1, le=1023)]
    """-1 for a process that reads and writes no KV itself."""
    process: ProcessId
    namespace: Namespace
    client: Id
    """Chosen at random by the client. A session that it had before ends, and it writes under no lease of that one."""


class FromSession(Message, frozen=True):
    """Base of what only a registered session may ask."""

    session: Id
    epoch: Id


class Unregister(FromSession, frozen=True):
    """Leave; what the session holds ends as if it had died."""


class Ping(FromSession, frozen=True):
    """I live. ``let_go`` names revoked write leases whose slots this process will not write again."""

    let_go: Annotated[tuple[Id, ...], Meta(max_length=MOST_ITEMS)] = ()


class Mapped(FromSession, frozen=True):
    """This process has mapped the arena, and will write into it. Before the reply it writes nothing."""

    nonce: Annotated[str, Meta(max_length=64)]
    """Read from the mapped segment."""
    mapping: MappingId


class Lookup(FromSession, frozen=True):
    """What of these tokens is stored? With ``acquire``, take a read lease on all that is ready.

    What has to come from the store first is fetched; the reply waits for it up to ``wait_s``.
    """

    acquire: bool = True
    skip_prefix_n_tokens: Position = 0
    wait_s: Seconds = 0.0


class Prefetch(FromSession, frozen=True):
    """Bring what is stored of these tokens into the arena; the reply does not wait for it."""


class Acquire(FromSession, frozen=True):
    """Take a read lease on matches that an earlier reply named; those that are gone meanwhile are left out."""

    matches: Annotated[tuple[Match, ...], Meta(max_length=MOST_ITEMS)]
    skip_prefix_n_tokens: Position = 0


class Release(FromSession, frozen=True):
    """End a read lease. If it ended before, what was read under it must not be used."""

    lease: Id


class Reserve(FromSession, frozen=True):
    """Room for the KV of ``span`` of these tokens, computed with all tokens before it.

    ``exact``: nothing before or in the span was blended. What is stored already at the same place after the same
    tokens needs no second copy: the reply's span begins behind it. ``run``: go on with this run if it ends where
    the span starts.
    """

    span: Span
    exact: bool = True
    run: Id | None = None


class Commit(FromSession, frozen=True):
    """This rank has written its shard of all slots up to position ``upto``."""

    lease: Id
    upto: Position


class Abort(FromSession, frozen=True):
    """Give up a write lease; what all ranks had committed before stays."""

    lease: Id


class Clear(FromSession, frozen=True):
    """Forget everything stored in the session's namespace, except what is leased just now."""


class Stats(Message, frozen=True):
    """How is the hub?"""


class Fetch(FromSession, frozen=True):
    """The bytes of this rank's shards of a read lease's pieces, as payloads; for clients on other machines."""

    lease: Id


class Put(FromSession, frozen=True):
    """Bytes for this rank's shard of the slot that begins at ``position``; for clients on other machines."""

    lease: Id
    position: Position


Request: TypeAlias = (
    Register
    | Unregister
    | Ping
    | Mapped
    | Lookup
    | Prefetch
    | Acquire
    | Release
    | Reserve
    | Commit
    | Abort
    | Clear
    | Stats
    | Fetch
    | Put
)

# What the hub answers.


class Registered(Message, frozen=True):
    session: Id
    epoch: Id
    arena: ArenaName
    ping_every_s: Annotated[float, Meta(ge=0.01, le=3600)]


class MayWrite(Message, frozen=True):
    """Which write leases this process may use: those numbered from ``first`` on, and the ``granted`` ones."""

    first: Id
    granted: tuple[Id, ...]
    longest_lease_s: Seconds


class Done(Message, frozen=True):
    """It was done, and there is nothing to tell."""


class Pong(Message, frozen=True):
    revoked: tuple[Id, ...] = ()
    """Write leases that ended without this engine's doing: write no more, then say so with ``let_go``."""


class Found(Message, frozen=True):
    """``matches`` is all that is stored; ``pieces`` is what the lease covers, ascending."""

    matches: tuple[Match, ...]
    pieces: tuple[Piece, ...] = ()
    lease: Id | None = None
    expires_s: Seconds = 0.0
    on_the_way_tokens: Position = 0
    """Tokens of the matches that are in the store only, and being fetched."""


class Reserved(Message, frozen=True):
    """Slots for ``span``, which may be shorter at its beginning than asked, or empty: then there is no lease."""

    span: Span
    run: Id | None = None
    lease: Id | None = None
    number: Id = 0
    slots: tuple[Slot, ...] = ()
    expires_s: Seconds = 0.0


class Numbers(Message, frozen=True):
    """Counters and gauges by name; counters begin anew with each epoch."""

    epoch: Id
    counters: dict[str, float]
    gauges: dict[str, float]
    namespaces: dict[str, dict[str, float]]


class Bytes(Message, frozen=True):
    """The payloads are what was asked for."""


Reply: TypeAlias = Registered | MayWrite | Done | Pong | Found | Reserved | Numbers | Bytes


def hub_codec() -> Codec:
    return Codec(Request, version=WIRE_VERSION)


def client_codec() -> Codec:
    return Codec(Reply, version=WIRE_VERSION)
