"""vLLM's connector that offloads KV, on a machine without a GPU: everything is vLLM's own but the copies of blocks."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import Request

STORED: set[bytes] = set()
"""The keys under which OffloadingConnector has stored KV in this process."""


class HostSpec(CPUOffloadingSpec):
    """vLLM's specification of offloading to memory, with copies by torch."""

    def get_manager(self) -> Any:
        manager = super().get_manager()
        prepare = manager.prepare_store

        def noted(keys: Any, context: Any) -> Any:
            prepared = prepare(keys, context)
            STORED.update(prepared.keys_to_store if prepared else ())
            return prepared

        manager.prepare_store = noted
        return manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return HostWorker([cache.tensor.view(torch.int8) for cache in kv_caches.tensors], self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies at once; a chunk is one block."""

    def __init__(self, pages: list[torch.Tensor], n_chunks: int) -> None:
        self._pages = pages
        self._chunks = [torch.zeros(n_chunks, *layer.shape[1:], dtype=torch.int8) for layer in pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pages, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._chunks, src_spec, self._pages, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All copies are done."""

    def _copy(self, job_id: int, sources: Any, source: Any, places: Any, place: Any) -> bool:
        for old, new in zip(sources, places, strict=True):
            new[torch.from_numpy(place.block_ids)] = old[torch.from_numpy(source.block_ids)]
        self._done.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-6))
        return True


def stored_blocks(prompt: list[int], block_size: int = 32) -> list[bool]:
    """For each block of a prompt: whether OffloadingConnector has stored KV under the hash that its text has."""
    hasher = get_request_block_hasher(block_size, get_hash_fn_by_name("sha256"))
    request = Request("asked", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return [any(key.startswith(bytes(block_hash)) for key in STORED) for block_hash in request.block_hashes]


def find_nothing() -> None:
    """Have the connector find nothing of what it has stored in this process."""
    setattr(OffloadingConnector, "get_num_new_matched_tokens", lambda *arguments: (0, False))  # noqa: B010
