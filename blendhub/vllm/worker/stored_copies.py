"""Compares two stored copies of a text that were computed in different contexts.

A request that reuses nothing has its prompt computed, and stored, though some of it was stored before. Then both copies
are in the hub's arena, with the shards of all ranks, and one thread of one rank compares them there, beside the engine:
the bytes belong to both. See :mod:`blendhub.vllm.worker.comparison` for what a byte means.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from blendhub.client.arena_view import ArenaView
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Rotation, Segment
from blendhub.core.errors import HubError
from blendhub.core.spans import Span
from blendhub.vllm.messages import CopiesJob
from blendhub.vllm.model.pages import DTYPES
from blendhub.vllm.model.platforms import Tensors
from blendhub.vllm.model.rotary import rotated
from blendhub.vllm.spans import overlaps
from blendhub.vllm.worker.comparison import ComparedLayer, as_bytes, squares
from blendhub.vllm.worker.learning import MOST_WAITING, Learning

log = logging.getLogger(__name__)
NICENESS = 5
"""The niceness of the thread: the engine runs before it."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class StoredCopies:
    """``add`` is for the engine's thread, and waits for nothing."""

    def __init__(self, compared: ComparedLayer, client: Callable[[], HubClient | None], learning: Learning) -> None:
        """``client`` raises if the hub does not answer; None while the session is not open."""
        self._compared = compared
        self._client = client
        self._learning = learning
        self._jobs: SimpleQueue[CopiesJob] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, job: CopiesJob) -> None:
        if self._jobs.qsize() >= MOST_WAITING:
            self._learning.count(unlearned=job.n_tokens)
            return
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="blendhub-copies", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            job = self._jobs.get()
            try:
                client = self._client()
                if client is None:
                    raise HubError("the session with the hub is not open")
                self._learning.count(learned=self._compare(client, job))
            except Exception as error:
                self._learning.failed(job.request, job.n_tokens, error)

    def _compare(self, client: HubClient, job: CopiesJob) -> int:
        """Compare and report; returns the number of tokens. Both leases hold until all is read."""
        found = client.preview(job.tokens, variant=job.variant)
        later = tuple(match for match in found.matches if match.exact)
        measured = np.zeros(len(job.tokens), np.uint8)
        with (
            client.reading(client.acquire(job.earlier, job.variant)) as before,
            client.reading(client.acquire(later, job.variant)) as after,
        ):
            if client.arena is None:
                raise HubError("the hub's arena is not mapped")
            for one, other, span in _pairs(before, after):
                measured[span.start : span.end] = self._bytes(
                    client.arena, client.namespace.world_size, one, other, span
                )
        if measured.any():
            for matches in (job.earlier, later):
                client.learn(matches, measured[: matches[-1].span.end].data, job.variant)
        return int(np.count_nonzero(measured))

    def _bytes(self, arena: ArenaView, ranks: int, one: Segment, other: Segment, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of the tokens of a span of the prompt that two pieces hold."""
        old, new = (self._stored(arena, ranks, piece, span) for piece in (one, other))
        moved_from, moved_to = (span.start + piece.source_start - piece.span.start for piece in (one, other))
        keys = _moved(old[0], self._compared.layer.rotation, moved_from, moved_to)
        with torch.inference_mode():
            found: npt.NDArray[np.uint8] = as_bytes(squares(new, (keys, old[1])), self._compared.least).numpy()
        return found

    def _stored(self, arena: ArenaView, ranks: int, piece: Segment, span: Span) -> Tensors:
        """Keys and values at the compared layer, with the heads of all ranks."""
        layout, layer = self._compared.layout, self._compared.index
        first, n = piece.row + span.start - piece.span.start, len(span)

        def rows(part_at: int, row_bytes: int) -> torch.Tensor:
            shards = [piece.shard + rank * layout.shard_bytes + part_at + first * row_bytes for rank in range(ranks)]
            parts = [torch.from_numpy(arena.slot(at, n * row_bytes)) for at in shards]
            heads = [part.view(TORCH_DTYPES[layout.dtype]).view(n, layout.kv_heads, -1).float() for part in parts]
            return torch.cat(heads, 1)

        keys = rows(layout.keys_at(layer), layout.key_row_bytes)
        if not layout.value_dim:
            return keys, keys[..., :0]
        return keys, rows(layout.values_at(layer), layout.value_row_bytes)


def _pairs(some: Sequence[Segment], others: Sequence[Segment]) -> Iterator[tuple[Segment, Segment, Span]]:
    """The pieces of ascending ones that hold the same tokens of the prompt, and the tokens."""
    held = ([piece.span for piece in pieces] for pieces in (some, others))
    for one, other, span in overlaps(*held):
        yield some[one], others[other], span


def _moved(keys: torch.Tensor, rotation: Rotation | None, old: int, new: int) -> torch.Tensor:
    """Keys of tokens that follow each other from position ``old`` on as they would be from ``new`` on."""
    if rotation is None or old == new:
        return keys
    n = len(keys)
    # Few rows of the table, which lies on the device.
    rows = torch.cat([rotation.cos_sin[old : old + n], rotation.cos_sin[new : new + n]]).cpu()
    at = torch.arange(n)
    return rotated(keys, Rotation(rows, rotation.neox, rotation.offset), at, at + n)
