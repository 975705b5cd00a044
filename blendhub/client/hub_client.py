"""The hub as a Python object, over any transport."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from blendhub.client import wire
from blendhub.client.answer import Answer, expecting
from blendhub.client.session import DONE, RESERVE_TIMEOUT_S, HubSession, Reservation
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Segment
from blendhub.core.errors import HubError
from blendhub.core.layout import Variant
from blendhub.core.provenance import EXACT, Provenance
from blendhub.core.spans import Span
from blendhub.core.tokens import TokenBuffer, as_tokens
from blendhub.outcome.report import LONGEST_NAME, Outcome

BASE = Variant()
"""The namespace of requests without LoRA and salt."""

ByteArray = npt.NDArray[np.uint8]


class HubClient(HubSession):
    """A session and its requests, none of which waits or raises: see ``Answer``. Each names the namespace that it
    concerns by its variant."""

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
    ) -> Answer[wire.Found]:
        """Ask what is stored of these tokens; with ``acquire``, a lease's ``pieces`` say where the KV is.

        The hub waits up to ``wait_s`` for what only its store has. ``settled``: the least share that was recomputed in
        settled KV; None: find none.
        """
        message = self._message(
            wire.Lookup,
            variant=variant,
            lease=secrets.randbits(62) if acquire else None,
            skip_prefix_n_tokens=skip_prefix,
            wait_s=wait_s,
            settled=settled,
        )

        def read(reply: object) -> wire.Found:
            found = expecting(wire.Found)(reply)
            self.ratio = found.ratio
            return found

        timeout = self._timeout + wait_s if timeout is None else timeout
        return self._ask(read, message, [as_tokens(tokens).data], timeout)

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
            self.release(found.lease)
            raise
        self.release(found.lease).result()

    def shard(self, slot: int) -> ByteArray:
        """This rank's shard of a slot, in place."""
        return self._in_arena(self.shard_at(slot), self.namespace.shard_bytes)

    def shard_at(self, slot: int) -> int:
        """Where in the arena this rank's shard of a slot begins."""
        return slot + self.namespace.shard_start(self.rank)

    def state_at(self, slot: int) -> int:
        """Where in the arena this rank's state begins, in the slot of a chunk that ends with one."""
        return slot + self.namespace.state_start(self.rank)

    def map_of(self, slot: int, shard_bytes: int) -> ByteArray:
        """This rank's map in the slot of a segment's last chunk, in place."""
        return self._in_arena(slot + self.namespace.map_start(self.rank, shard_bytes), shard_bytes)

    def _in_arena(self, offset: int, size: int) -> ByteArray:
        if self.arena is None:
            raise HubError("this client is not registered; call register first")
        return self.arena.slot(offset, size)

    # Writing.

    def reserve(
        self,
        tokens: TokenBuffer,
        span: Span,
        variant: Variant = BASE,
        provenance: Provenance = EXACT,
        run: int | None = None,
    ) -> Answer[Reservation]:
        """Slots for the KV of ``span``; the reply's span leaves out what is stored already, and may be empty."""
        message = self._message(
            wire.Reserve,
            variant=variant,
            span=span,
            provenance=provenance,
            run=run,
        )
        session = self._registered

        def read(reply: object) -> Reservation:
            reserved, right = expecting(wire.Reserved)(reply), None
            if reserved.lease is not None and session:
                right = WriteRight(reserved.lease, session.epoch, session.arena.nonce, reserved.span.end)
            return Reservation(reserved.span, reserved.run, right, reserved.slots, provenance)

        return self._ask(read, message, [as_tokens(tokens).data], RESERVE_TIMEOUT_S)

    @contextlib.contextmanager
    def writing(self, right: WriteRight) -> Iterator[None]:
        """Enclose every write into the slots of a lease; raises LeaseError if the right to write has ended."""
        self._rights.begin_write(right)
        try:
            yield
        finally:
            self._rights.end_write(right)

    def commit(self, right: WriteRight, upto: int) -> Answer[wire.Done]:
        """Report that this rank has written its shards up to a position; when all ranks have, they are matchable.

        At the end of the lease this process writes no more under it.
        """
        is_last = upto == right.end

        def check() -> None:
            self._rights.check(right)
            if is_last:
                self._rights.end(right)
                if self._rights.is_writing(right.lease):
                    raise HubError(f"a write into lease {right.lease} has not ended; try again")

        message = self._message(wire.Commit, lease=right.lease, upto=upto)
        return self._ask(DONE, message, check=check, ends=right.lease if is_last else None)

    # The rest.

    def clear(self, variant: Variant | None = None) -> Answer[wire.Done]:
        """Delete what is stored in one namespace of the engine or in all of them, and end rights to write there."""
        return self._ask(DONE, self._message(wire.Clear, variant=variant))

    def report(self, outcomes: Sequence[Outcome]) -> Answer[wire.Done]:
        """Report what became of requests of this engine that have ended; at most ``MAX_OUTCOMES`` of them."""
        return self._ask(DONE, self._message(wire.Reported, outcomes=tuple(outcomes)))

    def explain(self, request: str) -> Answer[wire.Explained]:
        """What became of a request that has ended; needs no registration."""
        return self._ask(expecting(wire.Explained), wire.Explain(request[:LONGEST_NAME]))

    def preview(self, tokens: TokenBuffer, engine: str = "", variant: Variant = BASE) -> Answer[wire.Previewed]:
        """What an engine would find of these tokens now; by default that which the client belongs to, or the only one.

        Nothing is fetched, leased or counted. It needs no registration.
        """
        engine = engine or (self._register.engine if self._register else "")
        message = wire.Preview(engine=engine, variant=variant)
        return self._ask(expecting(wire.Previewed), message, [as_tokens(tokens).data])

    def forget(self, salt: str, timeout: float | None = None) -> Answer[wire.Done]:
        """Delete what all requests with a cache salt stored; needs no registration."""
        return self._ask(DONE, wire.Forget(salt), (), timeout)

    def stats(self) -> Answer[wire.HubStats]:
        """The hub's counters and gauges; needs no registration."""
        return self._ask(expecting(wire.HubStats), wire.Stats())
