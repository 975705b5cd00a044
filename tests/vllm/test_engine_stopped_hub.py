"""A hub that stands still costs reuse, and not one late token of a request that has nothing to do with it."""

import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import pytest

from blendhub.vllm.hub_executor import LEAVE_S
from harness.engines import ONE_THREAD, Engine, disagreement
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 0.5
LATE_S = 0.1
"""How much longer than otherwise the longest time between two tokens may be."""

ATTEMPTS = 4
"""The machine does other things too: one undisturbed attempt is enough."""

ORDER = Path(tempfile.gettempdir()) / f"stop-the-hub-{os.getpid()}"
"""The file that says where the hub is to be stopped."""

STREAM_TOKENS = 300
STAGES = {
    "before the lookup is answered": "Lookup sent",
    "between the lookup and the load": "Lookup answered",
    "at the load's end": "Release sent",
    "before room is given": "Reserve sent",
    "in the save": "Reserve answered",
    "at the save's end": "Commit sent",
}
IN_EVERY_RUN = ("before the lookup is answered", "at the load's end", "in the save")


def stoppable_engine(model, hub: HubProcess) -> Engine:
    settings = SETTINGS | {"endpoint": hub.endpoint, "hub": {}, "lookup_timeout_s": TIMEOUT_S}
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "STOP_THE_HUB": str(ORDER)} | ONE_THREAD
    return Engine(model, settings, variables=variables, arrange=["tests.vllm.stopping_hub:arrange"])


class Scene:
    """An engine, its hub, and a document that the hub has."""

    def __init__(self, model, plain, texts, folder: Path) -> None:
        self.hub = HubProcess(folder, arena_gib=0.25)
        self.engine = stoppable_engine(model, self.hub)
        self._texts = texts
        self.document, self._stream = texts.new(400), texts.new(20)
        self._expected_stream = plain.one(self._stream, tokens=STREAM_TOKENS)
        self._plain = plain
        self.ready()
        runs = [self.ask(mode) for mode in ("blend", "off", "blend", "off")]
        assert runs[0].answer.report["moved_tokens"] == 400
        self.usual_gap_s = max(statistics.median(run.longest_gap_s for run in some) for some in (runs[::2], runs[1::2]))
        self.usual_s = max(statistics.median(run.ended_s for run in some) for some in (runs[::2], runs[1::2]))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hub.process.pid, signal.SIGCONT)
        self.engine.close()
        self.hub.kill()

    def ready(self) -> None:
        """Until the hub gives the document."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            self.engine.one(self.document)
            self.engine.forget()
            answer = self.engine.one([*self._texts.new(9), *self.document, *self._texts.new(9)], store=False)
            self.engine.forget()
            if answer.report["moved_tokens"] == 400:
                return
            time.sleep(0.1)
        pytest.fail(f"nothing is reused any more: {answer.report}\n{self.engine.log[-3000:]}")

    def ask(self, mode: str = "blend"):
        """The document in a new prompt, beside another request; its answer is held against plain vLLM's."""
        prompt = [*self._texts.new(30), *self.document, *self._texts.new(20)]
        run = self.engine.beside(self._stream, STREAM_TOKENS, prompt, 4, mode=mode, recompute_ratio=1.0)
        self.engine.call("settle")
        self.engine.forget()
        expected = [self._plain.one(prompt, tokens=4), self._expected_stream]
        assert disagreement([run.answer, run.stream], expected) < TOLERANCE
        return run

    def stop_at(self, moment: str, then) -> threading.Thread:
        """Have the hub stopped at a moment, and do something a while after it."""
        ORDER.write_text(f"{moment} {self.hub.process.pid}")

        def wait():
            until = time.monotonic() + 60
            while ORDER.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(2 * TIMEOUT_S)
            then()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def thaw(self) -> None:
        os.kill(self.hub.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def scene(model, plain, tmp_path_factory):
    from tests.vllm.conftest import Texts

    made = Scene(model, plain, Texts(12), tmp_path_factory.mktemp("scene"))
    yield made
    made.close()


def test_the_engine_has_two_batches_in_flight(scene):
    assert scene.engine.call("batches_in_flight") == 2


def undisturbed(scene, stage, then) -> None:
    """Stop the hub, and see how late another request and its own were, in one attempt of several."""
    seen = []
    for _ in range(ATTEMPTS):
        stopped = scene.stop_at(STAGES[stage], then)
        run = scene.ask()
        stopped.join()
        scene.ready()
        gap_s, longer_s = run.longest_gap_s - scene.usual_gap_s, run.ended_s - scene.usual_s
        seen.append((round(gap_s, 3), round(longer_s, 3)))
        if gap_s < LATE_S and longer_s < TIMEOUT_S + LATE_S:
            return
    pytest.fail(f"longest gap and time of the request, beyond the usual: {seen}")


@pytest.mark.parametrize(
    "stage", [pytest.param(one, marks=() if one in IN_EVERY_RUN else pytest.mark.long) for one in STAGES]
)
def test_a_hub_that_stops_delays_no_other_request_and_its_own_no_longer_than_the_timeout(scene, stage):
    undisturbed(scene, stage, scene.thaw)


@pytest.mark.parametrize("stage", ["at the load's end", pytest.param("in the save", marks=pytest.mark.long)])
def test_so_does_one_that_is_killed_while_it_stands_still_and_another_one_is_used_when_it_comes(scene, stage):
    def replace():
        scene.hub.kill()
        scene.hub.start()

    undisturbed(scene, stage, replace)


@pytest.fixture
def hub(tmp_path):
    made = HubProcess(tmp_path, arena_gib=0.25)
    yield made
    if made.process.poll() is None:
        made.kill()


def test_an_engine_starts_without_its_hub_and_uses_it_when_it_comes(model, plain, hub, texts):
    hub.kill()
    document = texts.new(400)
    with stoppable_engine(model, hub) as engine:
        answer = engine.one(document, tokens=4)
        assert disagreement([answer], [plain.one(document, tokens=4)]) < TOLERANCE
        assert hub.endpoint in answer.report["reason"]
        warnings = [
            line
            for line in engine.log.splitlines()
            if "BlendHub: no session with the hub" in line and "WARNING" in line
        ]
        assert len(warnings) == 1 and hub.endpoint in warnings[0]
        hub.start()
        until = time.monotonic() + 30
        while True:
            engine.one(document)
            engine.forget()
            if engine.one([*texts.new(9), *document], recompute_ratio=1.0).report["moved_tokens"]:
                break
            engine.forget()
            assert time.monotonic() < until, f"the hub that came is not used:\n{engine.log[-3000:]}"


def test_an_engine_starts_and_ends_beside_a_hub_that_stands_still(model, plain, hub, texts):
    document = texts.new(400)
    os.kill(hub.process.pid, signal.SIGSTOP)
    engine = stoppable_engine(model, hub)
    assert disagreement([engine.one(document, tokens=4)], [plain.one(document, tokens=4)]) < TOLERANCE
    os.kill(hub.process.pid, signal.SIGCONT)
    until = time.monotonic() + 30
    while "reason" in (answer := engine.one([*document, *texts.new(9)])).report:
        engine.forget()
        assert time.monotonic() < until, answer.report
    os.kill(hub.process.pid, signal.SIGSTOP)
    without_hub = Engine(model, variables=ONE_THREAD)
    # The scheduler and the worker each wait for the hub to end their sessions.
    assert engine.close() < without_hub.close() + 2 * LEAVE_S + 0.5
