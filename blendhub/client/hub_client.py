"""The hub as a Python object, over any transport."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.client import wire
from blendhub.client.session import HubSession, PendingReply
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Segment
from blendhub.contracts.transport import Pending
from blendhub.core.errors import BlendHubError, DeadlineExceeded, HubError, TransportError
from blendhub.core.layout import Variant
from blendhub.core.provenance import EXACT, Provenance
from blendhub.core.spans import Span
from blendhub.core.tokens import TokenBuffer, as_tokens
from blendhub.outcome.report import LONGEST_NAME, Outcome

BASE = Variant()
"""The namespace of requests without LoRA and salt."""

ByteArray = npt.NDArray[np.uint8]


class Reservation(msgspec.Struct, frozen=True):
    """Slots for ``span``: the requested span without what is stored already; no right if nothing is left to write."""

    span: Span
    run: int | None
    right: WriteRight | None
    slots: tuple[wire.Slot, ...]


class PendingLookup(PendingReply[wire.Found]):
    """A lookup under way, and the lease that its answer brings. To be closed, whatever becomes of it."""

    request: wire.Lookup
    _owner: "HubClient"

    def __init__(self, client: "HubClient", request: wire.Lookup, pending: Pending) -> None:
        super().__init__(client, request, pending, wire.Found)
        self.sent_at = time.monotonic()
        self._registration = client.registrations

    @property
    def lacks_some(self) -> bool:
        """Whether the answer came before all was there that the hub has; more may be there by now."""
        return self.request.wait_s > 0 and self.reply is not None and bool(self.reply.on_the_way)

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended that it was sent in, and with it the lease on the matches."""
        return self._owner.registrations != self._registration

    def close(self) -> None:
        """End the lease that the answer brought, or still brings."""
        with contextlib.suppress(BlendHubError):
            if not self.reply and not self.error and self.done():
                self.result()
            if self.reply and self.reply.lease is not None:
                self._owner.release(self.reply.lease)
        if not self.reply and self.request.lease is not None:
            # An answer that comes too late, or is not waited for.
            self._owner.abandon(self.request.lease, self._pending)


class HubClient(HubSession):
    """A session and its requests. Each request names the namespace that it concerns by its variant."""

    def __enter__(self) -> "HubClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Reading.

    def lookup(
        self,
        tokens: TokenBuffer,
        variant: Variant = BASE,
        *,
        acquire: bool = True,
        skip_prefix: int = 0,
        wait_s: float = 0.0,
        settled: float | None = None,
        timeout: float | None = None,
    ) -> PendingLookup:
        """Ask what is stored of these tokens; with ``acquire``, a lease's ``pieces`` say where the KV is.

        The hub waits up to ``wait_s`` for what only its store has. ``settled``: the least share that was recomputed in
        settled KV; None: find none.
        """
        message = wire.Lookup(
            **self._ids(),
            variant=variant,
            lease=secrets.randbits(62) if acquire else None,
            skip_prefix_n_tokens=skip_prefix,
            wait_s=wait_s,
            settled=settled,
        )
        timeout = self._timeout + wait_s if timeout is None else timeout
        return PendingLookup(self, message, self._send(message, [as_tokens(tokens).data], timeout))

    def release(self, lease: int, *, timeout: float | None = None) -> PendingReply[wire.Done]:
        """End a read lease. The reply is LeaseError if it had ended before, or if what it covers was deleted: then
        what was read must not be used."""
        message = wire.Release(**self._ids(), lease=lease)
        with self._abandons(lease):
            pending = self._send(message, timeout=timeout)
        self.abandon(lease, pending)  # the next ping repeats it: it may be lost
        return PendingReply(self, message, pending, wire.Done)

    @contextlib.contextmanager
    def reading(self, found: wire.Found) -> Iterator[tuple[Segment, ...]]:
        """The pieces of a lease, which is released at the end of the block.

        Use what was read only after the block ended without an error: a lease that ended meanwhile, with its session,
        raises LeaseError at the end of the block, and the bytes may be another chunk's.
        """
        if found.lease is None:
            yield ()
            return
        try:
            yield found.pieces
        except BaseException:
            with contextlib.suppress(BlendHubError):
                self.release(found.lease).result()
            raise
        self.release(found.lease).result()

    def shard(self, slot: int) -> ByteArray:
        """This rank's shard of a slot, in place."""
        if self.arena is None:
            raise HubError("this client is not registered; call register first")
        return self.arena.slot(self.shard_at(slot), self.namespace.shard_bytes)

    def shard_at(self, slot: int) -> int:
        """Where in the arena this rank's shard of a slot begins."""
        return slot + self.namespace.shard_start(self.rank)

    # Writing.

    def reserve(
        self,
        tokens: TokenBuffer,
        span: Span,
        variant: Variant = BASE,
        provenance: Provenance = EXACT,
        run: int | None = None,
    ) -> Reservation:
        """Slots for the KV of ``span``; the reply's span leaves out what is stored already, and may be empty."""
        session = self.registered
        message = wire.Reserve(
            **self._ids(),
            variant=variant,
            span=span,
            provenance=provenance,
            run=run,
        )
        try:
            answer = self._call(wire.Reserved, message, [as_tokens(tokens).data])
        except DeadlineExceeded:
            # The hub may have granted a lease that nobody would end: a new session begins without leases.
            self._is_lost = True
            raise
        right = None
        if answer.lease is not None:
            right = WriteRight(answer.lease, session.epoch, session.arena.nonce, answer.span.end)
        return Reservation(answer.span, answer.run, right, answer.slots)

    @contextlib.contextmanager
    def writing(self, right: WriteRight) -> Iterator[None]:
        """Enclose every write into the slots of a lease; raises LeaseError if the right to write has ended."""
        self._rights.begin_write(right)
        try:
            yield
        finally:
            self._rights.end_write(right)

    def commit(self, right: WriteRight, upto: int) -> None:
        """Report that this rank has written its shards up to a position; when all ranks have, they are matchable."""
        message = wire.Commit(**self._ids(), lease=right.lease, upto=upto)
        if upto == right.end:
            self._end(right, message)
        else:
            self._call(wire.Done, message)

    def abort(self, right: WriteRight) -> None:
        """End a write lease; waits for writes of this process that are under way."""
        self._end(right, wire.Abort(**self._ids(), lease=right.lease))

    # The rest.

    def clear(self, variant: Variant | None = None) -> None:
        """Delete what is stored in one namespace of the engine or in all of them, and end rights to write there."""
        self._call(wire.Done, wire.Clear(**self._ids(), variant=variant))

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Report what became of requests of this engine that have ended; at most ``MAX_OUTCOMES`` of them."""
        self._call(wire.Done, wire.Reported(**self._ids(), outcomes=tuple(outcomes)))

    def explain(self, request: str) -> wire.Explained:
        """What became of a request that has ended; needs no registration."""
        return self._call(wire.Explained, wire.Explain(request[:LONGEST_NAME]))

    def preview(self, tokens: TokenBuffer, engine: str = "", variant: Variant = BASE) -> wire.Previewed:
        """What an engine would find of these tokens now; by default that which the client belongs to, or the only one.

        Nothing is fetched, leased or counted. It needs no registration.
        """
        engine = engine or (self._register.engine if self._register else "")
        message = wire.Preview(engine=engine, variant=variant)
        return self._call(wire.Previewed, message, [as_tokens(tokens).data])

    def forget(self, salt: str, timeout: float | None = None) -> None:
        """Delete what all requests with a cache salt stored; needs no registration."""
        self._submit(wire.Done, wire.Forget(salt), (), timeout).result()

    def stats(self) -> wire.HubStats:
        """The hub's counters and gauges; needs no registration."""
        return self._call(wire.HubStats, wire.Stats())

    def _end(self, right: WriteRight, message: wire.Commit | wire.Abort) -> None:
        """End a right, and tell the hub."""
        self._rights.end(right)
        if not self._rights.wait_until_idle(self._timeout, right.lease):
            raise HubError(f"a write into lease {right.lease} has not ended; try again")
        with self._abandons(right.lease):
            self._call(wire.Done, message)

    @contextlib.contextmanager
    def _abandons(self, lease: int) -> Iterator[None]:
        """Have a ping end a lease if what is sent within, to end it, cannot be sent or gets no reply."""
        try:
            yield
        except TransportError:
            self.abandon(lease)
            raise
