"""Saves under way: a real hub, and copies that end when and how a test says."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.contracts import Transfer
from blendhub.core.errors import LeaseError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.messages import SaveJob
from blendhub.vllm.worker.saves import Copy, Saves

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
SPACE = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(96, dtype=np.uint32)
BLOCKS = np.arange(6, dtype=np.int64)


class HeldTransfer(Transfer):
    """Ends when the test says so, with or without an error."""

    def __init__(self, error: Exception | None, until: threading.Event | None) -> None:
        self._error = error
        self._until = until

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._until:
            self._until.wait()
        if self._error:
            raise self._error


@pytest.fixture
def client():
    with HubInThread(HubConfig(arena_gib=0.001, metrics=""), HOST) as hub, hub.connect() as made:
        made.register("engine", SPACE, 0)
        yield made


@pytest.fixture
def asking():
    """The thread that asks the hub."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def saver(asking):
    adapters: Any = None
    made = Saves(lambda: None, None, adapters, asking.submit, 1.0)
    yield made
    made.close()


def settle(saver, asking) -> None:
    saver.settle(None)
    asking.submit(lambda: None).result()


def save(saver, client, reserved, start: int, end: int, error=None, until=None) -> None:
    for slot in reserved.slots[start // 32 : end // 32]:
        right = ExitStack()
        right.enter_context(client.writing(reserved.right))
        job = SaveJob("r", reserved.right, slot, (BLOCKS,))
        saver.add(Copy(job, HeldTransfer(error, until), right, client, time.monotonic()))


def found(client) -> set[int]:
    matches = client.lookup(TOKENS, acquire=False).result().matches
    return {p for match in matches for p in range(match.span.start, match.span.end)}


def test_what_is_copied_is_committed_and_counted_once(saver, asking, client):
    reserved = client.reserve(TOKENS, Span(0, 96))
    for start in (0, 32, 64):
        save(saver, client, reserved, start, start + 32)
    settle(saver, asking)
    assert found(client) == set(range(96))
    assert not saver.needs_blocks("r") and not saver.is_committing("r")
    tokens, seconds, failed = saver.take_numbers()
    assert (tokens, failed) == (96, {}) and len(seconds) == 3 and min(seconds) > 0
    assert saver.take_numbers() == (0, (), {})


def test_only_copies_of_the_requests_that_are_named_are_waited_for(saver, client):
    reserved, ends = client.reserve(TOKENS, Span(0, 96)), threading.Event()
    save(saver, client, reserved, 0, 96, until=ends)
    saver.settle({"another"})
    assert saver.needs_blocks("r")
    threading.Timer(0.05, ends.set).start()
    saver.settle({"r", "another"})
    assert ends.is_set() and not saver.needs_blocks("r")


def test_a_request_s_blocks_are_free_when_its_copies_have_ended_whether_the_hub_answers_or_not(saver, asking, client):
    reserved, answers = client.reserve(TOKENS, Span(0, 96)), threading.Event()
    asking.submit(answers.wait)
    for start in (0, 32, 64):
        save(saver, client, reserved, start, start + 32)
    saver.settle({"r"})
    assert not saver.needs_blocks("r") and not saver.is_copying()
    assert saver.is_committing("r") and found(client) == set()
    answers.set()
    settle(saver, asking)
    assert found(client) == set(range(96)) and not saver.is_committing("r")


@pytest.mark.parametrize("failed", [0, 1])
def test_a_commit_that_fails_holds_back_those_behind_it_in_the_lease(saver, asking, client, failed):
    reserved, asked = client.reserve(TOKENS, Span(0, 96)), []

    class Refuses:
        def commit(self, right, upto):
            asked.append(upto)
            if len(asked) == failed + 1:
                raise LeaseError("not now")
            client.commit(right, upto)

        abort, writing = client.abort, client.writing

    for start in (0, 32, 64):
        save(saver, Refuses(), reserved, start, start + 32)
    settle(saver, asking)
    assert asked == [32, 64, 96][: failed + 1]
    assert found(client) == set(range(32 * failed))
    saver.forget("r")
    settle(saver, asking)
    assert client.stats().gauges["write_leases"] == 0


@pytest.mark.parametrize("failed", [0, 32])
def test_nothing_at_or_behind_a_save_that_failed_can_be_read(saver, asking, client, failed):
    reserved = client.reserve(TOKENS, Span(0, 96))
    for start in (0, 32, 64):
        save(saver, client, reserved, start, start + 32, LeaseError("too late") if start == failed else None)
    settle(saver, asking)
    assert found(client) == set(range(failed))
    assert saver.take_numbers()[2]["LeaseError"] >= 1


def test_whatever_a_copy_raises_the_request_s_blocks_are_let_go(saver, client):
    reserved = client.reserve(TOKENS, Span(0, 96))
    save(saver, client, reserved, 0, 32, RuntimeError("the device is lost"))
    saver.settle(None)
    assert not saver.needs_blocks("r")
    assert saver.take_numbers() == (0, (), {"RuntimeError": 1})
    client.abort(reserved.right)
