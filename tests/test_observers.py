"""Observers: real plugins, called in order on a separate thread, that cannot slow down or fail an engine."""

import logging
import sys
import threading
import time

import pytest

from blendhub.framework.hookspecs import EngineInfo
from blendhub.framework.observers import Observers
from blendhub.outcome.report import Outcome
from harness.waiting import wait_until

INFO = EngineInfo(engine="e", model="m", device="cpu", matchers=("prefix",), selector="none")

SEEING = """
    import threading
    from blendhub import hookimpl

    seen, threads, may_go_on = [], set(), threading.Event()
    may_go_on.set()

    def note(*what):
        may_go_on.wait(20)
        seen.append(what)
        threads.add(threading.current_thread())

    @hookimpl
    def blendhub_engine_started(info):
        note("started", info)

    @hookimpl
    def blendhub_request_done(outcome):
        note("done", outcome.request)

    @hookimpl
    def blendhub_engine_stopping():
        note("stopping")
"""

FAILING = """
    from blendhub import hookimpl

    @hookimpl
    def blendhub_request_done(outcome):
        raise SystemExit(3) if outcome.request == "r1" else KeyError(outcome.request)
"""


def outcome(name: object) -> Outcome:
    return Outcome(request=f"r{name}", prompt_tokens=9, engine_tokens=0)


@pytest.fixture
def seeing(site):
    """The module of an observer, imported as the host imports it."""
    site.install("seeing-things", SEEING)
    site.host().names("matcher")
    return sys.modules["seeing_things"]


def test_observers_see_everything_in_order_on_a_separate_thread_and_an_error_harms_no_other(site, seeing, caplog):
    site.install("failing-one", FAILING, version="0.7")
    observers = Observers(site.host().observers())
    with caplog.at_level(logging.ERROR, logger="blendhub"):
        observers.engine_started(INFO)
        for number in (1, 2, 2):
            observers.request_done(outcome(number))
        assert observers.engine_stopping() and observers.engine_stopping()
        observers.request_done(outcome(3))
    assert seeing.seen == [("started", INFO), ("done", "r1"), ("done", "r2"), ("done", "r2"), ("stopping",)]
    assert len(seeing.threads) == 1 and threading.current_thread() not in seeing.threads
    assert observers.dropped == 1, "after the end"
    origin = "observer 'failing_one' of failing-one 0.7"
    assert observers.errors == {origin: 3}
    assert [record.message for record in caplog.records] == [f"{origin} failed in blendhub_request_done: SystemExit: 3"]


def test_a_slow_observer_delays_no_caller_and_the_calls_it_misses_are_counted(site, seeing, caplog):
    seeing.may_go_on.clear()
    observers = Observers(site.host().observers(), max_waiting=3)
    observers.engine_started(INFO)
    wait_until(lambda: not observers._waiting.qsize(), 10.0, 0.001)  # the first call is under way
    started = time.monotonic()
    for number in range(10):
        observers.request_done(outcome(number))
    assert not observers.engine_stopping(timeout=0.05)
    assert time.monotonic() - started < 2
    assert observers.dropped == 7
    seeing.may_go_on.set()
    assert observers.engine_stopping()
    assert [what for what, *_ in seeing.seen] == ["started", "done", "done", "done", "stopping"]
    assert "observers are slower than requests end" in caplog.text and "seeing-things" in caplog.text
