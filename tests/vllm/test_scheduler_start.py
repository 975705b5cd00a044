"""The time from vLLM's start until requests are served; tests play the worker."""

import time

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from blendhub.core.errors import BlendHubError
from blendhub.core.layout import KVLayout
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm import scheduler_start
from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.messages import LoadedAdapter, WorkerProof, WorkerReport
from blendhub.vllm.model_support import ModelSupport, unsupported
from blendhub.vllm.plugin import register
from tests.stand_in import StandIn

register()
init_none_hash(sha256)
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
PROOF = WorkerProof(0, ModelSupport((LAYOUT,), True, ()), "weights", "rotary")
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32)
CACHE = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)])
OURS = {
    "kv_connector": "BlendHubConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"blendhub": {"hub": {"arena_gib": 0.01, "metrics": ""}}},
}


def config_of(transfer):
    config = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer), cache_config=CacheConfig(block_size=16))
    config.model_config = StandIn(model="m", revision=None, max_model_len=512, dtype="float32", is_hybrid=False)
    return config


MANAGER = StandIn(
    block_pool=StandIn(hash_block_size=16),
    coordinator=StandIn(find_longest_cache_hit=lambda hashes, most: ((), 0)),
)


def made_in_scheduler(config):
    made = BlendHubConnector(config, KVConnectorRole.SCHEDULER, CACHE)
    made.bind_kv_cache_manager(MANAGER)
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
    while connector._starting and time.monotonic() < until:
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
    assert list(side._requests) == ["early"] and side._admission.adapters._loaded == adapters
    assert connector.get_num_new_matched_tokens(early, 0) == (0, False)
    assert side.executor.place.namespace.layout == LAYOUT and side.executor.place.namespace.weights


@pytest.mark.parametrize(
    "proofs, reason",
    [
        ({0: WorkerProof(0, unsupported("it has no KV"))}, "it has no KV"),
        ({}, scheduler_start.NOT_HEARD),
    ],
    ids=["unsupported", "not heard"],
)
def test_without_reuse_no_hub_is_started_and_requests_go_on_and_learn_why(connector, proofs, reason):
    early = request("early")
    connector.on_new_request(early)
    report(connector, WorkerReport(proofs=proofs))
    for _ in range(scheduler_start.MOST_STEPS):
        step(connector)
    assert connector.get_num_new_matched_tokens(early, 0) == (0, False)
    assert connector._scheduler is None and not connector.has_pending_push_work()
    assert reason in connector.request_finished(early, [])[1]["blendhub"]["reason"]
    assert connector.get_kv_connector_stats().data == {"refused_model": 1}


def test_several_ranks_blend_if_all_of_them_can_and_all_have_reported(monkeypatch):
    config = config_of(OURS)
    config.parallel_config.tensor_parallel_size = 2
    other = msgspec.structs.replace(PROOF, rank=1, weights="others")
    for proofs, blends, ranks in (
        ({0: PROOF}, None, None),
        ({1: other, 0: PROOF}, True, 2),
        ({0: PROOF, 1: msgspec.structs.replace(other, support=ModelSupport((LAYOUT,), False, ("no",)))}, False, 2),
    ):
        made = made_in_scheduler(config)
        report(made, WorkerReport(proofs=proofs))
        steps_until_served(made)
        side = made._scheduler
        assert (side._admission._support.blends if side else None) == blends
        assert (side.executor.place.namespace.world_size if side else None) == ranks
        made.shutdown()


def test_a_hub_that_refuses_the_engine_ends_it(monkeypatch):
    made = made_in_scheduler(config_of(OURS))
    made._starting._settings = msgspec.structs.replace(made._settings, matchers=(PluginChoice("nobody"),))
    monkeypatch.setattr(scheduler_start, "finds_prefixes", lambda *given: True)
    report(made, WorkerReport(proofs={0: PROOF}))
    with pytest.raises(BlendHubError, match="nobody"):
        steps_until_served(made)
    made.shutdown()
