"""A worker's saves: a real hub and worker, and copies that end when and how a test says."""

import threading
import time

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.contracts import Transfer
from blendhub.core.errors import LeaseError
from blendhub.vllm.messages import SaveJob, StepPlan
from blendhub.vllm.worker import saves
from blendhub.vllm.worker.recompute import HostCopy
from tests.vllm.played_engine import text
from tests.vllm.played_worker import SideDevice, played_worker
from tests.vllm.standing_still import standing_still

TOKENS = np.array(text(3, 96), np.uint32)


class HeldTransfer(Transfer):
    """Ends when the test says so, with or without an error."""

    def __init__(self, error: Exception | None, scene: "Scene") -> None:
        self._error = error
        self._scene = scene

    def done(self) -> bool:
        return self._scene.copies_end.is_set()

    def wait(self) -> None:
        assert self._scene.copies_end.wait(20)
        if self._error:
            raise self._error

    def release_pages(self) -> None:
        self._scene.order.append("pages released")
        if self._error:
            raise self._error


class Scene:
    """A worker that saves the three chunks of a request; ``error`` is that of the copy of chunk ``failing``."""

    def __init__(self, played, device) -> None:
        self.played = played
        self.worker = played.worker
        self.client = played.worker._client
        self.copies_end = threading.Event()
        self.failing, self.error = -1, None
        self.have_states = False
        self.order = []
        """When pages were released and when the device began a step."""
        self.copied = []
        """The spans of tokens that were copied, step by step."""
        self._n_copies, self._save = 0, device.save
        device.save = self._copy

    def _copy(self, segments, *given) -> HeldTransfer:
        self._n_copies += 1
        self.copied += [segment.span for segment in segments]
        self._save(segments, *given)
        return HeldTransfer(self.error if self._n_copies - 1 == self.failing else None, self)

    def jobs(self, **changes: str) -> list[SaveJob]:
        """The saves of its chunks. ``changes`` are those of the right to write."""
        reserved = self.client.reserve(TOKENS, Span(0, 96)).result()
        right = replace(reserved.right, **changes)
        return [SaveJob("r", right, slot, (np.arange(1, 7),), None, self.have_states) for slot in reserved.slots]

    def begin(self, **changes: str) -> None:
        self.worker.save(StepPlan(saves=self.jobs(**changes), ending={"r"}))

    def saved(self) -> set[str]:
        """The requests whose blocks can be freed."""
        return self.worker.finished()[0]

    def wait_until_saved(self) -> None:
        until = time.monotonic() + 20
        while self.saved() != {"r"}:
            assert time.monotonic() < until
            time.sleep(1e-3)

    def committed(self):
        """The worker's report once every commit is done."""
        self.worker.begin_step(StepPlan(preempted={"r"}))
        self.wait_until_saved()
        return self.committed_by_now()

    def committed_by_now(self):
        until, reports = time.monotonic() + 20, []
        while not any(report.committed_ranks for report in reports):
            assert time.monotonic() < until
            self.worker.finished()
            reports += [report for report in [self.worker.take_report()] if report]
        assert sum(len(report.save_seconds) for report in reports) == sum(r.saved_tokens for r in reports) // 32
        return reports

    def readable(self) -> set[int]:
        matches = self.client.lookup(TOKENS, acquire=False).result().matches
        return {position for match in matches for position in range(match.span.start, match.span.end)}

    def write_leases(self) -> float:
        return self.client.stats().result().gauges["write_leases"]


@pytest.fixture
def scene():
    device = SideDevice()
    with played_worker(device, text(0, 96)) as played:
        scene = Scene(played, device)
        yield scene
        scene.copies_end.set()


@pytest.mark.parametrize(("fails", "failing"), [("the copy", 0), ("the copy", 1), ("the commit", 1), ("nothing", 3)])
def test_what_is_copied_can_be_read_but_nothing_at_or_behind_a_save_that_failed(scene, monkeypatch, fails, failing):
    commit, asked = scene.client.commit, []

    def refuse(right, upto):
        asked.append(upto)
        if fails == "the commit" and len(asked) == failing + 1:
            scene.client.abort(right)  # as if the hub had revoked it
        return commit(right, upto)

    monkeypatch.setattr(scene.client, "commit", refuse)
    if fails == "the copy":
        scene.failing, scene.error = failing, LeaseError("too late")
    scene.begin()
    scene.copies_end.set()
    reports = scene.committed()
    assert scene.readable() == set(range(32 * failing))
    assert sum(report.saved_tokens for report in reports) == min(32 * failing, 96)
    assert any("LeaseError" in report.failed_saves for report in reports) == (failing < 3)
    scene.played.engine.eventually(lambda: scene.write_leases() == 0)  # a failed right is given back


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_copied_first_is_committed_behind_what_stands_before_it_in_the_lease(scene, monkeypatch, fails):
    """A commit vouches for all of its lease before it."""
    first_ends = threading.Event()

    def copy(segments, *given):
        transfer = scene._copy(segments, *given)
        if segments[0].span.start == 0:
            monkeypatch.setattr(transfer, "done", first_ends.is_set)
        return transfer

    monkeypatch.setattr(scene.played.device, "save", copy)
    if fails:
        scene.failing, scene.error = 0, RuntimeError("the copy failed")
    scene.begin()
    scene.copies_end.set()
    for _ in range(3):
        assert scene.saved() == set() and scene.readable() == set()
    first_ends.set()
    scene.committed()
    assert scene.readable() == (set() if fails else set(range(96)))


def test_a_request_whose_name_comes_again_is_not_forgotten_with_the_one_before(scene):
    """Whose blocks are free, while the hub has yet to answer its commits."""
    scene.played.arrive("r", text(0, 128))
    plan = scene.played.engine.side.plan(SchedulerOutput.make_empty())
    scene.begin()
    scene.copies_end.set()
    with standing_still(scene.played.engine.hub):
        scene.wait_until_saved()
        scene.worker.begin_step(plan)
        assert scene.worker.take_report() is None
    scene.committed_by_now()
    scene.played.until_loaded("r")


def test_a_request_s_blocks_are_free_when_its_copies_have_ended_whether_the_hub_answers_or_not(scene):
    scene.begin()
    with standing_still(scene.played.engine.hub):
        scene.worker.begin_step(StepPlan(preempted={"another"}))
        assert scene.saved() == set() and not scene.order, "only copies of the requests that are named are in the way"
        scene.worker.begin_step(StepPlan(preempted={"r", "another"}))
        assert scene.order == 3 * ["pages released"]
        scene.copies_end.set()
        scene.wait_until_saved()
        assert scene.worker.take_report() is None
    while scene.readable() != set(range(96)):
        time.sleep(1e-3)


@pytest.mark.parametrize("have_states", [False, True], ids=["windows", "states"])
def test_where_blocks_are_freed_early_a_step_waits_for_no_save_and_its_loads_follow_the_reads(
    have_states, scene, monkeypatch
):
    """vLLM reuses blocks that have left a window, and those with states, while the request goes on, also for what is
    loaded."""
    scene.have_states = have_states
    monkeypatch.setattr(scene.played.model, "frees_blocks_early", not have_states)
    device, begin_step = scene.played.device, scene.played.device.begin_step
    monkeypatch.setattr(device, "begin_step", lambda: (scene.order.append("step begun"), begin_step()))
    scene.begin()
    scene.played.arrive("q", [*text(0, 96), *text(5, 40)], first_block=10)
    scene.played.step()
    assert scene.order == [*3 * ["pages released"], "step begun"] and not scene.copies_end.is_set()
    scene.played.step()
    assert scene.order.count("pages released") == 3, "later steps follow the reads, too"


def test_a_rank_commits_what_another_one_with_the_same_kv_writes(scene, monkeypatch):
    space = scene.client.namespace
    monkeypatch.setattr(type(scene.client), "namespace", replace(space, world_size=2, copies=2))
    scene.begin()
    scene.copies_end.set()
    reports = scene.committed()
    assert scene._n_copies == 2 and scene.readable() == set(range(96))
    assert sum(report.saved_tokens for report in reports) == 96


@pytest.mark.parametrize("opens", [True, False])
def test_a_save_waits_for_the_session_until_vllm_frees_its_blocks(scene, monkeypatch, opens):
    monkeypatch.setattr(scene.worker._saves, "_open", lambda: None)
    scene.begin()
    assert scene.saved() == set()
    scene.copies_end.set()
    if opens:
        monkeypatch.undo()
        scene.worker.save(StepPlan())
    reports = scene.committed()
    assert scene.readable() == set(range(96 if opens else 0))
    failures = sum(report.failed_saves.get("DeadlineExceeded", 0) for report in reports)
    assert failures == (0 if opens else 3)


def test_nothing_is_stored_behind_a_chunk_that_no_session_could_copy(scene, monkeypatch):
    first, *others = scene.jobs()
    with monkeypatch.context() as closed:
        closed.setattr(scene.worker._saves, "_open", lambda: None)
        scene.worker.save(StepPlan(saves=[first]))
        scene.worker.begin_step(StepPlan(preempted={"r"}))
    scene.worker.save(StepPlan(saves=others, ending={"r"}))
    scene.copies_end.set()
    (report,) = scene.committed()
    assert report.failed_saves == {"DeadlineExceeded": 1} and scene.readable() == set()


def test_of_too_many_maps_those_of_the_oldest_loads_are_dropped(scene):
    map, records = HostCopy(torch.zeros(1)), [scene.worker._record(f"r{number}") for number in range(9)]
    for number, record in enumerate(records):
        record.load_number = 9 - number
    for record in reversed(records):
        scene.worker._saves.keep_maps(record, {Span(0, 64): map, Span(64, 96): map})
    assert saves.MAX_MAPS < 9 * 2 and sum(len(record.maps) for record in records) == saves.MAX_MAPS
    assert not records[-1].maps and set(records[0].maps) == {64, 96}, "the last record has the oldest load"


def test_nothing_is_copied_to_the_slots_of_another_arena(scene):
    scene.begin(arena="another")
    (report,) = scene.committed()
    assert report.failed_saves == {"HubError": 1} and scene._n_copies == 0


@pytest.mark.parametrize("is_preempted", [False, True])
def test_where_steps_wait_for_copies_each_copies_a_part_of_what_was_computed_and_all_before_vllm_has_the_blocks(
    monkeypatch, is_preempted
):
    monkeypatch.setattr(saves, "PART_TOKENS", 20)
    monkeypatch.setattr(SideDevice, "overlaps_compute", False)
    with played_worker(device := SideDevice(), text(0, 96)) as played:
        scene = Scene(played, device)
        scene.copies_end.set()
        played.kv.normal_()
        scene.begin()
        assert scene.copied == []  # the first token does not wait for what its own step has computed
        played.worker.save(StepPlan())
        assert scene.copied == [Span(0, 20)] and scene.saved() == set() and scene.readable() == set()
        if is_preempted:
            played.worker.begin_step(StepPlan(preempted={"r"}))
            assert scene.copied[1:] == [Span(20, 32), Span(32, 64), Span(64, 96)]
        else:
            for _ in range(4):
                played.worker.save(StepPlan())
            parts = [(20, 32), (32, 40), (40, 60), (60, 64), (64, 80), (80, 96)]
            assert scene.copied[1:] == [Span(*part) for part in parts]
        scene.committed()
        played.arrive("q", [*TOKENS.tolist(), *text(5, 40)], first_block=10)
        while played.step() != {"q"}:
            pass
        assert played.kv[9:15].equal(played.kv[:6])
