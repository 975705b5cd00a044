"""A plugin of pytest for vLLM's tests: BlendHub is the connector where they have another one.

It plays what surrounds BlendHub there: what the other connector has lies in a real hub, and a worker reports what the
test says in its place.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import recorder
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import LoadResult, WorkerProof, WorkerReport
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler import loads
from blendhub.vllm.scheduler_start import SchedulerStart
from blendhub.vllm.watching.stats import BlendHubStats

OTHERS = (
    "ExampleConnector", "MockKVConnector", "NixlConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"
)  # fmt: skip
"""The connectors in whose place BlendHub is."""

BLOCK = 16
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="float32", chunk_tokens=BLOCK)
PROOF = WorkerProof(0, ModelSupport((LAYOUT,), True, ()), "weights", "rotary")
SETTINGS = {
    "hub": {"arena_gib": 0.01, "metrics": ""},
    "mode": "exact",
    "chunk_tokens": BLOCK,
    "policy": {"min_reused_tokens": 2},  # the prompts of many tests have their first token in common
}

# The hub's answers are waited for however busy the machine is.
loads.LOOKUP_WAIT_S = 5.0

PEERS: list["Peer"] = []
"""Those of the running test."""


class Peer(BlendHubConnector):
    """BlendHub in the place of another connector."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._other, transfer.kv_connector_extra_config = transfer.kv_connector_extra_config, {"blendhub": SETTINGS}
        self._defers = dict[str, int]()
        self._closing = contextlib.ExitStack()
        self._new = set[str]()
        """The requests of which BlendHub hears when vLLM asks for them: what they load was stored before."""
        transfer.kv_role = "kv_both"  # the tests do not heed it
        super().__init__(vllm_config, role, kv_cache_config)
        PEERS.append(self)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._hear(WorkerReport(proofs={0: PROOF}, opened=1))
        while isinstance(self._scheduler, SchedulerStart):
            super().build_connector_meta(SchedulerOutput.make_empty())
        hub = super().build_connector_meta(SchedulerOutput.make_empty()).hub
        self._writer = self._closing.enter_context(join_hub(hub, "peer", 0, PluginHost.discover()))
        self._writer.reach()

    def has(self, request: Request, n: int) -> None:
        """Have the hub hold the first ``n`` tokens of a request, as the other connector does."""
        tokens = np.asarray(request.all_token_ids[:n], np.uint32)
        if len(tokens) and (right := self._writer.reserve(tokens, Span(0, len(tokens))).result().right):
            self._writer.commit(right, right.end).result()

    def on_new_request(self, request: Request) -> None:
        self._new.add(request.request_id)
        self._defers[request.request_id] = self._other.get("num_defers_before_matching", 0)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        recorder.asked()
        if self._defers.get(request.request_id):
            self._defers[request.request_id] -= 1
            return None, False
        if n := self._other.get("matched_tokens"):
            self.has(request, num_computed_tokens + n)
        if request.request_id in self._new:
            self._new.remove(request.request_id)
            params = request.kv_transfer_params or {}
            if params.get("do_remote_prefill"):
                self.has(request, request.num_tokens)
            request.kv_transfer_params = {"blendhub": {"store": bool(params.get("do_remote_decode"))}}
            super().on_new_request(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = super().build_connector_meta(scheduler_output)
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        # Tests count what vLLM shows a connector.
        plan.requests = [*scheduler_output.scheduled_new_reqs, *resumed]
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Report what a worker of BlendHub would."""
        failed = set(connector_output.failed_recving or ())
        for request in self._scheduler.requests.known:
            if any(map(connector_output.invalid_block_ids.intersection, self._blocks.of(request))):
                failed.add(request)
        self._hear(
            WorkerReport(
                loads=dict.fromkeys(connector_output.finished_recving or (), LoadResult())
                | dict.fromkeys(failed, LoadResult(error="the test says so")),
                committed_ranks={
                    request: 1
                    for request in connector_output.finished_sending or ()
                    if request in self._scheduler.requests.ended
                },
            )
        )

    def shutdown(self) -> None:
        self._closing.close()
        super().shutdown()

    def _hear(self, report: WorkerReport) -> None:
        super().update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


class Method(Mock):
    """A method of a connector that a test made up: the test sets what it returns, and BlendHub answers."""

    answer: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        said = super().__call__(*arguments, **named)
        return self.answer(said, *arguments, **named)


class Seat:
    """The attribute ``connector`` of vLLM's scheduler: behind a connector that a test makes up later is BlendHub."""

    def __get__(self, scheduler: Scheduler, owner: type) -> Any:
        return self if scheduler is None else scheduler.__dict__["connector"]

    def __set__(self, scheduler: Scheduler, connector: Any) -> None:
        peer = scheduler.__dict__.get("connector")
        if isinstance(connector, Mock) and isinstance(peer, Peer):
            _speak_for(connector, peer)
        scheduler.__dict__["connector"] = connector


def _speak_for(mock: Mock, peer: Peer) -> None:
    """Have BlendHub answer what vLLM asks the mock, of which the test counts the calls."""

    def matched(said: Any, request: Request, n_computed: int) -> tuple[int | None, bool]:
        peer.has(request, n_computed + said[0])
        return peer.get_num_new_matched_tokens(request, n_computed)

    for name in dir(KVConnectorBase_V1):
        if callable(getattr(peer, name)) and not name.startswith("_"):
            method = Method()
            method.answer = lambda said, *arguments, name=name: getattr(peer, name)(*arguments)
            setattr(mock, name, method)
    mock.get_num_new_matched_tokens.answer = matched


def pytest_configure() -> None:
    # What the tests need of a model is its configuration, in the cache of the Hugging Face Hub.
    model = Path(os.environ["HF_HOME"], "hub", "models--facebook--opt-125m")
    for file, text in {
        "refs/main": "0",
        "snapshots/0/config.json": '{"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "float16"}',
    }.items():
        (model / file).parent.mkdir(parents=True, exist_ok=True)
        (model / file).write_text(text)
    if recorder.OURS:
        Scheduler.connector = Seat()
        nixl.NixlKVConnectorStats = BlendHubStats


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker("skip_global_cleanup")  # of what only engines leave behind; it takes a second


def pytest_collection_finish() -> None:
    """Take the connectors' places; the modules of the tests have registered some of them, which works once."""
    if recorder.OURS:
        KVConnectorFactory._registry |= dict.fromkeys(OTHERS, lambda: Peer)
        # A connector of the tests hands on what it is asked, and counts that.
        if utils := sys.modules.get("tests.v1.kv_connector.unit.utils"):
            utils.ExampleConnector = Peer


def pytest_runtest_teardown() -> None:
    while PEERS:
        PEERS.pop().shutdown()
