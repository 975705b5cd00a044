"""The connector in a worker, between vLLM's own steps: behind a drafter, and while vLLM's KV cache is unmapped."""

import threading
import time

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

from blendhub import Span
from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.messages import SaveJob, StepPlan, WorkerReport
from blendhub.vllm.worker.side import WorkerSide
from tests.stand_in import StandIn
from tests.vllm.played_engine import text
from tests.vllm.played_worker import SideDevice, SideTransfer, played_worker
from tests.vllm.test_saves import HeldTransfer
from tests.vllm.test_scheduler_start import CACHE, OURS, config_of

STORED, NEW = text(0, 96), np.array(text(3, 96), np.uint32)
BLOCKS = (np.arange(1, 7),)


class Connected:
    """The connector of a worker with a real hub, in the steps of vLLM's model runner V1."""

    def __init__(self, played, monkeypatch) -> None:
        self.played = played
        self.connector = BlendHubConnector(config_of(OURS), KVConnectorRole.WORKER, CACHE)
        self.connector._unchecked, self.connector._worker = None, played.worker
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector)
        self.client = played.worker._client
        self.outputs = []
        """vLLM's own reports of the steps."""

    def step(self, plan=None, drafter=None):
        """A step; ``drafter`` proposes tokens at its end."""
        if plan is None:
            plan = self.played.engine.side.plan(SchedulerOutput.make_empty())
        step = SchedulerOutput.make_empty()
        step.kv_connector_metadata = plan
        self.connector.handle_preemptions(plan)
        with set_forward_context(None, VllmConfig()):
            with Runner.maybe_get_kv_connector_output(step, defer_finalize=drafter is not None) as output:
                self.played.device.runtime.synchronize(self.played.device.runtime.record_event())
            if drafter:
                drafter()
                Runner.finalize_kv_connector()
        if isinstance(report := output.kv_connector_worker_meta, WorkerReport):
            report.committed_ranks.pop("s", None)  # the scheduler has not planned these saves
            self.played.engine.side.process_report(report)
        self.outputs.append(output)

    def heard(self, kind):
        """The requests of which vLLM has heard in this field of its reports."""
        return {name for output in self.outputs for name in getattr(output, kind) or ()}

    def until(self, name, kind):
        until = time.monotonic() + 20
        while name not in self.heard(kind):
            assert time.monotonic() < until
            self.step()
            time.sleep(1e-3)

    def saves(self):
        """The plan of a step that saves the chunks of a request."""
        reserved = self.client.reserve(NEW, Span(0, 96)).result()
        jobs = [SaveJob("s", reserved.right, slot, BLOCKS) for slot in reserved.slots]
        return StepPlan(saves=jobs, ending={"s"})

    def found(self, tokens):
        matches = self.client.lookup(np.asarray(tokens, np.uint32), acquire=False).result().matches
        return sum(len(match.span) for match in matches)

    def sleep(self):
        """What vLLM does then; its pages are no more what they were when it wakes up."""
        self.connector.unregister_kv_caches()
        self.connector.unregister_kv_caches()
        self.played.kv[:] = torch.nan

    def wake(self):
        self.connector.restore_kv_caches()
        self.connector.restore_kv_caches()


@pytest.fixture
def device():
    return SideDevice()


@pytest.fixture
def scene(device, monkeypatch):
    with played_worker(device, STORED) as played:
        connected = Connected(played, monkeypatch)
        yield connected
        connected.connector._worker = WorkerSide()


def test_saves_begin_behind_the_drafter(scene, device):
    begun = []
    save, device.save = device.save, lambda *given: begun.append("save") or save(*given)
    scene.step(scene.saves(), lambda: begun.append("draft"))
    assert begun == ["draft", "save", "save", "save"] and not scene.heard("finished_sending")
    scene.until("s", "finished_sending")


def test_what_is_saved_when_vllm_goes_to_sleep_is_stored_as_it_was_and_saves_and_loads_go_on_when_it_wakes(
    scene, device
):
    scene.played.kv[:6] = 7.0
    ends, save = threading.Event(), device.save
    late = []

    def copy_late(*given):
        late.append(given)
        return HeldTransfer(None, StandIn(copies_end=ends, order=[]))

    device.save = copy_late
    scene.step(scene.saves())

    def end_copies():
        for given in late:
            save(*given).wait()
        ends.set()

    threading.Timer(0.1, end_copies).start()
    scene.sleep()
    assert ends.is_set(), "vLLM would unmap pages that are being read"
    device.save = save
    scene.wake()
    scene.until("s", "finished_sending")
    scene.played.engine.eventually(lambda: scene.found(NEW) == 96)
    assert scene.played.engine.gauge("write_leases") == 0, "a chunk is half-written"
    scene.played.arrive("r", [*NEW.tolist(), *text(1, 32)])
    scene.until("r", "finished_recving")
    assert (scene.played.kv[:6] == 7.0).all(), "what was stored before is not what is loaded now"


def test_a_load_that_vllm_s_sleep_interrupts_is_computed_by_vllm_and_the_next_one_is_loaded(scene, device, monkeypatch):
    def wait(transfer):
        while not transfer.done():
            time.sleep(1e-3)

    monkeypatch.setattr(SideTransfer, "wait", wait)
    scene.played.arrive("r", [*STORED, *text(1, 32)])
    device.is_held = True
    scene.step()
    threading.Timer(0.1, setattr, (device, "is_held", False)).start()
    scene.sleep()
    assert not device.is_held, "the copy would write into pages that are unmapped"
    scene.wake()
    scene.step()
    assert scene.heard("finished_recving") == {"r"} == scene.heard("failed_recving")
    assert "sleep" in scene.played.engine.report("r")["reason"] and scene.played.kv.isnan().all()
    scene.played.engine.eventually(lambda: scene.played.engine.gauge("read_leases") == 0)
    scene.played.arrive("next", [*STORED, *text(2, 32)], first_block=20)
    scene.until("next", "finished_recving")
    assert "next" not in scene.heard("failed_recving") and not scene.played.kv[19:25].isnan().any()


def test_nothing_is_copied_while_vllm_sleeps(scene, device):
    scene.played.arrive("r", [*STORED, *text(1, 32)])
    scene.sleep()
    scene.step(scene.saves())
    assert not device.loads and scene.found(NEW) == 0
    scene.wake()
    scene.until("r", "finished_recving")
    scene.until("s", "finished_sending")


def test_nothing_is_recomputed_while_vllm_sleeps(scene):
    """Where the runner samples after the connector, what a step recomputes waits for the next one."""
    scene.played.model.samples_last, forwards = True, []
    scene.played.worker._forwards.step = lambda blends, budget: forwards.extend(blends) or 0
    scene.played.arrive("r", [*text(1, 32), *STORED, *text(2, 32)])
    while not forwards:
        plan = scene.played.engine.side.plan(SchedulerOutput.make_empty())
        plan.computes = True
        scene.step(plan)
    scene.sleep()
    forwards.clear()
    scene.step()
    assert not forwards and scene.heard("failed_recving") == {"r"}


def test_nothing_is_reused_with_weights_that_were_exchanged_in_vllm_s_sleep(scene, caplog):
    scene.sleep()
    scene.played.model.module.weight = torch.nn.Parameter(torch.ones(4))
    scene.wake()
    scene.played.arrive("r", [*STORED, *text(1, 32)])
    scene.until("r", "failed_recving")
    assert "other weights" in scene.played.engine.report("r")["reason"]
    scene.step(scene.saves())
    assert "other weights" in caplog.text and scene.found(NEW) == 0
