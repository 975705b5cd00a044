"""What the two sides of the connector tell each other."""

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import (
    HubAddress,
    HubPlace,
    LoadedAdapter,
    LoadJob,
    LoadResult,
    LoadSource,
    SaveJob,
    StepPlan,
    WorkerProof,
    WorkerReport,
)
from blendhub.vllm.model_support import ModelSupport

LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)

outcomes = st.builds(
    LoadResult,
    recomputed=st.sampled_from([(), (Span(3, 8),)]),
    holes=st.integers(0, 9),
    error=st.sampled_from(["", "", "no"]),
) | st.builds(LoadResult, error=st.just("another rank failed"), another_failed=st.just(True))
reports = st.builds(
    WorkerReport,
    loads=st.dictionaries(st.sampled_from("abc"), outcomes),
    saved_tokens=st.integers(0, 9),
    failed_saves=st.dictionaries(st.sampled_from(["Busy", "HubError"]), st.integers(1, 3)),
    opened=st.integers(0, 1),
    committed_ranks=st.dictionaries(st.sampled_from("ab"), st.just(1)),
)


@given(st.lists(reports, min_size=1, max_size=4))
def test_the_reports_of_all_ranks_become_one(ranks):
    before = pickle.dumps(ranks)
    whole = ranks[0]
    for report in ranks[1:]:
        whole = whole.aggregate(report)
    assert pickle.dumps(ranks) == before
    assert set(whole.loads) == {request for report in ranks for request in report.loads}
    for request, result in whole.loads.items():
        results = [report.loads[request] for report in ranks if request in report.loads]
        assert result in results
        assert bool(result.error) == any(one.error for one in results)
        own = [one for one in results if one.error and not one.another_failed]
        assert not own or result in own, "the reason of the rank that failed, whichever reports last"
    assert whole.opened == sum(report.opened for report in ranks)
    assert whole.committed_ranks == sum((Counter(report.committed_ranks) for report in ranks), Counter())
    # Ranks save their shards of the same tokens, but each fails by itself.
    assert whole.saved_tokens == max(report.saved_tokens for report in ranks)
    for reason in ("Busy", "HubError"):
        assert whole.failed_saves.get(reason, 0) == sum(report.failed_saves.get(reason, 0) for report in ranks)


def test_a_plan_survives_the_way_to_workers_in_other_processes():
    decision = Decision(0, 12, (Match(Span(2, 12), 3, 40, False),), 0.5)
    blocks = np.arange(3, dtype=np.int64)
    space = Namespace(model="m", layout=LAYOUT)
    plan = StepPlan(hub=HubPlace(HubAddress("ipc:///x", PluginChoice("zmq", {"max_pending": 9})), space), budget=64)
    tokens = np.arange(12, dtype=np.uint32)
    plan.loads.append(LoadJob("r", tokens, (blocks,), decision, LoadSource(7, 8, (Segment(Span(2, 12), 64, 3, 40),))))
    right = WriteRight(5, 7, "nonce", 8)
    plan.saves.append(SaveJob("r", right, Slot(Span(0, 8), 64), (blocks,)))
    plan.cancelled.add("gone")
    plan.ending.add("done")
    given = pickle.loads(pickle.dumps(plan))
    assert (given.hub, given.budget, given.cancelled, given.ending) == (plan.hub, 64, {"gone"}, {"done"})
    (load,), (save,) = given.loads, given.saves
    assert load.source == plan.loads[0].source
    assert load.decision == decision and load.tokens.dtype == np.uint32
    assert np.array_equal(load.tokens, plan.loads[0].tokens) and np.array_equal(load.blocks[0], blocks)
    assert save.right == plan.saves[0].right
    assert save.slot == Slot(Span(0, 8), 64) and np.array_equal(save.blocks[0], blocks)


def test_what_workers_tell_survives_the_way_to_the_scheduler():
    adapters = {1: {5: LoadedAdapter("weights", 3)}}
    report = WorkerReport(
        loads={"r": LoadResult(recomputed=(Span(3, 6),), holes=4, load_seconds=0.5, error="no")},
        saved_tokens=7,
        failed_saves={"Busy": 2},
        opened=1,
        adapters=adapters,
    )
    report.proofs = {1: WorkerProof(1, ModelSupport((LAYOUT,), False, ("why",)), "weights", "rotary")}
    assert WorkerReport(adapters={0: {}}).aggregate(report).adapters == {0: {}} | adapters
    other = WorkerReport(proofs={0: WorkerProof(0, ModelSupport((LAYOUT,), True, ()))})
    assert other.aggregate(report).proofs == other.proofs | report.proofs
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_plan_is_pickled_without_a_look_at_other_modules():
    """Python looks through all modules for an object that does not say where it is, and so imports some of them."""
    place = HubPlace(HubAddress("ipc://hub", PluginChoice("zmq")), Namespace(model="m", layout=LAYOUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "whichmodule", lambda one, name: one.__module__)
        in_python: Any = pickle
        in_python._dumps(StepPlan(hub=place), protocol=pickle.HIGHEST_PROTOCOL)
