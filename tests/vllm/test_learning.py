"""Reports of sensitivity to the hub: what is sent, what is dropped, and that no step waits."""

from concurrent.futures import Future

import numpy as np
import pytest
from msgspec.structs import replace

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub.core.errors import PeerGone
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.worker.learning import MOST_WAITING, Learning

EXACT, MOVED = Match(Span(0, 10), 1, 0, True), Match(Span(12, 20), 2, 40, False)
TOKENS = np.zeros(30, np.uint32)
JOB = LoadJob("r", Variant(cache_salt="s"), TOKENS, np.arange(4), Decision(0, 20, (EXACT, MOVED), 0.5), epoch=7)


class Compared:
    """A comparison whose bytes are there, or still on their way."""

    positions = np.array([13, 14, 17])

    def __init__(self, has_arrived: bool = True) -> None:
        self.has_arrived = has_arrived

    def found(self):
        return np.array([9, 1, 255], np.uint8) if self.has_arrived else None


class Hub:
    """The executor's thread, which runs when ``answer`` is called, and the client's part of it."""

    epoch = 7

    def __init__(self) -> None:
        self.learned = []
        self.error = None
        self._asked = []

    def run(self, work):
        answered = Future()
        self._asked.append((work, answered))
        return answered

    def answer(self):
        asked, self._asked = self._asked, []
        for work, answered in asked:
            try:
                answered.set_result(work(self))
            except Exception as error:
                answered.set_exception(error)
        return len(asked)

    def learn(self, matches, measured, variant):
        if self.error:
            raise self.error
        self.learned.append((list(matches), bytes(measured), variant))


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def learning(hub):
    return Learning(hub.run)


def test_a_byte_for_each_position_is_sent_with_the_moved_matches(hub, learning):
    learning.add(JOB, [Compared()])
    assert learning.take_numbers() == (0, 0)
    hub.answer()
    measured = bytes(13) + bytes([9, 1, 0, 0, 255, 0, 0])
    assert hub.learned == [([MOVED], measured, Variant(cache_salt="s"))]
    assert learning.take_numbers() == (3, 0) and learning.take_numbers() == (0, 0)


def test_what_is_still_on_the_device_is_sent_when_it_has_come(hub, learning):
    late = Compared(has_arrived=False)
    learning.add(JOB, [Compared(), late])
    learning.advance()
    assert hub.answer() == 0
    late.has_arrived = True
    learning.advance()
    assert hub.answer() == 1


def test_what_comes_from_a_hub_that_was_restarted_is_not_sent(hub, learning, caplog):
    """Another hub gives other runs the same names."""
    learning.add(replace(JOB, epoch=6), [Compared()])
    hub.answer()
    assert hub.learned == [] and learning.take_numbers() == (0, 3)
    assert "tokens of request r are" in caplog.text and "restarted" in caplog.text


def test_failures_are_counted_and_logged_once(hub, learning, caplog):
    hub.error = PeerGone("the hub is gone")
    for _ in range(3):
        learning.add(JOB, [Compared()])
        hub.answer()
    assert learning.take_numbers() == (0, 9)
    assert caplog.text.count("the hub is gone") == 1


@pytest.mark.parametrize("has_arrived", [True, False], ids=["the hub is slow", "the device is slow"])
def test_reports_that_wait_are_bounded(hub, learning, has_arrived):
    for _ in range(MOST_WAITING + 5):
        learning.add(JOB, [Compared(has_arrived)])
    assert learning.take_numbers() == (0, 15)
    assert hub.answer() == (MOST_WAITING if has_arrived else 0)


def test_a_job_s_bytes_are_as_many_as_its_tokens():
    for given in (b"", bytes([3, 4]), bytes(range(1, 31))):
        job = LoadJob("r", Variant(), TOKENS, np.arange(4), JOB.decision, sensitivity=given)
        assert job.known_sensitivity.tobytes() == given + bytes(30 - len(given))
