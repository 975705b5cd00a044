"""A client of the peer's server behind a pipe: with the peer's interpreter, it runs commands and times them.

Commands come as lines of JSON, answers go back likewise. Needs only numpy, torch and the peer, nothing of BlendHub.
"""

import json
import logging
import os
import sys
import time
from typing import Any

CHUNK = 256
LAYERS = 8
HIDDEN = 1024
HEADS = 8
BLOCK = 128
CHUNKS = 8
BLOCKS = CHUNKS * CHUNK // BLOCK
MODEL, PAGED_MODEL = "a model", "a model in pages"
WORKER = 2
TIMEOUT_S = 60.0


class Peer:
    """A worker's client of the peer's server."""

    def __init__(self, port: int) -> None:
        logging.disable(logging.CRITICAL)
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
        from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        self._client.noop().result(timeout=TIMEOUT_S)
        registered = self._client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(1, MODEL, 1, 16, LAYERS, HIDDEN, "bfloat16", False, CHUNK)
        ).result(timeout=TIMEOUT_S)
        shape = torch.Size([2, LAYERS, CHUNK, HIDDEN])
        metadata = EngineDrivenContextMetadata(MemoryLayoutDesc(shapes=[shape], dtypes=[torch.bfloat16]), 16, False)
        self._context = EngineDrivenContextShm(
            metadata, self._client, TIMEOUT_S, registered.shm_name, registered.pool_size
        )
        self._source = torch.ones(shape, dtype=torch.bfloat16)
        self._target = torch.zeros(shape, dtype=torch.bfloat16)
        # Pages as vLLM has them on a CPU: of each head and token the key, and behind it the value.
        blocks = [HEADS, BLOCK, 2 * HIDDEN // HEADS]
        self._pages = {f"layer {n}": torch.randn(2 * BLOCKS, *blocks).to(torch.bfloat16) for n in range(LAYERS)}
        order = torch.randperm(2 * BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        self._stored_from, self._brought_to = order[:BLOCKS], order[BLOCKS:]
        self._worker = EngineDrivenTransferContext(WORKER, self._client)
        self._worker.register(self._pages, PAGED_MODEL, 1, CHUNK // BLOCK, TIMEOUT_S)

    def round_trips(self, repeats: int) -> list[float]:
        """Seconds of each of so many requests that ask for nothing."""
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            self._client.noop().result(timeout=TIMEOUT_S)
            seconds.append(time.perf_counter() - begun)
        return seconds

    def store(self, first: int) -> float:
        """Store new chunks from pages, as its worker does."""
        key = self._key(PAGED_MODEL, first)
        begun = time.perf_counter()
        stored = self._worker.submit_store(
            key.request_id, key, self._pages, [self._stored_from], None, CHUNK // BLOCK
        ).result(timeout=TIMEOUT_S)
        if not stored:
            raise SystemExit("the peer's worker did not store")
        return time.perf_counter() - begun

    def retrieve(self, first: int) -> float:
        """Look them up and bring them back into other pages, as its worker does."""
        key = self._key(PAGED_MODEL, first)
        begun = time.perf_counter()
        self._look_up(key)
        brought = self._worker.submit_retrieve(
            key.request_id, key, self._pages, [self._brought_to], None, CHUNK // BLOCK
        ).result(timeout=TIMEOUT_S)
        if not brought:
            raise SystemExit("the peer's worker did not bring back what it stored")
        return time.perf_counter() - begun

    def store_bytes(self, first: int) -> float:
        """Get slots for new chunks, fill them with what lies in one piece, and say so."""
        key = self._key(MODEL, first)
        begun = time.perf_counter()
        prepared = self._context.prepare_store(key, 1)
        if prepared is None or len(prepared[0]) != CHUNKS:
            raise SystemExit(f"the peer gave {prepared and len(prepared[0])} slots for {CHUNKS} chunks")
        for slot in prepared[0]:
            slot.copy_(self._source)
        if not self._context.commit_store(key, 1, prepared[0]):
            raise SystemExit("the peer did not commit")
        return time.perf_counter() - begun

    def retrieve_bytes(self, first: int) -> float:
        """Look chunks up, copy them out, and let them go."""
        key = self._key(MODEL, first)
        begun = time.perf_counter()
        found = self._look_up(key)
        slots = self._context.prepare_retrieve(key, 1)
        if not slots or len(slots) != CHUNKS:
            raise SystemExit(f"the peer found {found} and gave {slots and len(slots)} of {CHUNKS} chunks")
        for slot in slots:
            self._target.copy_(slot)
        self._context.commit_retrieve(key, 1)
        return time.perf_counter() - begun

    def clear(self) -> None:
        """Forget what was stored, so that the next is stored where it was: in memory that was touched before."""
        self._client.clear(True).result(timeout=TIMEOUT_S)

    def close(self) -> None:
        for pages in self._pages.values():
            if not pages[self._brought_to].equal(pages[self._stored_from]):
                raise SystemExit("what the peer brought back is not what it stored")
        self._worker.close()
        self._context.close()

    def _look_up(self, key: Any) -> Any:
        self._client.lookup(key, 1).result(timeout=TIMEOUT_S)
        return self._client.wait_prefetch_status(key.request_id, TIMEOUT_S).result(timeout=TIMEOUT_S)

    def _key(self, model: str, first: int) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        length = CHUNKS * CHUNK
        tokens = tuple(range(first, first + length))
        return IPCCacheServerKey(model, 1, 0, tokens, 0, length, request_id=f"{time.time_ns()}", num_kv_readers=1)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the peer prints must not end up among the answers
    peer = Peer(int(sys.argv[1]))
    try:
        for line in sys.stdin:
            command: list[Any] = json.loads(line)
            answers.write(json.dumps(getattr(peer, command[0])(*command[1:])) + "\n")
            answers.flush()
    finally:
        peer.close()


if __name__ == "__main__":
    main()
