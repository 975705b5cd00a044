"""A connector that does to vLLM what its NixlConnector does, with files in the place of NIXL.

Its class has the same name. It shows handshakes, and accepts no others, as vLLM's ``nixl/base_scheduler.py`` does.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


class Payload(KVConnectorHandshakeMetadata):
    """What the connectors of two engines tell each other first."""


@dataclass
class Transfers(KVConnectorMetadata):
    """The blocks to write to files, and to read from files, by request."""

    sent: dict[str, list[int]] = field(default_factory=dict)
    received: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


class NixlConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.kv_connector_extra_config["folder"])
        self._n_blocks = kv_cache_config.num_blocks
        self._pages: dict[str, torch.Tensor] = {}
        self._transfers = Transfers()

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._pages = kv_caches

    def get_handshake_metadata(self) -> Payload:
        return Payload()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, blocks in self._plan.received.values():
            kept = torch.load(self._folder / name)
            for layer, pages in self._pages.items():
                at = pages.shape.index(self._n_blocks)
                pages.index_copy_(at, torch.tensor(blocks), kept[layer].narrow(at, 0, len(blocks)))

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for request, blocks in self._plan.sent.items():
            kept = {
                layer: pages.index_select(pages.shape.index(self._n_blocks), torch.tensor(blocks))
                for layer, pages in self._pages.items()
            }
            torch.save(kept, self._folder / request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(self._plan.sent) or None, set(self._plan.received) or None

    @property
    def _plan(self) -> Transfers:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Transfers)
        return plan

    # In the scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if not all(isinstance(payload, Payload) for payload in metadata.values()):
            raise ValueError("NixlConnectorScheduler expects NixlHandshakePayload for handshake metadata.")
        print(f"played NIXL has heard {len(metadata)} handshakes", flush=True)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            n_tokens = len(request.prompt_token_ids) - num_computed_tokens
            return n_tokens, n_tokens > 0
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            request.kv_transfer_params["do_remote_prefill"] = False
            if num_external_tokens:
                name = request.kv_transfer_params["remote_request_id"]
                self._transfers.received[request.request_id] = name, blocks.get_block_ids()[0]

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def has_pending_push_work(self) -> bool:
        return bool(self._transfers.sent)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._transfers.sent[request.request_id] = block_ids
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request.request_id}
