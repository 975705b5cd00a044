"""KV to and from a hub whose memory this machine cannot map: through the transport, and memory of the worker's."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Shards
from blendhub.contracts import Segment, Transfer
from blendhub.contracts.transport import Buffer
from blendhub.core.spans import Span
from blendhub.vllm.messages import LoadJob, SaveJob
from blendhub.vllm.worker.layer_copies import LayerCopies

SLOWEST_BYTES_PER_S = 50 * 2**20
"""A fetch that is slower fails, and vLLM computes the tokens."""
LEAST_FETCH_S = 5.0


class RemoteKV:
    """The transport in place of shared memory. One half of the memory is for loads, the other one for saves.

    Both always end, because neither keeps its memory until other work is done: a slot that a later step fills is
    copied, and sent, as a whole by each save that has a part of it.
    """

    def __init__(self, copies: LayerCopies, n_slots: int) -> None:
        """``n_slots``: how many slots loads, and saves, may use at a time."""
        self._copies = copies
        self._shard_bytes = shard_bytes = copies.shard_bytes
        self._memory = np.zeros(2 * n_slots * shard_bytes, np.uint8)
        places = list(range(0, len(self._memory), shard_bytes))
        self._for_loads, self._for_saves = places[:n_slots], places[n_slots:]
        self._carried_bytes = 0
        self._lock = threading.Lock()
        """Guards the fields for saves, and the number of bytes."""
        copies.device.pin(self._memory)

    def take_bytes(self) -> int:
        """The number of bytes that went through the transport since the last call."""
        with self._lock:
            carried, self._carried_bytes = self._carried_bytes, 0
            return carried

    # Loads.

    def load(self, client: HubClient, job: LoadJob) -> Transfer:
        """Fetch the pieces of a job, and copy them to the blocks."""
        slots = list(dict.fromkeys(piece.shard for piece in job.pieces))
        timeout = max(LEAST_FETCH_S, len(slots) * self._shard_bytes / SLOWEST_BYTES_PER_S)
        reply = client.submit_fetch(job.lease, slots, timeout=timeout)
        return _Fetch(self, client, reply, slots, job)

    def place(self, segments: Sequence[Segment], shards: Mapping[int, Buffer]) -> list[Segment]:
        """Put as many shards as there is room for into the memory; returns their segments."""
        placed = []
        for segment in segments[: len(self._for_loads)]:
            at = self._for_loads.pop()
            self._at(at)[:] = np.frombuffer(shards[segment.shard], np.uint8)
            placed.append(replace(segment, shard=at))
        self._count(len(placed))
        return placed

    def free(self, placed: Sequence[Segment]) -> None:
        """Free the memory of these segments, which are copied."""
        self._for_loads += [segment.shard for segment in placed]

    def copy_in(self, placed: Sequence[Segment], job: LoadJob) -> Transfer:
        transfer = self._copies.load(placed, job.blocks, job.decision.start)
        if not self._copies.device.overlaps_compute:
            transfer.wait()
        return transfer

    # Saves.

    def save(self, job: SaveJob) -> "Delivery | None":
        """Copy slots of a job out of the blocks, with what earlier jobs saved of them, as many as there is room for.

        None: there is no room yet.
        """
        with self._lock:
            places = [self._for_saves.pop() for _ in job.slots[: len(self._for_saves)]]
        if not places:
            return None
        part, rest = _divided(job, len(places))
        segments = [
            Segment(Span(slot.span.start, min(slot.span.end, part.span.end)), at, 0, slot.span.start)
            for slot, at in zip(part.slots, places, strict=True)
        ]
        try:
            return Delivery(self, part, places, self._copies.save(segments, job.blocks), rest)
        except BaseException:
            self.free_of_save(places)
            raise

    def put(self, client: HubClient, job: SaveJob, places: Sequence[int]) -> None:
        """Send the slots of a job whose copy has ended."""
        for slot, at in zip(job.slots, places, strict=True):
            client.put(job.right, slot.span.start, self._at(at).data)
        self._count(len(places))

    def free_of_save(self, places: Sequence[int]) -> None:
        with self._lock:
            self._for_saves += places

    def _at(self, place: int) -> npt.NDArray[np.uint8]:
        return self._memory[place : place + self._shard_bytes]

    def _count(self, shards: int) -> None:
        with self._lock:
            self._carried_bytes += shards * self._shard_bytes


class Delivery(NamedTuple):
    """A save: the copy into staging memory, and what follows it on the thread that commits."""

    remote: RemoteKV
    job: SaveJob
    places: list[int]
    copy: Transfer
    rest: SaveJob | None
    """The slots for which there was no room."""

    def send(self, client: HubClient) -> None:
        """Send the slots, whose copy has ended."""
        self.remote.put(client, self.job, self.places)

    def close(self) -> None:
        """Free the memory."""
        self.remote.free_of_save(self.places)


def _divided(job: SaveJob, n_slots: int) -> tuple[SaveJob, SaveJob | None]:
    if n_slots == len(job.slots):
        return job, None
    border = job.slots[n_slots].span.start
    first = replace(job, slots=job.slots[:n_slots], span=Span(job.span.start, border))
    return first, replace(job, slots=job.slots[n_slots:], span=Span(border, job.span.end))


class _Fetch(Transfer):
    """A load: one reply with all shards, and as many copies as staging memory makes of them.

    It goes on when ``done`` is called, on the worker's thread.
    """

    def __init__(
        self,
        remote: RemoteKV,
        client: HubClient,
        reply: PendingReply[Shards],
        slots: Sequence[int],
        job: LoadJob,
    ) -> None:
        self._remote = remote
        self._client = client
        self._reply = reply
        self._slots = slots
        self._job = job
        self._left: Sequence[Segment] = job.pieces
        """The pieces that are not copied yet."""
        self._shards: dict[int, Buffer] | None = None
        """The shards, by slot; None while the hub has not answered."""
        self._placed: list[Segment] = []
        self._copying: Transfer | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        try:
            return self._error is not None or self._goes_on()
        except Exception as error:  # ``wait`` raises it
            self._error = error
            return True

    def wait(self) -> None:
        while not self.done():
            # What failed, ``done`` notices.
            with contextlib.suppress(Exception):
                self._reply.result()
                if self._copying:
                    self._copying.wait()
        if self._error:
            raise self._error

    def _goes_on(self) -> bool:
        """Continue the load; returns whether all is copied."""
        if self._shards is None:
            if not self._reply.done():
                self._client.check_up()
                return False
            self._shards = dict(zip(self._slots, self._reply.payload(), strict=True))
        if self._copying:
            if not self._copying.done():
                return False
            copied, self._copying = self._copying, None
            self._remote.free(self._placed)
            copied.wait()
        if not self._left:
            return True
        placed = self._remote.place(self._left, self._shards)
        self._left = self._left[len(placed) :]
        if placed:
            try:
                self._copying, self._placed = self._remote.copy_in(placed, self._job), placed
            except BaseException:
                self._remote.free(placed)
                raise
        return False
