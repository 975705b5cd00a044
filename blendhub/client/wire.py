"""The messages between engines and the hub.

Token ids are a request's first payload, raw uint32, sent once. Whatever comes from a peer is decoded into these
structs, which bound every field; the hub checks the rest before it uses it. A session belongs to one engine; requests
name one of the engine's namespaces by its ``Variant``, so they cannot name another engine's. Lookups answer with
matches and, under a read lease, with the places of their KV in the arena; reserves answer with slots. KV itself never
travels in messages.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from blendhub.client.arena_view import ArenaName, MappingId
from blendhub.contracts import Segment
from blendhub.contracts.transport import Codec
from blendhub.core.layout import Namespace, Text, Variant
from blendhub.core.provenance import EXACT, MapBytes, Provenance, Ratio
from blendhub.core.spans import Id, Match, Position, Span, total
from blendhub.outcome.reasons import NotReused
from blendhub.outcome.report import LONGEST_NAME, MAX_OUTCOMES, Outcome
from blendhub.system.processes import ProcessId

WIRE_VERSION = 1

Seconds = Annotated[float, Meta(ge=0, le=3600)]
FIRST_RATIO = 0.3
"""The share of moved text that is recomputed until the hub has found one."""
MAX_ITEMS = 2**16
MAX_MATCHES = 2**12
"""The most matches in one message; a lookup answers with no more."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="is"):
    """Base of requests and replies."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``span`` of a sequence, and the slot where their KV is to be written."""

    span: Span
    slot: Position


# Requests.


class Register(Message, frozen=True):
    """Join as one process of an engine. The first process of an engine fixes its namespace.

    ``namespace`` is that of requests without LoRA and salt; requests name others by their ``Variant``.
    """

    engine: Text
    rank: Annotated[int, Meta(ge=-1, le=1023)]
    """-1 for a process that reads and writes no KV itself."""
    process: ProcessId
    namespace: Namespace
    client: Id
    """A random number that the client keeps. When it registers anew, its earlier session ends: the client no longer
    writes under the leases of that session."""
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The share of moved text to recompute that the client heard of last, so that a hub that was restarted knows it."""


class FromSession(Message, frozen=True):
    """Base of requests that only a registered session may send."""

    session: Id
    epoch: Id


class InNamespace(FromSession, frozen=True, kw_only=True):
    """Base of requests that concern one namespace of the session's engine."""

    variant: Variant = Variant()


class Unregister(FromSession, frozen=True):
    """End the session and its leases. The process has stopped writing."""


class Ping(FromSession, frozen=True):
    """Keep the session alive, and with it all of its leases."""

    acknowledged: Annotated[tuple[Id, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Revoked write leases under which this process will not write again."""
    abandoned: Annotated[tuple[Id, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Leases that this process uses no more: lookups whose replies did not come in time may have brought them, or what
    ended them may have been lost. Those of the session's engine that hold end."""


class Mapped(FromSession, frozen=True):
    """This process has mapped the arena and is going to write into it. It writes nothing before the reply."""

    nonce: Annotated[str, Meta(max_length=64)]
    """The nonce that the process has read from the mapped segment."""
    mapping: MappingId


class Lookup(InNamespace, frozen=True):
    """Find what is stored of these tokens. With ``lease``, take a read lease on what is in the arena.

    What only the store has is fetched into the arena; the reply waits for that up to ``wait_s``.
    """

    lease: Id | None = None
    """The id of the lease, which the client has drawn at random."""
    skip_prefix_n_tokens: Position = 0
    wait_s: Seconds = 0.0
    settled: Ratio | None = None
    """Find settled KV, too, of which at least this share was recomputed when it was blended. None: find none."""


class Release(FromSession, frozen=True):
    """End a read lease of the session's engine. The reply is LeaseError if what was read under it must not be used."""

    lease: Id


class Reserve(InNamespace, frozen=True, kw_only=True):
    """Allocate slots for the KV of ``span`` of these tokens, computed with all tokens before it.

    What is stored exactly already, and moves as far, is not stored again: the reply's span begins after it. KV that is
    neither exact nor movable is not stored again where anything is stored behind that prefix. ``run``: extend this run
    if it ends where the span starts, and is of the same provenance.

    A segment is stored whole, in a run of its own, or not at all: not if the same text is stored as a segment already.
    """

    span: Span
    provenance: Provenance = EXACT
    run: Id | None = None


class Commit(FromSession, frozen=True):
    """This rank has written what it writes of all slots up to position ``upto``."""

    lease: Id
    upto: Position


class Abort(FromSession, frozen=True):
    """End a write lease; what all ranks have committed stays stored."""

    lease: Id


class Clear(FromSession, frozen=True):
    """Delete what is stored in one namespace of the session's engine, and end the rights to write there.

    After the reply no lookup finds what was stored before, and the hub has discarded what it knew of in its store.
    """

    variant: Variant | None = None
    """None for all namespaces of the engine: whatever LoRA and salt."""


class Reported(FromSession, frozen=True, kw_only=True):
    """Report what became of requests of the session's engine that have ended."""

    outcomes: Annotated[tuple[Outcome, ...], Meta(max_length=MAX_OUTCOMES)]


class Explain(Message, frozen=True):
    """Ask what became of a request's prompt; needs no session."""

    request: Annotated[str, Meta(max_length=LONGEST_NAME)]


class Preview(Message, frozen=True, kw_only=True):
    """Ask what an engine would find of these tokens now, without a lease; needs no session."""

    engine: Text = ""
    """The engine's name; empty: the only engine that is registered."""
    variant: Variant = Variant()


class Forget(Message, frozen=True):
    """Delete what all requests with a cache salt stored. Needs no session.

    After the reply the hub's store, and its arena but for what is being read, hold nothing of it any more.
    """

    salt: Text


class Stats(Message, frozen=True):
    """Ask for the hub's counters and gauges; needs no session."""


Request: TypeAlias = (
    Register
    | Unregister
    | Ping
    | Mapped
    | Lookup
    | Release
    | Reserve
    | Commit
    | Abort
    | Clear
    | Reported
    | Explain
    | Preview
    | Forget
    | Stats
)

# Replies.

FoundSpans = Annotated[tuple[Span, ...], Meta(max_length=MAX_MATCHES)]


class Registered(Message, frozen=True):
    session: Id
    epoch: Id
    arena: ArenaName
    ping_every_s: Annotated[float, Meta(ge=0.01, le=3600)]


class MayWrite(Message, frozen=True):
    """This process may use write leases numbered from ``first`` on, and the ``granted`` ones."""

    first: Id
    granted: tuple[Id, ...]


class Done(Message, frozen=True):
    """The request was carried out; it has no result."""


class Pong(Message, frozen=True):
    revoked: tuple[Id, ...] = ()
    """Write leases that ended early: the process stops writing under them, and acknowledges that in its next ping."""


class FoundMap(msgspec.Struct, frozen=True, array_like=True):
    """The map of a segment that stands at ``span`` of the prompt."""

    span: Span
    slot: Position
    """The slot that ends with the map."""
    shard_bytes: MapBytes


class Found(Message, frozen=True):
    """``matches`` are in the arena: ascending and disjoint. A lease covers all of them, in ``pieces``."""

    matches: tuple[Match, ...] = ()
    lease: Id | None = None
    pieces: tuple[Segment, ...] = ()
    """The parts of the matches that lie in one chunk each, and where the shards of rank 0 are."""
    state: Position | None = None
    """The slot with the state at the end of the exact matches, of a model with recurrent layers."""
    maps: Annotated[tuple[FoundMap, ...], Meta(max_length=MAX_MATCHES)] = ()
    """The maps of such a model's moved matches, each of which is a whole segment."""
    on_the_way: FoundSpans = ()
    """The parts of the prompt that only the store has. They are being fetched, and no match covers them yet."""
    fetched: FoundSpans = ()
    """The parts of the prompt that the lookup had to be read from the store."""
    staying: Annotated[tuple[NotReused, ...], Meta(max_length=MAX_MATCHES)] = ()
    """The parts of the prompt that are stored, but may not move here, or lead to no state; no match covers them."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = FIRST_RATIO
    """The share of moved text that engines should recompute, as the hub has found it."""

    @property
    def on_the_way_tokens(self) -> int:
        return total(self.on_the_way)


class Reserved(Message, frozen=True):
    """Slots for ``span``: the requested one without what is stored already. If it is empty there is no lease."""

    span: Span
    run: Id | None = None
    lease: Id | None = None
    slots: tuple[Slot, ...] = ()


class Explained(Message, frozen=True):
    """The newest outcome of the request, and its engine; none if the hub has none."""

    engine: Text = ""
    outcome: Outcome | None = None


class Previewed(Message, frozen=True):
    """The engine's name, and the matches that are in the arena for it."""

    engine: Text
    model: Text
    matches: tuple[Match, ...] = ()
    on_the_way: FoundSpans = ()
    """The parts of the prompt that only the store has."""
    staying: Annotated[tuple[NotReused, ...], Meta(max_length=MAX_MATCHES)] = ()
    exact_tokens: Position = 0
    """How many tokens of the prompt are exact, in the arena or in the store."""


class HubStats(Message, frozen=True):
    """Counters and gauges by name; counters start at zero in each epoch."""

    epoch: Id
    counters: dict[str, float]
    gauges: dict[str, float]
    namespaces: dict[str, dict[str, float]]


Reply: TypeAlias = Registered | MayWrite | Done | Pong | Found | Reserved | Explained | Previewed | HubStats


def hub_codec() -> Codec:
    return Codec(Request, version=WIRE_VERSION)


def client_codec() -> Codec:
    return Codec(Reply, version=WIRE_VERSION)
