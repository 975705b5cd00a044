"""The connector in vLLM's scheduler, with a real hub and vLLM's own requests; the workers are played by the test."""

import json
import logging
import threading
import time

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from blendhub import PluginHost
from blendhub.arena_view import SHM
from blendhub.client import HubClient
from blendhub.config import HubConfig, Listen, StoreChoice
from blendhub.errors import LeaseError
from blendhub.hub.embedded import HubInThread
from blendhub.layout import KVLayout, Namespace
from blendhub.observers import Observers
from blendhub.plugin_choice import PluginChoice
from blendhub.vllm.messages import HubAddress, LoadResult, WorkerReport
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.plugin import register
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.connector_scheduler import ConnectorScheduler
from blendhub.vllm.scheduler.startup import StartupFacts
from blendhub.vllm.settings import ReusePolicy, Settings
from blendhub.vllm.stats import BlendHubStats
from tests.vllm.standing_still import standing_still

register()
init_none_hash(sha256)
BLOCK = 16
HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
SPACE = Namespace(model="m", layout=LAYOUT)
SETTINGS = Settings(
    policy=ReusePolicy(min_reused_tokens=16, min_saved_tokens=1, max_recompute_share=1.0), lookup_wait_ms=1000.0
)
FACTS = StartupFacts(settings=SETTINGS, blends=True, role="kv_both", max_model_len=4096, namespace=SPACE)
TEXT = np.random.default_rng(1).permutation(60_000).tolist()


def text(number: int, length: int) -> list[int]:
    """Tokens that no other text has."""
    return TEXT[1000 * number : 1000 * number + length]


class Engine:
    """vLLM around the scheduler side: requests, steps, and one worker that stores what it is told to."""

    def __init__(self, hub: HubInThread, address: HubAddress | None = None) -> None:
        config = VllmConfig(
            kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both"),
            cache_config=CacheConfig(block_size=BLOCK),
        )
        address = address or HubAddress(hub.inproc_endpoint, PluginChoice("inproc"))
        admission = Admission(config, SETTINGS, ModelSupport(LAYOUT, True, ()), SPACE)
        self.side = ConnectorScheduler(
            config, SETTINGS, admission, address, "engine", HOST, FACTS, Observers(HOST.observers())
        )
        self.side.saves.block_ids = lambda request: list(range(1, 101))
        self.client = HubClient(address.endpoint, address.transport.name, address.transport.options, host=HOST)
        self.client.register("engine", SPACE, 0)
        self.saved = []
        self.hub = hub

    def close(self) -> None:
        self.client.close()
        self.side.close()

    def request(self, name: str, prompt: list[int], salt: str | None = None) -> Request:
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request(name, prompt, SamplingParams(max_tokens=99), None, cache_salt=salt, block_hasher=hasher)

    def settle(self) -> None:
        """Until the hub has answered all that the scheduler side asked."""
        answered = threading.Event()
        self.side.executor.run_later(answered.set)
        assert answered.wait(10)

    def step(self, **computed: tuple[int, int]) -> list:
        """A step that computes so many tokens of these requests after so many; returns what has to be saved."""
        cached = CachedRequestData.make_empty()
        cached.req_ids.extend(computed)
        cached.num_computed_tokens.extend(before for before, _ in computed.values())
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = {name: scheduled for name, (_, scheduled) in computed.items()}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        plan = self.side.plan(output)
        self.settle()
        for job in plan.saves:
            self.client.commit(job.right, job.span.end)
        self.saved += plan.saves
        self.ending = plan.ending
        return plan.saves

    def load(self, request: Request, local: int = 0, error: str = "") -> int:
        """What vLLM does with a request whose turn it is; returns how far its KV is there after it."""
        told, _ = self.side.matched(request, local)
        assert told is not None
        if told:
            self.side.allocated(request, list(range(1, 1 - (-(local + told) // BLOCK))), told)
            self.step()
            self.side.process_report(WorkerReport({request.request_id: LoadResult(error=error)}))
        return local if error else local + told

    def end(self, request: Request, computed: int) -> None:
        request.num_computed_tokens = computed
        blocks = list(range(1, 1 - (-computed // BLOCK)))
        if self.side.ended(request, blocks)[0]:
            while request.request_id not in self.ending:
                self.step()
            self.side.process_report(WorkerReport(settled={request.request_id: 1}))
        self.settle()

    def serve(self, name: str, prompt: list[int], salt: str | None = None) -> int:
        """A request from its arrival to its end; returns how many of its tokens were reused."""
        request = self.request(name, prompt, salt)
        self.side.arrived(request)
        there = self.load(request)
        self.step(**{name: (there, len(prompt) - there)})
        request.append_output_token_ids(1)
        self.end(request, len(prompt))
        return there

    def found(self, tokens: list[int], *, exact: bool) -> set[int]:
        matches = self.client.lookup(np.asarray(tokens, np.uint32), acquire=False).matches
        return {p for match in matches if match.exact is exact for p in range(match.span.start, match.span.end)}

    def gauge(self, name: str) -> float:
        return self.client.stats().gauges[name]


@pytest.fixture
def engine():
    with HubInThread(HubConfig(arena_gib=0.01, metrics=""), HOST) as hub:
        made = Engine(hub)
        yield made
        made.close()


def test_what_was_served_is_found_exactly_by_the_same_prompt_and_moved_in_another(engine):
    document = text(0, 96)
    engine.serve("a", document)
    assert engine.found(document, exact=True) == set(range(96))
    request = engine.request("b", text(1, 32) + document + text(2, 32))
    engine.side.arrived(request)
    assert engine.load(request) == 128
    told = engine.side._requests["b"].report()
    assert (told["exact_tokens"], told["moved_tokens"]) == (0, 96)


def test_no_other_request_can_find_blended_blocks_in_vllm_s_cache(engine):
    engine.serve("a", text(0, 96))
    prompt = text(1, 32) + text(0, 96) + text(2, 32)
    blended, plain = engine.request("b", prompt), engine.request("c", prompt)
    engine.side.arrived(blended)
    engine.load(blended)
    exact = 32 // BLOCK
    assert blended.block_hashes[:exact] == plain.block_hashes[:exact]
    assert not set(blended.block_hashes[exact:]) & set(plain.block_hashes)


def test_nothing_is_leased_once_everything_has_ended(engine):
    document = text(0, 96)
    engine.serve("a", document)
    engine.serve("b", document + text(1, 64))
    engine.serve("c", text(2, 40) + document)
    assert (engine.gauge("read_leases"), engine.gauge("write_leases")) == (0, 0)


def test_of_blended_text_nothing_is_stored_as_exact(engine):
    engine.serve("a", text(0, 96))
    prompt = text(1, 64) + text(0, 96) + text(2, 64)
    engine.serve("b", prompt)
    # Before the first moved token all is as the model alone computes it.
    assert engine.found(prompt, exact=True) == set(range(64))
    assert set(range(160, 224)) <= engine.found(prompt, exact=False)


def test_an_answer_is_stored_too(engine):
    prompt, answer = text(0, 64), text(3, 32)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 64))
    for token in answer:
        request.append_output_token_ids(token)
    engine.end(request, 95)
    assert engine.found(prompt + answer, exact=True) == set(range(95))


def test_of_a_request_that_is_aborted_only_what_was_computed_is_stored(engine):
    prompt = text(0, 200)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 64))
    engine.end(request, 64)
    assert all(job.span.end <= 64 for job in engine.saved)
    assert engine.found(prompt, exact=True) == set(range(64))
    assert engine.gauge("write_leases") == 0


def test_what_a_preempted_request_had_computed_is_not_gone_on_with_as_exact_when_it_comes_back_blended(engine):
    beginning, document = text(0, 64), text(1, 96)
    engine.serve("beginning", beginning)
    prompt = beginning + document + text(2, 64)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    assert engine.load(request) == 64
    engine.step(a=(64, 16))
    engine.step(a=(80, 16))
    # It is preempted, and before its next turn another request brings its text to the hub.
    engine.serve("document", text(3, 32) + document)
    assert engine.load(request) == 160
    engine.step(a=(160, 64))
    request.append_output_token_ids(1)
    engine.end(request, 224)
    assert engine.found(prompt, exact=True) <= set(range(96))


def test_a_load_that_fails_does_not_make_exact_what_an_earlier_one_blended(engine):
    document, answer = text(1, 96), text(3, 33)
    engine.serve("document", document)
    prompt = text(0, 64) + document + text(2, 64)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    assert engine.load(request) == 160
    engine.step(a=(160, 64))
    # It is preempted and comes back: vLLM's cache still has its first blended blocks, the rest fails to load.
    engine.load(request, local=96, error="the hub is gone")
    engine.step(a=(96, 128))
    for token in answer:
        request.append_output_token_ids(token)
    engine.end(request, 224 + 32)
    assert not engine.found(prompt + answer, exact=True) & set(range(64, 256))


def test_an_answer_s_blocks_are_kept_until_the_hub_s_late_word_is_acted_on(engine, monkeypatch):
    prompt, answer = text(0, 64), text(3, 33)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 64))
    for token in answer:
        request.append_output_token_ids(token)
    save = engine.side.saves._schedule

    def save_just_before_the_hub_answers(*arguments):
        save(*arguments)
        engine.settle()

    monkeypatch.setattr(engine.side.saves, "_schedule", save_just_before_the_hub_answers)
    engine.end(request, 96)
    assert engine.found(prompt + answer, exact=True) == set(range(96))


def test_a_reason_is_logged_once_however_often_the_counters_are_taken(engine, caplog):
    with caplog.at_level(logging.INFO, logger="blendhub"):
        for number in range(3):
            engine.serve(f"r{number}", text(number, 32))
            BlendHubStats.taken_from(engine.side.counters)
    assert sum("nothing of this prompt is stored" in line for line in caplog.messages) == 1


def test_a_hub_that_went_away_is_noticed_and_requests_are_served_without_it(engine):
    engine.serve("a", text(0, 64))
    request = engine.request("b", text(0, 64))
    engine.side.executor.registered.close()
    engine.side.arrived(request)
    assert engine.side.matched(request, 0) == (0, False)
    assert engine.side.counters["refused_hub_failed"] == 1
    engine.step(b=(0, 64))
    engine.end(request, 64)


def test_workers_are_told_whose_blocks_a_step_gives_to_others(engine):
    output = SchedulerOutput.make_empty()
    assert engine.side.plan(output).preempted == set()
    output.preempted_req_ids = {"a", "b"}
    assert engine.side.plan(output).preempted == {"a", "b"}


def test_a_request_that_is_aborted_while_it_loads_is_called_off(engine):
    engine.serve("a", text(0, 64))
    request = engine.request("b", text(0, 96))
    engine.side.arrived(request)
    told, asynchronous = engine.side.matched(request, 0)
    assert (told, asynchronous) == (64, True)
    engine.side.allocated(request, list(range(4)), told)
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert [load.request for load in plan.loads] == ["b"]
    assert engine.side.ended(request, list(range(4)))[0] is False
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert plan.cancelled == {"b"} and not plan.loads
    engine.settle()
    assert engine.gauge("read_leases") == 0


def test_what_is_still_being_read_from_the_store_is_called_so(tmp_path, monkeypatch):
    store = StoreChoice(options={"path": str(tmp_path)})
    config, prompt = HubConfig(arena_gib=0.01, metrics="", store=store), text(0, 96)
    with HubInThread(config, HOST) as hub:
        engine = Engine(hub)
        engine.serve("a", prompt)
        engine.close()
    with HubInThread(config, HOST) as hub:
        ended = threading.Event()
        monkeypatch.setattr(hub.hub.service._tier.store, "load", lambda *asked: ended.wait(30))
        engine = Engine(hub)
        request = engine.request("b", prompt)
        engine.side.arrived(request)
        assert engine.load(request) == 0
        reason = engine.side._requests["b"].report()["reason"]
        ended.set()
        engine.close()
    assert "96 tokens of this prompt were still being read from the store" in reason


def test_the_log_has_every_request_s_report_in_a_line_of_json(engine, caplog):
    """Streamed responses and batches do not carry it."""
    document = text(0, 96)
    with caplog.at_level(logging.DEBUG, logger="blendhub"):
        engine.serve("a", document)
        request = engine.request("b", text(1, 32) + document)
        engine.side.arrived(request)
        engine.load(request)
        report = engine.side._requests["b"].report()
        engine.end(request, 128)
    lines = [line for line in caplog.messages if line.startswith("{")]
    assert not any("\n" in line for line in lines)
    assert [json.loads(line)["request"] for line in lines] == ["a", "b"]
    assert json.loads(lines[1]) == {"request": "b", "blendhub": report} and report["moved_tokens"] == 95


def test_no_report_is_written_for_a_log_that_nobody_wants(engine, caplog):
    with caplog.at_level(logging.INFO, logger="blendhub"):
        engine.serve("a", text(0, 96))
    assert not any(line.startswith("{") for line in caplog.messages)


def test_where_the_hub_s_memory_cannot_be_mapped_nothing_is_asked_and_a_hub_that_can_be_mapped_is_used(
    tmp_path, caplog
):
    """Every load and save failed, under a line that said that text is reused anywhere."""
    endpoint = f"ipc://{tmp_path}/hub.sock"
    config = HubConfig(arena_gib=0.01, metrics="", listen=(Listen(endpoint=endpoint),))
    document = text(0, 96)
    with caplog.at_level(logging.INFO, logger="blendhub"):
        with HubInThread(config, HOST) as hub:
            # As if it had another /dev/shm.
            segment = SHM / hub.hub.service.state.cache.arena.name.segment
            segment.unlink()
            engine = Engine(hub, HubAddress(endpoint, PluginChoice("zmq")))
            for name in ("a", "b"):
                engine.serve(name, document)
            request = engine.request("c", document)
            engine.side.arrived(request)
            assert engine.side._requests["c"].report()["reason"].startswith("this machine cannot map the hub's shared")
            engine.end(request, 0)
            asked = hub.hub.service.counters.requests
            assert not asked["lookup"] and not asked["reserve"] and not engine.saved
        assert engine.side.counters["refused_no_arena"] == 3
        (warning,) = [line for line in caplog.messages if line.startswith("BlendHub: ")]
        assert warning.startswith("BlendHub: nothing is reused or stored: cannot map the hub's arena")
        with HubInThread(config, HOST):
            until = time.monotonic() + 20
            while engine.client.arena is None or engine.side._arena.refusal():
                assert time.monotonic() < until, "the hub that came back was not found"
                time.sleep(0.05)
            engine.serve("d", document)
            assert engine.found(document, exact=True) == set(range(96))
            assert sum("text is reused anywhere; " in line for line in caplog.messages) == 1
            engine.close()


def test_an_ending_is_announced_in_one_plan_however_long_vllm_takes_to_free_it(engine):
    """With two batches in flight there is a plan between the one that says it and the answer to that."""
    request = engine.request("a", text(0, 64))
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 64))
    request.append_output_token_ids(1)
    request.num_computed_tokens = 64
    assert engine.side.ended(request, [1, 2, 3, 4])[0]
    announced = []
    for _ in range(5):
        engine.step()
        announced.append(engine.ending)
    assert sorted(map(len, announced)) == [0, 0, 0, 0, 1]
    assert engine.side.has_work
    engine.side.process_report(WorkerReport(settled={"a": 1}))
    assert not engine.side.has_work


def test_a_lookup_is_sent_when_its_request_arrives_and_its_answer_waits_for_the_request_s_turn(engine):
    engine.serve("a", text(0, 96))
    request = engine.request("b", text(1, 32) + text(0, 96))
    engine.side.arrived(request)
    time.sleep(1.2 * SETTINGS.lookup_timeout_s)
    with standing_still(engine.hub):
        assert engine.side.matched(request, 0) == (127, True)


def test_what_is_found_is_asked_for_anew_when_its_lease_has_expired():
    with HubInThread(HubConfig(arena_gib=0.01, read_lease_s=0.3, metrics=""), HOST) as hub:
        engine = Engine(hub)
        engine.serve("a", text(0, 96))
        request = engine.request("b", text(1, 32) + text(0, 96))
        engine.side.arrived(request)
        assert engine.side.matched(request, 0) == (127, True)
        lookup = engine.side._requests["b"].lookup
        time.sleep(0.4)
        assert engine.side.matched(request, 0) == (127, True)
        assert engine.side._requests["b"].lookup is not lookup
        engine.close()


def test_the_scheduler_waits_a_moment_for_a_hub_that_stands_still_and_no_longer_than_the_timeout(engine):
    engine.side._settings = msgspec.structs.replace(SETTINGS, lookup_wait_ms=2.0, lookup_timeout_s=0.3)
    engine.step()
    with standing_still(engine.hub):
        request = engine.request("a", text(0, 64))
        started = time.monotonic()
        engine.side.arrived(request)
        longest = 0.0
        while True:
            before = time.monotonic()
            engine.side.plan(SchedulerOutput.make_empty())
            told, _ = engine.side.matched(request, 0)
            longest = max(longest, time.monotonic() - before)
            if told is not None:
                break
        assert told == 0 and time.monotonic() - started < 0.6 and longest < 0.1
        assert "lookup_timeout_s" in engine.side._requests["a"].report()["reason"]
        # Who comes now is not kept waiting at all.
        another = engine.request("b", text(1, 64))
        engine.side.arrived(another)
        assert engine.side.matched(another, 0) == (0, False)
    assert engine.side.counters["refused_hub_failed"] == 2


def test_blocks_are_kept_for_room_that_the_hub_does_not_give_no_longer_than_the_timeout(engine):
    engine.side.saves._timeout_s = 0.2
    request = engine.request("a", text(0, 64))
    engine.side.arrived(request)
    engine.load(request)
    with standing_still(engine.hub):
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        output.scheduled_cached_reqs.req_ids.append("a")
        output.scheduled_cached_reqs.num_computed_tokens.append(0)
        output.num_scheduled_tokens = {"a": 64}
        engine.side.plan(output)
        request.append_output_token_ids(1)
        request.num_computed_tokens = 64
        assert engine.side.ended(request, [1, 2, 3, 4])[0]
        started = time.monotonic()
        while "a" not in engine.side.plan(SchedulerOutput.make_empty()).ending:
            assert time.monotonic() - started < 0.5
        assert engine.side.counters["reservations_failed_DeadlineExceeded"] == 1
        engine.side.process_report(WorkerReport(settled={"a": 1}))
    # The room that it gives all the same is given back.
    engine.settle()
    assert engine.gauge("write_leases") == 0
    assert not engine.side.has_work


def test_blocks_that_vllm_took_away_meanwhile_are_not_stored(engine):
    """Attention with a window: vLLM has block 0 in the place of those that the window has left."""
    engine.side.saves.block_ids = lambda request: [0, 0, 3, 4]
    prompt = text(0, 64)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 64))
    assert not engine.step(a=(64, 1))
    request.append_output_token_ids(1)
    engine.end(request, 64)
    assert engine.found(prompt, exact=True) == set()
    assert engine.gauge("write_leases") == 0
    assert engine.side.counters["reservations_failed_DeadlineExceeded"] == 1


def test_each_salt_reuses_its_own_text_over_one_session(engine):
    document, salts = text(0, 64), (None, "ann", "bob")
    for salt in salts:
        assert engine.serve(f"first {salt}", document, salt) == 0
        assert engine.serve(f"again {salt}", document, salt) == 63
    assert engine.gauge("sessions") == 2, "one of the scheduler and one of the worker"
    assert engine.side.clear()
    for salt in salts:
        assert engine.serve(f"after the clear {salt}", document, salt) == 0


def test_after_a_clear_nothing_from_before_is_found_or_stored(engine):
    document = text(0, 96)
    engine.serve("a", document)
    waiting = engine.request("b", text(1, 32) + document)
    engine.side.arrived(waiting)
    computing, prompt = engine.request("c", text(2, 64)), text(2, 64)
    engine.side.arrived(computing)
    engine.load(computing)
    engine.step(c=(0, 32))
    assert engine.side.matched(waiting, 0)[0] == 127
    assert engine.side.clear()
    engine.settle()
    assert engine.side.matched(waiting, 0) == (0, False)
    engine.step(c=(32, 32))
    computing.append_output_token_ids(1)
    engine.end(computing, 64)
    assert engine.found(document, exact=True) == set() == engine.found(prompt, exact=True)
    assert engine.gauge("write_leases") == 0


def test_what_the_workers_have_yet_to_commit_when_all_is_cleared_is_not_stored(engine):
    prompt = text(0, 64)
    request = engine.request("a", prompt)
    engine.side.arrived(request)
    engine.load(request)
    engine.step(a=(0, 32))
    request.append_output_token_ids(1)
    request.num_computed_tokens = 64
    assert engine.side.ended(request, [1, 2, 3, 4])[0]
    plan = engine.side.plan(SchedulerOutput.make_empty())
    (save,) = plan.saves
    assert plan.ending == {"a"} and save.span.end == 64
    engine.side.clear()
    engine.settle()
    with pytest.raises(LeaseError):
        engine.client.commit(save.right, 64)
    assert engine.found(prompt, exact=True) == set()


def test_a_clear_does_not_wait_for_a_hub_that_stands_still(engine):
    with standing_still(engine.hub):
        started = time.monotonic()
        engine.side.clear()
        assert time.monotonic() - started < 0.1


def test_workers_are_told_once_where_the_hub_is(engine):
    plans = [engine.side.plan(SchedulerOutput.make_empty()) for _ in range(3)]
    assert [plan.hub is not None for plan in plans] == [True, False, False]
    assert plans[0].hub.namespace == SPACE
