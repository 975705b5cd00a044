"""How many requests a server gets at a time."""

import threading
import time

import pytest

from blendhub.tools.warm.pace import FIRST, MOST, Pace, done_at_pace


class Played:
    """A server that computes so many requests at a time in a second each, and a clock."""

    def __init__(self, sustained: int) -> None:
        self.sustained = sustained
        self.now = 0.0

    def serve(self, pace: Pace, answers: int) -> None:
        for _ in range(answers):
            self.now += 1 / min(pace.limit, self.sustained)
            pace.computed(300)


@pytest.mark.parametrize("sustained, limit", [(1, FIRST), (16, 16), (100, 128), (10_000, MOST)])
def test_it_doubles_while_that_brings_more(sustained, limit):
    server = Played(sustained)
    pace = Pace(clock=lambda: server.now)
    server.serve(pace, 5000)
    assert pace.limit == limit


def test_a_fixed_number_stays_but_for_a_server_that_refuses():
    server, pace = Played(64), Pace(12)
    server.serve(pace, 1000)
    assert pace.limit == 12
    for _ in range(9):
        pace.refused()
    server.serve(pace, 1000)
    assert pace.limit == 1


def test_jobs_run_at_the_pace_and_none_begins_behind_a_stop():
    stop, lock = threading.Event(), threading.Lock()
    at_once, most, begun = 0, 0, 0

    def job(number: int) -> int:
        nonlocal at_once, most, begun
        with lock:
            at_once, begun = at_once + 1, begun + 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        if number == 20:
            stop.set()
        return number

    done = list(done_at_pace(range(1000), job, Pace(3), stop))
    assert most == 3 and len(done) == begun <= 25 and set(range(20)) < set(done)


def test_an_error_of_a_job_is_raised():
    with pytest.raises(ZeroDivisionError):
        list(done_at_pace([1, 0], lambda number: 1 // number, Pace(), threading.Event()))
