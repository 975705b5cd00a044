"""The load of one request on a worker: copy under the lookup's lease, and release it to prove that it held."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.client.answer import Answer
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Done
from blendhub.core.errors import AdapterReplaced, DeadlineExceeded, HubError, StaleEpoch
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.worker.layer_copies import LayerCopies, Load
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.recompute import Blend

log = logging.getLogger(__name__)


class PinnedArena(NamedTuple):
    """The arena that the device uses, of one life of the hub. The client may have registered with a later one."""

    client: HubClient
    epoch: int
    nonce: str


Open = Callable[[], PinnedArena | None]
"""Returns None while the arena is still to come. Raises if it failed to come."""

LONG_COPY_S = 60.0


class LoadProgress(IntEnum):
    """How far a load has come on a rank. The lowest of all ranks counts: no rank fails while another still copies."""

    PENDING = 0
    PROBEABLE = 1
    """What probes read is copied."""
    FAILED = 2
    COPIED = 3
    """Recomputation may begin; it still reads maps under the lease."""
    READ = 4
    """All is read, and the proof that the lease held is still missing."""
    PROVEN = 5
    """The lease held until all ranks had copied, so the copied bytes are those that were found; and nothing is written
    any more that another connector may write, too."""


class LoadTask:
    """``advance`` takes it forward and never waits for the hub. The hub has ``timeout_s`` for all of its answers.

    One rank releases the lease, once all ranks have copied; it calls ``release``.
    """

    def __init__(
        self, job: LoadJob, open: Open, copies: LayerCopies, adapters: LoadedAdapters, timeout_s: float, releases: bool
    ) -> None:
        """``releases``: whether this rank releases the lease."""
        self.job = job
        self.blend: Blend | None = None
        self.is_cancelled = False
        self.seconds = 0.0
        """The seconds until the KV was copied."""
        self._error: Exception | None = None
        self._open = open
        self._copies = copies
        self._adapters = adapters
        self._releases = releases and job.source.lease is not None
        self.maps: list[npt.NDArray[np.uint8]] = []
        """The maps of the decision, in the arena. They are read until the blend has ended."""
        # One half to open the session, and one to release the lease.
        self._timeout_s = timeout_s / 2
        self._begun_at = time.monotonic()
        self._client: HubClient | None = None
        self._load: Load | None = None
        """What is copied; None before and behind that."""
        self._releasing: Answer[Done] | None = None
        self._is_probeable = self._is_copied = self._is_proven = False
        self._warn_at = self._begun_at + LONG_COPY_S
        self._told = LoadProgress.PENDING

    @property
    def error(self) -> Exception | None:
        return self._error or (self.blend.error if self.blend else None)

    @property
    def reads_maps(self) -> bool:
        """Whether forwards may still read maps under the lease."""
        if not self.job.decision.maps:
            return False
        return self.blend is None or self.blend.result is None or self.blend.is_writing

    @property
    def is_copying(self) -> bool:
        return self._load is not None

    @property
    def progress(self) -> LoadProgress:
        is_writing = self.blend is not None and self.blend.is_writing
        if self.error:
            return LoadProgress.PENDING if self._load or is_writing else LoadProgress.FAILED
        if self._is_copied:
            is_proven = self._is_proven or not self._releases
            if self.reads_maps:
                return LoadProgress.COPIED
            return LoadProgress.PROVEN if is_proven and not is_writing else LoadProgress.READ
        return LoadProgress.PROBEABLE if self._is_probeable else LoadProgress.PENDING

    def told(self) -> LoadProgress:
        """The progress, which the other ranks are told."""
        self._told = self.progress
        return self._told

    @property
    def has_news(self) -> bool:
        """Whether there is progress that the other ranks were not told of, or what a probe has measured."""
        return self.progress != self._told or (self.blend is not None and self.blend.is_measured)

    def cancel(self) -> None:
        """The request was aborted; the load ends when its copy has ended."""
        self.is_cancelled = True
        self.fail(HubError("the request was aborted"))

    def fail(self, error: Exception) -> None:
        """The load has failed; it ends when its copy has ended."""
        self._error = self.error or error

    def stop(self, error: Exception) -> None:
        """The load has failed, and recomputes nothing any more; wait until its copy has ended."""
        self.fail(error)
        self.blend = None
        if self._load:
            with contextlib.suppress(Exception):  # it has failed already
                self._load.all.wait()

    def advance(self) -> None:
        """Do what is possible without waiting."""
        try:
            self._adapters.check(self.job.adapter, is_loaded=True)
        except AdapterReplaced as error:
            self.fail(error)
        try:
            if not (self._load or self.error or self._is_copied):
                if arena := self._open():
                    if arena.epoch != self.job.source.epoch:
                        raise StaleEpoch("the hub was restarted since the lookup")
                    self._client, source = arena.client, self.job.source
                    segments = [replace(piece, shard=self._client.shard_at(piece.shard)) for piece in source.pieces]
                    state_at = None if source.state is None else self._client.state_at(source.state)
                    start, tables = self.job.decision.start, self.job.blocks
                    self._load = self._copies.load(segments, tables, start, state_at, source.donors)
                    maps = self.job.decision.maps
                    self.maps = [self._client.map_of(map.slot, map.shard_bytes) for map in maps]
                elif time.monotonic() - self._begun_at > self._timeout_s:
                    raise DeadlineExceeded("the worker's session with the hub was not open in time")
            if self._load:
                self._look_at_copy(self._load)
            elif self._client and self._releasing and not (self.error or self._is_proven):
                if self._releasing.done():
                    # A restarted hub does not know the lease, because leases have random ids.
                    self._releasing.result()
                    self._is_proven = True
                else:
                    self._client.check_up()
        except Exception as error:  # vLLM can compute the tokens after any error
            self.fail(error)

    def release(self) -> None:
        """All ranks have read what they need, or stopped to: release the lease."""
        if not self._releases or self._releasing:
            return
        try:
            client = self._client
            if client is None and (arena := self._open()):
                client = arena.client
            if client:
                assert self.job.source.lease is not None
                self._releasing = client.release(self.job.source.lease, timeout=self._timeout_s)
        except Exception as error:  # then the scheduler releases it
            self.fail(error)

    def _look_at_copy(self, load: Load) -> None:
        if load.all.done():
            self._load = None
            load.all.wait()
            self._is_copied = True
            self.seconds = time.monotonic() - self._begun_at
            return
        if not self._is_probeable and load.probed.done():
            load.probed.wait()
            self._is_probeable = True
        if self._warn_at < time.monotonic():
            # vLLM cannot have the blocks back while the device may still write into them.
            self._warn_at = math.inf
            log.warning(
                "the copy of request %s has not ended within %.0f s, and the request waits for it; if it never does, "
                "the device is stuck: end the engine",
                self.job.request, LONG_COPY_S,
            )  # fmt: skip
