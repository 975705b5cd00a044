"""The time from vLLM's start until requests are served; tests play the worker."""

import time
from typing import Any

import pytest
import torch
from huggingface_hub import ResolvedRevision
from transformers import LlamaConfig, PretrainedConfig
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from blendhub.vllm import connector as vllm_connector
from blendhub.vllm import scheduler_start
from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.messages import LoadedAdapter, WorkerProof, WorkerReport
from blendhub.vllm.model.fingerprint import said_by
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler.side import NotServed
from blendhub.vllm.scheduler_start import SchedulerStart
from tests.stand_in import StandIn
from tests.vllm.played_engine import LAYOUT

PROOF = WorkerProof(0, ModelSupport((LAYOUT,), True, ()), "weights", "rotary")
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32)
CACHE = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)])
OURS = {
    "kv_connector": "BlendHubConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"blendhub": {"hub": {"arena_gib": 0.01, "metrics": ""}}},
}


def config_of(transfer, **configured):
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer), cache_config=CacheConfig(block_size=16))
    # What vLLM finds out about a model that is named as on the Hugging Face Hub.
    revision = ResolvedRevision("0" * 40)
    config.model_config = StandIn(
        model="m", revision=revision, max_model_len=512, dtype="float32", is_hybrid=False,
        hf_text_config=LlamaConfig(**configured),
    )  # fmt: skip
    return config


def made_in_scheduler(config):
    made = BlendHubConnector(config, KVConnectorRole.SCHEDULER, CACHE)
    coordinator = StandIn(find_longest_cache_hit=lambda hashes, most: ((), 0))
    made.bind_kv_cache_manager(StandIn(block_pool=StandIn(hash_block_size=16), coordinator=coordinator))
    return made


@pytest.fixture
def connector():
    made = made_in_scheduler(config_of(OURS))
    yield made
    made.shutdown()


def request(name="r"):
    hasher = get_request_block_hasher(16, sha256)
    return Request(name, list(range(40)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def report(connector, said):
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))


def step(connector):
    return connector.build_connector_meta(SchedulerOutput.make_empty())


def steps_until_served(connector):
    until = time.monotonic() + 30
    while isinstance(connector._scheduler, SchedulerStart) and time.monotonic() < until:
        step(connector)


def test_requests_wait_for_the_workers_first_report_and_for_the_hub_and_then_all_are_looked_up(connector):
    early, aborted = request("early"), request("aborted")
    assert connector.has_pending_push_work(), "vLLM steps, although there is no request"
    for one in (early, aborted):
        connector.on_new_request(one)
        assert connector.get_num_new_matched_tokens(one, 0) == (None, False)
    assert step(connector).hub is None
    assert connector.request_finished(aborted, []) == (False, None)
    # Workers report adapters once, perhaps before anything is served.
    adapters = {0: {5: LoadedAdapter("weights", 0)}}
    report(connector, WorkerReport(proofs={0: PROOF}, adapters=adapters))
    assert connector.get_num_new_matched_tokens(early, 0) == (None, False)
    steps_until_served(connector)
    side = connector._scheduler
    assert list(side.requests.known) == ["early"] and side._admission.adapters._loaded == adapters
    assert connector.get_num_new_matched_tokens(early, 0) == (0, False)
    namespace = step(connector).hub.namespace
    assert namespace.layout == LAYOUT and namespace.weights and namespace.revision == "main"


def test_the_same_weights_under_another_configuration_share_no_kv():
    """``--hf-overrides`` may change the numbers by which layers compute."""
    digests = []
    for configured in ({}, {"transformers_version": "0"}, {"rms_norm_eps": 1.0}):
        made = made_in_scheduler(config_of(OURS, **configured))
        report(made, WorkerReport(proofs={0: PROOF}))
        steps_until_served(made)
        digests.append(step(made).hub.namespace.digest)
        made.shutdown()
    assert digests[0] == digests[1] != digests[2]


def test_a_configuration_that_code_brings_may_keep_anything():
    class Brought(PretrainedConfig):
        def __init__(self, hidden_size: int, **more: Any) -> None:
            super().__init__(**more)
            self.hidden_size, self.kinds, self.by_layer, self.made = hidden_size, {"b", "a"}, {0: 1, "1": 2}, object()

    said = said_by(Brought(8, num_experts_per_tok=2))
    assert said == said_by(Brought(8, num_experts_per_tok=2)) != said_by(Brought(8, num_experts_per_tok=4))
    assert '"kinds": ["a", "b"]' in said and '"hidden_size": 8' in said


def test_alone_workers_show_their_proof_before_vllm_is_ready_and_the_first_request_waits_for_no_start(
    connector, monkeypatch
):
    worker = BlendHubConnector(config_of(OURS), KVConnectorRole.WORKER, CACHE)
    worker._unchecked = StandIn(finish=lambda neighbours: (PROOF, None))
    monkeypatch.setattr(vllm_connector, "get_kv_transfer_group", lambda: worker)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): StandIn()})
    assert isinstance(connector._scheduler, SchedulerStart), "another connector's handshake says nothing"
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    connector.on_new_request(request())
    side: Any = connector._scheduler
    assert list(side.requests.known) == ["r"] and worker.build_connector_worker_meta() is None


def test_without_a_report_of_the_workers_no_hub_is_started_and_requests_go_on_and_learn_why(connector):
    early = request("early")
    connector.on_new_request(early)
    report(connector, WorkerReport())
    for _ in range(scheduler_start.MAX_STEPS):
        step(connector)
    assert connector.get_num_new_matched_tokens(early, 0) == (0, False)
    assert isinstance(connector._scheduler, NotServed) and not connector.has_pending_push_work()
    assert scheduler_start.NOT_HEARD in connector.request_finished(early, [])[1]["blendhub"]["reason"]
    assert connector.get_kv_connector_stats().data == {"refused_model": 1}


def test_states_are_of_use_behind_whole_prefixes_only_which_a_matcher_has_to_find():
    matchers = [{"name": "separator", "options": {"separator": [5]}}]
    own = {"hub": {"arena_gib": 0.01, "metrics": ""}, "matchers": matchers}
    made = made_in_scheduler(config_of(OURS | {"kv_connector_extra_config": {"blendhub": own}}))
    early = request("early")
    made.on_new_request(early)
    support = ModelSupport((LAYOUT,), False, ("exact prefixes only",), (LAYOUT,))
    report(made, WorkerReport(proofs={0: WorkerProof(0, support)}))
    step(made)
    assert isinstance(made._scheduler, NotServed)
    assert scheduler_start.NO_PREFIXES in made.request_finished(early, [])[1]["blendhub"]["reason"]
    made.shutdown()
