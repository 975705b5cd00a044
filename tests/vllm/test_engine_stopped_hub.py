"""A hub that stands still or dies costs reuse, and not one late token of a request that has nothing to do with it."""

import contextlib
import os
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest

from blendhub.client.session import LEAVE_TIMEOUT_S
from harness.engines import ONE_THREAD, Engine, disagreement
from tests.hub.processes import HubProcess
from tests.vllm.arrangements import arrange, signal_the_hub
from tests.vllm.conftest import SETTINGS, TOLERANCE, Texts, store

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 0.5
LATE_S = 0.1
"""How much longer than otherwise the longest time between two tokens may be."""

ATTEMPTS = 4
"""The machine does other things too: one undisturbed attempt is enough."""

STREAM_TOKENS = 300
STAGES = {
    "before the lookup is answered": "Lookup sent",
    "at the load's end": "Release sent",
    "in the save": "Reserve answered",
}


class Scene:
    """A hub, and an engine that has started while the hub stood still; later the hub has a document."""

    def __init__(self, model: Path, plain: Engine, folder: Path) -> None:
        self.hub = HubProcess(folder, arena_gib=0.25)
        self._order = folder / "order"
        self._plain = plain
        self._texts = Texts(12)
        self.document, self._stream = self._texts.new(400), self._texts.new(20)
        self._expected_stream = plain.one(self._stream, tokens=STREAM_TOKENS)
        self.freeze()
        settings = SETTINGS | {"endpoint": self.hub.endpoint, "hub": {}, "lookup_timeout_s": TIMEOUT_S}
        self.engine = Engine(model, settings, variables=ONE_THREAD, arrange=arrange(signal_the_hub, str(self._order)))
        self.first = self.engine.one(self.document, tokens=4)
        self.thaw()
        self.ready()
        runs = [self.ask(mode) for mode in ("blend", "off", "blend", "off")]
        assert runs[0].answer.report["moved_tokens"] == 400
        alike = (runs[::2], runs[1::2])
        self.usual_gap_s = max(statistics.median(run.longest_gap_s for run in some) for some in alike)
        self.usual_s = max(statistics.median(run.answer.ended_s for run in some) for some in alike)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # a test has ended it
            self.engine.close()
        self.hub.kill()

    def freeze(self) -> None:
        os.kill(self.hub.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.hub.process.pid, signal.SIGCONT)

    def replace(self) -> None:
        self.hub.kill()
        self.hub.start()

    def ready(self) -> None:
        """Wait until the hub gives the document."""
        until = time.monotonic() + 30
        while True:
            store(self.engine, self.document)
            answer = self.engine.one([*self._texts.new(9), *self.document, *self._texts.new(9)], store=False)
            self.engine.forget()
            if answer.report["moved_tokens"] == 400:
                return
            assert time.monotonic() < until, f"nothing is reused: {answer.report}\n{self.engine.log[-3000:]}"
            time.sleep(0.1)

    def ask(self, mode: str = "blend"):
        """The document in a new prompt, beside another request; both answers are held against plain vLLM's."""
        prompt = [*self._texts.new(30), *self.document, *self._texts.new(20)]
        run = self.engine.beside([self._stream], STREAM_TOKENS, prompt, 4, mode=mode, recompute_ratio=1.0)
        self.engine.forget()
        expected = [self._plain.one(prompt, tokens=4), self._expected_stream]
        assert disagreement([run.answer, run.stream], expected) < TOLERANCE
        return run

    def signal_at(self, moment: str, how: signal.Signals, then) -> threading.Thread:
        """Have the hub get a signal at a moment, and do something a while after it."""
        self._order.write_text(f"{moment} {self.hub.process.pid} {int(how)}")

        def wait():
            until = time.monotonic() + 60
            while self._order.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(2 * TIMEOUT_S)
            then()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def check_nothing_is_late(self, moment: str, how: signal.Signals, then) -> str:
        """Signal the hub, and see how late another request and its own were, in one attempt of several; returns why
        its own was computed.
        """
        seen = []
        for _ in range(ATTEMPTS):
            signalled = self.signal_at(moment, how, then)
            run = self.ask()
            signalled.join()
            self.ready()
            gap_s, longer_s = run.longest_gap_s - self.usual_gap_s, run.answer.ended_s - self.usual_s
            seen.append((round(gap_s, 3), round(longer_s, 3)))
            if gap_s < LATE_S and longer_s < TIMEOUT_S + LATE_S:
                return run.answer.report.get("reason", "")
        pytest.fail(f"longest gap and time of the request, beyond the usual: {seen}")


@pytest.fixture(scope="module")
def scene(model, plain, tmp_path_factory):
    made = Scene(model, plain, tmp_path_factory.mktemp("scene"))
    yield made
    made.close()


@pytest.mark.versions
def test_an_engine_starts_beside_a_hub_that_stands_still_says_so_once_and_uses_it_when_it_comes(scene, plain):
    assert scene.engine.call("batches_in_flight") == 2
    assert disagreement([scene.first], [plain.one(scene.document, tokens=4)]) < TOLERANCE
    assert scene.hub.endpoint in scene.first.report["reason"]
    told = [line for line in scene.engine.log.splitlines() if "no session with the hub" in line and "WARNING" in line]
    assert 1 <= len(told) <= 2, "the scheduler's session and the worker's say it once each"
    assert all(scene.hub.endpoint in line for line in told)


@pytest.mark.parametrize("moment", STAGES.values(), ids=STAGES)
def test_a_hub_that_stops_delays_no_other_request_and_its_own_no_longer_than_the_timeout(scene, moment):
    reason = scene.check_nothing_is_late(moment, signal.SIGSTOP, scene.thaw)
    assert moment != "Lookup sent" or "lookup_timeout_s" in reason


@pytest.mark.versions
def test_a_hub_that_dies_is_no_worse_and_the_next_one_is_used(scene):
    scene.check_nothing_is_late("Release sent", signal.SIGKILL, scene.replace)


def test_an_engine_ends_while_its_hub_stands_still(scene):
    """The last test of this engine. The scheduler and the worker each wait for the hub to end their sessions."""
    scene.freeze()
    assert scene.engine.close() < 2 * LEAVE_TIMEOUT_S + 1.5, "vLLM's own end takes a moment"
